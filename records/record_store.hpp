// Places of tuning records, and the search for the record that a call is nearest to.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "records/record.hpp"
#include "records/record_files.hpp"

namespace flce {

/// Places in the order in which they are asked: at equal distance the first wins.
struct RecordPlaces {
    std::vector<std::filesystem::path> extra;  ///< directories of records, or single files; read only
    std::filesystem::path directory;           ///< the user's own; empty: none
    bool shipped = true;                       ///< records that the library brings
};

/// A record's plans for a call, the best first: a file may say anything, and the first of them that is legal is taken.
struct RecordedPlan {
    struct Timed {
        std::string plan;
        double median_ms = 0;
    };
    std::vector<Timed> plans;  ///< plans, at least one
    std::string origin;        ///< the file, or "shipped with flce: NAME"
    RecordKey key;
    std::size_t candidates = 0;
    bool other_kernels = false;  ///< measured with other kernels than this library's

    [[nodiscard]] const std::string& best() const { return plans.front().plan; }
};

/// Thread-safe. The store keeps the records that it has read of a layer, so that a session's answers do not change while it lives. A record
/// that cannot be read or does not belong where it lies is reported once, and ignored.
class RecordStore {
public:
    explicit RecordStore(RecordPlaces places);

    /// Best plans of the records of that device and spec, nearest first: kernels of this version before others; then the nearest token
    /// bucket (of two the smaller); then the nearest memory; then by place, and the record's digest. `wanted` is a key of record_key().
    [[nodiscard]] std::vector<RecordedPlan> plans(const RecordKey& wanted);

    /// The user's record of exactly this key, where there is one that a session would read: nobody else can have written it.
    [[nodiscard]] std::optional<Record> find(const RecordKey& key) const;
    /// Merges the record into the user's directory, safely beside other publishers of whatever machine (records/record_files.hpp); returns
    /// the file, which holds all that is known by now. Throws EnvironmentError where it cannot be written or there is no directory.
    std::filesystem::path save(const Record& record);
    /// Puts the record in the place of the file that was there before; files that others publish meanwhile stay. Otherwise as save().
    std::filesystem::path replace(const Record& record);

    /// Throws EnvironmentError where the user's directory cannot be made or written, or has no room for a record.
    void check_room() const;

    [[nodiscard]] const RecordPlaces& places() const noexcept { return places_; }

private:
    struct Found {
        RecordedPlan plan;
        int place = 0;
    };
    [[nodiscard]] std::vector<Found> read_subject(const std::string& subject);
    static void read_file(const std::filesystem::path& file, const std::string& subject, int place, std::vector<Found>& found);
    static void read_directory(const std::filesystem::path& directory, const std::string& subject, int place, Writers writers,
                               std::vector<Found>& found);
    [[nodiscard]] std::filesystem::path begin_writing(const RecordKey& key) const;
    void forget(const RecordKey& key);

    RecordPlaces places_;
    std::mutex mutex_;
    std::map<std::string, std::shared_ptr<const std::vector<Found>>> known_;  ///< records by subject
};

/// Record of exactly this key in a directory's files.
[[nodiscard]] std::optional<Record> find_record(const std::filesystem::path& directory, const RecordKey& key, Writers writers);

/// A file's record. std::nullopt, and the reason in `why`, where it cannot be read or is none; `why` is empty where there is no such file.
[[nodiscard]] std::optional<Record> read_record_file(const std::filesystem::path& file, std::string& why);
/// Writes the file whole or not at all, and reads it back before it replaces anything; runs that have no room in a file (fitted) are left
/// out with a warning. Throws EnvironmentError naming the file, which is then unchanged.
void write_record_file(const std::filesystem::path& file, const Record& record);

}  // namespace flce

#include "records/record_store.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "cache/artifact_cache.hpp"
#include "cache/file_io.hpp"
#include "cache/key_lock.hpp"
#include "cache/log.hpp"
#include "flce/error.hpp"
#include "records/shipped_records.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kLockWait{5};

CacheKey lock_key(const RecordKey& key) { return KeyBuilder("tuning record's file").add("digest", key.digest()).finish(); }

/// "4096-0123456789abcdef.<32 digits of the text's digest>.json"
fs::path file_by_contents(const fs::path& file, std::string_view text) {
    constexpr std::size_t kDigits = 32;
    const std::string digest = KeyBuilder("tuning record's text").add("text", text).finish().hex();
    return file.parent_path() / fmt::format("{}.{}.json", file.stem().string(), digest.substr(0, kDigits));
}

std::optional<RecordedPlan> recorded_plan(const Record& record, std::string origin) {
    RecordedPlan recorded{.origin = std::move(origin), .key = record.key, .candidates = record.candidates.size()};
    for (const std::string& plan : record.ranked_plans()) recorded.plans.push_back({plan, record.candidates.at(plan).median_ms()});
    if (recorded.plans.empty()) return std::nullopt;
    return recorded;
}

double ratio_distance(std::int64_t a, std::int64_t b) {
    if (a <= 0 || b <= 0) return a == b ? 0 : 1e9;
    return std::abs(std::log2(static_cast<double>(a) / static_cast<double>(b)));
}

/// Distance of a record's device, kernels and request from the wanted ones; lexicographic. Equal tuples are decided by place and digest.
auto distance(const RecordKey& key, const RecordKey& wanted) {
    const PlanRequest& has = key.request;
    const PlanRequest& wants = wanted.request;
    return std::tuple(key.kernel_version != wanted.kernel_version, ratio_distance(has.num_tokens, wants.num_tokens), has.num_tokens,
                      key.retained != wanted.retained, ratio_distance(has.workspace_limit_bytes, wants.workspace_limit_bytes),
                      ratio_distance(has.scratch_bytes, wants.scratch_bytes), key.policy != wanted.policy);
}

}  // namespace

std::optional<Record> read_record_file(const fs::path& file, std::string& why) {
    bool unreadable = false;
    const auto text = read_record_text(file, Writers::all, why, unreadable);
    return text ? parse_record(*text, why) : std::nullopt;
}

namespace {

/// Text of a record's file, which can be read again: no file that nobody could read takes a good file's place.
std::string file_text(const fs::path& file, const Record& record) {
    std::size_t dropped = 0;
    const Record kept = fitted(record, dropped);
    std::string text = record_text(kept);
    std::string why;
    if (!parse_record(text, why)) {
        throw EnvironmentError(fmt::format("{} is not written, it could not be read again: {}", file.string(), why));
    }
    if (dropped > 0) {
        logger().warn(
            "tuning record {}: times of its {} oldest runs are left out, with them it would have more than {} bytes or {} candidates",
            file.string(), dropped, kMaxRecordBytes, kMaxRecordCandidates);
    }
    return text;
}

void write_text(const fs::path& file, const std::string& text) {
    int error = file.has_parent_path() ? make_private_directories(file.parent_path()) : 0;
    const std::array pieces{std::as_bytes(std::span(text))};
    if (error == 0) error = write_atomically(file, pieces, Durability::now);
    if (error != 0) throw EnvironmentError(fmt::format("{} cannot be written: {}", file.string(), std::strerror(error)));
}

}  // namespace

void write_record_file(const fs::path& file, const Record& record) { write_text(file, file_text(file, record)); }

RecordStore::RecordStore(RecordPlaces places) : places_(std::move(places)) {}

void RecordStore::read_file(const fs::path& file, const std::string& subject, int place, std::vector<Found>& found) {
    std::string why;
    const auto record = read_record_file(file, why);
    if (!record) {
        if (!why.empty()) say_unused(file.string(), why);
        return;
    }
    if (record->key.subject() != subject) return;
    if (auto plan = recorded_plan(*record, file.string())) found.push_back({std::move(*plan), place});
}

void RecordStore::read_directory(const fs::path& directory, const std::string& subject, int place, Writers writers,
                                 std::vector<Found>& found) {
    RecordFolder folder = read_record_folder(directory / subject.substr(0, 16), "", writers);
    std::map<std::string, RecordFile> by_key;  // under the name of its first file
    for (RecordFile& file : folder.files) {
        if (file.record.key.subject() != subject) continue;
        const auto [known, first] = by_key.try_emplace(file.record.key.digest(), std::move(file));
        if (!first) known->second.record = merged(known->second.record, file.record);
    }
    for (const auto& [digest, file] : by_key) {
        if (auto plan = recorded_plan(file.record, file.path.string())) found.push_back({std::move(*plan), place});
    }
}

std::vector<RecordStore::Found> RecordStore::read_subject(const std::string& subject) {
    std::vector<Found> found;
    int place = 0;
    for (const fs::path& extra : places_.extra) {
        std::error_code error;
        const auto type = fs::status(extra, error).type();
        if (type == fs::file_type::directory) {
            read_directory(extra, subject, place, Writers::all, found);
        } else if (type == fs::file_type::not_found) {
            say_unused(extra.string(), "there is no such file or directory");
        } else {
            read_file(extra, subject, place, found);
        }
        ++place;
    }
    if (!places_.directory.empty()) read_directory(places_.directory, subject, place, Writers::own, found);
    ++place;
    if (!places_.shipped) return found;
    for (const ShippedRecord& shipped : shipped_records()) {
        if (peek_subject(shipped.text) != subject) continue;
        std::string why;
        const std::string origin = fmt::format("shipped with flce: {}", shipped.name);
        const auto record = parse_record(shipped.text, why);
        if (!record) {
            say_unused(origin, why);
        } else if (auto plan = recorded_plan(*record, origin)) {
            found.push_back({std::move(*plan), place});
        }
    }
    return found;
}

std::vector<RecordedPlan> RecordStore::plans(const RecordKey& wanted) {
    const std::string subject = wanted.subject();
    std::shared_ptr<const std::vector<Found>> all;
    {
        const std::lock_guard lock(mutex_);
        auto& known = known_[subject];
        if (known == nullptr) known = std::make_shared<const std::vector<Found>>(read_subject(subject));
        all = known;
    }
    std::vector<const Found*> nearest;
    for (const Found& found : *all) nearest.push_back(&found);
    std::ranges::sort(nearest, [&](const Found* a, const Found* b) {
        const auto order = [&](const Found& f) {
            return std::tuple(distance(f.plan.key, wanted), f.place, f.plan.key.digest(), f.plan.best());
        };
        return order(*a) < order(*b);
    });
    std::vector<RecordedPlan> result;
    for (const Found* found : nearest) {
        result.push_back(found->plan);
        result.back().other_kernels = found->plan.key.kernel_version != wanted.kernel_version;
    }
    return result;
}

std::optional<Record> RecordStore::find(const RecordKey& key) const {
    // sessions read records by this rule too: nothing is built upon a record that they refuse
    return places_.directory.empty() ? std::nullopt : find_record(places_.directory, key, Writers::own);
}

std::optional<Record> find_record(const fs::path& directory, const RecordKey& key, Writers writers) {
    const fs::path file = directory / key.file();
    return merged_record(read_record_folder(file.parent_path(), file.stem().native(), writers), key);
}

fs::path RecordStore::begin_writing(const RecordKey& key) const {
    if (places_.directory.empty()) throw EnvironmentError("there is no directory for tuning records: set FLCE_RECORDS_DIR");
    fs::path file = places_.directory / key.file();
    if (const int error = make_private_directories(file.parent_path())) {
        throw EnvironmentError(fmt::format("{} cannot be made: {}", file.parent_path().string(), std::strerror(error)));
    }
    return file;
}

void RecordStore::check_room() const {
    constexpr std::size_t kBytes = 1 << 18;  // bytes of a long search's record
    if (places_.directory.empty()) throw EnvironmentError("there is no directory for tuning records: set FLCE_RECORDS_DIR");
    const fs::path tried = places_.directory / fmt::format(".room-{}", ::getpid());
    const std::string filling(kBytes, ' ');
    const std::array pieces{std::as_bytes(std::span(filling))};
    int error = make_private_directories(places_.directory);
    if (error == 0) error = write_atomically(tried, pieces, Durability::now);
    ::unlink(tried.c_str());
    if (error != 0) {
        throw EnvironmentError(fmt::format("{} cannot have records written to it: {}", places_.directory.string(), std::strerror(error)));
    }
}

void RecordStore::forget(const RecordKey& key) {
    const std::lock_guard lock(mutex_);
    known_.erase(key.subject());
}

// records/record_files.hpp says why this loses nothing, whatever other publishers do meanwhile.
fs::path RecordStore::save(const Record& record) {
    const fs::path file = begin_writing(record.key);
    const KeyLock lock(places_.directory, lock_key(record.key), kLockWait, LockFile::removed);
    const RecordFolder there = read_record_folder(file.parent_path(), file.stem().native(), Writers::own);
    const auto before = merged_record(there, record.key);
    const std::string text = file_text(file, before ? merged(*before, record) : record);
    const bool alone = lock.excludes_all() && is_local_folder(file.parent_path()) && there.complete;
    const fs::path written = alone ? file : file_by_contents(file, text);
    write_text(written, text);
    for (const RecordFile& merged_one : there.files) {
        if (merged_one.record.key == record.key && merged_one.path != written && merged_one.path != file) ::unlink(merged_one.path.c_str());
    }
    forget(record.key);
    return written;
}

fs::path RecordStore::replace(const Record& record) {
    const fs::path file = begin_writing(record.key);
    const KeyLock lock(places_.directory, lock_key(record.key), kLockWait, LockFile::removed);
    const RecordFolder there = read_record_folder(file.parent_path(), file.stem().native(), Writers::own);
    write_record_file(file, record);
    for (const RecordFile& old : there.files) {
        if (old.record.key == record.key && old.path != file) ::unlink(old.path.c_str());
    }
    forget(record.key);
    return file;
}

}  // namespace flce

#include "autotune/record_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <tuple>

#include "autotune/shipped_records.hpp"
#include "cache/artifact_cache.hpp"
#include "cache/file_descriptor.hpp"
#include "cache/file_io.hpp"
#include "cache/key_lock.hpp"
#include "cache/log.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostFilesOfASubject = 512;
constexpr std::chrono::seconds kLockWait{5};

void warn(const std::string& origin, const std::string& why) { logger().warn("tuning record {} is not used: {}", origin, why); }

/// The bytes of a regular file of sensible size. `owned`: others must not have been able to write it.
std::optional<std::string> read_text(const fs::path& path, bool owned, std::string& why) {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) {
        why = means_absent(errno) ? "" : std::strerror(errno);
        return std::nullopt;
    }
    if (!S_ISREG(status.st_mode)) {
        why = "not a regular file";
    } else if (static_cast<std::uint64_t>(status.st_size) > kMaxRecordBytes) {
        why = fmt::format("{} bytes long; at most {} are read", status.st_size, kMaxRecordBytes);
    } else if (owned) {
        why = ownership_fault(status, Owner::user_or_root);
    }
    if (!why.empty()) return std::nullopt;
    std::string text(static_cast<std::size_t>(status.st_size), '\0');
    if (const int error = read_at(file.get(), 0, std::as_writable_bytes(std::span(text)))) {
        why = std::strerror(error);
        return std::nullopt;
    }
    return text;
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

/// How far what a record was measured with is from what is wanted; lexicographic. Equal tuples are decided by place and digest.
auto distance(const RecordKey& key, const RecordKey& wanted) {
    return std::tuple(key.kernel_version != wanted.kernel_version, ratio_distance(key.num_tokens, wanted.num_tokens), key.num_tokens,
                      key.memory.retained != wanted.memory.retained, ratio_distance(key.memory.limit_bytes, wanted.memory.limit_bytes),
                      ratio_distance(key.memory.scratch_bytes, wanted.memory.scratch_bytes), key.policy != wanted.policy);
}

}  // namespace

std::optional<Record> read_record_file(const fs::path& file, std::string& why) {
    why.clear();
    const auto text = read_text(file, false, why);
    return text ? parse_record(*text, why) : std::nullopt;
}

void write_record_file(const fs::path& file, const Record& record) {
    std::size_t dropped = 0;
    const Record kept = fitted(record, dropped);
    const std::string text = record_text(kept);
    // Nothing takes a good file's place that nobody could read.
    std::string why;
    if (!parse_record(text, why)) {
        throw EnvironmentError(fmt::format("{} is not written, it could not be read again: {}", file.string(), why));
    }
    if (dropped > 0) {
        logger().warn(
            "tuning record {}: times of its {} oldest runs are left out, with them it would have more than {} bytes or {} candidates",
            file.string(), dropped, kMaxRecordBytes, kMaxRecordCandidates);
    }
    int error = file.has_parent_path() ? make_private_directories(file.parent_path()) : 0;
    const std::array pieces{std::as_bytes(std::span(text))};
    if (error == 0) error = write_atomically(file, pieces, Durability::now);
    if (error != 0) throw EnvironmentError(fmt::format("{} cannot be written: {}", file.string(), std::strerror(error)));
}

RecordStore::RecordStore(RecordPlaces places) : places_(std::move(places)) {}

void RecordStore::read_file(const fs::path& file, const std::string& subject, int place, bool owned, std::vector<Found>& found) {
    std::string why;
    const auto text = read_text(file, owned, why);
    if (!text) {
        if (!why.empty()) warn(file.string(), why);
        return;
    }
    const auto record = parse_record(*text, why);
    if (!record) return warn(file.string(), why);
    if (record->key.subject() != subject) return;
    if (auto plan = recorded_plan(*record, file.string())) found.push_back({std::move(*plan), place});
}

void RecordStore::read_directory(const fs::path& directory, const std::string& subject, int place, bool owned, std::vector<Found>& found) {
    const fs::path folder = directory / subject.substr(0, 16);
    std::error_code error;
    std::vector<fs::path> files;
    for (fs::directory_iterator it(folder, error); !error && it != fs::directory_iterator(); it.increment(error)) {
        if (it->path().extension() == ".json" && !it->path().filename().string().starts_with('.')) files.push_back(it->path());
    }
    std::ranges::sort(files);
    if (files.size() > kMostFilesOfASubject) {
        warn(folder.string(), fmt::format("{} files; the first {} are read", files.size(), kMostFilesOfASubject));
        files.resize(kMostFilesOfASubject);
    }
    for (const fs::path& file : files) read_file(file, subject, place, owned, found);
}

std::vector<RecordStore::Found> RecordStore::read_subject(const std::string& subject) {
    std::vector<Found> found;
    int place = 0;
    for (const fs::path& extra : places_.extra) {
        std::error_code error;
        const auto type = fs::status(extra, error).type();
        if (type == fs::file_type::directory) {
            read_directory(extra, subject, place, false, found);
        } else if (type == fs::file_type::not_found) {
            warn(extra.string(), "there is no such file or directory");
        } else {
            read_file(extra, subject, place, false, found);
        }
        ++place;
    }
    if (!places_.directory.empty()) read_directory(places_.directory, subject, place, true, found);
    ++place;
    if (!places_.shipped) return found;
    for (const ShippedRecord& shipped : shipped_records()) {
        if (peek_subject(shipped.text) != subject) continue;
        std::string why;
        const std::string origin = fmt::format("shipped with flce: {}", shipped.name);
        const auto record = parse_record(shipped.text, why);
        if (!record) {
            warn(origin, why);
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
    if (places_.directory.empty()) return std::nullopt;
    const fs::path file = places_.directory / key.file();
    // As sessions read it: what they refuse is not built upon.
    std::string why;
    const auto text = read_text(file, true, why);
    auto record = text ? parse_record(*text, why) : std::nullopt;
    if (record && !(record->key == key)) why = "it is a record of something else";
    if (!why.empty()) warn(file.string(), why);
    return why.empty() ? std::move(record) : std::nullopt;
}

fs::path RecordStore::save(const Record& record) {
    if (places_.directory.empty()) throw EnvironmentError("there is no directory for tuning records: set FLCE_RECORDS_DIR");
    const fs::path file = places_.directory / record.key.file();
    if (const int error = make_private_directories(file.parent_path())) {
        throw EnvironmentError(fmt::format("{} cannot be made: {}", file.parent_path().string(), std::strerror(error)));
    }
    // Two tuners of one layer: neither loses what the other measured.
    const KeyLock lock(places_.directory, KeyBuilder("tuning record's file").add("digest", record.key.digest()).finish(), kLockWait);
    const auto before = find(record.key);
    write_record_file(file, before ? merged(*before, record) : record);
    const std::lock_guard forget(mutex_);
    known_.erase(record.key.subject());
    return file;
}

}  // namespace flce

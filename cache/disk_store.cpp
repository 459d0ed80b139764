#include "cache/disk_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>

#include "cache/artifact_format.hpp"
#include "cache/cleanup.hpp"
#include "cache/file_descriptor.hpp"
#include "cache/file_io.hpp"
#include "cache/log.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr std::time_t kAccessTimeSeconds = 3600;
constexpr std::uint64_t kPutsBetweenCleanups = 32;

// Now, if the last use lies an hour back, or ahead: clocks jump.
void mark_used(int file, const struct stat& status) {
    const std::time_t age = std::time(nullptr) - status.st_atim.tv_sec;
    if (age >= 0 && age < kAccessTimeSeconds) return;
    const std::array<timespec, 2> times{timespec{0, UTIME_NOW}, timespec{0, UTIME_OMIT}};
    (void)::futimens(file, times.data());  // fails on a read-only file system, where nobody evicts by this time either
}

struct Opened {
    FileDescriptor file;
    struct stat status{};
    Lookup found;
    int error = 0;    // errno of the medium; means_absent: there is no file
    std::string why;  // there is no artifact
};

Opened open_entry(const fs::path& path, const CacheKey& key) {
    Opened opened;
    const auto unreadable = [&](int error) {
        opened.error = error;
        opened.why = fmt::format("cannot be read: {}", std::strerror(error));
    };
    // O_NONBLOCK: a FIFO of that name must not hang us.
    opened.file = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!opened.file || ::fstat(opened.file.get(), &opened.status) != 0) {
        unreadable(errno);
        return opened;
    }
    const auto size = static_cast<std::uint64_t>(opened.status.st_size);
    opened.why = ownership_fault(opened.status, Owner::user);
    if (!S_ISREG(opened.status.st_mode)) {
        opened.why = "not a regular file";
    } else if (size > kMaxEntryBytes) {
        opened.why = fmt::format("{} bytes long", size);
    }
    if (!opened.why.empty()) return opened;
    opened.found.entry.resize(size);
    if (const int error = read_at(opened.file.get(), 0, opened.found.entry)) {
        unreadable(error);
    } else {
        opened.found.artifact = decode_artifact(key, opened.found.entry, opened.why);
    }
    return opened;
}

bool is_same_file(const struct stat& one, const struct stat& other) { return one.st_ino == other.st_ino && one.st_dev == other.st_dev; }

// Puts the file back, over nothing: another may have been published since.
void put_back(const std::string& from, const fs::path& path) {
    if (::link(from.c_str(), path.c_str()) == 0 || errno == EEXIST) {
        ::unlink(from.c_str());
    } else {
        (void)::rename(from.c_str(), path.c_str());  // where there are no links
    }
}

// Renames the file aside instead of removing it, so that it can be looked at; a second one of a key replaces the first, so they cannot pile
// up. `read` is the status of the faulty file: between two system calls another process may publish a good one in its place. The moved file
// is therefore looked at where nobody else has a name for it, and goes back if it is another.
bool quarantine(const fs::path& path, const struct stat& read) {
    struct stat present{};
    if (::stat(path.c_str(), &present) != 0 || !is_same_file(read, present)) return false;
    std::string aside = (path.parent_path() / ("." + path.stem().string() + ".XXXXXX")).string();
    if (::mkdtemp(aside.data()) == nullptr) return false;
    const std::string moved = aside + "/entry";
    bool kept = false;
    if (::rename(path.c_str(), moved.c_str()) == 0) {
        // A link is not what anybody publishes.
        const bool same = ::lstat(moved.c_str(), &present) != 0 || S_ISLNK(present.st_mode) || is_same_file(read, present);
        kept = same && ::rename(moved.c_str(), (path.string() + ".corrupt").c_str()) == 0;
        if (!same) put_back(moved, path);
    }
    ::rmdir(aside.c_str());  // a file that could not be renamed stays in the folder, and goes with other files of dead processes
    return kept;
}

}  // namespace

DiskStore::DiskStore(fs::path directory, std::uint64_t max_bytes) : directory_(std::move(directory)), max_bytes_(max_bytes) {}

fs::path DiskStore::path_of(const CacheKey& key) const {
    const std::string hex = key.hex();
    return directory_ / "artifacts" / hex.substr(0, 2) / (hex + ".art");
}

// A medium that is broken in one way is broken in others: the first is said, the rest are for debugging.
void DiskStore::warn_once(const std::string& message) {
    if (!warned_.exchange(true, std::memory_order_relaxed)) {
        logger().warn("cache: {}", message);
    } else {
        logger().debug("cache: {}", message);
    }
}

bool DiskStore::usable(bool make) {
    const std::lock_guard lock(mutex_);
    if (verdict_ != Verdict::unknown) return verdict_ == Verdict::usable;
    int error = 0;
    std::string refusal = directory_fault(directory_, error);
    if (means_absent(error) && !make) return false;
    if (means_absent(error)) {
        error = make_private_directories(directory_);
        refusal = error != 0 ? std::strerror(error) : directory_fault(directory_, error);
    }
    verdict_ = refusal.empty() ? Verdict::usable : Verdict::refused;
    if (refusal.empty()) return true;
    out_of_use_ = fmt::format("{} is not used: {}", directory_.string(), refusal);
    warned_ = true;
    warn_once_in_process("cache: " + out_of_use_);  // every set of kernels that is prewarmed opens the directory anew
    return false;
}

bool DiskStore::shard_usable(const CacheKey& key, std::string& why) {
    // Looked at once, so that a hit costs no more system calls than it must.
    std::atomic<Verdict>& verdict = shards_[key.digest[0]];
    if (verdict.load(std::memory_order_relaxed) == Verdict::usable) return true;
    const fs::path shard = path_of(key).parent_path();
    for (const fs::path& folder : {shard.parent_path(), shard}) {
        int error = 0;
        const std::string fault = directory_fault(folder, error);
        if (means_absent(error)) return true;  // nothing is in it; the process that makes it makes it private
        if (fault.empty()) continue;
        why = fmt::format("{} is not used: {}", folder.string(), fault);
        return false;
    }
    verdict.store(Verdict::usable, std::memory_order_relaxed);
    return true;
}

std::string DiskStore::out_of_use() {
    (void)usable(false);
    const std::lock_guard lock(mutex_);
    return out_of_use_;
}

void DiskStore::cannot_write(const std::string& message) {
    warn_once(message);
    const std::lock_guard lock(mutex_);
    out_of_use_ = message;
}

Lookup DiskStore::get(const CacheKey& key) try {
    if (!usable(false)) {
        const std::lock_guard lock(mutex_);
        return {.fault = verdict_ == Verdict::refused};
    }
    std::string why;
    if (!shard_usable(key, why)) {
        warn_once(why);
        return {.fault = true};
    }
    return read(path_of(key), key);
} catch (const std::exception& error) {
    warn_once(fmt::format("{}: {}", directory_.string(), error.what()));
    return {.fault = true};
}

Lookup DiskStore::read(const fs::path& path, const CacheKey& key) {
    Opened opened = open_entry(path, key);
    if (opened.error != 0) {
        if (means_absent(opened.error)) return {};
        warn_once(fmt::format("{} {}", path.string(), opened.why));
        return {.fault = true};
    }
    if (opened.found.artifact) {
        mark_used(opened.file.get(), opened.status);
        return std::move(opened.found);
    }
    const bool moved = quarantine(path, opened.status);
    logger().warn("cache: {} is not used: {}{}", path.string(), opened.why, moved ? "; renamed to *.corrupt" : "");
    return {.fault = true};
}

bool DiskStore::reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) try {
    const fs::path path = path_of(key);
    const Opened present = open_entry(path, key);
    const bool moved = std::ranges::equal(present.found.entry, entry) && quarantine(path, present.status);
    logger().warn("cache: {} is not used: {}{}", path.string(), why, moved ? "; renamed to *.corrupt" : "");
    return false;
} catch (const std::exception& error) {
    warn_once(fmt::format("{}: {}", directory_.string(), error.what()));
    return false;
}

Lookup DiskStore::inspect(const CacheKey& key, std::string& why) {
    if (!usable(false) || !shard_usable(key, why)) return {.fault = !why.empty()};
    Opened opened = open_entry(path_of(key), key);
    if (means_absent(opened.error)) return {};
    why = std::move(opened.why);
    opened.found.fault = !opened.found.artifact;
    return std::move(opened.found);
}

bool DiskStore::contains(const CacheKey& key) {
    std::string why;
    return usable(false) && shard_usable(key, why) && ::access(path_of(key).c_str(), F_OK) == 0;
}

Kept DiskStore::put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) try {
    if (!usable(true)) return Kept::fault;
    if (std::string why; !shard_usable(key, why)) {
        cannot_write(why);
        return Kept::fault;
    }
    const fs::path path = path_of(key);
    const std::array pieces{entry};
    int error = 0;
    // Twice: somebody may clear the cache between the two steps.
    for (int attempt = 0; attempt < 2; ++attempt) {
        error = make_private_directories(path.parent_path());
        if (error == 0) error = write_atomically(path, pieces, durability);
        if (!means_absent(error)) break;
    }
    if (error == 0) {
        clean_up_now_and_then();
        return Kept::yes;
    }
    cannot_write(fmt::format("{} cannot be written: {}", path.string(), std::strerror(error)));
    return Kept::fault;
} catch (const std::exception& error) {
    cannot_write(fmt::format("{}: {}", directory_.string(), error.what()));
    return Kept::fault;
}

void DiskStore::clean_up_now_and_then() {
    if (max_bytes_ == 0 || puts_.fetch_add(1, std::memory_order_relaxed) % kPutsBetweenCleanups != 0) return;
    (void)clean_up(directory_, max_bytes_);
}

}  // namespace flce

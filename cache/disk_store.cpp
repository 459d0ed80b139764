#include "cache/disk_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

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
    (void)::futimens(file, times.data());  // on a read-only file system nobody evicts by it either
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
    struct stat status{};
    int error = ::stat(directory_.c_str(), &status) == 0 ? 0 : errno;
    if (means_absent(error) && !make) return false;
    if (means_absent(error)) {
        error = make_private_directories(directory_);
        if (error == 0 && ::stat(directory_.c_str(), &status) != 0) error = errno;
    }
    std::string refusal;
    if (error != 0) {
        refusal = std::strerror(error);
    } else if (!S_ISDIR(status.st_mode)) {
        refusal = "not a directory";
    } else {
        refusal = ownership_fault(status, Owner::user);
    }
    verdict_ = refusal.empty() ? Verdict::usable : Verdict::refused;
    if (refusal.empty()) return true;
    out_of_use_ = fmt::format("{} is not used: {}", directory_.string(), refusal);
    warn_once(out_of_use_);
    return false;
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
    return read(path_of(key), key);
} catch (const std::exception& error) {
    warn_once(fmt::format("{}: {}", directory_.string(), error.what()));
    return {.fault = true};
}

Lookup DiskStore::read(const fs::path& path, const CacheKey& key) {
    const auto unreadable = [&](int error) {
        if (means_absent(error)) return Lookup{};
        warn_once(fmt::format("{} cannot be read: {}", path.string(), std::strerror(error)));
        return Lookup{.fault = true};
    };
    // O_NONBLOCK: a FIFO of that name must not hang us.
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) return unreadable(errno);
    const auto size = static_cast<std::uint64_t>(status.st_size);
    std::string why = ownership_fault(status, Owner::user);
    if (!S_ISREG(status.st_mode)) {
        why = "not a regular file";
    } else if (size > kMaxEntryBytes) {
        why = fmt::format("{} bytes long", size);
    }
    Lookup found;
    if (why.empty()) {
        found.entry.resize(size);
        if (const int error = read_at(file.get(), 0, found.entry)) return unreadable(error);
        found.artifact = decode_artifact(key, found.entry, why);
    }
    if (found.artifact) {
        mark_used(file.get(), status);
        return found;
    }
    quarantine(path, file.get(), why);
    return {.fault = true};
}

// Renamed aside, not removed, so that it can be looked at; a second one of the same key replaces the first, so they cannot pile up.
void DiskStore::quarantine(const fs::path& path, int file, const std::string& why) {
    struct stat opened{};
    struct stat present{};
    // Another process may have replaced the entry by a good one since.
    const bool same = ::fstat(file, &opened) == 0 && ::stat(path.c_str(), &present) == 0 && opened.st_ino == present.st_ino &&
                      opened.st_dev == present.st_dev;
    const bool moved = same && ::rename(path.c_str(), (path.string() + ".corrupt").c_str()) == 0;
    logger().warn("cache: {} is not used: {}{}", path.string(), why, moved ? "; renamed to *.corrupt" : "");
}

bool DiskStore::contains(const CacheKey& key) { return usable(false) && ::access(path_of(key).c_str(), F_OK) == 0; }

Kept DiskStore::put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) try {
    if (!usable(true)) return Kept::fault;
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

#include "cache/disk_store.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <vector>

#include "cache/artifact_format.hpp"
#include "cache/file_descriptor.hpp"
#include "cache/log.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

// What network file systems say about a file that another machine is replacing or has removed.
bool means_absent(int error) { return error == ENOENT || error == ENOTDIR || error == ESTALE || error == EBUSY; }

// Makes the directory and its parents, readable by the user alone. Returns 0 or an errno.
int make_private_directories(const fs::path& path) {
    if (::mkdir(path.c_str(), 0700) == 0) return 0;
    if (errno == EEXIST) return 0;
    if (errno != ENOENT || !path.has_parent_path() || path.parent_path() == path) return errno;
    if (const int error = make_private_directories(path.parent_path())) return error;
    return ::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

// Returns 0 or an errno; a file that shrinks while it is read is reported as EIO.
int read_exactly(int file, std::span<std::byte> out) {
    while (!out.empty()) {
        const ssize_t count = ::read(file, out.data(), out.size());
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return errno;
        if (count == 0) return EIO;
        out = out.subspan(static_cast<std::size_t>(count));
    }
    return 0;
}

bool write_all(int file, std::span<const std::byte> in) {
    while (!in.empty()) {
        const ssize_t count = ::write(file, in.data(), in.size());
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return false;
        in = in.subspan(static_cast<std::size_t>(count));
    }
    return true;
}

}  // namespace

DiskStore::DiskStore(fs::path directory) : directory_(std::move(directory)) {}

fs::path DiskStore::path_of(const CacheKey& key) const {
    const std::string hex = key.hex();
    return directory_ / "artifacts" / hex.substr(0, 2) / (hex + ".art");
}

void DiskStore::fault(std::atomic<bool>& warned, const std::string& message) {
    faults_.fetch_add(1, std::memory_order_relaxed);
    if (!warned.exchange(true, std::memory_order_relaxed)) {
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
    } else if (status.st_uid != ::geteuid()) {
        refusal = fmt::format("owned by user {}, not by user {}", status.st_uid, ::geteuid());
    } else if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        refusal = fmt::format("mode {:04o} lets group or others write; chmod go-w to use it", status.st_mode & 07777);
    }
    verdict_ = refusal.empty() ? Verdict::usable : Verdict::refused;
    if (!refusal.empty()) fault(warned_directory_, fmt::format("{} is not used: {}", directory_.string(), refusal));
    return refusal.empty();
}

std::optional<Artifact> DiskStore::get(const CacheKey& key) try {
    if (!usable(false)) return std::nullopt;
    const fs::path path = path_of(key);
    // O_NONBLOCK: a FIFO of that name must not hang us.
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) {
        if (!means_absent(errno)) fault(warned_read_, fmt::format("{} cannot be read: {}", path.string(), std::strerror(errno)));
        return std::nullopt;
    }
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (!S_ISREG(status.st_mode) || size > kMaxEntryBytes) {
        quarantine(path, file.get(), S_ISREG(status.st_mode) ? fmt::format("{} bytes long", size) : "not a regular file");
        return std::nullopt;
    }
    std::vector<std::byte> entry(size);
    if (const int error = read_exactly(file.get(), entry)) {
        if (!means_absent(error)) fault(warned_read_, fmt::format("{} cannot be read: {}", path.string(), std::strerror(error)));
        return std::nullopt;
    }
    std::string why;
    auto artifact = decode_artifact(key, entry, why);
    if (!artifact) quarantine(path, file.get(), why);
    return artifact;
} catch (const std::exception& error) {
    fault(warned_read_, fmt::format("{}: {}", directory_.string(), error.what()));
    return std::nullopt;
}

// Renamed aside, not removed, so that it can be looked at; a second one of the same key replaces the first, so they cannot pile up.
void DiskStore::quarantine(const fs::path& path, int file, const std::string& why) {
    faults_.fetch_add(1, std::memory_order_relaxed);
    struct stat opened{};
    struct stat present{};
    // Another process may have replaced the entry by a good one since.
    const bool same = ::fstat(file, &opened) == 0 && ::stat(path.c_str(), &present) == 0 && opened.st_ino == present.st_ino &&
                      opened.st_dev == present.st_dev;
    const bool moved = same && ::rename(path.c_str(), (path.string() + ".corrupt").c_str()) == 0;
    logger().warn("cache: {} is not used: {}{}", path.string(), why, moved ? "; renamed to *.corrupt" : "");
}

void DiskStore::put(const CacheKey& key, const Artifact& artifact) try {
    if (!usable(true)) return;
    const fs::path path = path_of(key);
    const std::vector<std::byte> entry = encode_artifact(key, artifact);
    int error = make_private_directories(path.parent_path());
    if (error == 0 && publish(path, entry, error)) return;
    // Somebody cleared the cache between the two steps.
    if (means_absent(error)) {
        error = make_private_directories(path.parent_path());
        if (error == 0 && publish(path, entry, error)) return;
    }
    fault(warned_write_, fmt::format("{} cannot be written: {}", path.string(), std::strerror(error)));
} catch (const std::exception& error) {
    fault(warned_write_, fmt::format("{}: {}", directory_.string(), error.what()));
}

bool DiskStore::publish(const fs::path& path, const std::vector<std::byte>& entry, int& error) {
    std::string temporary = (path.parent_path() / ("." + path.stem().string() + ".XXXXXX")).string();
    FileDescriptor file(::mkostemp(temporary.data(), O_CLOEXEC));
    if (!file) {
        error = errno;
        return false;
    }
    // fsync before rename: after a power cut the name must never lead to missing bytes.
    const bool done =
        write_all(file.get(), entry) && ::fsync(file.get()) == 0 && file.close() && ::rename(temporary.c_str(), path.c_str()) == 0;
    if (!done) {
        error = errno;
        ::unlink(temporary.c_str());
        return false;
    }
    const FileDescriptor folder(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder) ::fsync(folder.get());  // some file systems refuse this on a directory; the entry is complete either way
    return true;
}

}  // namespace flce

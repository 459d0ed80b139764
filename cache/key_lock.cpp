#include "cache/key_lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "cache/file_io.hpp"
#include "cache/log.hpp"
#include "cache/machine_folder.hpp"

namespace flce {
namespace {

// Not in <linux/magic.h> of every distribution.
constexpr std::uint64_t kXfsMagic = 0x58465342;
constexpr std::uint64_t kZfsMagic = 0x2fc12fc1;

// A folder goes with the last lock in it (LockFile::removed), maybe right after it was made for another.
constexpr int kFolderAttempts = 100;

// A user who can write it could take every lock and keep it.
void warn_of(const std::string& folder_and_fault) { warn_once_in_process("cache: no locks are taken in " + folder_and_fault); }

}  // namespace

bool is_local_file(int file) {
    struct statfs status{};
    if (::fstatfs(file, &status) != 0) return false;
    switch (static_cast<std::uint64_t>(static_cast<std::uint32_t>(status.f_type))) {
        case EXT4_SUPER_MAGIC:
        case BTRFS_SUPER_MAGIC:
        case TMPFS_MAGIC:
        case OVERLAYFS_SUPER_MAGIC:
        case F2FS_SUPER_MAGIC:
        case kXfsMagic:
        case kZfsMagic: return true;
        default: return false;
    }
}

bool is_local_folder(const std::filesystem::path& folder) {
    const FileDescriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return opened && is_local_file(opened.get());
}

bool KeyLock::open(const std::filesystem::path& path) {
    for (int attempt = 0; attempt < kFolderAttempts; ++attempt) {
        file_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
        if (file_) return is_local_file(file_.get());
        if (errno != ENOENT || (::mkdir(path.parent_path().c_str(), 0700) != 0 && errno != EEXIST)) return false;
    }
    return false;
}

bool KeyLock::still_named(const std::filesystem::path& path) const {
    struct stat opened{};
    struct stat named{};
    return ::fstat(file_.get(), &opened) == 0 && ::lstat(path.c_str(), &named) == 0 && opened.st_ino == named.st_ino &&
           opened.st_dev == named.st_dev;
}

void KeyLock::remove_unheld(const std::filesystem::path& path) {
    const FileDescriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (!file || !is_local_file(file.get()) || ::flock(file.get(), LOCK_EX | LOCK_NB) != 0) return;
    ::unlink(path.c_str());
}

bool KeyLock::usable(const std::filesystem::path& folder) {
    int error = ENOENT;
    std::string fault;
    for (int attempt = 0; error == ENOENT && attempt < kFolderAttempts; ++attempt) {
        if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return false;
        fault = directory_fault(folder, error);
    }
    if (!fault.empty() && error == 0) warn_of(fmt::format("{}: {}", folder.string(), fault));
    return fault.empty();
}

KeyLock::KeyLock(const std::filesystem::path& directory, const CacheKey& key, std::chrono::milliseconds wait, LockFile afterwards) {
    const std::filesystem::path folder = directory / "locks";
    if (!usable(folder)) return;
    if (is_local_folder(directory)) {
        take(folder / key.hex(), key, wait);
        if (held_ && afterwards == LockFile::removed) removed_ = folder / key.hex();
        return;
    }
    std::string why;
    const std::filesystem::path own = machine_folder("locks", true, why);
    if (!why.empty()) warn_of(why);
    if (own.empty()) return;
    const std::string place = std::filesystem::absolute(directory).string();
    const std::filesystem::path path = own / fmt::format("{}-{:016x}", key.hex(), XXH3_64bits(place.data(), place.size()));
    take(path, key, wait);
    of_machine_ = true;
    if (held_) removed_ = path;
}

KeyLock::~KeyLock() {
    if (removed_.empty()) return;
    ::unlink(removed_.c_str());
    if (!of_machine_) ::rmdir(removed_.parent_path().c_str());  // fails where another lock is in it
}

void KeyLock::take(const std::filesystem::path& path, const CacheKey& key, std::chrono::milliseconds wait) {
    if (!open(path)) return;
    const auto deadline = std::chrono::steady_clock::now() + wait;
    auto pause = std::chrono::milliseconds(1);
    while (true) {
        if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
            if (still_named(path)) {
                held_ = true;
                return;
            }
            // Removed since it was opened: another process may hold a new one of that name.
            if (!open(path)) return;
        } else if (errno != EWOULDBLOCK && errno != EINTR) {
            return;
        } else {
            waited_ = true;
        }
        const auto now = std::chrono::steady_clock::now();
        if (now >= deadline) {
            logger().info("cache: another process has held {} for {} ms; compiling here too", key.hex(), wait.count());
            return;
        }
        std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(pause, deadline - now));
        pause = std::min(pause * 2, std::chrono::milliseconds(50));
    }
}

}  // namespace flce

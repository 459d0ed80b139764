#include "cache/key_lock.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "cache/log.hpp"

namespace flce {
namespace {

// Not in <linux/magic.h> of every distribution.
constexpr std::uint64_t kXfsMagic = 0x58465342;
constexpr std::uint64_t kZfsMagic = 0x2fc12fc1;

bool is_local(int file) {
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

}  // namespace

KeyLock::KeyLock(const std::filesystem::path& directory, const CacheKey& key, std::chrono::milliseconds wait) {
    const std::filesystem::path folder = directory / "locks";
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return;
    file_ = FileDescriptor(::open((folder / key.hex()).c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!file_ || !is_local(file_.get())) return;
    const auto deadline = std::chrono::steady_clock::now() + wait;
    auto pause = std::chrono::milliseconds(1);
    while (true) {
        if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0) {
            held_ = true;
            return;
        }
        if (errno != EWOULDBLOCK && errno != EINTR) return;
        waited_ = true;
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

// One builder per key on a machine: an flock on <directory>/locks/<key>, so that sixteen ranks starting together compile once. Where the
// directory lies on a network file system, on a file of this machine.
#pragma once

#include <chrono>
#include <filesystem>

#include "cache/artifact_cache.hpp"
#include "cache/file_descriptor.hpp"

namespace flce {

/// The fate of a lock's file when the lock is given up. Many processes that compile find it there; of a folder of records, which people
/// copy and commit, it would be litter.
enum class LockFile { kept, removed };

/// Held until destroyed, or by the kernel until the process dies: a killed builder leaves nothing behind but an empty file, which anyone
/// may lock. File systems that are not known to be local are not asked for locks, which hang or lie there: <temporary
/// directory>/flce-locks-<user> has those. Not taken (which is no error: the caller compiles for itself) where neither will do, in a
/// directory that cannot be written, and after `wait`.
class KeyLock {
public:
    KeyLock(const std::filesystem::path& directory, const CacheKey& key, std::chrono::milliseconds wait,
            LockFile afterwards = LockFile::kept);
    ~KeyLock();
    KeyLock(const KeyLock&) = delete;
    KeyLock& operator=(const KeyLock&) = delete;
    KeyLock(KeyLock&&) = delete;
    KeyLock& operator=(KeyLock&&) = delete;

    [[nodiscard]] bool held() const noexcept { return held_; }
    /// Whether the file that is held lies in the directory itself: then it keeps everybody out to whom that directory is local.
    [[nodiscard]] bool excludes_all() const noexcept { return held_ && !of_machine_; }
    /// Whether somebody else had it first: what the caller looked for may be there now.
    [[nodiscard]] bool waited() const noexcept { return waited_; }

    /// Removes a lock file that nobody holds. A process that opened it before and locks it afterwards sees that its name is gone, and
    /// starts again.
    static void remove_unheld(const std::filesystem::path& file);

private:
    /// Makes the folder where there is none; false where no locks are to be taken in it.
    [[nodiscard]] static bool usable(const std::filesystem::path& folder);
    void take(const std::filesystem::path& path, const CacheKey& key, std::chrono::milliseconds wait);
    [[nodiscard]] bool open(const std::filesystem::path& path);
    [[nodiscard]] bool still_named(const std::filesystem::path& path) const;

    FileDescriptor file_;
    std::filesystem::path removed_;  ///< file to remove at the end, with its folder where that is empty then
    bool of_machine_ = false;        ///< whether the lock is in a folder of this machine, where nobody else cleans up
    bool held_ = false;
    bool waited_ = false;
};

/// Whether the file lies on a file system whose locks work: a local one. Unknown ones count as remote.
[[nodiscard]] bool is_local_file(int file);
[[nodiscard]] bool is_local_folder(const std::filesystem::path& folder);

}  // namespace flce

// One builder per key on a machine: an flock on <directory>/locks/<key>, so that sixteen ranks starting together compile once.
#pragma once

#include <chrono>
#include <filesystem>

#include "cache/artifact_cache.hpp"
#include "cache/file_descriptor.hpp"

namespace flce {

/// Held until destroyed, or by the kernel until the process dies: a killed builder leaves nothing behind but an empty file, which anyone may
/// lock. Not taken (which is no error: the caller compiles for itself) on file systems that are not known to be local, where locks hang or lie;
/// in a directory that cannot be written; and after `wait`.
class KeyLock {
public:
    KeyLock(const std::filesystem::path& directory, const CacheKey& key, std::chrono::milliseconds wait);
    [[nodiscard]] bool held() const noexcept { return held_; }
    /// Whether somebody else had it first: what the caller looked for may be there now.
    [[nodiscard]] bool waited() const noexcept { return waited_; }

    /// Removes a lock file that nobody holds. Whoever opened it before and locks it afterwards sees that its name is gone, and starts again.
    static void remove_unheld(const std::filesystem::path& file);

private:
    [[nodiscard]] bool open(const std::filesystem::path& path);
    [[nodiscard]] bool still_named(const std::filesystem::path& path) const;

    FileDescriptor file_;
    bool held_ = false;
    bool waited_ = false;
};

/// Whether the file lies on a file system whose locks work: a local one. Unknown ones count as remote.
[[nodiscard]] bool is_local_file(int file);

}  // namespace flce

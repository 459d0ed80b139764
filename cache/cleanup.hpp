// Keeps a cache directory under a size: entries used longest ago go first. Safe beside processes that read and write: an open file stays
// readable when its name is removed, and a process that comes too late compiles once more.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"

namespace flce {

struct CleanupResult {
    std::int64_t removed_entries = 0;
    std::uint64_t removed_bytes = 0;  ///< bytes removed, with files that are not entries: temporaries and locks of dead processes,
                                      ///< quarantined entries
    std::int64_t kept_entries = 0;
    std::uint64_t kept_bytes = 0;
    bool busy = false;  ///< another process is at it: nothing was done
    std::string fault;  ///< the first thing that could not be listed or removed, and why; empty: all could
};

/// Removes entries until the rest takes at most `max_bytes`. Entries of at most 1 KiB go when nothing else is left: they say which
/// compilers' cubins there are, and take no room. Files of dead processes go too, a day after they were written; quarantined entries and
/// unheld locks at once with max_bytes 0. The directory has passed DiskStore::usable. A file that cannot be listed or removed stays, and no
/// other entry goes in its place: the next cleanup mends that.
[[nodiscard]] CleanupResult clean_up(const std::filesystem::path& directory, std::uint64_t max_bytes);

/// An entry's file.
struct StoredFile {
    std::filesystem::path path;
    CacheKey key;
    std::uint64_t bytes = 0;
    std::int64_t used = 0;  ///< seconds since the epoch, to the hour
};

/// Every entry of the directory, by key; sound or not. `fault`: why these may not be all; empty: they are.
[[nodiscard]] std::vector<StoredFile> list_entries(const std::filesystem::path& directory, std::string& fault);

}  // namespace flce

// <directory>/statistics: what all processes together did with a cache directory and the tiers behind it, for `flce cache stats`. Numbers for people;
// nothing is decided by them, and a process that is killed or finds the file busy for long may go uncounted.
//
//     file = lines of "<tier>.<counter> <20 digits>", and "created <20 digits>": written in place, under an flock
#pragma once

#include <cstdint>
#include <filesystem>

#include "cache/artifact_cache.hpp"

namespace flce {

/// Sums over all processes, `tiers` and `created` only. Zeros where there is no such file, or none that can be understood.
[[nodiscard]] CacheStatistics read_statistics(const std::filesystem::path& directory);

/// Adds what is new. Says no where that would take long or cannot be done: the caller tries again with more. Only on local file systems, whose locks
/// work.
[[nodiscard]] bool add_statistics(const std::filesystem::path& directory, const CacheStatistics& news);

}  // namespace flce

// <directory>/statistics: what all processes together did with a cache directory and the tiers behind it, for `flce cache stats`. Where the
// directory cannot be used or written, or its locks do not work, all such processes count in a file of the user's own on this machine: the
// directory at fault cannot hold the faults that one wants to see. The numbers are for people. Nothing is decided by them, and a process
// that is killed or finds the file busy for long may go uncounted.
//
//     file = lines of "<tier>.<counter> <20 digits>", and "created <20 digits>": written in place, under an flock
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "cache/artifact_cache.hpp"

namespace flce {

/// Sums over all processes, `tiers` and `created` only. Zeros where there is no such file, none that can be understood, or no directory.
[[nodiscard]] CacheStatistics read_statistics(const std::filesystem::path& directory);

enum class Counted {
    yes,
    busy,  ///< adding would take long: the caller tries again with more
    no,    ///< the file cannot be written, or lies where locks do not work
};
/// Adds new counts to the directory's file, which has passed DiskStore::usable.
[[nodiscard]] Counted add_statistics(const std::filesystem::path& directory, const CacheStatistics& news);

/// Adds new counts to the file in machine_folder("statistics").
[[nodiscard]] Counted add_machine_statistics(const CacheStatistics& news);

struct MachineStatistics {
    CacheStatistics sums;
    std::filesystem::path folder;  ///< empty: there is none that can be used, so that nothing is counted
    std::string why;               ///< reason why it is not used
};
[[nodiscard]] MachineStatistics read_machine_statistics();

}  // namespace flce

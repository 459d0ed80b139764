// Every environment variable that flce reads, parsed once, here. The table is printed by `flce info`.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "flce/flce.hpp"

namespace flce {

struct Environment {
    std::filesystem::path cache_dir;  ///< FLCE_CACHE_DIR, else $XDG_CACHE_HOME/flce, else ~/.cache/flce; empty: no home, so no disk cache
    bool no_disk_cache = false;       ///< FLCE_NO_DISK_CACHE
    std::string device;               ///< FLCE_DEVICE; empty: not set
    int num_threads = 0;              ///< FLCE_NUM_THREADS; 0: every core
    std::filesystem::path nvrtc;      ///< FLCE_NVRTC: the library or the folder it is in; empty: search
    std::filesystem::path libcuda;    ///< FLCE_LIBCUDA; empty: libcuda.so.1
    std::string log = "warn";         ///< FLCE_LOG
};

/// Throws EnvironmentError naming a variable whose value it does not understand. A variable set to "" counts as not set.
[[nodiscard]] Environment parse_environment(const std::function<const char*(const char*)>& getenv);

/// The process's, parsed at the first call, which also sets the logger's level.
[[nodiscard]] const Environment& environment();

}  // namespace flce

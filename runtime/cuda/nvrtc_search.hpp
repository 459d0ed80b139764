// Search for NVRTC: a file next to its builtins, found without loading anything, so that a kernel that the cache holds never pays for the
// compiler.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace flce {

struct NvrtcLocation {
    std::filesystem::path library;                ///< absolute
    std::vector<std::filesystem::path> builtins;  ///< libnvrtc-builtins of the same CUDA major version beside it; may be empty
    std::string build_id;                         ///< GNU build-ids of all of them, or SHA-256 of a file without one
};

/// Looks at, in this order: `chosen` (FLCE_NVRTC: a file or a folder; nothing else unless it is empty), the folders the build recorded
/// relative to libflce, CUDA_HOME, CUDA_PATH, /usr/local/cuda, the loader's path, PyPI wheels of VIRTUAL_ENV, CONDA_PREFIX and python3.
/// Throws EnvironmentError listing every place and its fault.
[[nodiscard]] NvrtcLocation find_nvrtc(const std::filesystem::path& chosen);

/// Result of looking at `file`: an NVRTC for this machine, or the reason why it is none.
struct NvrtcProbe {
    bool usable = false;
    NvrtcLocation location;
    std::string why;
};
[[nodiscard]] NvrtcProbe probe_nvrtc(const std::filesystem::path& file);

/// Folders of the toolkits and wheels above that exist, in that order: places of other libraries of CUDA's.
[[nodiscard]] std::vector<std::filesystem::path> cuda_library_folders();

}  // namespace flce

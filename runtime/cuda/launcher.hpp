// Lowers a launch program to host code with LLVM: one function per pass, all constants folded, no branch on an option left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flce/device.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

/// What a compiled launcher reads besides the slots: the driver's entry points and the loaded kernels.
struct LauncherContext {
    void* launch_kernel =
        nullptr;  ///< CUresult cuLaunchKernel(CUfunction, 6 × unsigned, unsigned smem, CUstream, void** params, void** extra);
                  ///< the parameter block goes through `extra`
    void* memset_async = nullptr;      ///< CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream)
    void* const* functions = nullptr;  ///< CUfunction of each KernelEntry
};

/// Returns 0, or (CUresult | statement index << 32) of the first call that failed; nothing after it is launched. Statements are numbered in
/// the order of their text, a Loop or If before its body.
using LauncherFunction = std::int64_t (*)(const LauncherContext* context, const std::int64_t* slots, void* stream);

inline constexpr const char* kForwardLauncherSymbol = "flce_launch_forward";
inline constexpr const char* kBackwardLauncherSymbol = "flce_launch_backward";

/// One line for each statement, at its index: for error messages, logs and the key of the compiled launchers.
[[nodiscard]] std::vector<std::string> statement_texts(const LaunchProgram& program, const std::vector<KernelEntry>& kernels);

/// The baseline of the host's architecture: launchers are a few integer instructions, so one object serves every host of a cluster.
[[nodiscard]] CpuProperties launcher_target(const CpuProperties& host);

/// Object file with the two symbols above, for the machine described by `host`.
[[nodiscard]] std::vector<std::byte> compile_launchers(const CudaProgram& program, const CpuProperties& host);

}  // namespace flce

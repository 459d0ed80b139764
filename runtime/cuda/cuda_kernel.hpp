// The parts of make_cuda_kernel.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "generator/cuda_program.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/launcher.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {

/// The cubin of each of `program`'s units from the cache, or compiled, several at a time. Their metadata holds the spec, plan, compiler and
/// each kernel's registers, shared memory and spills. Needs NVRTC, no GPU.
[[nodiscard]] std::vector<std::shared_ptr<const Artifact>> cuda_cubins(const BuildRequest& request, const CudaProgram& program,
                                                                       ArtifactCache& cache);

/// The kernel set's launchers from the cache, or compiled. Needs neither NVRTC nor a GPU.
[[nodiscard]] std::shared_ptr<const Artifact> cuda_launchers(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache);

/// The symbols of the launchers' object.
inline constexpr std::array kLauncherSymbols{kForwardLauncherSymbol, kMergeLauncherSymbol, kBackwardLauncherSymbol};

/// make_cuda_kernel on a given driver.
[[nodiscard]] std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache, const CudaDriver& driver);

}  // namespace flce

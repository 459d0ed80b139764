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

/// Sees to it that the cache has the kernel set's launchers, for hosts of every architecture where it may create them, so that a pack that
/// is made on one serves the others. Needs neither NVRTC nor a GPU.
void cuda_launchers(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache);

/// The symbols of the launchers' object.
inline constexpr std::array kLauncherSymbols{kForwardLauncherSymbol, kMergeLauncherSymbol, kBackwardLauncherSymbol};

/// make_cuda_kernel on a given driver.
[[nodiscard]] std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache, const CudaDriver& driver);

}  // namespace flce

// The parts of make_cuda_kernel.
#pragma once

#include <memory>

#include "generator/cuda_program.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {

/// The cubin of `program` from the cache, or compiled. Its metadata holds the spec, plan, compiler and each kernel's registers, shared memory and
/// spills. Needs NVRTC, no GPU.
[[nodiscard]] std::shared_ptr<const Artifact> cuda_cubin(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache);

/// The same for its launchers. Needs neither NVRTC nor a GPU.
[[nodiscard]] std::shared_ptr<const Artifact> cuda_launchers(const BuildRequest& request, const CudaProgram& program, ArtifactCache& cache);

/// make_cuda_kernel on a given driver.
[[nodiscard]] std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache, const CudaDriver& driver);

}  // namespace flce

// make_cuda_kernel on a given driver.
#pragma once

#include <memory>

#include "runtime/cuda/driver.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {

[[nodiscard]] std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache, const CudaDriver& driver);

}  // namespace flce

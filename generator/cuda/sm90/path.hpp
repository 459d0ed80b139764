// Path cuda_sm90a: Hopper's kernels (wgmma, tensor copies, clusters) for 16-bit dtypes.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"

namespace flce {

[[nodiscard]] const CudaPath& path_sm90();

}  // namespace flce

// Path cuda_sm80: the kernels that run on sm_80 and everything newer (mma.sync, cp.async).
#pragma once

#include "generator/cuda/common/cuda_path.hpp"

namespace flce {

[[nodiscard]] const CudaPath& path_sm80();

}  // namespace flce

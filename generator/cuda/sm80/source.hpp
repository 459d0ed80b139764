// The kernels of a set on path cuda_sm80.
#pragma once

#include "generator/cuda/common/source.hpp"

namespace flce::sm80 {

[[nodiscard]] CudaSource source(const Spec& spec, const Device& device, const Plan& plan);

}  // namespace flce::sm80

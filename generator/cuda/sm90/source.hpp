// The kernels of a set on path cuda_sm90a.
#pragma once

#include "generator/cuda/common/source.hpp"

namespace flce::sm90 {

[[nodiscard]] CudaSource source(const Spec& spec, const Device& device, const Plan& plan);

}  // namespace flce::sm90

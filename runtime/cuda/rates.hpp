// Rates of a GPU, measured on it: what a cost model takes from tables where nobody has measured.
#pragma once

#include "runtime/cuda/driver.hpp"

namespace flce {

/// Measures for about `seconds` in all, after NVRTC has compiled the kernels. Throws as NVRTC and the driver do.
[[nodiscard]] MeasuredRates measure_rates(const std::shared_ptr<const CudaContext>& context, double seconds);

/// mma_flops over `seconds` in a row: with a second or two, the rate that the GPU's power limit allows.
[[nodiscard]] double measure_mma_rate(const std::shared_ptr<const CudaContext>& context, double seconds);

}  // namespace flce

// Rates of a GPU, measured on it: what a cost model takes from tables where nobody has measured.
#pragma once

#include "runtime/cuda/driver.hpp"

namespace flce {

struct GpuRates {
    double mma_flops = 0;         ///< operations a second of mma.sync on bf16, operands read from shared memory by ldmatrix
    double copy_bytes_per_s = 0;  ///< bytes read and bytes written, of a copy in device memory
    double l2_bytes_per_s = 0;    ///< bytes read from the L2 cache
    double launch_seconds = 0;    ///< from the end of one small kernel to the end of the next one in line
};

/// Measures for about `seconds` in all, after NVRTC has compiled the kernels. Throws as NVRTC and the driver do.
[[nodiscard]] GpuRates measure_rates(const std::shared_ptr<const CudaContext>& context, double seconds);

/// mma_flops over `seconds` in a row: with a second or two, the rate that the GPU's power limit allows.
[[nodiscard]] double measure_mma_rate(const std::shared_ptr<const CudaContext>& context, double seconds);

}  // namespace flce

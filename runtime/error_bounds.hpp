// How wrong an output may be: the formulas of docs/numerics.md, shared by the tests and by `flce check`. Pure arithmetic on doubles.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "flce/spec.hpp"

namespace flce {

/// Largest relative error of rounding to nearest: 2⁻⁸ for bf16, 2⁻¹¹ for fp16, 2⁻²⁴ for fp32.
[[nodiscard]] constexpr double unit_roundoff(DType dtype) noexcept {
    switch (dtype) {
        case DType::bf16: return 0x1p-8;
        case DType::fp16: return 0x1p-11;
        case DType::fp32: return 0x1p-24;
    }
    return 0;
}

/// Largest absolute error that rounding to a subnormal adds: half of fp16's smallest number; bf16 and fp32 reach too far down to matter.
[[nodiscard]] constexpr double underflow_error(DType dtype) noexcept { return dtype == DType::fp16 ? 0x1p-25 : 0; }

/// Most relative error of lse, logprobs, entropy and log_sum_sq_probs where the inputs allow it.
[[nodiscard]] constexpr double output_error_cap(DType dtype) noexcept { return dtype == DType::fp32 ? 1e-6 : 1e-5; }

/// Most relative error of loss and z_loss. With dft a loss is multiplied by exp(logprob), whose relative error is logprob's absolute error.
[[nodiscard]] constexpr double loss_error_cap(const Spec& spec) noexcept { return output_error_cap(spec.dtype) * (spec.dft ? 2 : 1); }

/// Most relative Frobenius error of a gradient where the inputs allow it. The logits' gradient is rounded to the spec's dtype, so that
/// dtype decides, whatever the gradient is stored in.
[[nodiscard]] constexpr double gradient_error_cap(DType dtype) noexcept {
    switch (dtype) {
        case DType::bf16: return 4e-3;
        case DType::fp16: return 5e-4;
        case DType::fp32: return 2e-6;
    }
    return 0;
}

/// Relative Frobenius error of a gradient that codes near a tie may make, in an FP8 head.
inline constexpr double kFp8TieError = 1e-3;
/// Most relative Frobenius error of a gradient of an FP8 head on a GPU, to the layer with the same numbers of 8 bits.
inline constexpr double kFp8GpuGradientError = 3e-2;
/// Most relative error of an output of a head with operands in e4m3, between a CPU and a GPU, whose tensor cores keep 13 bits of sums of
/// FP8 products.
inline constexpr double kFp8GpuOutputError = 5e-4;

/// How a product of matrices in the spec's dtype adds up in fp32.
enum class Summation {
    rounding,    ///< every addition rounds to nearest, in slices of a few hundred terms: fp32 units, and fp32 inputs on any device
    truncating,  ///< tensor cores: kTensorCoreStep products at a time join the sum, which is then cut off to 24 bits
};

/// Products that one tensor-core instruction of 16-bit operands adds to an accumulator (mma.sync and wgmma alike).
inline constexpr std::int64_t kTensorCoreStep = 16;

/// Summation of a framework's matrix products on that kind of device: TF32 is off by default, so only 16-bit inputs go to tensor cores.
[[nodiscard]] constexpr Summation summation_of(DType dtype, bool on_gpu) noexcept {
    return on_gpu && dtype != DType::fp32 ? Summation::truncating : Summation::rounding;
}

/// `value` cut off to fp32's 24 significant bits.
[[nodiscard]] inline double truncated_to_fp32(double value) noexcept {
    return std::bit_cast<double>(std::bit_cast<std::uint64_t>(value) & ~((std::uint64_t{1} << 29) - 1));
}

/// How far the norm of `count` independent errors may exceed its expectation by chance: four standard deviations for a single number, next
/// to nothing for many.
[[nodiscard]] inline double chance_factor(std::int64_t count) noexcept {
    return 1 + 3 / std::sqrt(static_cast<double>(std::max<std::int64_t>(count, 1)));
}

/// The bound of an output's error: twice the error of the reference arithmetic. The bound is never below `floor`, the expected cost of
/// rounding the intermediates times chance_factor, since a reference may happen to be exact. It is at most `cap` where reference and floor
/// keep to `cap`.
[[nodiscard]] constexpr double error_bound(double reference_error, double floor, double cap) noexcept {
    const double bound = std::max(2 * reference_error, floor);
    return reference_error <= cap && floor <= cap ? std::min(bound, cap) : bound;
}

}  // namespace flce

// Bounds of docs/numerics.md, written down once more: the tests of the judge do not take its word for them.
#pragma once

#include <algorithm>
#include <cmath>

#include "flce/spec.hpp"

namespace flce::test {

// Multiples of its bound by which a result is off and is refused, or passes.
inline constexpr double kRefused = 3;
inline constexpr double kPasses = 0.5;
inline constexpr double kFp32Unit = 0x1p-24;

inline double output_cap(DType dtype) { return dtype == DType::fp32 ? 1e-6 : 1e-5; }
inline double gradient_cap(DType dtype) { return dtype == DType::bf16 ? 4e-3 : dtype == DType::fp16 ? 5e-4 : 2e-6; }
inline double rounding(DType dtype) { return 0.4 * (dtype == DType::bf16 ? 0x1p-8 : dtype == DType::fp16 ? 0x1p-11 : kFp32Unit); }

/// Twice the framework's error, at least what rounding costs, and at most the cap where both keep to it.
inline double bound_of(double yardstick, double floor, double cap) {
    const double bound = std::max(2 * yardstick, std::min(floor, cap));
    return yardstick <= cap ? std::min(bound, cap) : bound;
}

/// Error of a logit: an fp32 sum of products.
inline double logit_error(double product_norm) { return 0.4 * kFp32Unit * std::sqrt(0.5) * product_norm; }
inline double output_floor(double product_norm, double size) { return 8 * kFp32Unit + 2 * logit_error(product_norm) / size; }
/// `rounded`: how many factors of the products are rounded, and the result.
inline double gradient_floor(DType dtype, double product_norm, int rounded = 2) {
    return std::sqrt(rounded * std::pow(rounding(dtype), 2) + 16 * std::pow(logit_error(product_norm), 2)) + 8 * kFp32Unit;
}

}  // namespace flce::test

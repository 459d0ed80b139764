// Matrix products as the tensor cores of an H100 add them up with fp32 accumulators and 16-bit inputs (given here as floats that hold such
// numbers).
//
// A step takes kTensorCoreStep products and the accumulator. All of them are cut off kTensorCoreBits below the largest exponent among them,
// added exactly, and the sum is cut off to fp32. An exponent is taken before the product is normalised: the sum of its factors' exponents.
// On an H100, mma.sync of normally distributed bf16 numbers and this model have the same error to three digits for every k from 8 to 2560
// (docs/numerics.md).
#pragma once

#include <cstdint>

namespace flce::test {

inline constexpr int kTensorCoreBits = 25;

/// c[m, n] = a[m, k] · b[n, k]ᵀ
void tensor_core_transposed(const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k);
/// c[m, n] += a[m, k] · b[k, n]
void tensor_core_add(const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k);

}  // namespace flce::test

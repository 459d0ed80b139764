// Numbers of 8 bits that an FP8 head multiplies, and the scales that bring its operands into their range. Plain C++, as row_math.cuh: the
// CPU backend, the reference of the tests and kernels have the same codes of the same numbers. A kernel may take an instruction for a
// function where its results are equal (cvt.rn.satfinite for e4m3_code and e5m2_code).
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include <math.h>

#include <bit>

#include "templates/common/host_device.cuh"
#endif

namespace flce {
namespace fp8 {

#if defined(__CUDACC__)
FLCE_HOST_DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
FLCE_HOST_DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }
#else
FLCE_HOST_DEVICE unsigned bits_of(float x) { return std::bit_cast<unsigned>(x); }
FLCE_HOST_DEVICE float float_of(unsigned bits) { return std::bit_cast<float>(bits); }
#endif

FLCE_HOST_DEVICE float int8_most() { return 127.f; }
FLCE_HOST_DEVICE float e4m3_most() { return 448.f; }
FLCE_HOST_DEVICE float e5m2_most() { return 57344.f; }
FLCE_HOST_DEVICE float log2_e() { return 1.44269504f; }

/// 2^n for −126 ≤ n ≤ 127.
FLCE_HOST_DEVICE float power_of_two(int n) { return float_of(static_cast<unsigned>(n + 127) << 23); }

/// Rounds to the nearest integer, ties to even, for |x| below 2^22.
FLCE_HOST_DEVICE float to_integer(float x) {
#if defined(__CUDACC__) || defined(__aarch64__)
    return rintf(x);  // an instruction there, which no compiler fuses with the product before it
#else
    constexpr float kShift = 12582912.f;  // 1.5 · 2^23
    return (x + kShift) - kShift;
#endif
}

/// Rounds to the nearest number with this many bits behind the leading one and, from 2^kLeast down, their spacing there; ties to even. What
/// is beyond `most` becomes that, NaN stays NaN.
template <int kBits, int kLeast>
FLCE_HOST_DEVICE float rounded(float x, float most) {
    constexpr unsigned kUnit = 1U << (23 - kBits);
    const unsigned bits = bits_of(x);
    const unsigned magnitude = bits & 0x7fffffffU;
    const float normal = float_of((magnitude + (kUnit / 2 - 1) + ((magnitude / kUnit) & 1U)) & ~(kUnit - 1));
    const float size = float_of(magnitude);
    const float shift = power_of_two(kLeast - kBits + 23);  // its unit in the last place is the spacing of subnormal numbers
    const float near_zero = (size + shift) - shift;
    const float nearest = size < power_of_two(kLeast) ? near_zero : normal;
    const float within = nearest < most ? nearest : most;
    const float result = float_of(bits_of(within) | (bits ^ magnitude));
    return magnitude > 0x7f800000U ? x : result;
}
FLCE_HOST_DEVICE float rounded_to_e4m3(float x) { return rounded<3, -6>(x, e4m3_most()); }
FLCE_HOST_DEVICE float rounded_to_e5m2(float x) { return rounded<2, -14>(x, e5m2_most()); }
/// The number in [−127, 127] that int8 has of a row's number times its factor. NaN is −127: the row's scale is NaN.
FLCE_HOST_DEVICE float rounded_to_int8(float x) {
    const float above = x > -int8_most() ? x : -int8_most();
    return to_integer(above < int8_most() ? above : int8_most());
}

/// Code of a number that `rounded` has made.
template <int kBits, int kLeast>
FLCE_HOST_DEVICE unsigned char code_of(float number) {
    const unsigned bits = bits_of(number);
    const unsigned magnitude = bits & 0x7fffffffU;
    const unsigned sign = bits >> 24 & 0x80U;
    if (magnitude > 0x7f800000U) return static_cast<unsigned char>(sign | 0x7fU);
    const float size = float_of(magnitude);
    if (size < power_of_two(kLeast)) return static_cast<unsigned char>(sign | static_cast<unsigned>(size * power_of_two(kBits - kLeast)));
    return static_cast<unsigned char>(sign | (magnitude - (static_cast<unsigned>(kLeast + 126) << 23)) >> (23 - kBits));
}
FLCE_HOST_DEVICE unsigned char e4m3_code(float x) { return code_of<3, -6>(rounded_to_e4m3(x)); }
FLCE_HOST_DEVICE unsigned char e5m2_code(float x) { return code_of<2, -14>(rounded_to_e5m2(x)); }

/// How a row of the logits' operands becomes codes: a number times `factor` is rounded, and a code times `scale` stands for the number.
struct RowScale {
    float factor;
    float scale;
};

/// `largest`: the largest |x| of the row, NaN where there is one (NaN is the largest as an integer). `most`: int8_most() or e4m3_most(). A
/// row of zeros, or of numbers so small that their factor is none of fp32, is codes of 0 and a scale of 0; one with NaN or an infinity has
/// a scale of NaN, whatever its codes are.
FLCE_HOST_DEVICE RowScale row_scale(float largest, float most) {
    if (!(largest <= 3.402823466e38f)) return {0.f, float_of(0x7fc00000U)};
    if (largest < 0x1p-100f) return {0.f, 0.f};
    return {most / largest, largest / most};
}

/// Takes a scale that is given for all rows. Numbers beyond most · scale are rounded to the largest code. `largest`: as above.
FLCE_HOST_DEVICE RowScale given_row_scale(float largest, float scale) {
    if (!(largest <= 3.402823466e38f)) return {0.f, float_of(0x7fc00000U)};
    if (largest == 0.f) return {0.f, 0.f};
    return {1.f / scale, scale};
}

/// hidden · weightᵀ of a token and a class from the sum of products of their codes.
FLCE_HOST_DEVICE float product_of(float sum, float row, float of_class) { return sum * of_class * row; }

/// Integer k by which a row's exponentials are brought into the range of their format: E = 2^(z·log2 e − k), where the row's sum of
/// exponentials is known. They add up to 2^14 to 2^15 in e5m2, which has 30 octaves below that, and to 2^7 to 2^8 in e4m3, which has 16.
/// k is a float, which NaN passes through. Since it is an integer, all k have the same codes but for their range.
FLCE_HOST_DEVICE float exponent_of_sum(float lse, bool e4m3) { return floorf(lse * log2_e()) - (e4m3 ? 7.f : 14.f); }
/// k where a logit near the row's largest is known instead, which may be up to 2^11 (e5m2) or 2 (e4m3) times below it: its E is 2^4 to 2^5,
/// or 2^7 to 2^8.
FLCE_HOST_DEVICE float exponent_of_reference(float logit, bool e4m3) { return floorf(logit * log2_e()) - (e4m3 ? 7.f : 4.f); }

/// Gradients of a token's logits are probabilities times a + b·z; b is not 0 where the entropy has a gradient. Codes are those of the
/// probabilities above k, times at_lse + slope·(z − lse), of which neither is beyond 1, and `scale` is the `a` of row_factor: p times
/// 1 + |z − lse| is never more than 1, so that codes keep their range.
struct RowShares {
    float scale;
    float at_lse;
    float slope;
};
FLCE_HOST_DEVICE RowShares row_shares(float a, float b, float lse) {
    if (b == 0.f) return {a, 1.f, 0.f};
    const float at_lse = fmaf(b, lse, a);
    const float scale = fmaxf(fabsf(at_lse), fabsf(b));
    return {scale, at_lse / scale, b / scale};
}

/// z·log2 e − k, of which E is a power of two.
FLCE_HOST_DEVICE float power_of_logit(float logit, float exponent) { return fmaf(logit, log2_e(), -exponent); }
/// r with dz = r · E, E the exponentials above k. `a`: the row's factor of probabilities (RowCoefficients::a or a scale of RowShares, times
/// the slope that all of its logits have). NaN where lse is so large that fp32 has no integers beside it, and exponentials above k could be
/// any number.
FLCE_HOST_DEVICE float row_factor(float a, float exponent, float lse) {
    if (!(fabsf(lse) < 0x1p23f)) return float_of(0x7fc00000U);
    return a * exp2f(-power_of_logit(lse, exponent));
}

/// Largest m with largest · 2^m ≤ 448, so that numbers up to `largest` use e4m3's range; from −120 to 120. 0 for 0, and for what is not
/// finite.
FLCE_HOST_DEVICE int e4m3_power(float largest) {
    const unsigned bits = bits_of(largest) & 0x7fffffffU;
    if (bits == 0 || bits >= 0x7f800000U) return 0;
    const int power = 8 - (static_cast<int>(bits >> 23) - 127) - ((bits & 0x7fffffU) > 0x600000U ? 1 : 0);
    return power > 120 ? 120 : power;
}

}  // namespace fp8
}  // namespace flce

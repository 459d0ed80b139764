// bf16, fp16 and codes of quantised weights on the host, one number or a row at a time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "flce/spec.hpp"

namespace flce {

[[nodiscard]] inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

/// Rounds to nearest even; NaN stays NaN.
[[nodiscard]] inline std::uint16_t float_to_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

[[nodiscard]] inline float fp16_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7fffU;
    if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);  // infinity, NaN
    // Shifting the exponent and mantissa into place leaves the number 2^112 too small, subnormals included.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112F));
}

/// Rounds to nearest even; overflow becomes infinity, NaN stays NaN.
[[nodiscard]] inline std::uint16_t float_to_fp16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return sign | 0x7e00U;
    if (magnitude >= 0x477ff000U) return sign | 0x7c00U;  // 65520 and more round to infinity
    if (magnitude < 0x38800000U) {                        // below 2^-14: a subnormal counts units of 2^-24
        // Adding 0.5 (whose unit in the last place is 2^-24) does the rounding.
        const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
        return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
    }
    const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

/// float8_e4m3fn: no infinities; all ones but the sign are NaN.
[[nodiscard]] inline float e4m3_to_float(std::uint8_t code) {
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
    const std::uint32_t magnitude = code & 0x7fU;
    if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
    // In place, exponent and mantissa leave the number 2^120 too small, subnormals included.
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120F));
}

/// Rounds to nearest even; what is beyond 448 becomes 448, NaN stays NaN.
[[nodiscard]] inline std::uint8_t float_to_e4m3(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80U);
    const std::uint32_t magnitude = bits & 0x7fffffffU;
    if (magnitude > 0x7f800000U) return sign | 0x7fU;
    if (magnitude >= 0x43e00000U) return sign | 0x7eU;  // 448
    if (magnitude < 0x3c800000U) {                      // below 2^-6: a subnormal counts units of 2^-9
        const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
        return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x46800000U));
    }
    const std::uint32_t rounded = magnitude + 0x7ffffU + ((magnitude >> 20) & 1U);
    return static_cast<std::uint8_t>(sign | ((rounded - 0x3c000000U) >> 20));
}

/// The 4 bits of float4_e2m1fn: sign, exponent, exponent, mantissa.
[[nodiscard]] inline float e2m1_to_float(std::uint8_t code) {
    constexpr float kNumbers[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    const float number = kNumbers[code & 7U];
    return (code & 8U) != 0 ? -number : number;
}

/// Rounds to nearest, of two to the even one; what is beyond 6 becomes 6.
[[nodiscard]] inline std::uint8_t float_to_e2m1(float value) {
    const float magnitude = value < 0 ? -value : value;
    const std::uint8_t sign = value < 0 ? 8 : 0;
    constexpr float kBetween[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};  // a number between each two
    std::uint8_t code = 0;
    for (const float between : kBetween) code += magnitude > between || (magnitude == between && code % 2 == 1) ? 1 : 0;
    return sign | code;
}

/// `count` numbers of `dtype`, at any alignment, as floats or doubles.
template <class Real>
void to_real(const std::byte* from, DType dtype, Real* to, std::size_t count) {
    if (dtype == DType::fp32) {
        for (std::size_t i = 0; i < count; ++i) {
            float value = 0;
            std::memcpy(&value, from + 4 * i, 4);
            to[i] = value;
        }
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, from + 2 * i, 2);
        to[i] = dtype == DType::bf16 ? bf16_to_float(bits) : fp16_to_float(bits);
    }
}

/// Floats rounded to `dtype`.
inline void from_float(const float* from, DType dtype, std::byte* to, std::size_t count) {
    if (dtype == DType::fp32) {
        std::memcpy(to, from, 4 * count);
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint16_t bits = dtype == DType::bf16 ? float_to_bf16(from[i]) : float_to_fp16(from[i]);
        std::memcpy(to + 2 * i, &bits, 2);
    }
}

}  // namespace flce

#include "tests/support/number_formats.hpp"

#include <bit>
#include <cmath>
#include <cstring>

namespace flce::test {

std::uint16_t to_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float from_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t to_fp16(float value) {
    const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000U : 0U);
    const double magnitude = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7e00U);
    if (magnitude >= 65520.0) return static_cast<std::uint16_t>(sign | 0x7c00U);  // half way to 2^16 and beyond
    if (magnitude < 0x1p-14) {                                                    // subnormal: multiples of 2^-24; nearbyint rounds to even
        return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::nearbyint(magnitude * 0x1p24)));
    }
    // Ties to even among the 13 bits that go; a carry out of the mantissa is the next exponent. The exponents' biases differ by 112.
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value) & 0x7fffffffU;
    return static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(((bits + 0xfffU + ((bits >> 13) & 1U)) >> 13) - (112U << 10)));
}

float from_fp16(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fU;
    const std::uint32_t mantissa = bits & 0x3ffU;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa != 0 ? 0x400000U : 0U));
    if (exponent == 0) return (sign != 0 ? -0x1p-24F : 0x1p-24F) * static_cast<float>(mantissa);
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

float rounded(float value, DType dtype) {
    switch (dtype) {
        case DType::bf16: return from_bf16(to_bf16(value));
        case DType::fp16: return from_fp16(to_fp16(value));
        case DType::fp32: return value;
    }
    return value;
}

ScalarType scalar_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return ScalarType::bf16;
        case DType::fp16: return ScalarType::fp16;
        case DType::fp32: return ScalarType::fp32;
    }
    return ScalarType::fp32;
}

std::vector<std::byte> encode(const std::vector<float>& values, DType dtype) {
    std::vector<std::byte> bytes(values.size() * element_bytes(dtype));
    if (dtype == DType::fp32) {
        if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
        return bytes;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint16_t half = dtype == DType::bf16 ? to_bf16(values[i]) : to_fp16(values[i]);
        std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
    return bytes;
}

std::vector<float> decode(const std::byte* bytes, std::int64_t count, DType dtype) {
    std::vector<float> values(static_cast<std::size_t>(count));
    if (dtype == DType::fp32) {
        if (count > 0) std::memcpy(values.data(), bytes, values.size() * sizeof(float));
        return values;
    }
    for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = decoded(bytes, i, dtype);
    return values;
}

float decoded(const std::byte* bytes, std::int64_t index, DType dtype) {
    if (dtype == DType::fp32) {
        float value = 0;
        std::memcpy(&value, bytes + 4 * index, 4);
        return value;
    }
    std::uint16_t half = 0;
    std::memcpy(&half, bytes + 2 * index, 2);
    return dtype == DType::bf16 ? from_bf16(half) : from_fp16(half);
}

}  // namespace flce::test

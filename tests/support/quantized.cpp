#include "tests/support/quantized.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace flce::test {
namespace {

constexpr std::int64_t kGroup = 16;

/// The code without a sign whose number is nearest.
template <std::size_t count>
std::uint8_t nearest(const std::array<float, count>& numbers, float value) {
    const float magnitude = std::fabs(value);
    const auto above = std::upper_bound(numbers.begin(), numbers.end(), magnitude);
    auto code = static_cast<std::size_t>(above - numbers.begin()) - 1;
    if (code + 1 < count && numbers[code + 1] - magnitude < magnitude - numbers[code]) ++code;
    return static_cast<std::uint8_t>(code);
}

std::uint8_t to_e4m3(float value) {
    static const std::array<float, 127> numbers = [] {
        std::array<float, 127> all{};
        for (std::size_t code = 0; code < all.size(); ++code) all[code] = from_e4m3(static_cast<std::uint8_t>(code));
        return all;
    }();
    const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
    return sign | (std::isfinite(value) ? nearest(numbers, value) : std::uint8_t{0x7f});
}

std::uint8_t to_e2m1(float value) {
    static constexpr std::array<float, 8> kNumbers = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    return (std::signbit(value) ? 8 : 0) | nearest(kNumbers, value);
}

std::int64_t blocks(std::int64_t extent, std::int64_t block) { return (extent + block - 1) / block; }

/// Place of a number's scale.
std::size_t scale_at(const Spec& spec, std::int64_t row, std::int64_t column) {
    if (spec.weight_block == 0) return static_cast<std::size_t>(row);
    const std::int64_t across = blocks(spec.hidden_size, spec.weight_block);
    return static_cast<std::size_t>(row / spec.weight_block * across + column / spec.weight_block);
}

QuantizedRows to_nvfp4(const std::vector<float>& values) {
    QuantizedRows rows;
    rows.codes.resize(values.size() / 2);
    rows.groups.resize(values.size() / kGroup);
    rows.tensor_scale = 0x1.91p-9F;  // groups of moderate weights have scales from subnormal ones on
    for (std::size_t group = 0; group < rows.groups.size(); ++group) {
        float most = 0;
        bool finite = true;
        for (std::size_t i = group * kGroup; i < (group + 1) * kGroup; ++i) {
            most = std::max(most, std::fabs(values[i]));
            finite = finite && std::isfinite(values[i]);
        }
        const float wanted = finite ? std::min(most / 6 / rows.tensor_scale, 448.0F) : std::numeric_limits<float>::quiet_NaN();
        rows.groups[group] = std::byte{to_e4m3(wanted)};
        const float scale = from_e4m3(to_e4m3(wanted)) * rows.tensor_scale;
        for (std::size_t i = group * kGroup; i < (group + 1) * kGroup; i += 2) {
            const auto code = [&](float value) { return finite && scale > 0 ? to_e2m1(value / scale) : std::uint8_t{1}; };
            rows.codes[i / 2] = std::byte(code(values[i]) | code(values[i + 1]) << 4);
        }
    }
    return rows;
}

}  // namespace

float from_e4m3(std::uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    const float sign = (code & 0x80) != 0 ? -1.0F : 1.0F;
    if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
    return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

float from_e2m1(std::uint8_t code) {
    const int exponent = code >> 1 & 3;
    const int mantissa = code & 1;
    const float magnitude =
        exponent == 0 ? 0.5F * static_cast<float>(mantissa) : std::ldexp(2.0F + static_cast<float>(mantissa), exponent - 2);
    return (code & 8) != 0 ? -magnitude : magnitude;
}

QuantizedRows quantized(const Spec& spec, const std::vector<float>& values) {
    if (spec.weight_format == WeightFormat::nvfp4) return to_nvfp4(values);
    QuantizedRows rows;
    const std::int64_t d = spec.hidden_size;
    const std::int64_t block = spec.weight_block;
    const std::int64_t scales = block == 0 ? spec.vocab_size : blocks(spec.vocab_size, block) * blocks(d, block);
    rows.scales.resize(static_cast<std::size_t>(scales));
    for (std::size_t i = 0; i < values.size(); ++i) {
        float& most = rows.scales[scale_at(spec, static_cast<std::int64_t>(i) / d, static_cast<std::int64_t>(i) % d)];
        if (std::isfinite(values[i])) most = std::max(most, std::fabs(values[i]));
    }
    for (float& most : rows.scales) most = most == 0 ? 1 : most / 448;
    rows.codes.resize(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        const float scale = rows.scales[scale_at(spec, static_cast<std::int64_t>(i) / d, static_cast<std::int64_t>(i) % d)];
        rows.codes[i] = std::byte{to_e4m3(values[i] / scale)};
    }
    return rows;
}

std::vector<float> dequantized(const Spec& spec, const QuantizedRows& rows) {
    const std::int64_t d = spec.hidden_size;
    const bool nvfp4 = spec.weight_format == WeightFormat::nvfp4;
    std::vector<float> values(rows.codes.size() * (nvfp4 ? 2 : 1));
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (nvfp4) {
            const auto two = std::to_integer<unsigned>(rows.codes[i / 2]);
            const float scale = from_e4m3(std::to_integer<std::uint8_t>(rows.groups[i / kGroup])) * rows.tensor_scale;
            values[i] = from_e2m1(static_cast<std::uint8_t>(i % 2 == 0 ? two % 16 : two / 16)) * scale;
        } else {
            const auto column = static_cast<std::int64_t>(i) % d;
            values[i] = from_e4m3(std::to_integer<std::uint8_t>(rows.codes[i])) *
                        rows.scales[scale_at(spec, static_cast<std::int64_t>(i) / d, column)];
        }
    }
    return values;
}

}  // namespace flce::test

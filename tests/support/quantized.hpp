// Weights of codes and scales: made from numbers, and read back by the formats' definitions. Nothing is shared with the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flce/spec.hpp"

namespace flce::test {

/// A weight's rows as codes, with their scales.
struct QuantizedRows {
    std::vector<std::byte> codes;   ///< e4m3 [V, D], nvfp4 [V, D / 2]
    std::vector<float> scales;      ///< scales of rows, or of blocks
    std::vector<std::byte> groups;  ///< nvfp4: e4m3 [V, D / 16]
    float tensor_scale = 1;
};

[[nodiscard]] float from_e4m3(std::uint8_t code);
[[nodiscard]] float from_e2m1(std::uint8_t code);

/// Codes and scales for `values` [V, D]; scales differ by rows, blocks or groups. Infinite and NaN numbers become NaN codes, those of nvfp4
/// a NaN scale.
[[nodiscard]] QuantizedRows quantized(const Spec& spec, const std::vector<float>& values);
/// The numbers of a quantised weight in fp32.
[[nodiscard]] std::vector<float> dequantized(const Spec& spec, const QuantizedRows& rows);

}  // namespace flce::test

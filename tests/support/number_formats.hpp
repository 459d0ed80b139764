// bf16 and fp16 as bit patterns, converted with round to nearest even. Written from the formats' definitions, not shared with the library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flce/spec.hpp"
#include "flce/tensor.hpp"

namespace flce::test {

[[nodiscard]] std::uint16_t to_bf16(float value);
[[nodiscard]] float from_bf16(std::uint16_t bits);
[[nodiscard]] std::uint16_t to_fp16(float value);
[[nodiscard]] float from_fp16(std::uint16_t bits);

/// `value` as `dtype` holds it.
[[nodiscard]] float rounded(float value, DType dtype);

[[nodiscard]] ScalarType scalar_type(DType dtype);

/// `values` as bytes of `dtype`.
[[nodiscard]] std::vector<std::byte> encode(const std::vector<float>& values, DType dtype);
/// `count` elements of `dtype` as floats.
[[nodiscard]] std::vector<float> decode(const std::byte* bytes, std::int64_t count, DType dtype);
/// One of them.
[[nodiscard]] float decoded(const std::byte* bytes, std::int64_t index, DType dtype);

}  // namespace flce::test

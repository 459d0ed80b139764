#include "runtime/cpu/quantized_weight.hpp"

#include <algorithm>
#include <array>

#include "runtime/layer/number_formats.hpp"

namespace flce {
namespace {

template <std::size_t count>
std::array<float, count> table_of(float (*number)(std::uint8_t)) {
    std::array<float, count> table{};
    for (std::size_t code = 0; code < count; ++code) table[code] = number(static_cast<std::uint8_t>(code));
    return table;
}

/// Numbers of all codes, made outside of workers.
const std::array<float, 256> kE4m3 = table_of<256>(e4m3_to_float);
const std::array<float, 16> kE2m1 = table_of<16>(e2m1_to_float);

std::size_t at(std::byte code) { return std::to_integer<std::size_t>(code); }

}  // namespace

const std::array<float, 256>& e4m3_numbers() { return kE4m3; }

QuantizedWeight::QuantizedWeight(const CpuCall& call)
    : spec_(&call.spec()),
      codes_(call.pointer(Slot::weight)),
      scales_(call.pointer(Slot::weight_scale)),
      tensor_scale_(call.element(Slot::weight_tensor_scale, 0, 1.F)) {}

void QuantizedWeight::load(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const {
    if (spec_->weight_format == WeightFormat::nvfp4) return load_nvfp4(row, column, count, to);
    load_e4m3(row, column, count, to);
}

void QuantizedWeight::load_e4m3(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const {
    const std::byte* const codes = codes_ + row * spec_->hidden_size + column;
    const auto* const scales = reinterpret_cast<const float*>(scales_);
    const std::int64_t block = spec_->weight_block;
    if (block == 0) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = kE4m3[at(codes[i])] * scales[row];
        return;
    }
    const float* const of_row = scales + row / block * ((spec_->hidden_size + block - 1) / block);
    for (std::int64_t i = 0; i < count;) {
        const std::int64_t end = std::min(count, ((column + i) / block + 1) * block - column);
        const float scale = of_row[(column + i) / block];
        for (; i < end; ++i) to[i] = kE4m3[at(codes[i])] * scale;
    }
}

void QuantizedWeight::load_nvfp4(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const {
    const std::byte* const codes = codes_ + row * (spec_->hidden_size / 2);
    const std::byte* const scales = scales_ + row * (spec_->hidden_size / kNvfp4Group);
    for (std::int64_t i = 0; i < count;) {
        const std::int64_t group = (column + i) / kNvfp4Group;
        const std::int64_t end = std::min(count, (group + 1) * kNvfp4Group - column);
        const float scale = kE4m3[at(scales[group])] * tensor_scale_;
        for (; i < end; ++i) {
            const std::size_t two = at(codes[(column + i) / 2]);
            to[i] = kE2m1[(column + i) % 2 == 0 ? two & 15U : two >> 4U] * scale;
        }
    }
}

}  // namespace flce

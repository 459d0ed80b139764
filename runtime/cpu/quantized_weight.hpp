// A call's weight of codes and scales on the CPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "runtime/cpu/cpu_call.hpp"

namespace flce {

/// Numbers of all codes of e4m3.
[[nodiscard]] const std::array<float, 256>& e4m3_numbers();

/// Reads numbers of a quantised weight. Numbers of codes come out of a table, since workers take fp32's subnormal numbers for 0.
class QuantizedWeight {
public:
    explicit QuantizedWeight(const CpuCall& call);

    /// Loads `count` numbers of class `row` from `column` on, in fp32, not rounded yet.
    void load(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const;

private:
    void load_e4m3(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const;
    void load_nvfp4(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const;

    const Spec* spec_;
    const std::byte* codes_;
    const std::byte* scales_;
    float tensor_scale_;
};

}  // namespace flce

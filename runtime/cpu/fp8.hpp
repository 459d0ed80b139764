// Operands of an FP8 head on the CPU: numbers of the dtype become numbers of 8 bits as they are packed (templates/common/fp8_codes.cuh).
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "flce/spec.hpp"

namespace flce {

struct CpuContext;
class CpuCall;

/// Rows of the dtype's numbers that are read as 8-bit ones: each times its row's factor, or its column's, and rounded. They stay floats,
/// which hold all numbers of 8 bits. Or rows of codes of e4m3, which are read as they are, or rounded anew as numbers of their scales.
class Fp8Numbers {
public:
    enum class Rounding : std::uint8_t { int8, e4m3 };
    enum class FactorsOf : std::uint8_t { rows, columns };

    /// `pitch`: numbers from one row to the next. `factors`: of row or column 0 and those behind it. Without them `factor` is all numbers'.
    Fp8Numbers(DType dtype, const std::byte* rows, std::int64_t pitch, Rounding rounding, const float* factors, float factor = 1.F,
               FactorsOf factors_of = FactorsOf::rows)
        : dtype_(dtype), rounding_(rounding), factors_of_(factors_of), rows_(rows), pitch_(pitch), factors_(factors), factor_(factor) {}

    /// Rows of codes, `pitch` apart. `scales`: of row 0 and those behind it; each code times its row's and `factor` is rounded to e4m3.
    /// Without them codes are read as they are.
    [[nodiscard]] static Fp8Numbers of_codes(const std::byte* codes, std::int64_t pitch, const float* scales, float factor = 1.F);

    /// Loads `count` numbers of `row` from `column` on.
    void load(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const;

private:
    void load_codes(std::int64_t row, std::int64_t column, std::int64_t count, float* to) const;

    DType dtype_;
    bool are_codes_ = false;
    Rounding rounding_;
    FactorsOf factors_of_;
    const std::byte* rows_;
    std::int64_t pitch_;
    const float* factors_;
    float factor_;
};

/// How operands of the logits are rounded.
[[nodiscard]] Fp8Numbers::Rounding logits_rounding(const Spec& spec) noexcept;

/// Factors and scales of rows [0, count) of the logits' operands. `given`: the spec's scale of the operand, or 0.
void fp8_row_scales(const Spec& spec, double given, const std::byte* rows, std::int64_t count, float* factors, float* scales);
/// Factors and scales of the weight's classes [first, first + count), which are columns of a hidden_major one. Codes have given ones.
void fp8_class_scales(const CpuCall& call, std::int64_t first, std::int64_t count, float* factors, float* scales);

/// The weight from class `first` on as operand of the logits. Its rows are those of memory: classes, or a hidden_major weight's hidden
/// dimensions. `factors`: of class `first` and those behind it.
[[nodiscard]] Fp8Numbers fp8_logits_weight(const CpuCall& call, std::int64_t first, const float* factors);
/// The weight from class `first` on as operand of grad_hidden: its numbers times `factor`.
[[nodiscard]] Fp8Numbers fp8_gradient_weight(const CpuCall& call, std::int64_t first, float factor);

/// Largest |x| of `count` numbers, without those that are not finite.
[[nodiscard]] float largest_finite(DType dtype, const std::byte* numbers, std::int64_t count);

/// Adds factor · x to `to`, for `count` numbers x of the dtype.
void add_multiple(DType dtype, const std::byte* numbers, std::int64_t count, float factor, float* to);

/// sums[k] = Σ c_j · w_jk over the call's classes j, as sum_of_rows adds them up.
void sum_of_classes(const CpuContext& context, const CpuCall& call, float* sums);

/// sums[k] = Σ factor(i) · x_ik over rows [0, count) of `columns` numbers x, in one order whatever the number of threads. A row whose
/// factor is 0 may hold anything. `factor` is called several times for a row.
void sum_of_rows(const CpuContext& context, DType dtype, const std::byte* rows, std::int64_t count, std::int64_t columns,
                 const std::function<float(std::int64_t)>& factor, float* sums);

/// The tile of sums of products of codes becomes hidden · weightᵀ.
void scale_products(float* tile, std::int64_t ld, std::int64_t rows, std::int64_t columns, const float* row_scales,
                    const float* class_scales);

/// The largest of numbers that several workers find.
class LargestNumber {
public:
    /// `number`: not negative. What is not finite does not count.
    void add(float number) noexcept;
    [[nodiscard]] float value() const noexcept { return std::bit_cast<float>(bits_.load(std::memory_order_relaxed)); }

private:
    std::atomic<std::uint32_t> bits_{0};  ///< numbers without a sign are ordered as their bits are
};

/// m: the weight's numbers times 2^m are operands of grad_hidden.
[[nodiscard]] int fp8_weight_power(const CpuContext& context, const CpuCall& call);

/// Rounds a tile of exponentials to the format of the logits' gradients.
void round_exponentials(const Spec& spec, float* tile, std::int64_t ld, std::int64_t rows, std::int64_t columns);

}  // namespace flce

#include "runtime/cpu/fp8_gradients.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "generator/logit_transforms.hpp"
#include "templates/common/fp8_codes.cuh"

namespace flce {
namespace {

/// Takes factor · numbers off.
void take(float factor, const float* numbers, std::int64_t count, float* from) {
    for (std::int64_t k = 0; k < count; ++k) from[k] -= factor * numbers[k];
}

/// Column of a row's target in a range of columns, or −1.
std::int64_t target_in(const Fp8Row& row, std::int64_t first, std::int64_t count) {
    const std::int64_t target = row.target - first;
    return row.target >= 0 && target >= 0 && target < count ? target : -1;
}

}  // namespace

Fp8Gradients::Fp8Gradients(const CpuContext& context, const CpuCall& call, float* weight_sum, float* hidden_sum)
    : context_(context),
      call_(call),
      spec_(call.spec()),
      element_(static_cast<std::int64_t>(element_bytes(spec_.dtype))),
      ld_(context.plan.cpu.block_n),
      weight_sum_(weight_sum),
      hidden_sum_(hidden_sum) {}

float Fp8Gradients::factor_of(const GradRow& row) const {
    const float scale = fp8::row_shares(row.coefficients.a, row.coefficients.b, row.lse).scale;
    return fp8::row_factor(scale * logit_slope(spec_).scale / row.temperature, row.exponent, row.lse);
}

float Fp8Gradients::smoothing_of(const GradRow& row) const { return row.coefficients.s * logit_slope(spec_).scale / row.temperature; }

void Fp8Gradients::find_powers(const std::function<GradRow(std::int64_t)>& row_of) {
    constexpr std::int64_t kTokensPerTask = 64;
    const std::int64_t d = spec_.hidden_size;
    if (call_.has(Slot::grad_hidden)) {
        weight_power_ = fp8_weight_power(context_, call_);
        if (smooths()) sum_of_classes(context_, call_, weight_sum_);
    }
    if (!call_.has(Slot::grad_weight)) return;
    const Blocks tasks = fixed_blocks(call_.num_tokens(), kTokensPerTask);
    LargestNumber largest;
    context_.workers->run(tasks.count, context_.threads, [&](std::int64_t task, std::int64_t) {
        for (std::int64_t token = tasks.begin(task); token < tasks.begin(task) + tasks.length(task); ++token) {
            const GradRow row = row_of(token);
            if (row.target == GradRow::kIgnored) continue;
            const std::byte* const hidden = call_.pointer(Slot::hidden) + token * d * element_;
            largest.add(std::abs(factor_of(row)) * largest_finite(spec_.dtype, hidden, d));
        }
    });
    hidden_power_ = fp8::e4m3_power(largest.value());
    if (!smooths()) return;
    const auto smoothing = [&](std::int64_t token) { return smoothing_of(row_of(token)); };
    sum_of_rows(context_, spec_.dtype, call_.pointer(Slot::hidden), call_.num_tokens(), d, smoothing, hidden_sum_);
}

Fp8Row Fp8Gradients::row(const GradRow& row) const {
    const float factor = row.target == GradRow::kIgnored ? 0.F : factor_of(row);
    return {factor, std::max(row.target, GradRow::kElsewhere), 0.F, smoothing_of(row)};
}

Fp8Numbers Fp8Gradients::weight(std::int64_t first) const { return fp8_gradient_weight(call_, first, fp8::power_of_two(weight_power_)); }

void Fp8Gradients::load_class(std::int64_t column, std::int64_t d, std::int64_t count, float* to) const {
    const Fp8Numbers numbers = weight(column);
    if (spec_.layout == WeightLayout::vocab_major) return numbers.load(0, d, count, to);
    for (std::int64_t k = 0; k < count; ++k) numbers.load(d + k, 0, 1, to + k);
}

void Fp8Gradients::round_tile(float* tile, const Fp8Step& step, const TileRange& range) const {
    for (std::int64_t i = 0; i < range.rows; ++i) {
        Fp8Row& row = step.rows[range.row + i];
        const std::int64_t target = target_in(row, range.column, range.columns);
        if (target >= 0) row.target_gradient = std::exchange(tile[i * ld_ + target], 0.F);
    }
    round_exponentials(spec_, tile, ld_, range.rows, range.columns);
}

void Fp8Gradients::sum_columns(const float* tile, const Fp8Step& step, const TileRange& range, float* sums) const {
    std::fill(sums, sums + range.columns, 0.F);
    float smoothing = 0.F;
    for (std::int64_t i = 0; i < range.rows; ++i) {
        const Fp8Row& row = step.rows[range.row + i];
        const float* const exponentials = tile + i * ld_;
        for (std::int64_t j = 0; j < range.columns; ++j) sums[j] += row.factor * exponentials[j];
        const std::int64_t target = target_in(row, range.column, range.columns);
        if (target >= 0) sums[target] += row.target_gradient;
        smoothing += row.smoothing;
    }
    if (!smooths()) return;
    for (std::int64_t j = 0; j < range.columns; ++j) sums[j] -= call_.class_weight(step.vocab + range.column + j) * smoothing;
}

void Fp8Gradients::finish_hidden(float* tile, const Fp8Step& step, const TileRange& range) const {
    for (std::int64_t i = 0; i < range.rows; ++i) {
        const Fp8Row& row = step.rows[range.row + i];
        float* const of_row = tile + i * ld_;
        const float factor = row.factor * fp8::power_of_two(-weight_power_);
        for (std::int64_t d = 0; d < range.columns; ++d) of_row[d] *= factor;
        if (smooths() && step.first_chunk) take(row.smoothing, weight_sum_ + range.column, range.columns, of_row);
        if (row.target < 0) continue;
        const float of_target = row.target_gradient * fp8::power_of_two(-weight_power_);
        std::array<float, 64> numbers{};
        for (std::int64_t d = 0; d < range.columns; d += std::ssize(numbers)) {
            const std::int64_t count = std::min(std::ssize(numbers), range.columns - d);
            load_class(step.vocab + row.target, range.column + d, count, numbers.data());
            for (std::int64_t k = 0; k < count; ++k) of_row[d + k] += of_target * numbers[static_cast<std::size_t>(k)];
        }
    }
}

void Fp8Gradients::finish_weight(float* tile, const Fp8Step& step, const TileRange& range) const {
    const float factor = fp8::power_of_two(-hidden_power_);
    for (std::int64_t i = 0; i < range.rows; ++i) {
        float* const of_class = tile + i * ld_;
        for (std::int64_t d = 0; d < range.columns; ++d) of_class[d] *= factor;
        if (!smooths() || !step.first_block) continue;
        take(call_.class_weight(step.vocab + range.row + i), hidden_sum_ + range.column, range.columns, of_class);
    }
    for (std::int64_t i = 0; i < step.count; ++i) {
        const Fp8Row& row = step.rows[i];
        const std::int64_t target = target_in(row, range.row, range.rows);
        if (target < 0) continue;
        const std::int64_t from = (step.token + i) * spec_.hidden_size + range.column;
        add_multiple(spec_.dtype, call_.pointer(Slot::hidden) + from * element_, range.columns, row.target_gradient, tile + target * ld_);
    }
}

}  // namespace flce

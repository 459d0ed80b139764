#include "generator/cpu/layout.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "flce/error.hpp"
#include "generator/cpu/code.hpp"
#include "templates/common/divergence_math.cuh"

namespace flce {
namespace {

constexpr std::int64_t kAlign = 64;  // a cache line, so that no two workers write to one line
constexpr std::int64_t kStripGroups = 64;
constexpr std::int64_t kStepsInFlight = 2;  // backward computes the next step's logit gradients while it multiplies the last one's

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

/// Hands out offsets.
class Arena {
public:
    std::int64_t take(std::int64_t bytes) {
        const std::int64_t offset = bytes_;
        bytes_ += round_up(bytes, kAlign);
        return offset;
    }
    [[nodiscard]] std::int64_t bytes() const { return bytes_; }

private:
    std::int64_t bytes_ = 0;
};

/// Rows come in whole A panels, and in whole pairs of depth where they are depth.
std::int64_t row_step(const CpuPlan& plan) { return std::lcm<std::int64_t>(plan.micro_m, 2); }

/// Chunks come in whole strips, and with batch_invariant in whole blocks of depth, so that grad_hidden is summed up in the same blocks
/// however wide chunks are.
std::int64_t chunk_step(const Spec& spec, const CpuPlan& plan) {
    return spec.batch_invariant ? std::lcm<std::int64_t>(plan.block_n, plan.block_k) : plan.block_n;
}

/// Blocks of an equal size for `extent`, which may need fewer of them.
Blocks fewer_blocks(const Blocks& blocks, std::int64_t extent) { return {extent, blocks.size, ceil_div(extent, blocks.size)}; }

std::int64_t panel_bytes(const CpuPlan& plan, std::int64_t rows, std::int64_t depth) {
    return 4 * round_up(rows, row_step(plan)) * depth_units(plan, depth);
}

SlotLayout slot_layout(const Spec& spec, const CpuPlan& plan) {
    Arena arena;
    SlotLayout slot;
    slot.tile = arena.take(std::int64_t{4} * round_up(plan.block_m, row_step(plan)) * plan.block_n);
    slot.b_block = arena.take(std::int64_t{4} * plan.block_k * plan.block_n);
    slot.bias = arena.take(std::int64_t{4} * plan.block_n);
    slot.class_weight = arena.take(std::int64_t{4} * plan.block_n);
    slot.class_offset = arena.take(std::int64_t{4} * plan.block_n);
    if (spec.class_groups) {
        slot.class_groups = arena.take(std::int64_t{4} * plan.block_n);
        slot.group_rows = arena.take(plan.block_m * static_cast<std::int64_t>(sizeof(GroupRow)));
    }
    slot.sums = arena.take(round_up(plan.block_m, row_step(plan)) * static_cast<std::int64_t>(sizeof(RowSums)));
    if (has_teacher_head(spec)) {
        slot.teacher_tile = arena.take(std::int64_t{4} * round_up(plan.block_m, row_step(plan)) * plan.block_n);
        slot.teacher_bias = arena.take(std::int64_t{4} * plan.block_n);
    }
    if (is_quantized(spec) || is_fp8(spec)) {
        const std::int64_t lines = is_fp8(spec) ? std::max(plan.micro_m, plan.micro_n) : plan.micro_n;
        slot.dequantized = arena.take(4 * lines * std::max<std::int64_t>(plan.block_k, kDepthsAtATime));
    }
    if (is_fp8(spec)) {
        slot.class_factors = arena.take(std::int64_t{4} * plan.block_n);
        slot.class_scales = arena.take(std::int64_t{4} * plan.block_n);
    }
    slot.bytes = round_up(arena.bytes(), 4096);
    return slot;
}

std::int64_t support_slot_bytes(const Spec& spec) {
    return round_up(4 * (3 * round_up(spec.hidden_size, 16) + spec.teacher_top_k), kAlign);
}

/// Bins of a support's classes are counted one by one, in memory that any scratch has.
int support_bin_bits(const Spec& spec) {
    constexpr int kMostBits = 16;
    return std::max(0, static_cast<int>(std::bit_width(static_cast<std::uint64_t>(spec.vocab_size - 1))) - kMostBits);
}
std::int64_t support_bins(const Spec& spec) { return ceil_div(spec.vocab_size, std::int64_t{1} << support_bin_bits(spec)); }

CpuForwardLayout place_forward(const Spec& spec, const Plan& plan, std::int64_t slots, std::int64_t num_tokens, std::int64_t largest_rows) {
    const CpuPlan& p = plan.cpu;
    CpuForwardLayout l;
    l.row_blocks = even_blocks(num_tokens, largest_rows, row_step(p));
    l.strips = fixed_blocks(spec.vocab_size, p.block_n);
    l.strip_groups = even_blocks(l.strips.count, ceil_div(l.strips.count, kStripGroups), 1);
    l.slot = slot_layout(spec, p);
    l.slots = slots;
    const std::int64_t rows = std::min(num_tokens, largest_rows);
    const std::size_t sums = has_teacher_head(spec) ? sizeof(DivergenceSums) : sizeof(RowSums);
    Arena arena;
    l.slot_offset = arena.take(l.slots * l.slot.bytes);
    l.hidden_panels = arena.take(panel_bytes(p, rows, spec.hidden_size));
    if (has_teacher_head(spec)) l.teacher_panels = arena.take(panel_bytes(p, rows, spec.teacher_hidden_size));
    if (is_fp8(spec)) {
        l.row_factors = arena.take(4 * rows);
        l.row_scales = arena.take(4 * rows);
    }
    l.partial_sums = arena.take(l.strip_groups.count * round_up(rows, row_step(p)) * static_cast<std::int64_t>(sums));
    l.row_losses = arena.take(8 * rows);
    if (spec.top_k > 0) {
        l.top_sizes = arena.take(8 * rows);
        l.top_keys = arena.take(8 * rows * spec.top_k);
    }
    l.bytes = arena.bytes();
    return l;
}

CpuBackwardLayout place_backward(const Spec& spec, const Plan& plan, std::int64_t slots, std::int64_t num_tokens, std::int64_t largest_rows,
                                 std::int64_t largest_chunk) {
    const CpuPlan& p = plan.cpu;
    CpuBackwardLayout l;
    l.row_blocks = even_blocks(num_tokens, largest_rows, row_step(p));
    l.chunks = even_blocks(spec.vocab_size, largest_chunk, chunk_step(spec, p));
    l.slot = slot_layout(spec, p);
    l.slots = slots;
    const std::int64_t rows = round_up(std::min(num_tokens, largest_rows), row_step(p));
    const std::int64_t chunk = round_up(l.chunks.size, p.block_n);
    Arena arena;
    const auto twice = [&](std::int64_t bytes, std::int64_t& stride) {
        stride = round_up(bytes, kAlign);
        return arena.take(kStepsInFlight * stride);
    };
    l.slot_offset = arena.take(l.slots * l.slot.bytes);
    l.hidden_panels = arena.take(panel_bytes(p, rows, spec.hidden_size));
    if (has_teacher_head(spec)) l.teacher_panels = arena.take(panel_bytes(p, rows, spec.teacher_hidden_size));
    if (is_fp8(spec)) {
        l.row_factors = arena.take(4 * rows);
        l.row_scales = arena.take(4 * rows);
        l.fp8_rows = twice(rows * static_cast<std::int64_t>(sizeof(Fp8Row)), l.fp8_rows_stride);
        l.hidden_factors = twice(4 * rows, l.hidden_factors_stride);
    }
    if (is_fp8(spec) && spec.label_smoothing > 0) {
        l.weight_sum = arena.take(4 * spec.hidden_size);
        l.hidden_sum = arena.take(4 * spec.hidden_size);
    }
    l.grad_rows = arena.take(rows * static_cast<std::int64_t>(sizeof(GradRow)));
    l.dlogits_rows = twice(panel_bytes(p, rows, chunk), l.dlogits_rows_stride);
    l.dlogits_columns = twice(4 * chunk * depth_units(p, rows), l.dlogits_columns_stride);
    l.column_sums = twice(4 * row_tiles(p, rows).count * chunk, l.column_sums_stride);
    l.bias_accumulator = arena.take(4 * chunk);
    const bool several = l.row_blocks.count > 1;
    l.weight_accumulator = arena.take(several ? 4 * chunk * spec.hidden_size : 0);
    l.hidden_accumulator = arena.take(spec.dtype == DType::fp32 ? 0 : 4 * num_tokens * spec.hidden_size);
    l.bytes = arena.bytes();
    return l;
}

/// Bytes that count against scratch_bytes.
std::int64_t scratch_of(const CpuBackwardLayout& l, const Spec& spec, std::int64_t num_tokens) {
    return l.bytes - (spec.dtype == DType::fp32 ? 0 : 4 * num_tokens * spec.hidden_size);
}

/// Most workers that may have a slot: one, and as many more as fit in a quarter of the scratch that the smallest blocks leave. Blocks are
/// chosen with this number.
std::int64_t most_slots(const Spec& spec, const Plan& plan) {
    const std::int64_t least = cpu_least_scratch_bytes(spec, plan);
    if (plan.scratch_bytes < least) {
        throw PlanError(fmt::format("scratch_bytes = {}: the CPU's smallest blocks need {} bytes", plan.scratch_bytes, least));
    }
    const std::int64_t slot = spec.support ? support_slot_bytes(spec) : slot_layout(spec, plan.cpu).bytes;
    return 1 + (plan.scratch_bytes - least) / 4 / slot;
}

}  // namespace

std::int64_t depth_units(const CpuPlan& plan, std::int64_t depth) { return plan.bf16_dot ? ceil_div(depth, 2) : depth; }

Blocks even_blocks(std::int64_t extent, std::int64_t largest, std::int64_t step) {
    const std::int64_t count = ceil_div(extent, largest);
    if (count == 0) return {extent, step, 0};
    const std::int64_t size = round_up(ceil_div(extent, count), step);
    return {extent, size, ceil_div(extent, size)};
}

Blocks fixed_blocks(std::int64_t extent, std::int64_t size) { return {extent, size, ceil_div(extent, size)}; }

Blocks row_tiles(const CpuPlan& plan, std::int64_t rows) { return even_blocks(rows, plan.block_m, row_step(plan)); }

std::int64_t cpu_worker_count(const Spec& spec, const Plan& plan, int threads) {
    return std::clamp<std::int64_t>(threads, 1, most_slots(spec, plan));
}

CpuForwardLayout cpu_forward_layout(const Spec& spec, const Plan& plan, int threads, std::int64_t num_tokens, std::int64_t vocab_columns) {
    // Everything but the packed rows and their sums is fixed; the rest of the scratch decides how many rows there can be.
    const std::int64_t step = row_step(plan.cpu);
    const std::int64_t slots = most_slots(spec, plan);
    const std::int64_t one = place_forward(spec, plan, slots, step, step).bytes;
    const std::int64_t two = place_forward(spec, plan, slots, 2 * step, 2 * step).bytes;
    const std::int64_t rows = step * (1 + (plan.scratch_bytes - one) / (two - one + 5 * kAlign));
    CpuForwardLayout layout = place_forward(spec, plan, cpu_worker_count(spec, plan, threads), num_tokens, rows);
    layout.strips = fewer_blocks(layout.strips, vocab_columns);
    layout.strip_groups = fewer_blocks(layout.strip_groups, layout.strips.count);
    return layout;
}

CpuBackwardLayout cpu_backward_layout(const Spec& spec, const Plan& plan, int threads, std::int64_t num_tokens,
                                      std::int64_t vocab_columns) {
    const CpuPlan& p = plan.cpu;
    const std::int64_t step = row_step(p);
    const std::int64_t slots = most_slots(spec, plan);
    const std::int64_t unit = chunk_step(spec, p);
    const std::int64_t units = ceil_div(std::min(spec.vocab_size, std::max(plan.vocab_chunk, unit)), unit);
    const std::int64_t eight_strips = ceil_div(std::int64_t{8} * p.block_n, unit);
    const auto fits = [&](std::int64_t rows, std::int64_t chunk_units) {
        const auto layout = place_backward(spec, plan, slots, num_tokens, rows, chunk_units * unit);
        return scratch_of(layout, spec, num_tokens) <= plan.scratch_bytes;
    };
    // Tall blocks save passes over the weight, wide chunks passes over grad_hidden: halve the rows until a chunk of eight strips fits.
    constexpr std::int64_t kMostRows = 4096;
    std::int64_t rows = round_up(std::clamp<std::int64_t>(num_tokens, 1, kMostRows), step);
    while (rows > step && !fits(rows, std::min(units, eight_strips))) rows = std::max(step, rows / 2 / step * step);
    std::int64_t low = 1;
    std::int64_t high = units;
    while (low < high) {  // the widest chunk that fits
        const std::int64_t middle = (low + high + 1) / 2;
        if (fits(rows, middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    CpuBackwardLayout layout = place_backward(spec, plan, cpu_worker_count(spec, plan, threads), num_tokens, rows, low * unit);
    layout.chunks = fewer_blocks(layout.chunks, vocab_columns);
    return layout;
}

CpuSupportLayout cpu_support_layout(const Spec& spec, const Plan& plan, int threads, std::int64_t num_tokens) {
    CpuSupportLayout l;
    l.depth = round_up(spec.hidden_size, 16);
    l.slots = cpu_worker_count(spec, plan, threads);
    l.slot_bytes = support_slot_bytes(spec);
    l.bin_bits = support_bin_bits(spec);
    l.bins = support_bins(spec);
    const std::int64_t places = num_tokens * spec.teacher_top_k;
    Arena arena;
    l.slot_offset = arena.take(l.slots * l.slot_bytes);
    l.row_losses = arena.take(4 * num_tokens);
    l.dlogits = arena.take(4 * places);
    l.sorted = arena.take(8 * places);
    l.starts = arena.take(4 * (l.bins + 2));
    l.bytes = arena.bytes();
    return l;
}

CpuRetained cpu_retained(const Plan& plan, std::int64_t num_tokens, std::int64_t vocab_columns, std::int64_t bytes) {
    if (num_tokens == 0 || vocab_columns == 0) return {};
    const std::int64_t column = 4 * num_tokens;
    if (bytes / column >= vocab_columns) return {vocab_columns, bytes / vocab_columns / 4 * 4};
    return {bytes / column / plan.cpu.block_n * plan.cpu.block_n, column};
}

std::int64_t cpu_least_scratch_bytes(const Spec& spec, const Plan& plan) {
    if (spec.support) return support_slot_bytes(spec) + 4 * (support_bins(spec) + 2) + 8 * kAlign;
    const std::int64_t step = row_step(plan.cpu);
    const std::int64_t forward = place_forward(spec, plan, 1, step, step).bytes;
    const std::int64_t many = 2 * step;  // several row blocks, so that the accumulator of grad_weight is counted
    return std::max(forward, scratch_of(place_backward(spec, plan, 1, many, step, chunk_step(spec, plan.cpu)), spec, many));
}

}  // namespace flce

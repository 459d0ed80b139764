// How the passes of cuda_sm80 cut their work. Forward: blocks of rows × parts of the vocabulary that are reduced apart (splits).
#include <algorithm>

#include "generator/cuda/sm80/path.hpp"
#include "templates/common/params.cuh"

namespace flce::sm80 {
namespace {

/// The number of splits that finishes first: whole waves of blocks, and splits of nearly the same number of tiles.
Expr choose_splits(const Expr& row_blocks, std::int64_t capacity, std::int64_t tiles, std::int64_t most_blocks) {
    Expr best = Expr(1);
    Expr best_time = ceil_div(row_blocks, capacity) * tiles;
    for (std::int64_t waves = 1; waves <= 4; ++waves) {
        const std::int64_t blocks = std::min(waves * capacity, most_blocks);
        const Expr splits = min(max(floor_div(blocks, row_blocks), 1), tiles);
        const Expr time = ceil_div(splits * row_blocks, capacity) * ceil_div(tiles, splits);
        const Expr better = less(time, best_time);
        best = select(better, splits, best);
        best_time = min(time, best_time);
        if (blocks == most_blocks) break;
    }
    return best;
}

/// Only a rounded weight needs scratch beside the partial sums.
std::int64_t most_partial_bytes(const Spec& spec, const Plan& plan) {
    return rounds_weight(spec) ? partial_bytes(plan) : kForwardPartialBytes;
}

std::int64_t field_bytes(const Spec& spec) { return std::int64_t{4} * partial_fields(spec); }

/// Blocks of forward that run at once.
std::int64_t capacity(const Spec& spec, const Device& device, const Plan& plan) {
    return std::int64_t{device.gpu.sm_count} * block(spec, device, forward_role(plan), plan.cuda.forward).per_sm;
}

std::int64_t stretch_of(const Spec& spec, const Plan& plan) { return forward_stretch(spec, plan, plan.cuda.forward.block_n); }

Expr splits_of(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t tiles = multiple_above(stretch_of(spec, plan), tile.block_n) / tile.block_n;
    const std::int64_t most_blocks = std::max<std::int64_t>(most_partial_bytes(spec, plan) / field_bytes(spec) / tile.block_m, 1);
    return choose_splits(max(ceil_div(rows, tile.block_m), 1), capacity(spec, device, plan), tiles, most_blocks);
}

/// Rows of a launch; the last may have fewer.
std::int64_t launch_rows_of(const Spec& spec, const Device& device, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t wave_rows = capacity(spec, device, plan) * tile.block_m;
    const std::int64_t most_rows = most_partial_bytes(spec, plan) / field_bytes(spec);
    const std::int64_t rows = most_rows > wave_rows ? multiple_below(most_rows, wave_rows) : most_rows;
    return multiple_above(rows, std::max<int>(kRowThreads, tile.block_m));
}

bool lends(const Spec& spec, const Plan& plan) { return lends_grad_weight(spec, plan.cuda.grad_weight, 1); }

std::int64_t counter_count(const Spec& spec) { return 1 + retained_blocks(spec); }

BackwardSizes sizes_of(const Spec& spec, const Plan& plan) {
    BackwardNeeds needs{.bias_rows = plan.cuda.dlogits.block_m};
    if (plan.strategy == Strategy::retain) {
        needs.own_bytes = multiple_above(counter_count(spec) * 4, kWorkspaceAlignment) + smoothing_bytes(spec);
    }
    return backward_sizes(spec, plan, needs);
}

/// Bytes of grad_hidden's fp32 sum. Where exponentials are retained there always is such a place, in which hidden states are scaled if
/// there is no sum. A grad_hidden in fp32 is its own sum, and the hidden states need a place nonetheless.
Expr sum_bytes(const Spec& spec, const Plan& plan, const Expr& chunk) {
    const Expr n = slot(Slot::num_tokens);
    const bool own_sum = grad_hidden_dtype(spec) == DType::fp32;
    if (plan.strategy == Strategy::retain) {
        const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
        return n * ((own_sum ? element : 4) * spec.hidden_size);
    }
    const Expr summed = own_sum ? Expr(0) : less(1, ceil_div(spec.vocab_size, chunk));
    return select(summed, n * (4 * spec.hidden_size), 0);
}

}  // namespace

ForwardLayoutSm80 forward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const Expr rows = launch_rows_of(spec, device, plan);
    const Expr most = min(slot(Slot::num_tokens), rows);
    const Expr partials = splits_of(spec, device, plan, most) * round_up(most, 32);
    const std::int64_t stretch = stretch_of(spec, plan);
    return {place_forward(spec, {.rows = rows, .partials = partials, .stretch = stretch, .most_stretch = stretch}),
            retained_layout(spec, plan, lends(spec, plan))};
}

Expr forward_splits(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    // The last launch of several has fewer rows, but no more parts, and its partial sums lie as far apart as the other launches'.
    const Expr first_rows = min(slot(Slot::num_tokens), launch_rows_of(spec, device, plan));
    return min(splits_of(spec, device, plan, rows), splits_of(spec, device, plan, first_rows));
}

BackwardLayoutSm80 backward_layout(const Spec& spec, const Plan& plan) {
    const BackwardSizes sizes = sizes_of(spec, plan);
    const Expr n = slot(Slot::num_tokens);
    BackwardLayoutSm80 b{cut_backward(sizes, widest_chunk(spec, sizes, n)), retained_for_backward(spec, plan, lends(spec, plan))};
    // A bias's partial sums have room for a chunk of the workspace's.
    if (may_widen_chunks(spec) && !spec.bias) add_wide_chunks(spec, widest_wide_chunk(spec, sizes), b.retained.columns, b);
    Pieces pieces = place_backward(spec, sizes, b);
    if (plan.strategy == Strategy::retain) {
        b.counter_count = counter_count(spec);
        b.counters = pieces.take(b.counter_count * 4);
        b.smoothing = pieces.take(smoothing_bytes(spec));
    }
    b.hidden_accumulator = pieces.take(sum_bytes(spec, plan, b.chunk));
    b.total = pieces.end();
    return b;
}

std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan) { return sizes_of(spec, plan).least; }

}  // namespace flce::sm80

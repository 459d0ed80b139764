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

/// Blocks that run at once.
std::int64_t capacity(const Spec& spec, const Device& device, const GemmTile& tile) {
    return std::int64_t{device.gpu.sm_count} * block(spec, device, GemmRole::forward, tile).per_sm;
}

std::int64_t stretch_of(const Spec& spec, const Plan& plan) { return forward_stretch(spec, plan, plan.cuda.forward.block_n); }

Expr splits_of(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t tiles = multiple_above(stretch_of(spec, plan), tile.block_n) / tile.block_n;
    const std::int64_t most_blocks = std::max<std::int64_t>(most_partial_bytes(spec, plan) / field_bytes(spec) / tile.block_m, 1);
    return choose_splits(max(ceil_div(rows, tile.block_m), 1), capacity(spec, device, tile), tiles, most_blocks);
}

/// Rows of a launch; the last may have fewer.
std::int64_t launch_rows_of(const Spec& spec, const Device& device, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t wave_rows = capacity(spec, device, tile) * tile.block_m;
    const std::int64_t most_rows = most_partial_bytes(spec, plan) / field_bytes(spec);
    const std::int64_t rows = most_rows > wave_rows ? multiple_below(most_rows, wave_rows) : most_rows;
    return multiple_above(rows, std::max<int>(kRowThreads, tile.block_m));
}

BackwardSizes sizes_of(const Spec& spec, const Plan& plan) { return backward_sizes(spec, plan, {.bias_rows = plan.cuda.dlogits.block_m}); }

}  // namespace

ForwardLayout forward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const Expr rows = launch_rows_of(spec, device, plan);
    const Expr most = min(slot(Slot::num_tokens), rows);
    const Expr partials = splits_of(spec, device, plan, most) * round_up(most, 32);
    return place_forward(spec, {.rows = rows, .partials = partials, .stretch = stretch_of(spec, plan)});
}

Expr forward_splits(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    // The last launch of several has fewer rows, but no more parts, and its partial sums lie as far apart as the other launches'.
    const Expr first_rows = min(slot(Slot::num_tokens), launch_rows_of(spec, device, plan));
    return min(splits_of(spec, device, plan, rows), splits_of(spec, device, plan, first_rows));
}

BackwardLayout backward_layout(const Spec& spec, const Plan& plan) {
    const BackwardSizes sizes = sizes_of(spec, plan);
    const Expr n = slot(Slot::num_tokens);
    BackwardLayout b = cut_backward(sizes, widest_chunk(spec, sizes, n));
    const RetainedLayout retained = retained_for_backward(spec, plan, false);
    // A bias's partial sums have room for a chunk of the workspace's.
    if (may_widen_chunks(spec) && !spec.bias) add_wide_chunks(spec, widest_wide_chunk(spec, sizes), retained.columns, b);
    Pieces pieces = place_backward(spec, sizes, b);
    // An fp32 grad_hidden is its own sum.
    const Expr summed = grad_hidden_dtype(spec) == DType::fp32 ? Expr(0) : less(1, ceil_div(spec.vocab_size, b.chunk));
    b.hidden_accumulator = pieces.take(select(summed, n * (4 * spec.hidden_size), 0));
    b.total = pieces.end();
    return b;
}

std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan) { return sizes_of(spec, plan).least; }

}  // namespace flce::sm80

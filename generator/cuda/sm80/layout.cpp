#include "generator/cuda/sm80/layout.hpp"

#include <algorithm>

#include "generator/cuda/sm80/rules.hpp"
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

Expr splits_of(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t most_blocks = std::max<std::int64_t>(most_partial_bytes(spec, plan) / field_bytes(spec) / tile.block_m, 1);
    return choose_splits(max(ceil_div(rows, tile.block_m), 1), capacity(spec, device, tile), forward_tiles(spec, plan, tile), most_blocks);
}

}  // namespace

ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const Expr n = slot(Slot::num_tokens);
    const std::int64_t wave_rows = capacity(spec, device, tile) * tile.block_m;
    const std::int64_t most_rows = most_partial_bytes(spec, plan) / field_bytes(spec);
    const std::int64_t rows = most_rows > wave_rows ? multiple_below(most_rows, wave_rows) : most_rows;
    ForwardRows f;
    f.rows = multiple_above(rows, std::max<int>(kRowThreads, tile.block_m));
    f.partials = splits_of(spec, device, plan, min(n, f.rows)) * round_up(min(n, f.rows), 32);
    return f;
}

Expr forward_splits(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    // The last launch of several has fewer rows, but no more parts, and its partial sums lie as far apart as the other launches'.
    const Expr first_rows = min(slot(Slot::num_tokens), forward_rows(spec, device, plan).rows);
    return min(splits_of(spec, device, plan, rows), splits_of(spec, device, plan, first_rows));
}

}  // namespace flce::sm80

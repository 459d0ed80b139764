#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/sm90/backward_pass.hpp"
#include "generator/cuda/sm90/maps.hpp"
#include "templates/sm90/params.cuh"

namespace flce::sm90 {
namespace {

MappedMatrix exponentials_matrix(const RetainedLayout& retained) {
    return {retained_at(retained.exponentials),
            kRetainedColumns,
            slot(Slot::num_tokens),
            kRetainedColumns,
            retained.blocks,
            retained.block_bytes};
}

/// The rows' scales in two parts, two rows of `pitch` numbers: factors with which grad_weight's kernel adds up grad_bias. The factors lie
/// at the end of the place of chunks' dlogits, of which none are computed yet, and not in retained memory, over which grad_weight may
/// write.
struct FactorsAt {
    Expr pitch{0};   ///< rows that the copy engine reads begin on 16 bytes
    Expr offset{0};  ///< offset in the place of dlogits; the sums of tiles in parts end before
    Expr fit{0};
    Expr at{0};

    explicit FactorsAt(const BackwardPassSm90& pass) {
        const BackwardLayoutSm90& layout = pass.layout;
        const bool any = sums_retained_bias(pass.spec, pass.plan);
        pitch = round_up(slot(Slot::num_tokens), 8);
        offset = layout.rows * layout.chunk * pass.element_bytes - (any ? pitch * (2 * pass.element_bytes) : Expr(0));
        fit = less(-1, offset);
        at = workspace_at(layout.dlogits) + offset;
    }
};

RetainedPlaces places_of(const BackwardPassSm90& pass) {
    return {pass.retained, pass.layout.counters, pass.layout.counter_count, pass.layout.smoothing};
}

/// With factors of grad_bias, where grad_weight's kernel adds it up.
Statement rows_launch(const BackwardPassSm90& pass, const RowBlock& rows, const Expr& scaled_hidden) {
    LaunchBuilder<RetainedRowsParams> launch = retained_rows_launch(pass, places_of(pass), rows, scaled_hidden);
    if (sums_retained_bias(pass.spec, pass.plan)) {
        const FactorsAt factors(pass);
        launch.set(&RetainedRowsParams::bias_factors, select(factors.fit, factors.at + rows.first * pass.element_bytes, 0))
            .set(&RetainedRowsParams::factor_pitch, factors.pitch);
    }
    return launch.build();
}

SmoothingSums smoothing_of(const BackwardPassSm90& pass) { return {pass.spec, pass.layout.smoothing}; }

Statement retained_grad_hidden_launch(const BackwardPassSm90& pass) {
    using Params = GradHiddenSm90Params;
    const RetainedLayout& retained = pass.retained;
    const BackwardLayoutSm90& layout = pass.layout;
    const GemmTile& tile = pass.plan.cuda.grad_hidden;
    const bool vocab_major = pass.spec.layout == WeightLayout::vocab_major;
    const RowBlock rows = all_rows();
    const MappedMatrix sum = sum_matrix(pass, 0, max(sum_room(pass), 1));
    const std::int64_t tile_sum_bytes = std::int64_t{4} * kClusterBlocks * tile.block_m * tile.block_n;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::grad_hidden), sum_grid(pass, rows.count));
    set_share(launch, pass);
    launch.set(&Params::scalars, scalars_at())
        .set(&Params::accumulator, sum.address)
        .set(&Params::grad_hidden, slot(Slot::grad_hidden))
        .set(&Params::rows, rows.count)
        .set(&Params::columns, retained.columns)
        .set(&Params::first, !pass.chunks_first)
        .set(&Params::last, pass.all_retained || pass.chunks_first)
        .set(&Params::row_scales, retained_at(retained.row_scales))
        .set(&Params::pace, workspace_at(layout.counters))
        .set(&Params::tail_sums, workspace_at(layout.dlogits))  // no chunk is computed yet
        .set(&Params::tail_counters, workspace_at(layout.counters) + std::int64_t{4} * kPaceCounters)
        .set(&Params::tail_room, floor_div(max(FactorsAt(pass).offset, 0), tile_sum_bytes))
        .set(&Params::tickets, tickets_at())
        .set(&Params::column_shift, kRetainedShift)
        .set_map(&Params::dlogits_map, exponentials_matrix(retained), tile.block_m)
        .set_map(&Params::weight_map, weight_matrix(pass.spec, slot(Slot::weight), retained.columns),
                 vocab_major ? kSecondRows : tile.block_n / kClusterBlocks)
        .set_map(&Params::accumulator_map, sum, kFirstRows, 4)
        .set_list(&Params::list, pass.list, rows.first);
    if (pass.spec.label_smoothing <= 0) return launch.build();
    LaunchBuilder<SmoothedGradHiddenSm90Params> smoothed(std::move(launch));
    smoothed.set(&SmoothedGradHiddenSm90Params::row_smoothing, retained_at(retained.row_smoothing))
        .set(&SmoothedGradHiddenSm90Params::weight_sum, smoothing_of(pass).weight_sum);
    return smoothed.build();
}

/// The launch of grad_weight, with what adds up grad_bias where its kernel does.
template <class Params>
Statement build_with_bias(const BackwardPassSm90& pass, LaunchBuilder<Params> launch) {
    if (!sums_retained_bias(pass.spec, pass.plan)) return launch.build();
    using Biased = WithScaledBias<Params>;
    LaunchBuilder<Biased> biased(std::move(launch));
    const FactorsAt factors(pass);
    biased.set(&Biased::grad_bias, select(factors.fit, slot(Slot::grad_bias), 0))
        .set(&Biased::smoothing_total, pass.spec.label_smoothing > 0 ? smoothing_of(pass).smoothing_total : Expr(0))
        .set_map(&Biased::scales_map,
                 {select(factors.fit, factors.at, workspace_at(pass.layout.dlogits)), slot(Slot::num_tokens), 2, factors.pitch}, 8);
    return biased.build();
}

Statement retained_grad_weight_launch(const BackwardPassSm90& pass) {
    using Params = GradWeightSm90Params;
    const RetainedLayout& retained = pass.retained;
    const BackwardLayoutSm90& layout = pass.layout;
    const GemmTile& tile = pass.plan.cuda.grad_weight;
    const bool vocab_major = pass.spec.layout == WeightLayout::vocab_major;
    const RowBlock rows = all_rows();
    const GradWeightExtents of = grad_weight_extents(pass.spec, retained.columns);
    const Expr lent = equal(slot(Slot::retained), slot(Slot::grad_weight));  // tiles wait for those that read what they write over
    const std::int64_t tiles_across = (pass.spec.hidden_size + tile.block_n - 1) / tile.block_n;
    const std::int64_t readers = kRetainedColumns / tile.block_m * tiles_across * warps_of_tile(tile);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::grad_weight), cluster_grid(pass, tile, of.m, of.n));
    launch.set(&Params::scalars, scalars_at())
        .set(&Params::grad_weight, slot(Slot::grad_weight))
        .set(&Params::rows, rows.count)
        .set(&Params::columns, retained.columns)
        .set(&Params::first, 1)
        .set(&Params::last, 1)
        .set(&Params::readers, select(lent, workspace_at(layout.counters) + std::int64_t{4} * (kPaceCounters + kMostTailTiles), 0))
        .set(&Params::tickets, tickets_at())
        .set(&Params::block_bytes, retained.block_bytes)
        .set(&Params::readers_of_block, readers)
        .set(&Params::column_shift, kRetainedShift)
        .set_map(&Params::dlogits_map, exponentials_matrix(retained), vocab_major ? kFirstRows : kSecondRows)
        .set_map(&Params::hidden_map, {scaled_hidden_at(pass), pass.spec.hidden_size, rows.count, pass.spec.hidden_size},
                 vocab_major ? kSecondRows : kFirstRows)
        .set_map(&Params::grad_weight_map, weight_matrix(pass.spec, slot(Slot::grad_weight), retained.columns), kFirstRows,
                 pass.grad_element_bytes)
        .set_list(&Params::list, pass.list, rows.first);
    if (pass.spec.label_smoothing <= 0) return build_with_bias(pass, std::move(launch));
    LaunchBuilder<SmoothedGradWeightSm90Params> smoothed(std::move(launch));
    smoothed.set(&SmoothedGradWeightSm90Params::hidden_sum, smoothing_of(pass).hidden_sum)
        .set(&SmoothedGradWeightSm90Params::class_weight, slot(Slot::class_weight));
    return build_with_bias(pass, std::move(smoothed));
}

/// Retained rows of all tokens.
Statement rows_step(const BackwardPassSm90& pass, const Expr& scaled_hidden) {
    return retained_rows_step(pass, [&](const RowBlock& rows) { return rows_launch(pass, rows, scaled_hidden); });
}

}  // namespace

std::vector<Statement> retained_hidden_steps(const BackwardPassSm90& pass) {
    std::vector<Statement> steps;
    const Expr later = pass.defers_hidden || pass.scales_behind;  // or never
    steps.push_back(rows_step(pass, select(and_not(present(Slot::grad_weight), later), compact_hidden_at(pass), 0)));
    if (pass.spec.label_smoothing > 0) {
        std::ranges::move(smoothing_steps(pass, retained_smoothing(pass, places_of(pass)), sums_retained_bias(pass.spec, pass.plan)),
                          std::back_inserter(steps));
    }
    // grad_weight comes later: it may take the place of what the others read.
    if (pass.spec.bias) {
        const Expr alone = sums_retained_bias(pass.spec, pass.plan) ? !(present(Slot::grad_weight) && FactorsAt(pass).fit) : Expr(1);
        steps.push_back({If{present(Slot::grad_bias) && alone, {retained_bias_launch(pass, pass.retained)}}});
    }
    steps.push_back({If{present(Slot::grad_hidden), {retained_grad_hidden_launch(pass)}}});
    return steps;
}

Statement retained_weight_step(const BackwardPassSm90& pass) {
    return {If{present(Slot::grad_weight), {retained_grad_weight_launch(pass)}}};
}

Statement make_room_step(const BackwardPassSm90& pass) {
    constexpr std::int64_t kCycles = 12'288;  // 7 µs: NCCL's blocks begin 3 to 6 µs after what they wait for
    LaunchBuilder<MakeRoomParams> launch(pass.source.kernel(KernelRole::make_room), Expr(1));
    launch.set(&MakeRoomParams::cycles, kCycles);
    return {If{present(Slot::grad_weight), {launch.build()}}};
}

std::vector<Statement> retained_weight_with_rows_steps(const BackwardPassSm90& pass) {
    return {{If{present(Slot::grad_weight), {rows_step(pass, scaled_hidden_at(pass)), retained_grad_weight_launch(pass)}}}};
}

}  // namespace flce::sm90

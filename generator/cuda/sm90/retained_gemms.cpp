#include <algorithm>
#include <iterator>
#include <utility>

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

/// The rows' scales, scaled hidden states, and the target's and the teacher's elements of each row of exponentials.
Statement retained_rows_launch(const BackwardPassSm90& pass, const RowBlock& rows, const Expr& scaled_hidden) {
    using Params = RetainedRowsParams;
    const RetainedLayout& retained = pass.retained;
    const BackwardLayoutSm90& layout = pass.layout;
    const std::int64_t row_bytes = pass.spec.hidden_size * pass.element_bytes;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::retained_rows), ceil_div(rows.count, kRowThreads / 32));
    launch.set(&Params::hidden, slot(Slot::hidden) + caller_row(pass, rows.first) * row_bytes)
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::scalars, scalars_at())
        .set(&Params::references, retained_at(retained.references) + rows.first * 4)
        .set(&Params::target_logits, retained_at(retained.target_logits) + rows.first * 4)
        .set(&Params::exponentials, retained_at(retained.exponentials) + rows.first * (kRetainedColumns * pass.element_bytes))
        .set(&Params::scaled_hidden, advanced(scaled_hidden, rows.first, row_bytes))
        .set(&Params::row_scales, retained_at(retained.row_scales) + rows.first * 4)
        .set(&Params::row_smoothing, retained_at(retained.row_smoothing) + rows.first * 4)
        .set(&Params::row_temperatures, workspace_at(layout.row_temperatures))
        .set(&Params::row_teacher_weights, pass.spec.teacher_top_k > 0 ? workspace_at(layout.row_teacher_weights) : Expr(0))
        .set_teacher(&Params::teacher, pass.spec, caller_row(pass, rows.first))
        .set_slope(&Params::slope, {.scale = 1.0F, .inverse_softcap = logit_slope(pass.spec).inverse_softcap})
        .set_transform(&Params::transform, pass.spec)
        .set(&Params::counters, workspace_at(layout.counters))
        .set(&Params::counter_count, layout.counter_count)
        .set(&Params::block_bytes, retained.block_bytes)
        .set(&Params::rows, rows.count)
        .set(&Params::columns, retained.columns)
        .set_float(&Params::derivative, static_cast<float>(pass.spec.logit_scale));
    if (sums_retained_bias(pass.spec, pass.plan)) {
        const FactorsAt factors(pass);
        launch.set(&Params::bias_factors, select(factors.fit, factors.at + rows.first * pass.element_bytes, 0))
            .set(&Params::factor_pitch, factors.pitch);
    }
    return launch.build();
}

/// Places of label smoothing's sums in the workspace: both totals, then both sums of stretches, then the total of the rows' shares.
struct SmoothingSums {
    Expr weight_sum{0};
    Expr hidden_sum{0};
    Expr weight_sums{0};
    Expr hidden_sums{0};
    Expr smoothing_total{0};

    explicit SmoothingSums(const BackwardPassSm90& pass) {
        const std::int64_t bytes = pass.spec.hidden_size * 4;
        weight_sum = workspace_at(pass.layout.smoothing);
        hidden_sum = weight_sum + bytes;
        weight_sums = hidden_sum + bytes;
        hidden_sums = weight_sums + kSmoothingParts * bytes;
        smoothing_total = hidden_sums + kSmoothingParts * bytes;
    }
};

/// Adds up label smoothing's terms, which grad_hidden and grad_weight of exponentials lack.
std::vector<Statement> smoothing_steps(const BackwardPassSm90& pass) {
    const SmoothingSums at(pass);
    LaunchBuilder<SmoothingSumsParams> sums(pass.source.kernel(KernelRole::smoothing_sums), 2 * kSmoothingParts);
    sums.set(&SmoothingSumsParams::weight, slot(Slot::weight))
        .set(&SmoothingSumsParams::hidden, slot(Slot::hidden))
        .set(&SmoothingSumsParams::class_weight, slot(Slot::class_weight))
        .set(&SmoothingSumsParams::row_smoothing, retained_at(pass.retained.row_smoothing))
        .set(&SmoothingSumsParams::weight_sums, at.weight_sums)
        .set(&SmoothingSumsParams::hidden_sums, at.hidden_sums)
        .set_list(&SmoothingSumsParams::list, pass.list, 0)
        .set(&SmoothingSumsParams::columns, pass.retained.columns)
        .set(&SmoothingSumsParams::rows, slot(Slot::num_tokens));
    const bool of_bias = sums_retained_bias(pass.spec, pass.plan);
    LaunchBuilder<SmoothingTotalsParams> totals(pass.source.kernel(KernelRole::smoothing_totals),
                                                2 * ((pass.spec.hidden_size + 31) / 32) + (of_bias ? 1 : 0));
    totals.set(&SmoothingTotalsParams::weight_sums, at.weight_sums)
        .set(&SmoothingTotalsParams::hidden_sums, at.hidden_sums)
        .set(&SmoothingTotalsParams::weight_sum, at.weight_sum)
        .set(&SmoothingTotalsParams::hidden_sum, at.hidden_sum);
    if (of_bias) {
        totals.set(&SmoothingTotalsParams::row_smoothing, retained_at(pass.retained.row_smoothing))
            .set(&SmoothingTotalsParams::smoothing_total, at.smoothing_total)
            .set_list(&SmoothingTotalsParams::list, pass.list, 0)
            .set(&SmoothingTotalsParams::rows, slot(Slot::num_tokens));
    }
    return {sums.build(), totals.build()};
}

Statement retained_bias_launch(const BackwardPassSm90& pass) {
    using Params = RetainedBiasParams;
    const RetainedLayout& retained = pass.retained;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::retained_bias), ceil_div(retained.columns, kBiasColumns));
    launch.set(&Params::exponentials, retained_at(retained.exponentials))
        .set(&Params::row_scales, retained_at(retained.row_scales))
        .set(&Params::row_smoothing, retained_at(retained.row_smoothing))
        .set(&Params::class_weight, slot(Slot::class_weight))
        .set(&Params::scalars, scalars_at())
        .set(&Params::grad_bias, slot(Slot::grad_bias))
        .set_list(&Params::list, pass.list, 0)
        .set(&Params::block_bytes, retained.block_bytes)
        .set(&Params::rows, slot(Slot::num_tokens))
        .set(&Params::columns, retained.columns);
    return launch.build();
}

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
        .set(&SmoothedGradHiddenSm90Params::weight_sum, SmoothingSums(pass).weight_sum);
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
        .set(&Biased::smoothing_total, pass.spec.label_smoothing > 0 ? SmoothingSums(pass).smoothing_total : Expr(0))
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
    smoothed.set(&SmoothedGradWeightSm90Params::hidden_sum, SmoothingSums(pass).hidden_sum)
        .set(&SmoothedGradWeightSm90Params::class_weight, slot(Slot::class_weight));
    return build_with_bias(pass, std::move(smoothed));
}

/// Retained rows of all tokens, with their coefficients where there is memory for coefficients of one block at a time.
Statement retained_rows_step(const BackwardPassSm90& pass, const Expr& scaled_hidden) {
    const RowBlock rows = row_block(pass, kRowBlockLoop);
    std::vector<Statement> of_rows;
    of_rows.push_back({If{less(1, pass.layout.row_blocks), {coefficients_launch(pass, rows)}}});
    of_rows.push_back(retained_rows_launch(pass, rows, scaled_hidden));
    return {Loop{kRowBlockLoop, pass.layout.row_blocks, std::move(of_rows)}};
}

}  // namespace

std::vector<Statement> retained_hidden_steps(const BackwardPassSm90& pass) {
    std::vector<Statement> steps;
    const Expr later = pass.defers_hidden || pass.scales_behind;  // or never
    steps.push_back(retained_rows_step(pass, select(and_not(present(Slot::grad_weight), later), compact_hidden_at(pass), 0)));
    if (pass.spec.label_smoothing > 0) std::ranges::move(smoothing_steps(pass), std::back_inserter(steps));
    // grad_weight comes later: it may take the place of what the others read.
    if (pass.spec.bias) {
        const Expr alone = sums_retained_bias(pass.spec, pass.plan) ? !(present(Slot::grad_weight) && FactorsAt(pass).fit) : Expr(1);
        steps.push_back({If{present(Slot::grad_bias) && alone, {retained_bias_launch(pass)}}});
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
    return {{If{present(Slot::grad_weight), {retained_rows_step(pass, scaled_hidden_at(pass)), retained_grad_weight_launch(pass)}}}};
}

}  // namespace flce::sm90

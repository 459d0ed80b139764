#include "generator/cuda/sm80/retained_gemms.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/retained_steps.hpp"

namespace flce::sm80 {
namespace {

/// A shard without a class retains nothing.
Expr retains_all(const Spec& spec, const RetainedLayout& retained) {
    const Expr all = equal(retained.columns, vocab_columns(spec));
    return is_shard(spec) ? less(0, retained.columns) && all : all;
}

RetainedPlaces places_of(const BackwardPassSm80& pass) {
    return {pass.retained, pass.layout.counters, pass.layout.counter_count, pass.layout.smoothing};
}

/// Address of the scaled hidden states: in grad_hidden, which is written last where chunks follow, or in the place of its sum.
Expr scaled_hidden_at(const BackwardPassSm80& pass) {
    const Expr place = workspace_at(pass.layout.hidden_accumulator);
    if (grad_hidden_dtype(pass.spec) == DType::fp32) return place;
    return select(and_not(present(Slot::grad_hidden), pass.all_retained), slot(Slot::grad_hidden), place);
}

/// All tokens' exponentials of the retained columns, as an operand that is summed over tokens or over the vocabulary.
Expr exponentials_at(const BackwardPassSm80& pass) { return retained_at(pass.retained.exponentials); }

Statement grad_hidden_step(const BackwardPassSm80& pass) {
    using Params = RetainGradHiddenParams;
    const Expr n = slot(Slot::num_tokens);
    const Expr grid = tile_grid(pass.plan.cuda.grad_hidden, n, pass.spec.hidden_size);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::grad_hidden), grid);
    launch.set(&Params::dlogits, exponentials_at(pass))
        .set(&Params::weight, slot(Slot::weight))
        .set(&Params::scalars, scalars_at())
        .set(&Params::accumulator, sum_at(pass))
        .set(&Params::grad_hidden, slot(Slot::grad_hidden))
        .set(&Params::ld, kRetainedColumns)
        .set(&Params::rows, n)
        .set(&Params::columns, pass.retained.columns)
        .set(&Params::first, 1)
        .set(&Params::last, pass.all_retained)
        .set(&Params::row_scales, retained_at(pass.retained.row_scales))
        .set(&Params::block_gap, floor_div(pass.retained.block_bytes, pass.element_bytes) - kRetainedColumns);
    if (pass.spec.label_smoothing > 0) {
        launch.set(&Params::row_smoothing, retained_at(pass.retained.row_smoothing))
            .set(&Params::weight_sum, SmoothingSums(pass.spec, pass.layout.smoothing).weight_sum);
    }
    return {If{present(Slot::grad_hidden), {launch.build()}}};
}

}  // namespace

BackwardPassSm80::BackwardPassSm80(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayoutSm80& layout)
    : BackwardPass(spec, plan, source, layout),
      layout(layout),
      retained(layout.retained),
      all_retained(plan.strategy == Strategy::retain ? retains_all(spec, layout.retained) : Expr(0)) {}

Expr sum_at(const BackwardPassSm80& pass) {
    return grad_hidden_dtype(pass.spec) == DType::fp32 ? slot(Slot::grad_hidden) : workspace_at(pass.layout.hidden_accumulator);
}

std::vector<Statement> retained_hidden_steps(const BackwardPassSm80& pass) {
    const Expr scaled_hidden = select(present(Slot::grad_weight), scaled_hidden_at(pass), 0);
    std::vector<Statement> steps = {retained_rows_step(
        pass, [&](const RowBlock& rows) { return retained_rows_launch(pass, places_of(pass), rows, scaled_hidden).build(); })};
    if (pass.spec.label_smoothing > 0) {
        std::ranges::move(smoothing_steps(pass, retained_smoothing(pass, places_of(pass)), false), std::back_inserter(steps));
    }
    if (pass.spec.bias) steps.push_back({If{present(Slot::grad_bias), {retained_bias_launch(pass, pass.retained)}}});
    steps.push_back(grad_hidden_step(pass));
    return steps;
}

Statement retained_weight_step(const BackwardPassSm80& pass) {
    using Params = RetainGradWeightParams;
    const GemmTile& tile = pass.plan.cuda.grad_weight;
    const RetainedLayout& retained = pass.retained;
    const GradWeightExtents of = grad_weight_extents(pass.spec, retained.columns);
    const Expr lent = equal(slot(Slot::retained), slot(Slot::grad_weight));  // tiles wait for those that read what they write over
    const std::int64_t tiles_across = (pass.spec.hidden_size + tile.block_n - 1) / tile.block_n;
    const Expr counters = workspace_at(pass.layout.counters);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::grad_weight), tile_grid(tile, of.m, of.n));
    launch.set(&Params::dlogits, exponentials_at(pass))
        .set(&Params::hidden, scaled_hidden_at(pass))
        .set(&Params::scalars, scalars_at())
        .set(&Params::grad_weight, slot(Slot::grad_weight))
        .set(&Params::ld, kRetainedColumns)
        .set(&Params::rows, slot(Slot::num_tokens))
        .set(&Params::columns, retained.columns)
        .set(&Params::first, 1)
        .set(&Params::last, 1)
        .set(&Params::taken, select(lent, counters, 0))
        .set(&Params::readers, select(lent, counters + 4, 0))
        .set(&Params::block_bytes, retained.block_bytes)
        .set(&Params::readers_of_block, kRetainedColumns / tile.block_m * tiles_across);
    if (pass.spec.label_smoothing > 0) {
        launch.set(&Params::hidden_sum, SmoothingSums(pass.spec, pass.layout.smoothing).hidden_sum)
            .set(&Params::class_weight, slot(Slot::class_weight));
    }
    return {If{present(Slot::grad_weight), {launch.build()}}};
}

}  // namespace flce::sm80

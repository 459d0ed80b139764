#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/lt/path.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/lt/params.cuh"

namespace flce::lt {
namespace {

/// A launch of `kernel` over all columns from `first` on.
HeadsLaunch launch_from(const ForwardPass& pass, const ForwardLayoutLt& layout, const Expr& first) {
    const RetainedHeads retained = retained_heads(pass.spec, pass.plan);
    return {.first_column = first,
            .rows = layout.partial_rows,
            .parked = layout.parked,
            .tickets = workspace_at(layout.counters),
            .retained = retained.from_row(pass.rows.base),
            .leaves_gradients = divergence_form(pass.spec.divergence_beta) == kMixture ? Expr(0) : retained.gradients};
}

/// A mixture's second walk over retained logits: nothing is multiplied.
Statement pairs_step(const ForwardPass& pass, const RetainedHeads& retained) {
    using Params = LtDivergenceParams;
    LaunchBuilder<Params> launch(LaunchBuilder<LtForwardParams>(
        forward_launch(pass, KernelRole::divergence_pairs, ceil_div(pass.rows.count, 2 * kLtThreads / 32), pass.splits)));
    launch.set(&Params::first_column, 0)
        .set(&Params::columns, retained.columns)
        .set(&Params::first, 1)
        .set(&Params::lse, slot(Slot::lse) + pass.rows.base * 4)
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + pass.rows.base * 4)
        .set_float(&Params::beta, static_cast<float>(pass.spec.divergence_beta));
    set_pairs(launch, retained.from_row(pass.rows.base));
    return build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.rows));
}

std::vector<Statement> sums_walk(ForwardPass pass, const Device& device, const ForwardLayoutLt& layout) {
    const HeadsLaunch launch = launch_from(pass, layout, 0);
    pass.splits = heads_splits(pass.spec, device, launch);
    std::vector<Statement> steps = with_columns(pass.spec, heads_steps(pass, device, KernelRole::heads_sums, launch));
    steps.push_back(divergence_outputs_launch(pass, false));
    return steps;
}

/// Columns that are not retained have the first partial results of a row.
std::vector<Statement> mixture_walk(ForwardPass pass, const Device& device, const ForwardLayoutLt& layout) {
    constexpr std::int64_t kWaves = 4;
    const Spec& spec = pass.spec;
    const RetainedHeads retained = retained_heads(spec, pass.plan);
    const HeadsLaunch launch = launch_from(pass, layout, retained.columns);
    const Expr again = less(retained.columns, vocab_columns(spec));
    const Expr of_heads = select(again, heads_splits(spec, device, launch), 0);
    const Expr blocks = ceil_div(pass.rows.count, 2 * kLtThreads / 32);
    const Expr most = max(floor_div(kWaves * 2 * device.gpu.sm_count, max(blocks, 1)), 1);
    const Expr of_pairs = min(most, ceil_div(retained.columns, std::int64_t{kLtTileColumns}));
    ForwardLayoutLt behind = layout;
    constexpr std::int64_t kFieldsBytes = sizeof(MixtureTerm);
    behind.partials = layout.partials + of_heads * layout.partial_rows * kFieldsBytes;
    ForwardPass of_retained(spec, pass.plan, pass.source, behind);
    of_retained.splits = of_pairs;
    std::vector<Statement> steps;
    steps.push_back({If{again, heads_steps(pass, device, KernelRole::heads_mixture, launch)}});
    if (pass.plan.strategy == Strategy::retain) steps.push_back({If{less(0, retained.columns), {pairs_step(of_retained, retained)}}});
    steps = with_columns(spec, std::move(steps));
    pass.splits = of_heads + of_pairs;
    steps.push_back(divergence_outputs_launch(pass, true));
    return steps;
}

}  // namespace

LaunchProgram heads_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                            const ForwardLayoutLt& layout) {
    const ForwardPass pass(spec, plan, source, layout);
    const auto asked = [&](WalkCode walk, std::vector<Statement> steps) {
        if (!is_shard(spec)) return steps;
        return std::vector<Statement>{{If{equal(slot(Slot::walk), static_cast<std::int64_t>(walk)), std::move(steps)}}};
    };
    std::vector<Statement> steps = asked(WalkCode::sums, sums_walk(pass, device, layout));
    if (divergence_form(spec.divergence_beta) == kMixture) {
        std::ranges::move(asked(WalkCode::mixture, mixture_walk(pass, device, layout)), std::back_inserter(steps));
    }
    const Expr left = heads_gradient_rows(spec, device, pass.rows.count, launch_from(pass, layout, 0));
    std::ranges::move(pair_gradients_steps(pass, left), std::back_inserter(steps));
    return {.body = for_all_rows(pass, std::move(steps)), .variable_count = forward_loops(spec)};
}

}  // namespace flce::lt

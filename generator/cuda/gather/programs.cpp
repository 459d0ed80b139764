// Layouts and launches of the two passes.
#include <algorithm>
#include <bit>
#include <utility>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/gather/path.hpp"
#include "templates/gather/params.cuh"

namespace flce::gather {
namespace {

Expr places(const Spec& spec) { return slot(Slot::num_tokens) * std::int64_t{spec.teacher_top_k}; }

Expr sort_blocks(const Spec& spec) { return ceil_div(places(spec), kSortPlaces); }

/// Class of places that name none of this weight's.
std::int64_t nowhere(const Spec& spec) { return spec.vocab_size; }

/// Rounds that go by all bits of a class.
int sort_rounds(const Spec& spec) { return (std::bit_width(static_cast<std::uint64_t>(nowhere(spec))) + kSortBits - 1) / kSortBits; }

Statement gather_forward_launch(const ForwardPass& pass) {
    using Params = GatherForwardParams;
    const LaunchRows& rows = pass.rows;
    const Expr of_launch = rounds_weight(pass.spec) ? rows.first * 4 : Expr(0);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::gather_forward), rows.count);
    launch.set(&Params::hidden, hidden_row_at(pass.spec, rows.base))
        .set(&Params::weight, slot(Slot::weight))
        .set(&Params::bias, slot(Slot::bias))
        .set(&Params::class_offset, slot(Slot::class_offset))
        .set_targets(&Params::targets, pass.spec, rows.base)
        .set_teacher(&Params::teacher, pass.spec, rows.base)
        .set(&Params::invalid_label, slot(Slot::invalid_label))
        .set(&Params::temperature, temperatures_at(rows))
        .set(&Params::first_row, rows.base)
        .set_transform(&Params::transform, pass.spec)
        .set(&Params::partials, workspace_at(pass.layout.partials) + of_launch)
        .set(&Params::target_logits, workspace_at(pass.layout.target_logits) + of_launch)
        .set(&Params::partial_rows, pass.layout.partial_rows);
    return launch.build();
}

Statement gather_hidden_launch(const BackwardPass& pass, const BackwardLayoutGather& layout) {
    using Params = GatherHiddenParams;
    const Expr wants_weight = present(Slot::grad_weight) || present(Slot::grad_bias);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::gather_hidden), slot(Slot::num_tokens));
    launch.set(&Params::weight, slot(Slot::weight))
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::row_weights, workspace_at(layout.row_teacher_weights))
        .set(&Params::row_temperatures, pass.spec.temperature ? workspace_at(layout.row_temperatures) : Expr(0))
        .set(&Params::grad_hidden, slot(Slot::grad_hidden))
        .set(&Params::dlogits, select(wants_weight, workspace_at(layout.dlogits_of_places), 0))
        .set_teacher(&Params::teacher, pass.spec, 0)
        .set_slope(&Params::slope, logit_slope(pass.spec))
        .set(&Params::class_offset, slot(Slot::class_offset));
    return launch.build();
}

/// Launches of one round of the sort.
void add_round(const BackwardPass& pass, const BackwardLayoutGather& layout, int round, std::vector<Statement>& steps) {
    using Params = GatherSortParams;
    const auto launch = [&](KernelRole role, const Expr& grid) {
        LaunchBuilder<Params> built(pass.source.kernel(role), grid);
        built.set_teacher(&Params::teacher, pass.spec, 0)
            .set(&Params::row_targets, workspace_at(layout.row_targets))
            .set(&Params::from, round == 0 ? Expr(0) : workspace_at(layout.sorted[(round + 1) % 2]))
            .set(&Params::to, workspace_at(layout.sorted[round % 2]))
            .set(&Params::counts, workspace_at(layout.counts))
            .set(&Params::places, places(pass.spec))
            .set(&Params::nowhere, nowhere(pass.spec))
            .set(&Params::blocks, sort_blocks(pass.spec))
            .set(&Params::shift, round * kSortBits);
        steps.push_back(built.build());
    };
    launch(KernelRole::sort_counts, sort_blocks(pass.spec));
    launch(KernelRole::sort_sums, kSortBins);
    launch(KernelRole::sort_places, sort_blocks(pass.spec));
}

/// Pieces that sorted places are cut into.
Expr pieces_of(const Spec& spec) { return ceil_div(places(spec), std::int64_t{piece_places(spec)}); }

/// grad_weight and grad_bias of the classes that are named.
std::vector<Statement> weight_steps(const BackwardPass& pass, const BackwardLayoutGather& layout) {
    using Params = GatherWeightParams;
    const Spec& spec = pass.spec;
    std::vector<Statement> steps;
    const int rounds = sort_rounds(spec);
    for (int round = 0; round < rounds; ++round) add_round(pass, layout, round, steps);
    const auto launch = [&](KernelRole role, const Expr& grid_x, const Expr& grid_y) {
        LaunchBuilder<Params> built(pass.source.kernel(role), grid_x, grid_y);
        built.set(&Params::hidden, slot(Slot::hidden))
            .set(&Params::dlogits, workspace_at(layout.dlogits_of_places))
            .set(&Params::sorted, workspace_at(layout.sorted[(rounds + 1) % 2]))
            .set(&Params::heads, workspace_at(layout.heads))
            .set(&Params::tails, workspace_at(layout.tails))
            .set(&Params::grad_weight, slot(Slot::grad_weight))
            .set(&Params::grad_bias, slot(Slot::grad_bias))
            .set(&Params::places, places(spec))
            .set(&Params::nowhere, nowhere(spec))
            .set(&Params::piece, piece_places(spec))
            .set(&Params::top_k, spec.teacher_top_k);
        steps.push_back(built.build());
    };
    const std::int64_t eights = (spec.hidden_size + 7) / 8;
    const std::int64_t of_block = std::max<std::int64_t>(kRowThreads / eights, 1);
    launch(KernelRole::gather_weight, ceil_div(pieces_of(spec), of_block), (eights + kRowThreads - 1) / kRowThreads);
    launch(KernelRole::gather_joints, pieces_of(spec), 1);
    return steps;
}

/// Gradients of all classes, named or not, where they are written.
std::vector<Statement> zero_steps(const BackwardPass& pass) {
    const Spec& spec = pass.spec;
    if (spec.grad_weight_mode != GradMode::write) return {};
    const Expr rows = weight_rows(spec);
    const Expr biases = is_shard(spec) ? rows : pass.columns;
    const Statement weight{MemsetZero{slot(Slot::grad_weight), rows * (spec.hidden_size * pass.grad_element_bytes)}};
    const Statement bias{MemsetZero{slot(Slot::grad_bias), biases * pass.grad_element_bytes}};
    std::vector<Statement> steps = {{If{present(Slot::grad_weight), {weight}}}};
    if (spec.bias) steps.push_back({If{present(Slot::grad_bias), {bias}}});
    return steps;
}

}  // namespace

int piece_places(const Spec& spec) { return std::max<int>(kGatherLeastPiece, 2 * spec.teacher_top_k); }

ForwardLayout forward_layout(const Spec& spec) {
    const Expr n = slot(Slot::num_tokens);
    ForwardLayout f;
    f.rows = kForwardRows;
    f.launches = ceil_div(n, kForwardRows);
    // Where a weight is rounded, row_outputs looks for sums of all tokens.
    const Expr rows = rounds_weight(spec) ? n : min(n, kForwardRows);
    f.partial_rows = f.running_rows = round_up(rows, 32);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    f.target_logits = pieces.take(rows * 4);
    f.loss_partials = pieces.take(ceil_div(n, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial)));
    f.partials = f.running = pieces.take(f.partial_rows * (4 * partial_fields(spec)));
    f.total = pieces.end();
    return f;
}

BackwardLayoutGather backward_layout(const Spec& spec) {
    const Expr n = slot(Slot::num_tokens);
    BackwardLayoutGather b;
    b.rows = max(n, 1);
    b.row_blocks = select(less(0, n), 1, 0);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    b.coefficients = pieces.take(n * 16);
    b.row_targets = pieces.take(n * 8);
    if (spec.temperature) b.row_temperatures = pieces.take(n * 4);
    b.row_teacher_weights = pieces.take(n * 4);
    b.dlogits_of_places = pieces.take(places(spec) * 4);
    for (Expr& sorted : b.sorted) sorted = pieces.take(places(spec) * static_cast<std::int64_t>(sizeof(ClassPlace)));
    b.counts = pieces.take((sort_blocks(spec) + 1) * std::int64_t{kSortBins * 4});
    for (Expr* sums : {&b.heads, &b.tails}) *sums = pieces.take(pieces_of(spec) * (4 * (spec.hidden_size + 8)));
    b.total = pieces.end();
    return b;
}

std::int64_t least_scratch_bytes(const Spec& spec, const Plan& /*plan*/) {
    // Forward's sums, a piece that is part full, and what alignment costs.
    return (1 << 20) + 16 * spec.hidden_size;
}

LaunchProgram forward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const ForwardLayout& layout) {
    ForwardPass pass(spec, plan, source, layout);
    pass.splits = 1;
    return {.body = for_all_rows(pass, {gather_forward_launch(pass), row_outputs_launch(pass, {})}), .variable_count = kRowsLoop + 1};
}

LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayoutGather& layout) {
    const BackwardPass pass(spec, plan, source, layout);
    std::vector<Statement> steps = zero_steps(pass);
    std::vector<Statement> gradients = coefficient_steps(pass);
    gradients.push_back(gather_hidden_launch(pass, layout));
    gradients.push_back(
        {If{(present(Slot::grad_weight) || present(Slot::grad_bias)) && less(0, pass.columns), weight_steps(pass, layout)}});
    steps.push_back({If{any_gradient() && less(0, slot(Slot::num_tokens)), std::move(gradients)}});
    return {.body = {{If{does_first_stage(), std::move(steps)}}}, .variable_count = kBackwardLoops};
}

}  // namespace flce::gather

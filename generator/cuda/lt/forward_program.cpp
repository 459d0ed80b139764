#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/lt/gemms.hpp"
#include "generator/cuda/lt/path.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/lt/params.cuh"

namespace flce::lt {
namespace {

constexpr int kPieceLoop = 2;  // over the columns that one call of the library computes

/// Columns of the pass that kPieceLoop is at, counted from the pass' first.
ColumnRange piece_of(const ForwardPass& pass) {
    const std::int64_t width = pass.plan.cuda.forward.block_n;
    const Expr first = variable(kPieceLoop) * width;
    return {first, min(pass.columns.count - first, width)};
}

Statement product(const ForwardPass& pass, const ForwardLayoutLt& layout, const ColumnRange& piece, const SumsPlace& sums) {
    const Spec& spec = pass.spec;
    const bool hidden_major = spec.layout == WeightLayout::hidden_major && !rounds_weight(spec);
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Expr weight = weight_at(pass) + piece.first * (hidden_major ? element : element * spec.hidden_size);
    return logits_gemm(spec, pass.plan, pass.rows.count, piece.count, hidden_row_at(spec, pass.rows.first),
                       weight_matrix(spec, hidden_major, weight), hidden_major, {sums.student, sums.tile.block_n},
                       workspace_at(layout.gemm_workspace));
}

/// Every stretch of the vocabulary: its product, and what forward makes of it.
Statement pieces_step(const ForwardPass& pass, const ForwardLayoutLt& layout, const RetainedLaunch* retained) {
    using Params = LtForwardParams;
    const ColumnRange piece = piece_of(pass);
    LaunchBuilder<Params> launch(forward_launch(pass, KernelRole::forward, ceil_div(pass.rows.count, 2 * kLtThreads / 32), pass.splits));
    launch.set(&Params::sums, layout.sums.student)
        .set(&Params::ld, pass.plan.cuda.forward.block_n)
        .set(&Params::first_column, pass.columns.first + piece.first)
        .set(&Params::columns, piece.count)
        .set(&Params::first, equal(variable(kPieceLoop), 0));
    if (pass.spec.top_k > 0) {
        launch.set(&Params::top_keys, workspace_at(layout.top_keys)).set(&Params::top_states, workspace_at(layout.top_states));
    }
    if (retained != nullptr) {
        const Expr row = pass.rows.first * (std::int64_t{kLtRetainedColumns} * static_cast<std::int64_t>(element_bytes(pass.spec.dtype)));
        launch.set(&Params::exponentials, retained_at(retained->layout.exponentials) + row)
            .set(&Params::references, retained->if_retained(retained->references))
            .set(&Params::block_bytes, retained->layout.block_bytes)
            .set(&Params::retained_columns, retained->layout.columns);
    }
    std::vector<Statement> steps = {product(pass, layout, piece, layout.sums),
                                    build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.rows))};
    return {Loop{kPieceLoop, ceil_div(pass.columns.count, std::int64_t{pass.plan.cuda.forward.block_n}), std::move(steps)}};
}

/// Logits are not read any more, and stale_sums' own sums take their place.
Statement stale_launch(const ForwardPass& pass, const ForwardLayoutLt& layout, const RetainedLaunch& retained, KernelRole kernel,
                       const Expr& across) {
    using Params = LtStaleParams;
    const Expr row = pass.rows.first * (std::int64_t{kLtRetainedColumns} * static_cast<std::int64_t>(element_bytes(pass.spec.dtype)));
    LaunchBuilder<Params> launch(forward_launch(pass, kernel, ceil_div(pass.rows.count, kOutputRows), across));
    launch.set(&Params::exponentials, retained_at(retained.layout.exponentials) + row)
        .set(&Params::references, retained.references)
        .set(&Params::stale, retained.stale)
        .set(&Params::own_sums, layout.sums.student)
        .set(&Params::block_bytes, retained.layout.block_bytes)
        .set(&Params::retained_columns, retained.layout.columns);
    return build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.rows));
}

// ---- A divergence from a teacher's head.

/// Every stretch of `columns`: both heads' products, and what `kernel` sums up of them. `begins`: whether no column comes before them.
Statement heads_step(const ForwardPass& pass, const ForwardLayoutLt& layout, KernelRole kernel, const HeadsColumns& columns,
                     const Expr& begins) {
    using Params = LtDivergenceParams;
    const Spec& spec = pass.spec;
    const std::int64_t width = columns.sums.tile.block_n;
    const Expr first = columns.first + variable(kPieceLoop) * width;
    const ColumnRange piece{first, min(columns.end - first, width)};
    LaunchBuilder<Params> launch(
        LaunchBuilder<LtForwardParams>(forward_launch(pass, kernel, ceil_div(pass.rows.count, 2 * kLtThreads / 32), pass.splits)));
    launch.set(&Params::sums, columns.sums.student)
        .set(&Params::ld, width)
        .set(&Params::first_column, piece.first)
        .set(&Params::columns, piece.count)
        .set(&Params::first, begins && equal(variable(kPieceLoop), 0))
        .set(&Params::teacher_sums, columns.sums.teacher)
        .set(&Params::teacher_bias, slot(Slot::teacher_bias))
        .set(&Params::lse, slot(Slot::lse) + pass.rows.base * 4)
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + pass.rows.base * 4)
        .set_transform(&Params::teacher_transform, teacher_head(spec))
        .set_float(&Params::beta, static_cast<float>(spec.divergence_beta));
    const RetainedHeads retained = retained_heads(spec, pass.plan);
    set_pairs(launch, retained.from_row(pass.rows.base));
    // A second walk finds logits that the first has retained.
    const Expr multiplies = kernel == KernelRole::divergence_mixture ? less(retained.columns, piece.first + piece.count) : Expr(1);
    std::vector<Statement> products = {product(pass, layout, piece, columns.sums),
                                       teacher_gemm(spec, pass.plan, {pass.rows.first, pass.rows.count}, {piece.first, piece.count},
                                                    {columns.sums.teacher, width}, workspace_at(layout.gemm_workspace))};
    std::vector<Statement> steps = {{If{multiplies, std::move(products)}},
                                    build_with_rows(std::move(launch), spec, row_numbers_at(pass.rows))};
    return {Loop{kPieceLoop, ceil_div(columns.end - columns.first, width), std::move(steps)}};
}

/// A walk over the vocabulary.
std::vector<Statement> walk_steps(const ForwardPass& pass, const ForwardLayoutLt& layout, KernelRole kernel) {
    std::vector<Statement> steps;
    Expr begins = 1;
    for (const HeadsColumns& columns : layout.heads) {
        steps.push_back(heads_step(pass, layout, kernel, columns, begins));
        begins = begins && !less(columns.first, columns.end);
    }
    return steps;
}

}  // namespace

std::vector<Statement> pair_gradients_steps(ForwardPass pass, const Expr& first) {
    using Params = PairRowsParams;
    if (!may_keep_gradients(pass.spec, pass.plan)) return {};
    pass.rows = {pass.rows.first + first, pass.rows.count - first, pass.rows.base + first};
    const RetainedHeads retained = retained_heads(pass.spec, pass.plan);
    const Expr& base = pass.rows.base;
    LaunchBuilder<Params> launch(forward_launch(pass, KernelRole::divergence_gradients, pass.rows.count, 1));
    launch.set(&Params::lse, slot(Slot::lse) + base * 4)
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + base * 4)
        .set(&Params::student_divergence, slot(Slot::student_divergence) + base * 4)
        .set_float(&Params::beta, static_cast<float>(pass.spec.divergence_beta));
    set_pairs(launch, retained.from_row(base));
    return {{If{retained.gradients, {build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.rows))}}}};
}

LaunchProgram divergence_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                 const ForwardLayoutLt& layout) {
    ForwardPass pass(spec, plan, source, layout);
    pass.splits = forward_splits(device, plan, pass.rows.count);
    const auto walk = [&](KernelRole kernel, bool mixture) {
        std::vector<Statement> steps = with_columns(spec, walk_steps(pass, layout, kernel));
        steps.push_back(divergence_outputs_launch(pass, mixture));
        if (!is_shard(spec)) return steps;
        const Expr asked = equal(slot(Slot::walk), static_cast<std::int64_t>(mixture ? WalkCode::mixture : WalkCode::sums));
        return std::vector<Statement>{{If{asked, std::move(steps)}}};
    };
    std::vector<Statement> steps = walk(KernelRole::divergence_sums, false);
    if (divergence_form(spec.divergence_beta) == kMixture) {
        std::ranges::move(walk(KernelRole::divergence_mixture, true), std::back_inserter(steps));
    }
    std::ranges::move(pair_gradients_steps(pass, 0), std::back_inserter(steps));
    return {.body = for_all_rows(pass, std::move(steps)), .variable_count = kPieceLoop + 1};
}

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayoutLt& layout) {
    ForwardPass pass(spec, plan, source, layout);
    pass.splits = forward_splits(device, plan, pass.rows.count);
    std::vector<Statement> body;
    if (sums_class_weights(spec)) {
        body.push_back(prepare_launch(spec, source, {.outputs = true, .counters = layout.counters}));
    }
    if (plan.strategy == Strategy::retain) {
        const RetainedLaunch retained(layout.retained, pass.rows);
        constexpr std::int64_t kBlocksAcross = 64;
        const auto gemm = [&](bool again) -> std::vector<Statement> {
            if (!again) return {pieces_step(pass, layout, &retained)};
            return {stale_launch(pass, layout, retained, KernelRole::stale_sums, pass.splits),
                    stale_launch(pass, layout, retained, KernelRole::stale_rows, kBlocksAcross)};
        };
        std::ranges::move(for_all_rows(pass, retaining_steps(pass, retained, 0, gemm)), std::back_inserter(body));
    } else {
        std::vector<Statement> classes;
        if (spec.top_k > 0) {
            classes.push_back(top_classes_launch(pass, {.keys = workspace_at(layout.top_keys), .states = workspace_at(layout.top_states)}));
        }
        std::ranges::move(outputs_of_gemm(pass, {pieces_step(pass, layout, nullptr)}, std::move(classes)), std::back_inserter(body));
    }
    return {.body = std::move(body), .variable_count = kPieceLoop + 1};
}

}  // namespace flce::lt

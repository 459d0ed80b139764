#include "generator/cuda/sm80/forward_program.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/sm80/layout.hpp"

namespace flce::sm80 {
namespace {

/// A block a tile of rows and part of the vocabulary.
Statement gemm_launch(const ForwardPass& pass, const LaunchRows& rows, const Expr& splits) {
    const Expr row_blocks = ceil_div(rows.count, pass.plan.cuda.forward.block_m);
    LaunchBuilder<ForwardParams> launch = forward_launch(pass, rows, KernelRole::forward, row_blocks, splits, splits);
    if (!rounds_weight(pass.spec)) return build_tempered(std::move(launch), pass.spec, temperatures_at(rows));
    const ColumnRange columns = stretch_columns(pass);
    LaunchBuilder<ForwardStretchParams> of_stretch(std::move(launch));
    of_stretch.set(&ForwardStretchParams::first_column, columns.first).set(&ForwardStretchParams::columns, columns.count);
    return build_tempered(std::move(of_stretch), pass.spec, temperatures_at(rows));
}

}  // namespace

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayout& layout) {
    const ForwardPass pass(spec, plan, source, layout);
    const LaunchRows rows = launch_rows(pass);
    Expr splits = forward_splits(spec, device, plan, rows.count);
    // The last stretch, or a shard, may have fewer tiles than parts.
    if (rounds_weight(spec)) {
        splits = min(splits, ceil_div(stretch_columns(pass).count, plan.cuda.forward.block_n));
    } else if (is_shard(spec)) {
        splits = min(splits, ceil_div(vocab_columns(spec), plan.cuda.forward.block_n));
    }
    std::vector<Statement> body;
    if (sums_class_weights(spec)) {
        body.push_back(prepare_launch(spec, source, {.scalars = layout.scalars, .outputs = true, .counters = layout.shares}));
    }
    std::vector<Statement> steps;
    Statement gemm = gemm_launch(pass, rows, splits);
    if (rounds_weight(spec)) {
        body.push_back(stretch_loop(pass, rows, splits, {std::move(gemm)}));
    } else {
        steps = with_columns(spec, {std::move(gemm)});
    }
    std::ranges::move(teacher_logits_steps(pass, rows), std::back_inserter(steps));
    steps.push_back(row_outputs_launch(pass, rows, splits, {}));
    body.push_back({Loop{kRowsLoop, layout.launches, std::move(steps)}});
    std::ranges::move(reduce_loss_steps(pass), std::back_inserter(body));
    return {.body = std::move(body), .variable_count = forward_loops(spec)};
}

}  // namespace flce::sm80

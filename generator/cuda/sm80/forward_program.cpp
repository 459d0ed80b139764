#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/sm80/path.hpp"
#include "templates/sm80/params.cuh"

namespace flce::sm80 {
namespace {

/// Retains exponentials. `again`: only of stale rows, and nothing else.
Statement forward_retain_launch(const ForwardPass& pass, const RetainedLaunch& retained, const Expr& row_blocks, bool again) {
    using Params = RetainForwardParams;
    LaunchBuilder<Params> launch(forward_launch(pass, KernelRole::forward, row_blocks, pass.splits));
    const Expr first = pass.rows.first * std::int64_t{kRetainedColumns} * static_cast<std::int64_t>(element_bytes(pass.spec.dtype));
    launch.set(&Params::exponentials, retained_at(retained.layout.exponentials) + first)
        .set(&Params::references, retained.if_retained(retained.references))
        .set(&Params::stale, retained.if_retained(retained.stale))
        .set(&Params::block_bytes, retained.layout.block_bytes)
        .set(&Params::retained_columns, retained.layout.columns)
        .set(&Params::again, again ? 1 : 0);
    return build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.rows));
}

}  // namespace

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayoutSm80& layout) {
    ForwardPass pass(spec, plan, source, layout);
    pass.splits = forward_splits(spec, device, plan, pass.rows.count);
    // The last stretch, or a shard, may have fewer tiles than parts.
    if (rounds_weight(spec) || is_shard(spec)) pass.splits = min(pass.splits, ceil_div(pass.columns.count, plan.cuda.forward.block_n));
    std::vector<Statement> body;
    if (sums_class_weights(spec)) {
        body.push_back(prepare_launch(spec, source, {.outputs = true, .counters = layout.counters}));
    }
    // A block a tile of rows and part of the vocabulary.
    const Expr row_blocks = ceil_div(pass.rows.count, plan.cuda.forward.block_m);
    if (plan.strategy == Strategy::retain) {
        const RetainedLaunch retained(layout.retained, pass.rows);
        const auto gemm = [&](bool again) { return std::vector{forward_retain_launch(pass, retained, row_blocks, again)}; };
        std::ranges::move(for_all_rows(pass, retaining_steps(pass, retained, 0, gemm)), std::back_inserter(body));
    } else {
        const Statement gemm = build_gemm<ForwardStretchParams>(pass, forward_launch(pass, KernelRole::forward, row_blocks, pass.splits));
        std::ranges::move(outputs_of_gemm(pass, {gemm}), std::back_inserter(body));
    }
    return {.body = std::move(body), .variable_count = forward_loops(spec)};
}

}  // namespace flce::sm80

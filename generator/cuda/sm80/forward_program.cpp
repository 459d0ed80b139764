#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/sm80/path.hpp"

namespace flce::sm80 {

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayout& layout) {
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
    const Statement gemm = build_gemm<ForwardStretchParams>(pass, forward_launch(pass, KernelRole::forward, row_blocks, pass.splits));
    std::ranges::move(outputs_of_gemm(pass, {gemm}), std::back_inserter(body));
    return {.body = std::move(body), .variable_count = forward_loops(spec)};
}

}  // namespace flce::sm80

// Backward of the columns whose exponentials forward retained, all tokens at once: plain GEMMs, with the rows' scales in grad_hidden's
// epilogue and in grad_weight's hidden states.
#pragma once

#include <utility>
#include <vector>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/sm80/path.hpp"
#include "templates/sm80/params.cuh"

namespace flce::sm80 {

struct BackwardPassSm80 : BackwardPass {
    const BackwardLayoutSm80& layout;  ///< BackwardPass's, with this path's places
    const RetainedLayout& retained;    ///< the layout's
    Expr all_retained;                 ///< whether the whole vocabulary is retained, so that no logits are computed again

    BackwardPassSm80(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayoutSm80& layout);
};

/// A block a tile of m × n results.
[[nodiscard]] inline Expr tile_grid(const GemmTile& tile, const Expr& m, const Expr& n) {
    return ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n);
}

/// Address of grad_hidden's fp32 sum: in fp32 it is its own.
[[nodiscard]] Expr sum_at(const BackwardPassSm80& pass);

/// The launch of a kernel whose parameters are `Extended` where the plan retains. What they have beyond `launch` stays 0.
template <class Extended, class Params>
[[nodiscard]] Statement build_extended(const BackwardPass& pass, LaunchBuilder<Params> launch) {
    if (pass.plan.strategy != Strategy::retain) return launch.build();
    return LaunchBuilder<Extended>(std::move(launch)).build();
}

/// Operands of the GEMMs, then grad_bias and grad_hidden's GEMM.
[[nodiscard]] std::vector<Statement> retained_hidden_steps(const BackwardPassSm80& pass);
/// grad_weight's, of the scaled hidden states that the steps above have left. Last: it may take the place of what the others read.
[[nodiscard]] Statement retained_weight_step(const BackwardPassSm80& pass);

}  // namespace flce::sm80

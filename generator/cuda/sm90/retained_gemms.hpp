// The gradients of the columns whose exponentials forward retained, all tokens at once: plain GEMMs, with the rows' scales in the hidden
// states and in grad_hidden's epilogue. Kernels retained_rows, grad_hidden and grad_weight.
#pragma once

#include <vector>

#include "generator/cuda/sm90/backward_pass.hpp"

namespace flce::sm90 {

/// Operands of the GEMMs, then grad_hidden's GEMM, and grad_bias where grad_weight's does not add it up.
[[nodiscard]] std::vector<Statement> retained_hidden_steps(const BackwardPassSm90& pass);
/// grad_weight's, of the scaled hidden states that the steps above have left.
[[nodiscard]] Statement retained_weight_step(const BackwardPassSm90& pass);
/// Between the first stage's grad_hidden and the last one's grad_weight, for a collective that was launched in between: its blocks need
/// SMs, and grad_weight's clusters leave none until they end.
[[nodiscard]] Statement make_room_step(const BackwardPassSm90& pass);
/// grad_weight's, with scaled hidden states made before it: where chunks are first, and grad_hidden has been written over the others; and
/// in the last stage of a backward whose first one has deferred hidden.
[[nodiscard]] std::vector<Statement> retained_weight_with_rows_steps(const BackwardPassSm90& pass);

}  // namespace flce::sm90

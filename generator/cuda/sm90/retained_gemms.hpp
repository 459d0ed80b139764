// The gradients of the columns whose exponentials forward retained, all tokens at once: plain GEMMs, with the rows' scales in the hidden
// states and in grad_hidden's epilogue. Kernels retained_rows, grad_hidden and grad_weight.
#pragma once

#include <vector>

#include "generator/cuda/sm90/backward_pass.hpp"

namespace flce::sm90 {

[[nodiscard]] std::vector<Statement> retained_steps(const BackwardPassSm90& pass);

}  // namespace flce::sm90

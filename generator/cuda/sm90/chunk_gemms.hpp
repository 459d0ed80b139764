// Hopper's GEMMs of one chunk of the vocabulary and one row block: kernels dlogits, grad_hidden and grad_weight.
#pragma once

#include "generator/cuda/sm90/backward_pass.hpp"

namespace flce::sm90 {

/// BlockedMap's shift where the columns of dlogits are one block.
inline constexpr int kOneBlock = 31;

[[nodiscard]] ChunkGemms chunk_gemms(const BackwardPassSm90& pass, const Stretch& stretch);

}  // namespace flce::sm90

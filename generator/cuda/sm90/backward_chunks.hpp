// All chunks of a stretch of the vocabulary in one launch, which orders its tiles by counters: kernels backward_chunks and hidden_chunks.
#pragma once

#include <vector>

#include "generator/cuda/sm90/backward_pass.hpp"

namespace flce::sm90 {

[[nodiscard]] std::vector<Statement> backward_chunks_steps(const BackwardPassSm90& pass, const Stretch& stretch);

/// Makes grad_hidden alone, of the vocabulary behind the retained part: a launch for each group of tokens.
[[nodiscard]] Statement hidden_chunks_groups(const BackwardPassSm90& pass);

}  // namespace flce::sm90

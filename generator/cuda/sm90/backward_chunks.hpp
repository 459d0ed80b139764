// All chunks of a stretch of the vocabulary in one launch, which orders its tiles by counters: kernel backward_chunks.
#pragma once

#include <vector>

#include "generator/cuda/sm90/backward_pass.hpp"

namespace flce::sm90 {

[[nodiscard]] std::vector<Statement> backward_chunks_steps(const BackwardPassSm90& pass, const Stretch& stretch);

}  // namespace flce::sm90

// Expected time of cuda_sm90a's backward.
#pragma once

#include "flce/plan.hpp"

namespace flce::sm90 {

[[nodiscard]] Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

}  // namespace flce::sm90

// Expected time of the CPU's passes.
#pragma once

#include "flce/plan.hpp"

namespace flce {

/// `retained` is the part of the fp32 logits, 0 to 1, that forward writes and backward reads instead of computing it again.
[[nodiscard]] Cost cpu_forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);
[[nodiscard]] Cost cpu_backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

}  // namespace flce

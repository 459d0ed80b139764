// The traced transform of the logits as the body of a device function.
#pragma once

#include <string>

#include "flce/spec.hpp"

namespace flce {

/// Statements that turn `x` and the parameters `p[…]` into `return {logit, derivative};`. `math` is the type that offers tanh. Depends on
/// which transforms are active, not on their values.
[[nodiscard]] std::string transform_source(const Spec& spec, const std::string& math, const std::string& indent);

}  // namespace flce

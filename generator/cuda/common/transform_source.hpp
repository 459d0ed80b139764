// The traced transform of the logits, and its derivative, as bodies of device functions.
#pragma once

#include <string>

#include "flce/spec.hpp"

namespace flce {

/// Statements that turn `x` and the parameters `p[…]` into `return {logit, derivative};`. `math` is the type that offers tanh. Depends on
/// which transforms are active, not on their values.
[[nodiscard]] std::string transform_source(const Spec& spec, const std::string& math, const std::string& indent);

/// Statements that turn the logit `z` and the parameters `p[…]` into `return derivative;`, without the factor logit_scale.
[[nodiscard]] std::string derivative_source(const Spec& spec, const std::string& indent);

}  // namespace flce

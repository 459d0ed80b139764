// The launch that rounds an fp32 weight of a 16-bit dtype into the workspace.
#pragma once

#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/launch_program.hpp"

namespace flce {

/// Rounds weight rows (hidden_major: columns) [first, first + rows) of the vocabulary to `rounded`, an address.
[[nodiscard]] Statement round_weight_launch(const Spec& spec, const CudaSource& source, const Expr& first, const Expr& rows,
                                            const Expr& rounded);

}  // namespace flce

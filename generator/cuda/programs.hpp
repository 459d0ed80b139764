// The launch programs of a CUDA kernel set.
#pragma once

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/source.hpp"
#include "generator/cuda/workspace.hpp"
#include "generator/launch_program.hpp"

namespace flce {

[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayout& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                             const BackwardLayout& layout);

/// Class-weight totals, and the divisors of a mean where `want_count` says so, into the scalars at the start of the workspace.
[[nodiscard]] Statement prepare_launch(const Spec& spec, const CudaSource& source, std::int64_t scalars, const Expr& want_count);

}  // namespace flce

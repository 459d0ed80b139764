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

/// What a pass starts with, into the workspace.
struct Preparation {
    std::int64_t scalars = 0;  ///< offset; class-weight totals, and the divisors of a mean where `want_count` says so
    Expr want_count{0};
    Expr list{0};               ///< address, or 0
    bool outputs = false;       ///< forward's, of rows that are not listed
    std::int64_t counters = 0;  ///< offset of words that are set to 0
    std::int64_t counter_count = 0;
};
/// Rounds weight rows (or columns, hidden_major) [first, first + rows) of the vocabulary to `rounded`, an address.
[[nodiscard]] Statement round_weight_launch(const Spec& spec, const CudaSource& source, const Expr& first, const Expr& rows,
                                            const Expr& rounded);
[[nodiscard]] Statement prepare_launch(const Spec& spec, const CudaSource& source, const Preparation& preparation);

}  // namespace flce

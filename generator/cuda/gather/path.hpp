// The path cuda_gather: a softmax over the ids that a token names. The weight's rows of these ids alone are read, and nothing walks the
// vocabulary but the zeroing of grad_weight.
#pragma once

#include <array>

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"

namespace flce {

extern const CudaPath kPathGather;

namespace gather {

/// Backward's places, beside those that row coefficients need.
struct BackwardLayoutGather : BackwardLayout {
    Expr dlogits_of_places{0};         ///< [N, K] fp32
    std::array<Expr, 2> sorted{0, 0};  ///< [N·K] ClassPlace: rounds of the sort go from one to the other
    Expr counts{0};                    ///< GatherSortParams'
    Expr heads{0};                     ///< GatherWeightParams', and so is tails
    Expr tails{0};
};
/// Most tokens of a launch of forward.
inline constexpr std::int64_t kForwardRows = 8192;
[[nodiscard]] ForwardLayout forward_layout(const Spec& spec);
[[nodiscard]] BackwardLayoutGather backward_layout(const Spec& spec);
/// Places of a piece: so many that all pieces' sums take no more than a grad_hidden in fp32 would.
[[nodiscard]] int piece_places(const Spec& spec);
[[nodiscard]] std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan);

[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const ForwardLayout& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source,
                                             const BackwardLayoutGather& layout);

}  // namespace gather
}  // namespace flce

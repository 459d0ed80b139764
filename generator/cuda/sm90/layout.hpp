// Division of the work of cuda_sm90a's passes, and workspace that the passes need beside every path's.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/sm90/rules.hpp"

namespace flce::sm90 {

/// CudaPath::least_segment_bytes.
[[nodiscard]] std::int64_t least_segment_bytes(const Spec& spec, const Plan& plan);

/// How a launch of forward divides its work. The number of partial sums of a row is known to the device alone (PassScalars::splits).
struct ForwardGrid {
    Expr clusters{0};                ///< clusters in the grid
    std::int64_t most_clusters = 0;  ///< most clusters that share the work
    std::int64_t stride = 0;         ///< stride of VocabularyWalk
};

[[nodiscard]] std::int64_t stretch_quantum(const Spec& spec, const Plan& plan);
[[nodiscard]] ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan);
[[nodiscard]] ForwardGrid forward_grid(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows);
/// Grid of a kernel whose tile has all tokens.
[[nodiscard]] ForwardGrid few_tokens_grid(const Spec& spec, const Device& device, const Plan& plan, const ForwardShape& shape);
[[nodiscard]] BackwardNeeds backward_needs(const Spec& spec, const Plan& plan);
[[nodiscard]] Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const Expr& widest, std::int64_t quantum);
[[nodiscard]] Expr sum_rows(const Spec& spec, const Device& device, const Plan& plan);
[[nodiscard]] JoinedChunks joined_chunks(const Spec& spec, const Device& device, const Plan& plan, const BackwardLayout& layout);
[[nodiscard]] bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight);

}  // namespace flce::sm90

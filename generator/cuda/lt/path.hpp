// The path cuda_lt: products by cuBLASLt, of a stretch of the vocabulary at a time, and kernels between them.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "templates/lt/params.cuh"

namespace flce {

extern const CudaPath kPathLt;

namespace lt {

// Candidates and speeds.
[[nodiscard]] Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] std::span<const TileCandidate> tile_candidates(DType dtype);
[[nodiscard]] double rate_share(const Device& device);
[[nodiscard]] TileRate tile_rate(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] Cost forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);
[[nodiscard]] Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

/// Logits of both heads that a divergence retains: LtRetainedHeads. A function of Slot::retained_bytes, so that both passes agree.
struct RetainedHeads {
    Expr columns{0};
    Expr block_bytes{0};
    Expr most{0};  ///< most bytes that there is a use for
};
[[nodiscard]] RetainedHeads retained_heads(const Spec& spec, const Plan& plan);
/// Sets the fields of an LtRetainedHeads, of rows from `first_row` on.
template <class Params>
void set_retained_heads(LaunchBuilder<Params>& launch, const RetainedHeads& heads, const Expr& first_row) {
    launch.set(&Params::retained, &LtRetainedHeads::data, slot(Slot::retained))
        .set(&Params::retained, &LtRetainedHeads::block_bytes, heads.block_bytes)
        .set(&Params::retained, &LtRetainedHeads::tokens, slot(Slot::num_tokens))
        .set(&Params::retained, &LtRetainedHeads::first_row, first_row)
        .set(&Params::retained, &LtRetainedHeads::columns, heads.columns);
}

// Layouts: those of every path, and this path's places beside. `sums`: hidden · weightᵀ of one call of the library, fp32.
struct ForwardLayoutLt : ForwardLayout {
    RetainedLayout retained;
    Expr sums{0};
    Expr teacher_sums{0};  ///< where the spec has a teacher's head
    Expr gemm_workspace{0};
    Expr top_keys{0};  ///< lists of classes and their states, where the spec has a top_k
    Expr top_states{0};
};
struct BackwardLayoutLt : BackwardLayout {
    RetainedLayout retained;  ///< retained memory that backward reads
    Expr sums{0};
    Expr teacher_sums{0};
    Expr gemm_workspace{0};
    Expr factors{0};  ///< Gemm::factors of grad_weight
    Expr operand{0};  ///< [N, D] in the spec's dtype, where no other place is free for hidden states that grad_weight's products read
};
[[nodiscard]] ForwardLayoutLt forward_layout(const Spec& spec, const Plan& plan);
[[nodiscard]] BackwardLayoutLt backward_layout(const Spec& spec, const Plan& plan);
[[nodiscard]] std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan);
/// Parts of a stretch that a launch of forward over `rows` tokens reduces apart.
[[nodiscard]] Expr forward_splits(const Device& device, const Plan& plan, const Expr& rows);

// Launches of the passes.
/// Forward where the spec has a teacher's head.
[[nodiscard]] LaunchProgram divergence_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                               const ForwardLayoutLt& layout);
[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayoutLt& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayoutLt& layout);

}  // namespace lt
}  // namespace flce

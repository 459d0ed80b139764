// The path cuda_sm80: mma.sync, on every GPU from sm_80 on.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"

namespace flce {

extern const CudaPath kPathSm80;

namespace sm80 {

// Rules for tiles, and the resources that kernels take of an SM.
[[nodiscard]] Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] KernelBlock block(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);

// Candidates and speeds.
[[nodiscard]] std::span<const TileCandidate> tile_candidates(DType dtype);
[[nodiscard]] double rate_share(const Device& device);
[[nodiscard]] TileRate tile_rate(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

// Layouts: those of every path, and this path's places beside.
struct ForwardLayoutSm80 : ForwardLayout {
    RetainedLayout retained;
};
struct BackwardLayoutSm80 : BackwardLayout {
    RetainedLayout retained;  ///< retained memory that backward reads
    Expr counters{0};         ///< number of grad_weight's tiles that are taken, and readers of each block of retained exponentials
    std::int64_t counter_count = 0;
    Expr smoothing{0};  ///< smoothing_bytes
};
[[nodiscard]] ForwardLayoutSm80 forward_layout(const Spec& spec, const Device& device, const Plan& plan);
/// Parts of the vocabulary that a launch of forward over `rows` tokens reduces apart (splits).
[[nodiscard]] Expr forward_splits(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows);
[[nodiscard]] BackwardLayoutSm80 backward_layout(const Spec& spec, const Plan& plan);
[[nodiscard]] std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan);

// Launches of the passes.
[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayoutSm80& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source,
                                             const BackwardLayoutSm80& layout);

}  // namespace sm80
}  // namespace flce

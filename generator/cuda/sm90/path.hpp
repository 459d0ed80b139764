// The path cuda_sm90a: wgmma, tensor copies and clusters, on Hopper.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/sm90/layout.hpp"

namespace flce {

extern const CudaPath kPathSm90;

namespace sm90 {

// Candidates and speeds.
[[nodiscard]] std::span<const TileCandidate> tile_candidates();
/// Share of the device's dense rate that wgmma keeps up at the chip's power limit, with operands from L2.
[[nodiscard]] double wgmma_share();
[[nodiscard]] TileRate tile_rate(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

// Kernels of a set, and launches of the passes.
[[nodiscard]] CudaSource source(const Spec& spec, const Device& device, const Plan& plan);
[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayoutSm90& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                             const BackwardLayoutSm90& layout);

}  // namespace sm90
}  // namespace flce

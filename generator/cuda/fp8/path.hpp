// The path cuda_fp8: products of numbers in 8 bits, on Hopper, for specs with fp8. Its main loop's ring, clusters and panels are those of
// cuda_sm90a (templates/sm90).
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/fp8/layout.hpp"

namespace flce {

extern const CudaPath kPathFp8;

namespace fp8 {

/// Blocks of a cluster, which stand along M.
inline constexpr int kClusterBlocks = 2;
/// Tile of logits: a narrower one where transforms crowd an epilogue's registers.
[[nodiscard]] const GemmTile& logits_tile(const Spec& spec);
inline constexpr GemmTile kGradientTile{.block_m = 128, .block_n = 256, .block_k = 128, .stages = 4, .schedule = TileSchedule::together};

/// Clusters of a grid that has a tile's worth of work for `m` × `n` results: at most as many as the device runs at once.
[[nodiscard]] Expr clusters_of(const Device& device, const GemmTile& tile, const Expr& m, const Expr& n);

[[nodiscard]] CudaSource source(const Spec& spec, const Device& device, const Plan& plan);
[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayoutFp8& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                             const BackwardLayoutFp8& layout);

}  // namespace fp8
}  // namespace flce

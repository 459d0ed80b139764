// Rules of cuda_sm90a's kernels for a spec and for tiles, the resources that kernels take of an SM, and the kernels that a plan has.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"

namespace flce::sm90 {

/// Blocks of a cluster, which stand along M.
inline constexpr int kClusterBlocks = 2;

[[nodiscard]] inline bool takes_turns(const GemmTile& tile) { return tile.schedule == TileSchedule::by_turns; }
/// Warps that multiply a tile.
[[nodiscard]] inline int warps_of_tile(const GemmTile& tile) { return takes_turns(tile) ? 4 : 8; }

[[nodiscard]] Reason problem(const Spec& spec, const Device& device, Strategy strategy);
[[nodiscard]] Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] KernelBlock block(const Spec& spec, GemmRole role, const GemmTile& tile);

/// One of forward's kernels: its tile, and how many blocks of a cluster share a tile of the vocabulary.
struct ForwardShape {
    GemmRole role{};  ///< forward_retain, or forward: it retains nothing
    GemmTile tile;
    int cluster = 1;
};
[[nodiscard]] inline ForwardShape forward_shape(const Plan& plan) { return {forward_role(plan), plan.cuda.forward, kClusterBlocks}; }

/// Up to this many tokens reading the weight is all that forward takes. Kernel `forward_few` then has them all in one tile, and every SM
/// reads its own part of the vocabulary.
inline constexpr int kFewTokens = 128;
[[nodiscard]] ForwardShape few_tokens_shape(const Spec& spec, const Plan& plan);

/// `block` of a kernel of forward.
[[nodiscard]] KernelBlock forward_block(const Spec& spec, const ForwardShape& shape);

/// Whether forward picks the logits of the classes that a teacher names from its own tiles (NamedPicks), where tokens are more than
/// kFewTokens. Few classes are quicker as products with single rows of the weight. Kernels over a rounded weight see a stretch of the
/// vocabulary at a time, and with batch_invariant the number of tokens may not decide between the two.
[[nodiscard]] bool picks_named(const Spec& spec);

/// Tiles of a segment of the vocabulary, whose sums batch_invariant keeps apart (ForwardShare); 0 without. The number follows from the
/// spec, which allows one tile for forward.
[[nodiscard]] int segment_tiles(const Spec& spec, const GemmTile& forward);

/// CudaProgram::defers_hidden. False with label smoothing: its term of grad_hidden is added up along with its term of grad_weight, which
/// reads hidden.
[[nodiscard]] bool defers_hidden(const Spec& spec, const Plan& plan);

/// Whether grad_weight's kernel has room to add up grad_bias as well: factors of each stage beside the tile, and registers. A hidden_major
/// gradient has the vocabulary as its second dimension, so that more columns of hidden states are of no use to it.
[[nodiscard]] bool sums_bias(const Spec& spec, const GemmTile& grad_weight);
/// Whether grad_weight's kernel adds up grad_bias of retained exponentials.
[[nodiscard]] bool sums_retained_bias(const Spec& spec, const Plan& plan);

/// Whether the three GEMMs of all chunks may be one launch, with dlogits' tile: warpgroups take turns with the tile, and it leaves
/// registers for the needs of five main loops. Beside a bias the launch adds up grad_bias, too.
[[nodiscard]] bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan);
/// Columns that the chunks of such a launch are multiples of: whole tiles of dlogits, whole clusters of grad_weight's.
[[nodiscard]] std::int64_t joined_quantum(const Plan& plan);

}  // namespace flce::sm90

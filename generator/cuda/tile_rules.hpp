// What the kernels of templates/ demand of a plan: tiles, shared memory, scratch. illegal_reason asks here, so that the templates' limits are
// written beside their generator.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"

namespace flce {

/// cuda_sm90a's forward of so few tokens that reading the weight is all it takes: one block a tile that has them all, every SM reads its own part of the
/// vocabulary.
inline constexpr int kFewTokens = 128;
[[nodiscard]] GemmTile few_tokens_tile(const Spec& spec);

/// Which of a plan's four GEMMs a tile belongs to, or all of backward's: it decides what lies in shared memory beside the operands.
enum class GemmRole : std::uint8_t { forward, forward_retain, dlogits, grad_hidden, grad_weight, chunks };

/// What the plan's forward tile does.
[[nodiscard]] inline GemmRole forward_role(const Plan& plan) {
    return plan.strategy == Strategy::retain ? GemmRole::forward_retain : GemmRole::forward;
}

/// Numbers that a token's forward needs of each part of the vocabulary: the maximum, the sum of exponentials, and what outputs and options add.
[[nodiscard]] int partial_fields(const Spec& spec);

/// Dynamic shared memory of one block, bytes.
[[nodiscard]] std::int64_t tile_smem_bytes(const Spec& spec, PlanPath path, GemmRole role, const GemmTile& tile);

/// Threads of one block.
[[nodiscard]] int tile_threads(PlanPath path, const GemmTile& tile);

/// Why `path` cannot express `spec` or run on `device`, whatever the tiles.
[[nodiscard]] std::optional<std::string> path_problem(const Spec& spec, const Device& device, PlanPath path);

/// Why nothing of `spec` can be retained from forward to backward.
[[nodiscard]] std::optional<std::string> retain_problem(const Spec& spec, PlanPath path);

/// Whether retained exponentials may lie in grad_weight's memory: it has to be written, vocabulary by vocabulary, and blocks of exponentials have to be
/// whole clusters of the GEMM's tiles.
[[nodiscard]] bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight);

/// Why the kernel templates cannot be instantiated with `tile`, or cannot run on `device`; std::nullopt when they can.
[[nodiscard]] std::optional<std::string> tile_problem(const Spec& spec, const Device& device, PlanPath path, GemmRole role,
                                                      const GemmTile& tile);

/// Whether the three GEMMs of all chunks may be one launch, with dlogits' tile: warpgroups take turns with it, and it leaves
/// registers for what five main loops need beside it.
[[nodiscard]] bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan);
/// Columns that the chunks of such a launch are multiples of: whole tiles of dlogits, whole clusters of grad_weight's.
[[nodiscard]] std::int64_t joined_quantum(const Plan& plan);

/// Rows whose gradients dlogits adds up to one partial sum of a bias's.
[[nodiscard]] int rows_of_bias_partial(const Plan& plan);

/// Least Plan::scratch_bytes with which backward can walk any number of tokens.
[[nodiscard]] std::int64_t smallest_scratch_bytes(const Spec& spec, const Plan& plan);

/// Blocks of this tile that an SM holds at a time, by shared memory and registers; at least 1 for a legal tile.
[[nodiscard]] int tile_blocks_per_sm(const Spec& spec, const Device& device, PlanPath path, GemmRole role, const GemmTile& tile);

/// Blocks of a cluster on cuda_sm90a, and whether its warpgroups take turns with tiles of their own.
inline constexpr int kClusterBlocks = 2;
[[nodiscard]] inline bool takes_turns(const GemmTile& tile) { return tile.warps_m == 4; }

}  // namespace flce

// The path cuda_lt: products by cuBLASLt, of a stretch of the vocabulary at a time, and kernels between them.
#pragma once

#include <vector>

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/heads_kernels.hpp"
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
[[nodiscard]] Reason lent_tile_problem(const Spec& spec, const GemmTile& tile);
[[nodiscard]] std::span<const GemmTile> lent_tiles(const Spec& spec);
[[nodiscard]] double rate_share(const Device& device);
[[nodiscard]] TileRate tile_rate(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
[[nodiscard]] Cost forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);
[[nodiscard]] Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

/// Logits of both heads that a divergence retains: RetainedPairs. A function of Slot::retained_bytes and retained_in_grad_weight, so that
/// both passes agree. In grad_weight's memory a block is at least as long as its classes' gradient, so that a gradient overwrites only
/// blocks of its own classes and of those before them. Memory of their own has all of a token's pairs side by side where no class is left
/// out; forward leaves gradients in their place there.
struct RetainedHeads {
    RetainedPairsAt pairs;
    Expr columns{0};
    Expr gradients{0};  ///< whether forward leaves gradients to backward; constant 0 where it never does
    Expr most{0};       ///< most bytes that there is a use for
    Expr lendable{0};   ///< bytes of grad_weight that may be lent; 0 where its memory will not do

    /// Fields of rows from `first_row` on.
    [[nodiscard]] RetainedPairsAt from_row(const Expr& first_row) const {
        RetainedPairsAt rows = pairs;
        rows.first_row = first_row;
        return rows;
    }
    /// Address of the scales of rows of gradients, [N] fp32, in the place of references, which nobody reads any more.
    [[nodiscard]] Expr row_scales() const { return slot(Slot::retained) + pairs.references; }
};
/// Whether a plan's forward may leave a divergence's gradients: they are summed up over rows for a bias's, and a shard's normalizers are
/// known when its forward has ended.
[[nodiscard]] bool may_keep_gradients(const Spec& spec, const Plan& plan);
[[nodiscard]] RetainedHeads retained_heads(const Spec& spec, const Plan& plan);

/// Whether forward's call has grad_weight's memory lent.
[[nodiscard]] Expr is_lent();

/// Places of sums hidden · weightᵀ of one call of the library, fp32: addresses.
struct SumsPlace {
    GemmTile tile;
    Expr student{0};
    Expr teacher{0};  ///< where the spec has a teacher's head
};
/// Bytes of both heads' sums, which lie side by side.
[[nodiscard]] Expr both_sums_bytes(const GemmTile& tile);

/// Columns that a divergence's forward computes with sums of one size.
struct HeadsColumns {
    Expr first;
    Expr end;
    SumsPlace sums;
};

// Layouts: those of every path, and this path's places beside.
struct ForwardLayoutLt : ForwardLayout {
    RetainedLayout retained;
    SumsPlace sums;
    std::vector<HeadsColumns> heads;  ///< the whole vocabulary in the order of forward, where the spec has a teacher's head
    Expr gemm_workspace{0};
    Expr top_keys{0};  ///< lists of classes and their states, where the spec has a top_k
    Expr top_states{0};
    Expr parked{0};  ///< student's products of HeadsLaunch, where that makes both
};
struct BackwardLayoutLt : BackwardLayout {
    RetainedLayout retained;  ///< retained memory that backward reads
    SumsPlace sums;
    Expr gemm_workspace{0};
    Expr factors{0};  ///< Gemm::factors of grad_weight
    Expr operand{0};  ///< [N, D] in the spec's dtype, where no other place is free for hidden states that grad_weight's products read
};
[[nodiscard]] ForwardLayoutLt forward_layout(const Spec& spec, const Plan& plan);
/// The layout of a forward that has grad_weight's memory, at whose end the sums lie until retained logits come there; the plan has a lent
/// tile.
[[nodiscard]] ForwardLayoutLt lent_forward_layout(const Spec& spec, const Plan& plan);
/// The layout of a forward whose launches make both heads' products (heads_kernels.hpp).
[[nodiscard]] ForwardLayoutLt heads_layout(const Spec& spec, const Device& device);
/// Whether the plan's set has those launches: the device has them, and scratch has room. They take more than kFewHeadsRows tokens.
[[nodiscard]] bool has_heads_launches(const Spec& spec, const Device& device, const Plan& plan);
[[nodiscard]] BackwardLayoutLt backward_layout(const Spec& spec, const Plan& plan);

/// A part of a divergence's vocabulary that backward walks in chunks of one kind, `first` to `end`.
struct HeadsStretch {
    Expr first{0};
    Expr end{0};
    Expr chunks{0};
    Expr width{0};
    Expr dlogits{0};  ///< address
    SumsPlace sums;
    bool retained = false;  ///< logits are read from retained memory, and no sums are made
};
/// The whole vocabulary, in order. While grad_weight's memory is free from some column on, sums lie at its end, and with very many tokens
/// dlogits behind them; a chunk's gradient never reaches its own dlogits, and no gradient before it has reached its sums.
[[nodiscard]] std::vector<HeadsStretch> heads_stretches(const Spec& spec, const Plan& plan, const BackwardLayoutLt& layout);
[[nodiscard]] std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan);
/// Parts of a stretch that a launch of forward over `rows` tokens reduces apart.
[[nodiscard]] Expr forward_splits(const Device& device, const Plan& plan, const Expr& rows);

// Launches of the passes.
/// Forward where the spec has a teacher's head.
[[nodiscard]] LaunchProgram divergence_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                               const ForwardLayoutLt& layout);
/// divergence_program with launches that make both heads' products.
[[nodiscard]] LaunchProgram heads_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                          const ForwardLayoutLt& layout);
/// Gradients in the place of pairs, of a launch's rows from `first` on, where forward leaves them; nothing where it never does.
[[nodiscard]] std::vector<Statement> pair_gradients_steps(ForwardPass pass, const Expr& first);
/// `plan` with its lent tile as forward's.
[[nodiscard]] Plan with_lent_tile(Plan plan);
[[nodiscard]] LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                            const ForwardLayoutLt& layout);
[[nodiscard]] LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                             const BackwardLayoutLt& layout);

}  // namespace lt
}  // namespace flce

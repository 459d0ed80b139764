// The steps of a backward pass that all paths have. A path's program (sm80/backward_program.cpp, sm90/backward_program.cpp) puts them in
// order around its own GEMMs. Every step's inputs are its arguments:
//
//     BackwardPass     the pass: spec, plan, kernels, layout
//      ├─ RowBlock     some of the tokens, mostly all of them
//      └─ Stretch      columns of the vocabulary that are cut into chunks of one width
//          └─ Chunk    one of them: its dlogits exist at once
#pragma once

#include <cstdint>
#include <vector>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "generator/launch_program.hpp"

namespace flce {

struct BackwardPass {
    const Spec& spec;
    const Plan& plan;
    const CudaSource& source;
    const BackwardLayout& layout;
    Expr list;                        ///< address of the list of tokens, or 0
    std::int64_t element_bytes;       ///< bytes of an element of the spec's dtype
    std::int64_t grad_element_bytes;  ///< bytes of an element of the weight's gradient
    std::int64_t grad_hidden_bytes;   ///< bytes of an element of grad_hidden
    Expr columns;                     ///< columns of the vocabulary
    Expr sum_begins{0};               ///< the column with which the first chunk of grad_hidden's sum begins
    Expr sum_ends;                    ///< column behind the last chunk, which writes grad_hidden; −1: a step after the chunks writes it

    BackwardPass(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayout& layout);
};

// The loop variables of a backward program.
inline constexpr int kCoefficientsLoop = 0;  ///< loop over row blocks, before the vocabulary is walked
inline constexpr int kChunkLoop = 1;         ///< loop over the chunks of a stretch
inline constexpr int kRowBlockLoop = 2;      ///< loop over row blocks, within a chunk
inline constexpr int kBackwardLoops = 3;

struct RowBlock {
    Expr number;
    Expr first;  ///< row; an entry of the list where there is one
    Expr count;
};
/// The block that `loop` is at.
[[nodiscard]] RowBlock row_block(const BackwardPass& pass, int loop);
/// Row `row` of a caller's tensor: its first where tokens are listed, since the list then says which rows are meant.
[[nodiscard]] Expr caller_row(const BackwardPass& pass, const Expr& row);

/// Where the workspace has the rows' numbers, from `row` of a block on.
[[nodiscard]] RowNumbers row_numbers_at(const BackwardLayout& layout, const Expr& row);

struct Stretch {
    Expr first_column;
    Expr chunks;
    Expr width;    ///< columns of a chunk, or of a pair that is joined; the last may have fewer
    Expr dlogits;  ///< address
    Expr end;      ///< column behind the last that a chunk may have
};
/// The vocabulary from `first_column` on: wide chunks, whose dlogits lie in grad_weight's memory, then chunks whose dlogits lie in the
/// workspace.
[[nodiscard]] std::vector<Stretch> stretches(const BackwardPass& pass, const Expr& first_column);

struct Chunk {
    Expr first_column;
    Expr columns;
    Expr width;    ///< distance from one row of dlogits to the next, in elements
    Expr dlogits;  ///< address
};
/// The chunk that kChunkLoop is at.
[[nodiscard]] Chunk chunk_of(const Stretch& stretch);
/// Address of the chunk's first row (hidden_major: column) in the weight or its gradient.
[[nodiscard]] Expr chunk_at(const BackwardPass& pass, const Chunk& chunk, Slot tensor, std::int64_t element_bytes);
/// Address of the chunk's weight as GEMMs read it: the caller's, or what has been rounded.
[[nodiscard]] Expr weight_operand(const BackwardPass& pass, const Chunk& chunk);

/// The chunk's columns as the grid of grad_weight has them: rows of the result, or columns where the weight is hidden_major.
struct GradWeightExtents {
    Expr m;
    Expr n;
};
[[nodiscard]] GradWeightExtents grad_weight_extents(const Spec& spec, const Expr& columns);

// The GEMMs of a chunk and a row block: parameters that kernels of every path have.

[[nodiscard]] LaunchBuilder<DlogitsParams> dlogits_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows,
                                                          const Expr& grid);
/// `sum`: address of the row block's fp32 sums. `last`: whether this chunk writes grad_hidden.
[[nodiscard]] LaunchBuilder<GradHiddenParams> grad_hidden_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows,
                                                                 const Expr& grid, const Expr& sum, const Expr& last);
[[nodiscard]] LaunchBuilder<GradWeightParams> grad_weight_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows,
                                                                 const Expr& grid);

/// A path's launches over the chunk of kChunkLoop and the row block of kRowBlockLoop.
struct ChunkGemms {
    Statement dlogits;
    Statement grad_weight;
    Statement grad_hidden;
};
/// The stretch chunk by chunk, and a chunk by row blocks: dlogits, then what the call wants of its gradients.
[[nodiscard]] Statement chunk_by_chunk(const BackwardPass& pass, const Stretch& stretch, const ChunkGemms& gemms);

// Steps before and after the vocabulary.

/// Scalars of the pass, and the coefficients of all rows.
[[nodiscard]] std::vector<Statement> coefficient_steps(const BackwardPass& pass);
/// The coefficients of one row block; there is memory for one block's at a time.
[[nodiscard]] Statement coefficients_launch(const BackwardPass& pass, const RowBlock& rows);

/// Whether the call wants any gradient.
[[nodiscard]] Expr any_gradient();
/// Zeroes what no chunk writes: gradients past the vocabulary, and everything when there is no token. Nothing where gradients are added to.
[[nodiscard]] std::vector<Statement> zero_the_rest(const BackwardPass& pass);
/// grad_hidden of a shard without a class, which has no chunk.
[[nodiscard]] Statement zero_without_class(const BackwardPass& pass);

}  // namespace flce

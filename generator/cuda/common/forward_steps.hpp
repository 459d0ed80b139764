// The steps of a forward pass that all paths have. A path's program (sm80/forward_program.cpp, sm90/forward_program.cpp) puts them in order
// around its own GEMM. Every step's inputs are its arguments.
#pragma once

#include <vector>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "generator/launch_program.hpp"

namespace flce {

struct ForwardPass {
    const Spec& spec;
    const Plan& plan;
    const CudaSource& source;
    const ForwardLayout& layout;
    Expr list;  ///< address of the list of tokens, or 0

    ForwardPass(const Spec& spec, const Plan& plan, const CudaSource& source, const ForwardLayout& layout);
};

// The loop variables of a forward program.
inline constexpr int kRowsLoop = 0;     ///< loop over launches, each of some of the tokens
inline constexpr int kStretchLoop = 1;  ///< loop over stretches of the vocabulary, where the weight is rounded
[[nodiscard]] int forward_loops(const Spec& spec) noexcept;

/// The tokens of one launch.
struct LaunchRows {
    Expr first;  ///< first token in the list, where there is one
    Expr count;
    Expr base;  ///< the row at which the caller's tensors are taken to begin: the call's first where there is a list
};
/// Tokens of the launch that kRowsLoop is at.
[[nodiscard]] LaunchRows launch_rows(const ForwardPass& pass);

/// Address of the rows' temperatures, from `base` on; 0 without.
[[nodiscard]] Expr temperatures_at(const LaunchRows& rows);

/// Columns of the vocabulary.
struct ColumnRange {
    Expr first;
    Expr count;
};
/// The stretch that kStretchLoop is at.
[[nodiscard]] ColumnRange stretch_columns(const ForwardPass& pass);

/// Address of row `row` of the hidden states.
[[nodiscard]] Expr hidden_row_at(const Spec& spec, const Expr& row);

/// Parameters that the GEMM's kernels of every path have. `splits`: partial sums of a row, 0 where only the device knows how many.
[[nodiscard]] LaunchBuilder<ForwardParams> forward_launch(const ForwardPass& pass, const LaunchRows& rows, KernelRole kernel,
                                                          const Expr& grid_x, const Expr& grid_y, const Expr& splits);

/// Runs over all stretches of the vocabulary: each is rounded, computed for all tokens by `gemm`, and merged with the stretches before it.
[[nodiscard]] Statement stretch_loop(const ForwardPass& pass, const LaunchRows& rows, const Expr& splits, std::vector<Statement> gemm);

/// Logits of the classes that a teacher names, before row_outputs: one launch, or none where the spec has no teacher.
[[nodiscard]] std::vector<Statement> teacher_logits_steps(const ForwardPass& pass, const LaunchRows& rows);

/// Addresses of a launch's rows in retained memory; 0: nothing is retained.
struct RetainedRowsAt {
    Expr references{0};
    Expr target_logits{0};
    Expr stale{0};
};
/// A shard's sums, or outputs where there are no shards.
[[nodiscard]] Statement row_outputs_launch(const ForwardPass& pass, const LaunchRows& rows, const Expr& splits,
                                           const RetainedRowsAt& retained);
/// The scalar loss, where no block of row_outputs has written it: one launch, or none for a shard.
[[nodiscard]] std::vector<Statement> reduce_loss_steps(const ForwardPass& pass);

/// `steps`, which need a class, where the call has one.
[[nodiscard]] std::vector<Statement> with_columns(const Spec& spec, std::vector<Statement> steps);

/// Outputs from all shards' sums; empty where the spec is not a shard's.
[[nodiscard]] LaunchProgram merge_program(const Spec& spec, const CudaSource& source, const MergeLayout& layout);

}  // namespace flce

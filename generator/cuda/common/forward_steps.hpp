// The steps of a forward pass that all paths have. A path's program (sm80/forward_program.cpp, sm90/forward_program.cpp) puts them in order
// around its own GEMM. Every step's inputs are its arguments.
#pragma once

#include <utility>
#include <vector>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda/common/workspace.hpp"
#include "generator/launch_program.hpp"

namespace flce {

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

/// Columns of the vocabulary.
struct ColumnRange {
    Expr first;
    Expr count;
};

struct ForwardPass {
    const Spec& spec;
    const Plan& plan;
    const CudaSource& source;
    const ForwardLayout& layout;
    Expr list;                     ///< address of the list of tokens, or 0
    LaunchRows rows;               ///< tokens of the launch that kRowsLoop is at
    Expr splits{0};                ///< partial sums of a row, 0 where only the device knows how many
    ColumnRange columns;           ///< columns that a GEMM computes: all, or the stretch that kStretchLoop is at
    std::vector<Statement> named;  ///< a path's own steps before the GEMM, in the place of teacher_logits_steps; none: the path has none

    ForwardPass(const Spec& spec, const Plan& plan, const CudaSource& source, const ForwardLayout& layout);
};

/// Address of the rows' temperatures, from `base` on; 0 without.
[[nodiscard]] Expr temperatures_at(const LaunchRows& rows);
[[nodiscard]] RowNumbers row_numbers_at(const LaunchRows& rows);

/// Address of row `row` of the hidden states.
[[nodiscard]] Expr hidden_row_at(const Spec& spec, const Expr& row);
/// Address of the weight that GEMMs read: the caller's, or what has been rounded.
[[nodiscard]] Expr weight_at(const ForwardPass& pass);

/// Parameters that the GEMM's kernels of every path have.
[[nodiscard]] LaunchBuilder<ForwardParams> forward_launch(const ForwardPass& pass, KernelRole kernel, const Expr& grid_x,
                                                          const Expr& grid_y);
/// The launch of a GEMM, with its columns of the vocabulary where sums run from one launch to the next: `Stretch` extends `Params`.
template <class Stretch, class Params>
[[nodiscard]] Statement build_gemm(const ForwardPass& pass, LaunchBuilder<Params> launch) {
    if (!pass.layout.sums_run) return build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.rows));
    LaunchBuilder<Stretch> of_stretch(std::move(launch));
    of_stretch.set(&Stretch::first_column, pass.columns.first).set(&Stretch::columns, pass.columns.count);
    return build_with_rows(std::move(of_stretch), pass.spec, row_numbers_at(pass.rows));
}

/// Parameters of kernels that begin with a row's named classes.
[[nodiscard]] LaunchBuilder<TeacherLogitsParams> teacher_logits_launch(const ForwardPass& pass, KernelRole kernel);
/// Logits of the classes that a teacher names, before row_outputs: one launch, or none where the spec has no teacher.
[[nodiscard]] std::vector<Statement> teacher_logits_steps(const ForwardPass& pass);

/// Addresses of a launch's rows in retained memory; 0: nothing is retained.
struct RetainedRowsAt {
    Expr references{0};
    Expr target_logits{0};
    Expr stale{0};
};
/// A shard's sums, or outputs where there are no shards.
[[nodiscard]] Statement row_outputs_launch(const ForwardPass& pass, const RetainedRowsAt& retained);

/// A launch's part in finding classes of rows' largest logits: addresses, and what columns there are before it and behind it.
struct TopClassesAt {
    Expr keys{0};      ///< lists of classes that forward has collected
    Expr states{0};    ///< and their states
    Expr dense{0};     ///< TopClassesParams::dense
    Expr kept{0};      ///< TopClassesParams::kept
    Expr bounds{0};    ///< TopClassesParams::bounds
    Expr columns{0};   ///< columns of `dense`
    Expr has_kept{0};  ///< TopClassesParams::kept_before
    bool last = true;  ///< TopClassesParams::last
};
/// Outputs, or a shard's sums, of the classes that forward has found, or what launches over further columns need.
[[nodiscard]] Statement top_classes_launch(const ForwardPass& pass, const TopClassesAt& at);

/// A shard's sums of a divergence, or outputs where there are no shards, from partial sums of both heads. `mixture`: from those of the
/// second walk, which knows both normalizers.
[[nodiscard]] Statement divergence_outputs_launch(const ForwardPass& pass, bool mixture);

/// `steps`, which need a class, where the call has one.
[[nodiscard]] std::vector<Statement> with_columns(const Spec& spec, std::vector<Statement> steps);

/// `steps` of every launch's rows, and the scalar loss where no block of row_outputs has written it.
[[nodiscard]] std::vector<Statement> for_all_rows(const ForwardPass& pass, std::vector<Statement> steps);
/// All of a pass whose `gemm` retains nothing, but what comes before it. A weight that is rounded is so a stretch of the vocabulary at a
/// time: each is computed for all tokens, and merged with the stretches before it.
/// `before`: steps of a launch's rows before their outputs.
[[nodiscard]] std::vector<Statement> outputs_of_gemm(const ForwardPass& pass, std::vector<Statement> gemm,
                                                     std::vector<Statement> before = {});

/// A program of these kernels with merge alone: outputs from all shards' sums, where the spec is a shard's.
[[nodiscard]] CudaProgram program_of(const Spec& spec, const CudaSource& source);

}  // namespace flce

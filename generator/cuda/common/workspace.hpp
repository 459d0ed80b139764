// How the passes of a CUDA program cut their work and where things lie in the workspace, as expressions over the number of tokens.
#pragma once

#include <cstdint>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/launch_program.hpp"

namespace flce {

inline constexpr std::int64_t kWorkspaceAlignment = 256;

/// Classes that the call's weight has: constant, but of a shard. Work is bounded by them, memory by the most that a call may have.
[[nodiscard]] Expr vocab_columns(const Spec& spec);
/// Rows (vocab_major) that the call's weight has in memory.
[[nodiscard]] Expr weight_rows(const Spec& spec);

/// How forward cuts the tokens of a call.
struct ForwardRows {
    Expr rows{0};                  ///< rows of a launch; the last may have fewer
    Expr partials{0};              ///< partial sums of a launch: numbers of each field
    std::int64_t share_words = 0;  ///< words of 4 bytes, by which clusters share the launches' work
};

/// Whether ignored tokens are left out of a pass: with more than kRowThreads tokens, where the list has a place in the workspace. The
/// expression is constant where the path has no lists.
[[nodiscard]] Expr lists_rows(const Plan& plan);

/// Forward runs over `rows` tokens at a time, so that its partial sums stay small for any number of tokens.
struct ForwardLayout {
    Expr rows{0};  ///< rows of a launch; the last may have fewer
    Expr launches{0};
    Expr partial_rows{0};  ///< leading dimension of the partial sums
    // Offsets in the workspace, bytes.
    std::int64_t scalars = 0;
    Expr list{0};
    std::int64_t shares = 0;  ///< counters of `share_words` words, by which clusters share the work
    std::int64_t share_words = 0;
    Expr target_logits{0};
    Expr loss_partials{0};
    Expr partials{0};
    Expr compact{0};   ///< hidden states of listed tokens, where the caller's workspace goes further than `total`
    Expr compacts{0};  ///< whether the caller's workspace goes further, and tokens are listed
    // Fields for a weight that is rounded a stretch of the vocabulary at a time: how the stretches are cut, and offsets.
    std::int64_t stretch = 0;  ///< columns of each but the last
    Expr stretches{0};
    Expr rounded_weight{0};  ///< [stretch, D] in the spec's dtype
    Expr running{0};         ///< [fields][running_rows] fp32: every token's sums over the stretches so far
    Expr running_rows{0};
    Expr total{0};
};

/// Backward walks the vocabulary in chunks. All tokens take part in a chunk at once unless their number makes chunks narrower
/// than is worthwhile; then tokens are cut into row blocks and a chunk's grad_weight is summed over them in fp32.
struct BackwardLayout {
    Expr rows{0};  ///< tokens of a row block
    Expr row_blocks{0};
    Expr chunk{0};  ///< vocabulary rows of a chunk; the leading dimension of dz
    std::int64_t scalars = 0;
    Expr list{0};
    Expr coefficients{0};
    Expr row_targets{0};
    Expr row_temperatures{0};     ///< where the spec has temperatures
    Expr row_teacher_weights{0};  ///< where the spec has a teacher
    Expr bias_partials{0};
    Expr bias_accumulator{0};
    Expr dlogits{0};
    Expr rounded_weight{0};  ///< [chunk, D] in the spec's dtype, where the weight is rounded
    Expr weight_accumulator{0};
    Expr hidden_accumulator{0};
    Expr sum_rows{0};  ///< rows that hidden_accumulator has room for: N, or more where so few tokens need several parts (SumShare)
    /// Wide chunks, the first of the vocabulary: their dlogits lie at the end of grad_weight's memory, while grad_weight is not written
    /// yet.
    Expr wide_chunk{0};
    Expr wide_chunks{0};   ///< 0 where there is no such memory: grad_weight is accumulated into or is not vocab_major
    Expr wide_dlogits{0};  ///< offset in grad_weight, bytes
    /// Columns of an even-numbered chunk where chunks are joined in one launch; chunk and wide_chunk are then a pair's. 0: chunks are never
    /// joined.
    Expr even_chunk{0};
    Expr even_wide_chunk{0};
    Expr joined{0};  ///< whether this number of tokens joins chunks, where the call wants both gradients
    /// Joined chunks where the call wants grad_hidden alone: groups of tokens one after the other, with wider chunks in dlogits' place. 0
    /// groups: chunks are not joined.
    Expr hidden_groups{0};
    Expr hidden_rows{0};   ///< tokens of a group
    Expr hidden_chunk{0};  ///< columns of a chunk
    Expr progress{0};
    std::int64_t progress_bytes = 0;
    Expr smoothing{0};  ///< SmoothingTotalsParams' totals and sums, where exponentials are retained with label smoothing
    /// Counters of two Paces, of TailParts' tiles, of the readers of each block of retained exponentials, and last of rows that
    /// scatter_rows scales.
    Expr counters{0};
    std::int64_t counter_count = 0;
    Expr total{0};  ///< total bytes, at most plan.scratch_bytes + workspace_of_tokens
};

/// Workspace that a path's backward needs, whatever the number of tokens.
struct BackwardNeeds {
    std::int64_t progress_bytes = 0;  ///< counters of the tiles of joined chunks
    bool sums_apart = false;          ///< grad_hidden's sum always has memory in the workspace, which other things use too
};

/// Whether all chunks of a call are one launch: BackwardLayout's fields of the same names.
struct JoinedChunks {
    Expr joined{0};
    Expr even_chunk{0};
    Expr even_wide_chunk{0};
    Expr hidden_groups{0};
    Expr hidden_rows{0};
    Expr hidden_chunk{0};
    std::int64_t progress_bytes = 0;
};

/// Memory that forward leaves for backward in Slot::retained where the plan retains: exponentials of the first columns of the vocabulary in
/// blocks of [N, kRetainedColumns], and the references that exponentials are relative to. A function of Slot::retained_bytes and
/// retained_in_grad_weight, so that both passes agree. In grad_weight's memory, of which `lendable` bytes are lent, block i lies i + 1
/// places from the beginning. A place is at least as large as a block's gradient, so that a block of the gradient overwrites only blocks
/// before its own.
struct RetainedLayout {
    Expr columns{0};
    Expr blocks{0};
    Expr lent{0};  ///< 1: in grad_weight's memory
    // Offsets, bytes.
    Expr references{0};     ///< [N] fp32
    Expr target_logits{0};  ///< [N] fp32
    Expr row_scales{0};     ///< [N] fp32, backward's own; row_smoothing too
    Expr row_smoothing{0};  ///< [N] fp32, with label smoothing
    Expr stale{0};          ///< [⌈N / kOutputRows⌉] SplitSumsParams::stale
    Expr exponentials{0};
    Expr block_bytes{0};  ///< bytes from one block to the next
    Expr most{0};         ///< most bytes that there is a use for
    Expr lendable{0};     ///< bytes of grad_weight that may be lent; 0 where its memory will not do
};
[[nodiscard]] RetainedLayout retained_layout(const Spec& spec, const Plan& plan);
/// Retained memory that backward reads: none in a call that has an entropy's gradient, which needs the logits again.
[[nodiscard]] RetainedLayout retained_for_backward(const Spec& spec, const Plan& plan);

/// Merge goes over rows once.
struct MergeLayout {
    static constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  ///< rows of a launch
    Expr loss_partials{0};                                            ///< offset, bytes
    Expr total{0};
};
[[nodiscard]] MergeLayout merge_layout();

[[nodiscard]] ForwardLayout forward_layout(const Spec& spec, const Device& device, const Plan& plan);
[[nodiscard]] BackwardLayout backward_layout(const Spec& spec, const Device& device, const Plan& plan);

/// Least scratch_bytes for which backward_layout holds its bound.
[[nodiscard]] std::int64_t smallest_scratch_bytes(const Spec& spec, const Plan& plan);

// Parts of the paths' layouts.

[[nodiscard]] inline std::int64_t multiple_below(std::int64_t value, std::int64_t multiple) { return value / multiple * multiple; }
[[nodiscard]] inline std::int64_t multiple_above(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}
/// Most bytes that forward's partial sums take.
inline constexpr std::int64_t kForwardPartialBytes = 768 << 10;
/// Most bytes of partial sums where other parts of the pass need scratch too.
[[nodiscard]] std::int64_t partial_bytes(const Plan& plan);
/// Columns of the vocabulary that a launch of forward computes: all, or a stretch whose weight is rounded before.
[[nodiscard]] std::int64_t forward_stretch(const Spec& spec, const Plan& plan);
/// Tiles of a whole stretch.
[[nodiscard]] std::int64_t forward_tiles(const Spec& spec, const Plan& plan, const GemmTile& tile);
/// Whether the plan's path has lists of tokens and scratch for them.
[[nodiscard]] bool has_lists(const Plan& plan);

}  // namespace flce

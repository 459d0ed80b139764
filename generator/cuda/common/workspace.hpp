// Parts of a path's layouts: how a pass cuts its work and where things lie in the workspace, as expressions over the number of tokens. A
// path calls these functions for what every path has, and adds places of its own. PassScalars lie at the beginning of every workspace.
#pragma once

#include <cstdint>
#include <utility>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/launch_program.hpp"

namespace flce {

inline constexpr std::int64_t kWorkspaceAlignment = 256;

/// Hands out aligned pieces of memory, from `begin` on.
class Pieces {
public:
    explicit Pieces(Expr begin = Expr(0)) : end_(std::move(begin)) {}
    Expr take(const Expr& bytes) {
        const Expr at = end_;
        end_ = end_ + round_up(bytes, kWorkspaceAlignment);
        return at;
    }
    [[nodiscard]] const Expr& end() const { return end_; }

private:
    Expr end_;
};

[[nodiscard]] inline std::int64_t multiple_below(std::int64_t value, std::int64_t multiple) { return value / multiple * multiple; }
[[nodiscard]] inline std::int64_t multiple_above(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

/// Classes that the call's weight has: constant, but of a shard. Work is bounded by them, memory by the most that a call may have.
[[nodiscard]] Expr vocab_columns(const Spec& spec);
/// Rows (vocab_major) that the call's weight has in memory.
[[nodiscard]] Expr weight_rows(const Spec& spec);

/// Whether scratch has a place for a list of tokens.
[[nodiscard]] bool has_lists(const Plan& plan);

// Forward.

/// Forward runs over `rows` tokens at a time, so that its partial sums stay small for any number of tokens.
struct ForwardLayout {
    Expr rows{0};  ///< rows of a launch; the last may have fewer
    Expr launches{0};
    Expr partial_rows{0};  ///< leading dimension of the partial sums
    Expr listing{0};       ///< whether ignored tokens are left out: constant 0 where the path has no lists
    // Offsets in the workspace, bytes.
    Expr list{0};
    std::int64_t counters = 0;  ///< offset of the path's counters, which `prepare` sets to 0
    std::int64_t counter_words = 0;
    Expr target_logits{0};
    Expr loss_partials{0};
    Expr partials{0};
    bool sums_run = false;  ///< whether sums run from one launch to the next, over other columns of the vocabulary: `running`
    // Fields for a weight that is rounded a stretch of the vocabulary at a time: how the stretches are cut, and offsets.
    Expr stretch{0};  ///< columns of each but the last
    Expr stretches{0};
    Expr rounded_weight{0};  ///< [stretch, D] in the spec's dtype
    Expr running{0};         ///< [fields][running_rows] fp32: every token's sums over the stretches so far
    Expr running_rows{0};
    Expr total{0};
};

/// A path's choices for forward.
struct ForwardCut {
    Expr rows{0};                    ///< ForwardLayout::rows
    Expr partials{0};                ///< partial sums of a launch: numbers of each field
    Expr stretch{0};                 ///< columns of a stretch, at most forward_stretch
    std::int64_t most_stretch = 0;   ///< forward_stretch
    std::int64_t counter_words = 0;  ///< words of 4 bytes
    bool lists = false;              ///< whether ignored tokens may be left out; has_lists
};
[[nodiscard]] ForwardLayout place_forward(const Spec& spec, const ForwardCut& cut);

/// Most bytes that forward's partial sums take.
inline constexpr std::int64_t kForwardPartialBytes = 768 << 10;
/// Most bytes of partial sums where other parts of the pass need scratch too.
[[nodiscard]] std::int64_t partial_bytes(const Plan& plan);
/// Most columns of the vocabulary that a launch of forward computes: all, or a stretch of whole `quantum`s whose weight is rounded before.
[[nodiscard]] std::int64_t forward_stretch(const Spec& spec, const Plan& plan, std::int64_t quantum);

/// Keys of a list of a row's classes: TopListSize.
[[nodiscard]] constexpr std::int64_t top_list_keys(int top_k) { return top_k <= 64 ? 128 : top_k <= 128 ? 256 : 512; }

// Backward.

/// Backward walks the vocabulary in chunks. All tokens take part in a chunk at once unless their number makes chunks narrower
/// than is worthwhile; then tokens are cut into row blocks and a chunk's grad_weight is summed over them in fp32.
struct BackwardLayout {
    Expr rows{0};  ///< tokens of a row block
    Expr row_blocks{0};
    Expr chunk{0};             ///< vocabulary rows of a chunk; the leading dimension of dz
    Expr listing{0};           ///< ForwardLayout's
    std::int64_t bias_rows{};  ///< BackwardNeeds'
    // Offsets in the workspace, bytes.
    Expr list{0};
    Expr coefficients{0};
    Expr row_targets{0};
    Expr row_temperatures{0};     ///< where the spec has temperatures
    Expr row_groups{0};           ///< where the spec has class_groups
    Expr row_teacher_weights{0};  ///< where the spec has a teacher
    Expr bias_partials{0};
    Expr bias_accumulator{0};
    Expr dlogits{0};
    Expr weight_places{1};   ///< chunks of a rounded weight that there is room for
    Expr rounded_weight{0};  ///< [weight_places, chunk, D] in the spec's dtype, where the weight is rounded
    Expr weight_accumulator{0};
    Expr hidden_accumulator{0};
    /// Wide chunks, the first of the vocabulary: their dlogits lie at the end of grad_weight's memory, while grad_weight is not written
    /// yet.
    Expr wide_chunk{0};
    Expr wide_chunks{0};   ///< 0 where there is no such memory: grad_weight is accumulated into or is not vocab_major
    Expr wide_dlogits{0};  ///< offset in grad_weight, bytes
    Expr total{0};         ///< total bytes, at most plan.scratch_bytes + workspace_of_tokens
};

/// A path's needs for backward.
struct BackwardNeeds {
    std::int64_t bias_rows = 0;  ///< tokens whose gradients dlogits adds up to one partial sum of a bias's
    bool lists = false;          ///< ForwardCut's
    std::int64_t own_bytes = 0;  ///< bytes of the path's own places, whatever the number of tokens
};

/// Sizes of backward that do not depend on the number of tokens.
struct BackwardSizes {
    BackwardNeeds needs;
    std::int64_t reserve;      ///< bytes for everything that has the same size for any number of tokens
    std::int64_t budget;       ///< bytes for everything else but dH's accumulator
    std::int64_t quantum;      ///< chunks are multiples of this
    std::int64_t chunk_limit;  ///< widest chunk
    std::int64_t chunk;        ///< chunk of row blocks
    std::int64_t rows;         ///< rows of a row block
    std::int64_t rows_limit;   ///< up to this many tokens take part at once
    std::int64_t least;        ///< least scratch_bytes with which the layout keeps its bound
};
[[nodiscard]] BackwardSizes backward_sizes(const Spec& spec, const Plan& plan, const BackwardNeeds& needs);

/// Widest chunk, in whole quanta, that scratch has room for where all tokens take part. `sum_rows`: rows of grad_hidden's sum.
/// `weight_places`: BackwardLayout's.
[[nodiscard]] Expr widest_chunk(const Spec& spec, const BackwardSizes& sizes, const Expr& sum_rows, int weight_places = 1);
/// Chunks and row blocks. `whole_chunk`: the chunk where all tokens take part, at most widest_chunk.
[[nodiscard]] BackwardLayout cut_backward(const BackwardSizes& sizes, const Expr& whole_chunk);

/// Whether the memory of a grad_weight that will be written has room for wide chunks until then.
[[nodiscard]] bool may_widen_chunks(const Spec& spec);
/// Widest chunk, in whole quanta, that is worth its memory: with many tokens grad_hidden's sum is gone through less often.
[[nodiscard]] Expr widest_wide_chunk(const Spec& spec, const BackwardSizes& sizes);
/// Adds wide chunks of at most widest_wide_chunk, behind the `retained` columns.
void add_wide_chunks(const Spec& spec, const Expr& wide_chunk, const Expr& retained, BackwardLayout& layout);

/// Places everything that all paths have but grad_hidden's sum, behind which `total` is.
[[nodiscard]] Pieces place_backward(const Spec& spec, const BackwardSizes& sizes, BackwardLayout& layout);

// Retained memory.

/// Memory that forward leaves for backward in Slot::retained where the plan retains: exponentials of the first columns of the vocabulary in
/// blocks of [N, CudaPath::retained_columns], and the references that exponentials are relative to. A function of Slot::retained_bytes and
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
/// `lends`: lends_grad_weight. Nothing is retained where the plan's strategy is another.
[[nodiscard]] RetainedLayout retained_layout(const Spec& spec, const Plan& plan, bool lends);
/// Retained memory that backward reads: none in a call that has an entropy's gradient, which needs the logits again.
[[nodiscard]] RetainedLayout retained_for_backward(const Spec& spec, const Plan& plan, bool lends);
/// Bytes for the sums over the weight and over hidden states that label smoothing needs beside retained exponentials, of each stretch and
/// in all, and for a bias's total.
[[nodiscard]] std::int64_t smoothing_bytes(const Spec& spec);
/// Blocks of kRetainedColumns that the vocabulary has.
[[nodiscard]] std::int64_t retained_blocks(const Spec& spec);

}  // namespace flce

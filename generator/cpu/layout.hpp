// How the CPU backend cuts a pass into blocks and where everything lies in the caller's workspace. The bound on the workspace, its size for
// N tokens and the addresses come from the same two functions, so they cannot disagree. Pure arithmetic. Blocks do not depend on the number
// of threads, so neither do a kernel's bits: only how many workers get a slot does.
#pragma once

#include <cstdint>

#include "flce/plan.hpp"
#include "flce/spec.hpp"

namespace flce {

/// `extent` in `count` blocks of `size`, a multiple of some step, except for the last one.
struct Blocks {
    std::int64_t extent = 0;
    std::int64_t size = 0;
    std::int64_t count = 0;
    [[nodiscard]] std::int64_t begin(std::int64_t index) const { return index * size; }
    [[nodiscard]] std::int64_t length(std::int64_t index) const { return index + 1 < count ? size : extent - begin(index); }
};
/// Makes the fewest possible blocks of at most `largest`, as equal as `step` allows. `largest` is a multiple of `step`.
[[nodiscard]] Blocks even_blocks(std::int64_t extent, std::int64_t largest, std::int64_t step);
/// Blocks of exactly `size`.
[[nodiscard]] Blocks fixed_blocks(std::int64_t extent, std::int64_t size);

/// Memory that one worker has for itself: a tile of C, a packed block of B and the strip's bias and class weights. Offsets from the slot's
/// start.
struct SlotLayout {
    std::int64_t tile = 0;           ///< fp32 [block_m, block_n]
    std::int64_t b_block = 0;        ///< block_k × block_n units, 4 bytes each
    std::int64_t bias = 0;           ///< fp32 [block_n]
    std::int64_t class_weight = 0;   ///< fp32 [block_n]
    std::int64_t class_offset = 0;   ///< fp32 [block_n]
    std::int64_t class_groups = 0;   ///< where the spec has class_groups: int32 [block_n]
    std::int64_t group_rows = 0;     ///< and GroupRow [block_m]
    std::int64_t sums = 0;           ///< RowSums [block_m]
    std::int64_t teacher_tile = 0;   ///< where the spec has a teacher's head: fp32 [block_m, block_n]
    std::int64_t teacher_bias = 0;   ///< and fp32 [block_n]
    std::int64_t dequantized = 0;    ///< where the weight is quantised: fp32 [micro_n, the deeper of block_k and kDepthsAtATime]; with fp8
                                     ///< as many lines as micro_m where those are more
    std::int64_t class_factors = 0;  ///< with fp8: fp32 [block_n], by which the strip's numbers become codes
    std::int64_t class_scales = 0;   ///< and fp32 [block_n], by which codes become numbers
    std::int64_t bytes = 0;
};

/// Depths that are packed together where B's lines are contiguous, so that their pages stay at hand while the panels pass.
inline constexpr std::int64_t kDepthsAtATime = 32;

struct CpuForwardLayout {
    Blocks row_blocks;    ///< tokens whose packed hidden states exist at once
    Blocks strips;        ///< vocabulary in strips of block_n
    Blocks strip_groups;  ///< strips that one task walks in order; its sums become one partial sum a row
    SlotLayout slot;
    std::int64_t slots = 0;
    std::int64_t slot_offset = 0;
    std::int64_t hidden_panels = 0;  ///< A of the logits, a row block
    std::int64_t teacher_panels = 0;
    std::int64_t row_factors = 0;   ///< with fp8: fp32 [rows], by which hidden states become codes
    std::int64_t row_scales = 0;    ///< and fp32 [rows], by which codes become numbers
    std::int64_t partial_sums = 0;  ///< RowSums [strip_groups, rows]; DivergenceSums where there is a teacher's head
    std::int64_t row_losses = 0;    ///< fp32 [2, rows]: cross entropies and z-losses
    std::int64_t top_sizes = 0;     ///< where the spec has a top_k: int64 [rows], classes in each row's list
    std::int64_t top_keys = 0;      ///< and ClassKey [rows, top_k]
    std::int64_t bytes = 0;
};

struct CpuBackwardLayout {
    Blocks row_blocks;  ///< tokens whose logit gradients exist at once
    Blocks chunks;      ///< vocabulary chunks, multiples of block_n
    SlotLayout slot;
    std::int64_t slots = 0;
    std::int64_t slot_offset = 0;
    std::int64_t hidden_panels = 0;    ///< A of the logits, a row block
    std::int64_t teacher_panels = 0;   ///< where the spec has a teacher's head
    std::int64_t row_factors = 0;      ///< with fp8: fp32 [rows], as forward's
    std::int64_t row_scales = 0;       ///< and fp32 [rows]
    std::int64_t grad_rows = 0;        ///< GradRow [rows]
    std::int64_t fp8_rows = 0;         ///< with fp8: Fp8Row [rows], for each of two steps in flight
    std::int64_t hidden_factors = 0;   ///< and fp32 [rows], r · 2^q, for each of two steps in flight
    std::int64_t fp8_rows_stride = 0;  ///< bytes between the two steps' copies
    std::int64_t hidden_factors_stride = 0;
    std::int64_t weight_sum = 0;          ///< with fp8 and label smoothing: fp32 [D], Σ c_j·weight[j]
    std::int64_t hidden_sum = 0;          ///< and fp32 [D], Σ smoothing_i·hidden[i]
    std::int64_t dlogits_rows = 0;        ///< A of grad_hidden, for each of two steps in flight
    std::int64_t dlogits_columns = 0;     ///< A of grad_weight, for each of two steps in flight
    std::int64_t column_sums = 0;         ///< fp32 [row tiles, chunk], for each of two steps in flight
    std::int64_t bias_accumulator = 0;    ///< fp32 [chunk]
    std::int64_t weight_accumulator = 0;  ///< fp32 [chunk, D]; only where there are several row blocks
    std::int64_t hidden_accumulator = 0;  ///< fp32 [N, D]; only where the dtype is not fp32: the 4·N·D beyond scratch_bytes
    std::int64_t dlogits_rows_stride = 0;
    std::int64_t dlogits_columns_stride = 0;
    std::int64_t column_sums_stride = 0;
    std::int64_t bytes = 0;
};

/// Both passes where the spec has support.
struct CpuSupportLayout {
    std::int64_t depth = 0;  ///< numbers of a row in a slot
    std::int64_t slots = 0;
    std::int64_t slot_offset = 0;
    std::int64_t slot_bytes = 0;  ///< fp32 [3, depth] and [teacher_top_k]
    std::int64_t row_losses = 0;  ///< fp32 [N]
    std::int64_t dlogits = 0;     ///< fp32 [N, teacher_top_k]
    std::int64_t sorted = 0;      ///< uint64 [N, teacher_top_k]: class · 2^32 + place, by bins of classes
    std::int64_t bins = 0;        ///< at most 2^16, of 2^bin_bits classes each
    int bin_bits = 0;
    std::int64_t starts = 0;  ///< uint32 [bins + 2]
    std::int64_t bytes = 0;
};

/// Place of the logits that forward leaves to backward: logits of the first `columns` of the vocabulary, fp32, before bias and transforms,
/// strip by strip as [num_tokens, strip's columns]. A function of the buffer's size alone, so that both passes agree. Strips spread over
/// the whole buffer: where it is grad_weight's own memory, a strip's logits begin no earlier than its gradient, so that a backward pass
/// that walks the vocabulary upwards has read them before it writes there.
struct CpuRetained {
    std::int64_t columns = 0;  ///< the whole vocabulary or a multiple of block_n
    std::int64_t stride = 0;   ///< bytes from a column to the next
    [[nodiscard]] bool holds(std::int64_t column) const { return column < columns; }
    /// Offset of the logits of `token` in the strip [begin, begin + width).
    [[nodiscard]] std::int64_t offset(std::int64_t begin, std::int64_t width, std::int64_t token) const {
        return begin * stride + 4 * token * width;
    }
};
[[nodiscard]] CpuRetained cpu_retained(const Plan& plan, std::int64_t num_tokens, std::int64_t vocab_columns, std::int64_t bytes);

/// Throws PlanError when even the smallest blocks exceed plan.scratch_bytes. A shard may have fewer classes than the spec, `vocab_columns`:
/// everything lies as it does for the spec's, and there are fewer strips and chunks.
[[nodiscard]] CpuForwardLayout cpu_forward_layout(const Spec& spec, const Plan& plan, int threads, std::int64_t num_tokens,
                                                  std::int64_t vocab_columns);
[[nodiscard]] CpuBackwardLayout cpu_backward_layout(const Spec& spec, const Plan& plan, int threads, std::int64_t num_tokens,
                                                    std::int64_t vocab_columns);

[[nodiscard]] CpuSupportLayout cpu_support_layout(const Spec& spec, const Plan& plan, int threads, std::int64_t num_tokens);

/// The least scratch_bytes with which the functions above succeed for any number of tokens (with one worker).
[[nodiscard]] std::int64_t cpu_least_scratch_bytes(const Spec& spec, const Plan& plan);

/// Workers that `threads` threads become: fewer where scratch holds no more slots.
[[nodiscard]] std::int64_t cpu_worker_count(const Spec& spec, const Plan& plan, int threads);

/// A block's rows in tiles of at most block_m.
[[nodiscard]] Blocks row_tiles(const CpuPlan& plan, std::int64_t rows);

/// Depth in units of 4 bytes: pairs where bf16 pairs are multiplied.
[[nodiscard]] std::int64_t depth_units(const CpuPlan& plan, std::int64_t depth);

}  // namespace flce

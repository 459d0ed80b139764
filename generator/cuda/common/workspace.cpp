#include "generator/cuda/common/workspace.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/planner.hpp"
#include "templates/common/params.cuh"

namespace flce {
namespace {

constexpr std::int64_t kReserveBytes = 8192;  // scalars and what alignment costs
constexpr std::int64_t kRowQuantum = 128;
constexpr std::int64_t kListedRowBytes = sizeof(ListedRow);
constexpr std::int64_t kMostListedRows = std::numeric_limits<int>::max();  // most tokens of a call that has a list
constexpr std::int64_t kLeastScratch = 16 << 20;                           // least scratch with which there are lists
constexpr std::int64_t kListReserve = kTokensInScratch * kListedRowBytes;  // a longer list goes beyond the scratch
constexpr std::int64_t kFewestRetained = 16;  // tokens: one rounding more shows in the gradients of fewer, and no layer is quicker

/// Hands out aligned pieces of the workspace.
class Pieces {
public:
    Expr take(const Expr& bytes) {
        const Expr at = end_;
        end_ = end_ + round_up(bytes, kWorkspaceAlignment);
        return at;
    }
    [[nodiscard]] const Expr& end() const { return end_; }

private:
    Expr end_{0};
};

std::int64_t retained_blocks(const Spec& spec) { return multiple_above(spec.vocab_size, kRetainedColumns) / kRetainedColumns; }

/// The sums over the weight and over hidden states that label smoothing needs beside retained exponentials, of each stretch and in all, and
/// a bias's total.
std::int64_t smoothing_bytes(const Spec& spec) {
    const std::int64_t sums = 2 * (kSmoothingParts + 1) * spec.hidden_size + (spec.bias ? 1 : 0);
    return spec.label_smoothing > 0 ? multiple_above(sums * 4, kWorkspaceAlignment) : 0;
}

/// Bytes that backward needs whatever the number of tokens.
std::int64_t reserve_bytes(const Spec& spec, const Plan& plan) {
    return kReserveBytes + cuda_path(plan.path).backward_needs(spec, plan).progress_bytes + (has_lists(plan) ? kListReserve : 0) +
           (plan.strategy == Strategy::retain
                ? multiple_above((std::int64_t{kPaceCounters} + retained_blocks(spec) + kMostTailTiles) * 4, kWorkspaceAlignment) +
                      smoothing_bytes(spec)
                : 0);
}

/// Sizes of backward that do not depend on the number of tokens.
struct BackwardSizes {
    std::int64_t budget;       ///< bytes for everything but dH's accumulator
    std::int64_t quantum;      ///< chunks are multiples of this
    std::int64_t chunk_limit;  ///< widest chunk
    std::int64_t chunk;        ///< chunk of row blocks
    std::int64_t rows;         ///< rows of a row block
    std::int64_t rows_limit;   ///< up to this many tokens take part at once
};

std::int64_t chunk_quantum(const Spec& spec, const Plan& plan) {
    const CudaPlan& c = plan.cuda;
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    // Whole tiles, whichever GEMM the chunk is cut for.
    return std::lcm(std::lcm(c.dlogits.block_n, 128), vocab_major ? c.grad_weight.block_m : c.grad_weight.block_n);
}

/// Bytes that a column of a chunk costs where its weight is rounded.
std::int64_t rounded_row_bytes(const Spec& spec) {
    return rounds_weight(spec) ? spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype)) : 0;
}

/// A token's coefficients, lse and target, its temperature, and what its teacher's probabilities are multiplied with.
std::int64_t row_bytes(const Spec& spec) { return 24 + (spec.temperature ? 4 : 0) + (spec.teacher_top_k > 0 ? 4 : 0); }

/// Bytes that a token costs where a chunk has `chunk` columns.
std::int64_t token_bytes(const Spec& spec, const Plan& plan, std::int64_t chunk) {
    const std::int64_t bias = spec.bias ? chunk * 4 / cuda_path(plan.path).rows_of_bias_partial(plan) + 1 : 0;
    return chunk * static_cast<std::int64_t>(element_bytes(spec.dtype)) + row_bytes(spec) + bias;
}

BackwardSizes backward_sizes(const Spec& spec, const Plan& plan) {
    BackwardSizes s{};
    s.budget = plan.scratch_bytes - reserve_bytes(spec, plan);
    s.quantum = chunk_quantum(spec, plan);
    s.chunk_limit = std::min(std::max(multiple_below(plan.vocab_chunk, s.quantum), s.quantum), multiple_above(spec.vocab_size, s.quantum));
    const std::int64_t weight_row = 4 * spec.hidden_size + (spec.bias ? 12 : 0) + rounded_row_bytes(spec);
    s.chunk = std::clamp(multiple_below(s.budget / 2 / weight_row, s.quantum), s.quantum, s.chunk_limit);
    s.rows = std::max(multiple_below((s.budget - s.chunk * weight_row) / token_bytes(spec, plan, s.chunk), kRowQuantum), kRowQuantum);
    // Each chunk passes over dH's accumulator and each row block over dW's: traffic goes with 1/chunk + 1/rows. Without row blocks it goes
    // with 1/chunk alone, so they start to pay when the chunk gets narrower than this.
    const std::int64_t narrowest = std::max(s.chunk * s.rows / (s.chunk + s.rows), s.quantum);
    s.rows_limit = (s.budget - narrowest * ((spec.bias ? 12 : 0) + rounded_row_bytes(spec))) / token_bytes(spec, plan, narrowest);
    return s;
}

}  // namespace

Expr vocab_columns(const Spec& spec) { return is_shard(spec) ? slot(Slot::vocab_columns) : Expr(spec.vocab_size); }

Expr weight_rows(const Spec& spec) { return is_shard(spec) ? slot(Slot::weight_rows) : Expr(spec.padded_vocab_size); }

Expr lists_rows(const Plan& plan) {
    if (!has_lists(plan)) return 0;
    return less(kRowThreads, slot(Slot::num_tokens)) && less(slot(Slot::num_tokens), kMostListedRows + 1);
}

bool has_lists(const Plan& plan) { return cuda_path(plan.path).lists_tokens() && plan.scratch_bytes >= kLeastScratch; }

std::int64_t partial_bytes(const Plan& plan) { return std::min(kForwardPartialBytes, (plan.scratch_bytes - kReserveBytes) / 2); }

/// A stretch is whole tiles whose rounded weight fits in half of the scratch. Stretches are nearly alike.
std::int64_t forward_stretch(const Spec& spec, const Plan& plan) {
    if (!rounds_weight(spec)) return spec.vocab_size;
    const std::int64_t quantum = cuda_path(plan.path).stretch_quantum(spec, plan);
    const std::int64_t most = std::max(multiple_below(plan.scratch_bytes / 2 / rounded_row_bytes(spec), quantum), quantum);
    const std::int64_t stretches = multiple_above(spec.vocab_size, most) / most;
    return multiple_above(multiple_above(spec.vocab_size, stretches) / stretches, quantum);
}

std::int64_t forward_tiles(const Spec& spec, const Plan& plan, const GemmTile& tile) {
    return multiple_above(forward_stretch(spec, plan), tile.block_n) / tile.block_n;
}

std::int64_t smallest_scratch_bytes(const Spec& spec, const Plan& plan) {
    const std::int64_t quantum = chunk_quantum(spec, plan);
    const std::int64_t backward = 2 * quantum * (4 * spec.hidden_size + (spec.bias ? 12 : 0) + rounded_row_bytes(spec)) +
                                  2 * kRowQuantum * token_bytes(spec, plan, quantum);
    const std::int64_t segments = spec.batch_invariant ? 4 * cuda_path(plan.path).least_segment_bytes(spec, plan) : 0;
    return reserve_bytes(spec, plan) + std::max(backward, segments);
}

ForwardLayout forward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const std::int64_t field_bytes = std::int64_t{4} * partial_fields(spec);
    const Expr n = slot(Slot::num_tokens);
    const ForwardRows cut = cuda_path(plan.path).forward_rows(spec, device, plan);
    ForwardLayout f;
    f.rows = cut.rows;
    const Expr rows = min(n, f.rows);
    f.launches = ceil_div(n, max(f.rows, 1));
    f.partial_rows = round_up(rows, 32);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    f.shares = *pieces.end().constant();
    f.share_words = cut.share_words;
    pieces.take(f.share_words * 4);
    f.list = pieces.take(lists_rows(plan) * n * kListedRowBytes);
    f.target_logits = pieces.take((rounds_weight(spec) ? n : rows) * 4);
    f.loss_partials = pieces.take(ceil_div(n, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial)));
    f.partials = pieces.take(cut.partials * field_bytes);
    if (rounds_weight(spec)) {
        f.stretch = forward_stretch(spec, plan);
        f.stretches = ceil_div(vocab_columns(spec), f.stretch);
        f.rounded_weight = pieces.take(std::min(f.stretch, spec.vocab_size) * rounded_row_bytes(spec));
        f.running_rows = round_up(n, 32);
        f.running = pieces.take(f.running_rows * field_bytes);
    }
    f.total = pieces.end();
    f.compact = pieces.take(n * spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype)));
    f.compacts = lists_rows(plan) && less(pieces.end(), slot(Slot::workspace_bytes) + 1);
    return f;
}

MergeLayout merge_layout() {
    MergeLayout m;
    m.total = round_up(ceil_div(slot(Slot::num_tokens), kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial)), kWorkspaceAlignment);
    return m;
}

/// Vocabulary rows of a chunk for all tokens at once, of which `fitting` have room.
static Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const BackwardSizes& s, const Expr& fitting) {
    const Expr widest = min(max(round_down(fitting, s.quantum), s.quantum), s.chunk_limit);
    return cuda_path(plan.path).whole_chunk(spec, device, plan, widest, s.quantum);
}

RetainedLayout retained_layout(const Spec& spec, const Plan& plan) {
    RetainedLayout r;
    if (plan.strategy != Strategy::retain) return r;
    const Expr n = slot(Slot::num_tokens);
    const Expr all_blocks = ceil_div(vocab_columns(spec), kRetainedColumns);
    const Expr block = max(n, 1) * (kRetainedColumns * static_cast<std::int64_t>(element_bytes(spec.dtype)));
    const std::int64_t gradient_row = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
    Pieces pieces;
    r.references = pieces.take(n * 4);
    r.target_logits = pieces.take(n * 4);
    r.row_scales = pieces.take(n * 4);
    if (spec.label_smoothing > 0) r.row_smoothing = pieces.take(n * 4);
    r.stale = pieces.take(ceil_div(n, kOutputRows) * 4);
    const Expr enough = less(kFewestRetained - 1, n);
    r.most = select(enough, pieces.end() + block * all_blocks, 0);
    if (cuda_path(plan.path).lends_grad_weight(spec, plan.cuda.grad_weight))
        r.lendable = select(enough, vocab_columns(spec) * gradient_row, 0);

    const Expr bytes = slot(Slot::retained_bytes);
    r.lent = slot(Slot::retained_in_grad_weight) && less(0, bytes);
    const Expr places = floor_div(bytes, max(block, kRetainedColumns * gradient_row));  // places of lent memory, the first of them for
                                                                                        // everything but exponentials
    const Expr lent_stride = floor_div(floor_div(bytes, max(places, 1)), kWorkspaceAlignment) * kWorkspaceAlignment;
    const Expr own_blocks = floor_div(max(bytes - pieces.end(), 0), block);
    r.blocks = min(select(r.lent, max(places - 1, 0), own_blocks), all_blocks);
    r.columns = select(enough, min(r.blocks * kRetainedColumns, vocab_columns(spec)), 0);
    r.block_bytes = select(r.lent, lent_stride, block);
    r.exponentials = select(r.lent, lent_stride, pieces.end());
    return r;
}

RetainedLayout retained_for_backward(const Spec& spec, const Plan& plan) {
    RetainedLayout retained = retained_layout(spec, plan);
    if (spec.outputs.entropy) retained.columns = select(equal(slot(Slot::grad_entropy), 0), retained.columns, 0);
    return retained;
}

/// The memory of a grad_weight that will be written is free until then: with many tokens, chunks in it can be wider than the workspace
/// allows, and grad_hidden's sum is gone through less often. Wider than this they gain nothing.
static void place_wide_chunks(const Spec& spec, const Device& device, const Plan& plan, const BackwardSizes& s, BackwardLayout& b) {
    if (spec.grad_weight_mode != GradMode::write || spec.layout != WeightLayout::vocab_major || rounds_weight(spec)) return;
    // A bias's partial sums have room for a chunk of the workspace's; where chunks are joined there are none.
    if (spec.bias && !cuda_path(plan.path).joins_chunks(spec, device, plan)) return;
    constexpr std::int64_t kMostDlogits = 256 << 20;
    const Expr row = max(slot(Slot::num_tokens), 1) * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const std::int64_t gradient_row = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
    b.wide_chunk = whole_chunk(spec, device, plan, s, floor_div(kMostDlogits, row));
    const Expr end = weight_rows(spec) * gradient_row - row * b.wide_chunk;
    b.wide_dlogits = floor_div(max(end, 0), kWorkspaceAlignment) * kWorkspaceAlignment;
    const Expr before = min(floor_div(b.wide_dlogits, gradient_row), vocab_columns(spec)) - retained_for_backward(spec, plan).columns;
    const Expr use = equal(b.row_blocks, 1) && less(b.chunk, b.wide_chunk) && less(0, slot(Slot::grad_weight));
    b.wide_chunks = select(use, max(floor_div(before, b.wide_chunk), 0), 0);
}

BackwardLayout backward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaPath& path = cuda_path(plan.path);
    const BackwardSizes s = backward_sizes(spec, plan);
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Expr n = slot(Slot::num_tokens);
    const Expr cut = less(s.rows_limit, n);
    const Expr bias_row = spec.bias ? (ceil_div(n, cuda_path(plan.path).rows_of_bias_partial(plan)) + 2) * 4 : Expr(0);
    // A launch of all tokens has no use for more of the list's place than there are tokens.
    const Expr list_bytes = lists_rows(plan) * n * kListedRowBytes;
    const std::int64_t list_place = has_lists(plan) ? kListReserve : 0;
    BackwardLayout b;
    b.sum_rows = path.sum_rows(spec, device, plan);
    const Expr more_rows = (b.sum_rows - n) * (4 * spec.hidden_size);
    const Expr fitting = floor_div(max(Expr(s.budget + list_place) - n * row_bytes(spec) - min(list_bytes, list_place) - more_rows, 0),
                                   max(n * element + bias_row + rounded_row_bytes(spec), 1));

    b.rows = select(cut, round_up(ceil_div(n, max(ceil_div(n, s.rows), 1)), kRowQuantum), max(n, 1));
    b.row_blocks = ceil_div(n, b.rows);
    b.chunk = select(cut, s.chunk, whole_chunk(spec, device, plan, s, fitting));
    const Expr most_chunks = ceil_div(spec.vocab_size, b.chunk);
    place_wide_chunks(spec, device, plan, s, b);
    const JoinedChunks joined = path.joined_chunks(spec, device, plan, b);
    b.joined = joined.joined;
    const bool has_wide = b.wide_chunks.constant() == nullptr;
    if (spec.bias && has_wide) b.wide_chunks = select(b.joined && less(0, slot(Slot::grad_hidden)), b.wide_chunks, 0);
    b.even_chunk = joined.even_chunk;
    b.even_wide_chunk = joined.even_wide_chunk;
    b.hidden_groups = joined.hidden_groups;
    b.hidden_rows = joined.hidden_rows;
    b.hidden_chunk = joined.hidden_chunk;
    b.progress_bytes = joined.progress_bytes;
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    b.list = pieces.take(list_bytes);
    b.coefficients = pieces.take(b.rows * 16);
    b.row_targets = pieces.take(b.rows * 8);
    if (spec.temperature) b.row_temperatures = pieces.take(b.rows * 4);
    if (spec.teacher_top_k > 0) b.row_teacher_weights = pieces.take(b.rows * 4);
    if (spec.bias) {
        b.bias_partials = pieces.take(ceil_div(b.rows, cuda_path(plan.path).rows_of_bias_partial(plan)) * b.chunk * 4);
        b.bias_accumulator = pieces.take(b.chunk * 4);
    }
    b.dlogits = pieces.take(b.rows * b.chunk * element);
    b.rounded_weight = pieces.take(min(b.chunk, spec.vocab_size) * rounded_row_bytes(spec));
    b.weight_accumulator = pieces.take(select(less(1, b.row_blocks), b.chunk * (4 * spec.hidden_size), 0));
    b.progress = pieces.take(b.progress_bytes);
    if (plan.strategy == Strategy::retain) {
        b.counter_count = std::int64_t{kPaceCounters} + kMostTailTiles + retained_blocks(spec) + 1;
        b.counters = pieces.take(b.counter_count * 4);
        b.smoothing = pieces.take(smoothing_bytes(spec));
    }
    // An fp32 grad_hidden is its own sum, but where parts of the sum have places of their own.
    const bool apart = path.backward_needs(spec, plan).sums_apart;
    const bool in_place = spec.dtype == DType::fp32 || (!apart && grad_hidden_dtype(spec) == DType::fp32);
    const Expr accumulated = in_place ? Expr(0) : apart ? Expr(1) : less(1, most_chunks);
    b.hidden_accumulator = pieces.take(select(accumulated, b.sum_rows * (4 * spec.hidden_size), 0));
    b.total = pieces.end();
    return b;
}

}  // namespace flce

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

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(element_bytes(dtype)); }

/// Whether ignored tokens are left out of a pass: with more than kRowThreads tokens.
Expr lists_rows(bool lists) {
    if (!lists) return 0;
    return less(kRowThreads, slot(Slot::num_tokens)) && less(slot(Slot::num_tokens), kMostListedRows + 1);
}

Expr list_bytes(bool lists) { return lists_rows(lists) * slot(Slot::num_tokens) * kListedRowBytes; }

std::int64_t chunk_quantum(const Spec& spec, const Plan& plan) {
    constexpr std::int64_t kOfLibrary = 512;
    if (cuda_path(plan.path).calls_library) return kOfLibrary;
    const CudaPlan& c = plan.cuda;
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    // Whole tiles, whichever GEMM the chunk is cut for.
    return std::lcm(std::lcm(c.dlogits.block_n, 128), vocab_major ? c.grad_weight.block_m : c.grad_weight.block_n);
}

/// Bytes that a column of a chunk costs where its weight is rounded.
std::int64_t rounded_row_bytes(const Spec& spec) { return rounds_weight(spec) ? spec.hidden_size * bytes_of(spec.dtype) : 0; }

/// Bytes of a chunk's column beside dz: its sums of a bias, and its rounded weight.
std::int64_t column_bytes(const Spec& spec) { return (spec.bias ? 12 : 0) + rounded_row_bytes(spec); }

/// A token's coefficients, lse and target, its temperature and group, and what its teacher's probabilities are multiplied with.
std::int64_t row_bytes(const Spec& spec) {
    return 24 + (spec.temperature ? 4 : 0) + (spec.class_groups ? 4 : 0) + (spec.teacher_top_k > 0 ? 4 : 0);
}

/// Bytes that a token costs where a chunk has `chunk` columns.
std::int64_t token_bytes(const Spec& spec, const BackwardNeeds& needs, std::int64_t chunk) {
    const std::int64_t bias = spec.bias ? chunk * 4 / needs.bias_rows + 1 : 0;
    return chunk * bytes_of(spec.dtype) + row_bytes(spec) + bias;
}

/// Chunk of at most `fitting` columns.
Expr whole_quanta(const BackwardSizes& s, const Expr& fitting) {
    return min(max(round_down(fitting, s.quantum), s.quantum), s.chunk_limit);
}

}  // namespace

Expr vocab_columns(const Spec& spec) { return is_shard(spec) ? slot(Slot::vocab_columns) : Expr(spec.vocab_size); }

Expr weight_rows(const Spec& spec) { return is_shard(spec) ? slot(Slot::weight_rows) : Expr(spec.padded_vocab_size); }

bool has_lists(const Plan& plan) { return plan.scratch_bytes >= kLeastScratch; }

std::int64_t partial_bytes(const Plan& plan) { return std::min(kForwardPartialBytes, (plan.scratch_bytes - kReserveBytes) / 2); }

/// A stretch is whole tiles whose rounded weight fits in half of the scratch, or in three quarters where the rest is enough for what lies
/// beside it. Stretches are nearly alike.
std::int64_t forward_stretch(const Spec& spec, const Plan& plan, std::int64_t quantum) {
    if (!rounds_weight(spec)) return spec.vocab_size;
    constexpr std::int64_t kEnoughBeside = 4 << 20;  // bytes of partial sums, of a list of tokens, and of sums that run
    const bool enough = plan.scratch_bytes / 4 >= kEnoughBeside && !spec.batch_invariant;
    const std::int64_t room = enough ? plan.scratch_bytes / 4 * 3 : plan.scratch_bytes / 2;
    const std::int64_t most = std::max(multiple_below(room / rounded_row_bytes(spec), quantum), quantum);
    const std::int64_t stretches = multiple_above(spec.vocab_size, most) / most;
    return multiple_above(multiple_above(spec.vocab_size, stretches) / stretches, quantum);
}

ForwardLayout place_forward(const Spec& spec, const ForwardCut& cut) {
    const std::int64_t field_bytes = std::int64_t{4} * partial_fields(spec);
    const Expr n = slot(Slot::num_tokens);
    ForwardLayout f;
    f.rows = cut.rows;
    const Expr rows = min(n, f.rows);
    f.launches = ceil_div(n, max(f.rows, 1));
    f.partial_rows = round_up(rows, 32);
    f.listing = lists_rows(cut.lists);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    f.counters = *pieces.end().constant();
    f.counter_words = cut.counter_words;
    pieces.take(f.counter_words * 4);
    f.list = pieces.take(list_bytes(cut.lists));
    f.target_logits = pieces.take((rounds_weight(spec) ? n : rows) * 4);
    f.loss_partials = pieces.take(ceil_div(n, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial)));
    f.partials = pieces.take(cut.partials * field_bytes);
    if (rounds_weight(spec)) {
        f.sums_run = true;
        f.stretch = cut.stretch;
        f.stretches = ceil_div(vocab_columns(spec), f.stretch);
        f.rounded_weight = pieces.take(std::min(cut.most_stretch, spec.vocab_size) * rounded_row_bytes(spec));
        f.running_rows = round_up(n, 32);
        f.running = pieces.take(f.running_rows * field_bytes);
    }
    f.total = pieces.end();
    return f;
}

BackwardSizes backward_sizes(const Spec& spec, const Plan& plan, const BackwardNeeds& needs) {
    BackwardSizes s{.needs = needs};
    s.reserve = kReserveBytes + needs.own_bytes + (needs.lists ? kListReserve : 0);
    s.budget = plan.scratch_bytes - s.reserve;
    s.quantum = chunk_quantum(spec, plan);
    s.chunk_limit = std::min(std::max(multiple_below(plan.vocab_chunk, s.quantum), s.quantum), multiple_above(spec.vocab_size, s.quantum));
    const std::int64_t weight_row = 4 * spec.hidden_size + column_bytes(spec);
    s.chunk = std::clamp(multiple_below(s.budget / 2 / weight_row, s.quantum), s.quantum, s.chunk_limit);
    s.rows = std::max(multiple_below((s.budget - s.chunk * weight_row) / token_bytes(spec, needs, s.chunk), kRowQuantum), kRowQuantum);
    // Each chunk passes over dH's accumulator and each row block over dW's: traffic goes with 1/chunk + 1/rows. Without row blocks it goes
    // with 1/chunk alone, so they start to pay when the chunk gets narrower than this.
    const std::int64_t narrowest = std::max(s.chunk * s.rows / (s.chunk + s.rows), s.quantum);
    s.rows_limit = (s.budget - narrowest * column_bytes(spec)) / token_bytes(spec, needs, narrowest);
    s.least = s.reserve + 2 * s.quantum * weight_row + 2 * kRowQuantum * token_bytes(spec, needs, s.quantum);
    return s;
}

Expr widest_chunk(const Spec& spec, const BackwardSizes& s, const Expr& sum_rows, int weight_places) {
    const Expr n = slot(Slot::num_tokens);
    const Expr bias_row = spec.bias ? (ceil_div(n, s.needs.bias_rows) + 2) * 4 : Expr(0);
    // A launch of all tokens has no use for more of the list's place than there are tokens.
    const std::int64_t list_place = s.needs.lists ? kListReserve : 0;
    const Expr more_rows = (sum_rows - n) * (4 * spec.hidden_size);
    const Expr room = Expr(s.budget + list_place) - n * row_bytes(spec) - min(list_bytes(s.needs.lists), list_place) - more_rows;
    const Expr column = n * bytes_of(spec.dtype) + bias_row + weight_places * rounded_row_bytes(spec);
    return whole_quanta(s, floor_div(max(room, 0), max(column, 1)));
}

BackwardLayout cut_backward(const BackwardSizes& s, const Expr& whole_chunk) {
    const Expr n = slot(Slot::num_tokens);
    const Expr cut = less(s.rows_limit, n);
    BackwardLayout b;
    b.rows = select(cut, round_up(ceil_div(n, max(ceil_div(n, s.rows), 1)), kRowQuantum), max(n, 1));
    b.row_blocks = ceil_div(n, b.rows);
    b.chunk = select(cut, s.chunk, whole_chunk);
    b.listing = lists_rows(s.needs.lists);
    b.bias_rows = s.needs.bias_rows;
    return b;
}

bool may_widen_chunks(const Spec& spec) {
    return spec.grad_weight_mode == GradMode::write && spec.layout == WeightLayout::vocab_major && !rounds_weight(spec);
}

Expr widest_wide_chunk(const Spec& spec, const BackwardSizes& s) {
    constexpr std::int64_t kMostDlogits = 256 << 20;
    return whole_quanta(s, floor_div(kMostDlogits, max(slot(Slot::num_tokens), 1) * bytes_of(spec.dtype)));
}

void add_wide_chunks(const Spec& spec, const Expr& wide_chunk, const Expr& retained, BackwardLayout& b) {
    const Expr row = max(slot(Slot::num_tokens), 1) * bytes_of(spec.dtype);
    const std::int64_t gradient_row = spec.hidden_size * bytes_of(spec.grad_weight_dtype);
    b.wide_chunk = wide_chunk;
    const Expr end = weight_rows(spec) * gradient_row - row * b.wide_chunk;
    b.wide_dlogits = floor_div(max(end, 0), kWorkspaceAlignment) * kWorkspaceAlignment;
    const Expr before = min(floor_div(b.wide_dlogits, gradient_row), vocab_columns(spec)) - retained;
    const Expr use = equal(b.row_blocks, 1) && less(b.chunk, b.wide_chunk) && less(0, slot(Slot::grad_weight));
    b.wide_chunks = select(use, max(floor_div(before, b.wide_chunk), 0), 0);
}

Pieces place_backward(const Spec& spec, const BackwardSizes& s, BackwardLayout& b) {
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    b.list = pieces.take(list_bytes(s.needs.lists));
    b.coefficients = pieces.take(b.rows * 16);
    b.row_targets = pieces.take(b.rows * 8);
    if (spec.temperature) b.row_temperatures = pieces.take(b.rows * 4);
    if (spec.class_groups) b.row_groups = pieces.take(b.rows * 4);
    if (spec.teacher_top_k > 0) b.row_teacher_weights = pieces.take(b.rows * 4);
    if (spec.bias) {
        b.bias_partials = pieces.take(ceil_div(b.rows, b.bias_rows) * b.chunk * 4);
        b.bias_accumulator = pieces.take(b.chunk * 4);
    }
    b.dlogits = pieces.take(b.rows * b.chunk * bytes_of(spec.dtype));
    b.rounded_weight = pieces.take((min(b.chunk, spec.vocab_size) + (b.weight_places - 1) * b.chunk) * rounded_row_bytes(spec));
    b.weight_accumulator = pieces.take(select(less(1, b.row_blocks), b.chunk * (4 * spec.hidden_size), 0));
    return pieces;
}

RetainedLayout retained_layout(const Spec& spec, const Plan& plan, bool lends) {
    RetainedLayout r;
    if (plan.strategy != Strategy::retain) return r;
    const std::int64_t columns = cuda_path(plan.path).retained_columns;
    const Expr n = slot(Slot::num_tokens);
    const Expr all_blocks = ceil_div(vocab_columns(spec), columns);
    const Expr block = max(n, 1) * (columns * bytes_of(spec.dtype));
    const std::int64_t gradient_row = spec.hidden_size * bytes_of(spec.grad_weight_dtype);
    Pieces pieces;
    r.references = pieces.take(n * 4);
    r.target_logits = pieces.take(n * 4);
    r.row_scales = pieces.take(n * 4);
    if (spec.label_smoothing > 0) r.row_smoothing = pieces.take(n * 4);
    r.stale = pieces.take(ceil_div(n, kOutputRows) * 4);
    const Expr enough = less(kFewestRetained - 1, n);
    r.most = select(enough, pieces.end() + block * all_blocks, 0);
    if (lends) r.lendable = select(enough, vocab_columns(spec) * gradient_row, 0);

    const Expr bytes = slot(Slot::retained_bytes);
    r.lent = slot(Slot::retained_in_grad_weight) && less(0, bytes);
    // Places of lent memory, the first of them for everything but exponentials.
    const Expr places = floor_div(bytes, max(block, columns * gradient_row));
    const Expr lent_stride = floor_div(floor_div(bytes, max(places, 1)), kWorkspaceAlignment) * kWorkspaceAlignment;
    const Expr own_blocks = floor_div(max(bytes - pieces.end(), 0), block);
    r.blocks = min(select(r.lent, max(places - 1, 0), own_blocks), all_blocks);
    r.columns = select(enough, min(r.blocks * columns, vocab_columns(spec)), 0);
    r.block_bytes = select(r.lent, lent_stride, block);
    r.exponentials = select(r.lent, lent_stride, pieces.end());
    return r;
}

RetainedLayout retained_for_backward(const Spec& spec, const Plan& plan, bool lends) {
    RetainedLayout retained = retained_layout(spec, plan, lends);
    if (spec.outputs.entropy) retained.columns = select(equal(slot(Slot::grad_entropy), 0), retained.columns, 0);
    return retained;
}

std::int64_t smoothing_bytes(const Spec& spec) {
    const std::int64_t sums = 2 * (kSmoothingParts + 1) * spec.hidden_size + (spec.bias ? 1 : 0);
    return spec.label_smoothing > 0 ? multiple_above(sums * 4, kWorkspaceAlignment) : 0;
}

std::int64_t retained_blocks(const Spec& spec) { return multiple_above(spec.vocab_size, kRetainedColumns) / kRetainedColumns; }

}  // namespace flce

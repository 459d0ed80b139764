#include "generator/cuda/workspace.hpp"

#include <algorithm>
#include <numeric>

#include "generator/cuda/chunk_time.hpp"
#include "generator/cuda/tile_rules.hpp"
#include "templates/params.cuh"
#include "templates/sum_parts.cuh"

namespace flce {
namespace {

constexpr std::int64_t kReserveBytes = 8192;              // scalars and what alignment costs
constexpr std::int64_t kForwardPartialBytes = 768 << 10;  // most that forward's partial sums take
constexpr std::int64_t kRowBytes = 24;                    // coefficients, lse and target of a token
constexpr std::int64_t kRowQuantum = 128;
constexpr std::int64_t kListedRowBytes = sizeof(ListedRow);
constexpr std::int64_t kMostListedRows = 1 << 18;  // of a call; where there are more, ignored ones are worked on like the others
constexpr std::int64_t kLeastScratch = 16 << 20;   // with less there are no lists
constexpr std::int64_t kMostTokensApart = 512;     // where there are no more, chunk by chunk is as quick or quicker

std::int64_t down(std::int64_t value, std::int64_t multiple) { return value / multiple * multiple; }
std::int64_t up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

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

std::int64_t retained_blocks(const Spec& spec) { return up(spec.vocab_size, kRetainedColumns) / kRetainedColumns; }

bool has_lists(const Plan& plan) { return plan.path == PlanPath::cuda_sm90a && plan.scratch_bytes >= kLeastScratch; }

/// Counters of the tiles of joined chunks: every pair has at least twice the quantum, and both stretches of the vocabulary may end in the middle of one.
std::int64_t progress_bytes(const Spec& spec, const Plan& plan) {
    const std::int64_t pairs = spec.vocab_size / (2 * joined_quantum(plan)) + 2;
    return up((1 + 2 * pairs * kChunkKinds) * 4, kWorkspaceAlignment);
}

/// Bytes that backward needs whatever the number of tokens.
std::int64_t reserve_bytes(const Spec& spec, const Plan& plan) {
    return kReserveBytes + (plan.path == PlanPath::cuda_sm90a ? progress_bytes(spec, plan) : 0) +
           (has_lists(plan) ? kMostListedRows * kListedRowBytes : 0) +
           (plan.strategy == Strategy::retain ? up((2 * kPaceCounters + retained_blocks(spec)) * 4, kWorkspaceAlignment) : 0);
}

/// The number of splits that finishes first: whole waves of blocks, and splits of nearly the same number of tiles.
Expr choose_splits(const Expr& row_blocks, std::int64_t capacity, std::int64_t tiles, std::int64_t most_blocks) {
    Expr best = Expr(1);
    Expr best_time = ceil_div(row_blocks, capacity) * tiles;
    for (std::int64_t waves = 1; waves <= 4; ++waves) {
        const std::int64_t blocks = std::min(waves * capacity, most_blocks);
        const Expr splits = min(max(floor_div(blocks, row_blocks), 1), tiles);
        const Expr time = ceil_div(splits * row_blocks, capacity) * ceil_div(tiles, splits);
        const Expr better = less(time, best_time);
        best = select(better, splits, best);
        best_time = min(time, best_time);
        if (blocks == most_blocks) break;
    }
    return best;
}

/// Sizes of backward that do not depend on the number of tokens.
struct BackwardSizes {
    std::int64_t budget;       ///< bytes for everything but dH's accumulator
    std::int64_t quantum;      ///< chunks are multiples of this
    std::int64_t chunk_limit;  ///< widest chunk
    std::int64_t chunk;        ///< of row blocks
    std::int64_t rows;         ///< of row blocks
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

/// Bytes that a token costs where a chunk has `chunk` columns.
std::int64_t token_bytes(const Spec& spec, const Plan& plan, std::int64_t chunk) {
    const std::int64_t bias = spec.bias ? chunk * 4 / rows_of_bias_partial(plan) + 1 : 0;
    return chunk * static_cast<std::int64_t>(element_bytes(spec.dtype)) + kRowBytes + bias;
}

BackwardSizes backward_sizes(const Spec& spec, const Plan& plan) {
    BackwardSizes s{};
    s.budget = plan.scratch_bytes - reserve_bytes(spec, plan);
    s.quantum = chunk_quantum(spec, plan);
    s.chunk_limit = std::min(std::max(down(plan.vocab_chunk, s.quantum), s.quantum), up(spec.vocab_size, s.quantum));
    const std::int64_t weight_row = 4 * spec.hidden_size + (spec.bias ? 12 : 0) + rounded_row_bytes(spec);
    s.chunk = std::clamp(down(s.budget / 2 / weight_row, s.quantum), s.quantum, s.chunk_limit);
    s.rows = std::max(down((s.budget - s.chunk * weight_row) / token_bytes(spec, plan, s.chunk), kRowQuantum), kRowQuantum);
    // Each chunk passes over dH's accumulator and each row block over dW's: traffic goes with 1/chunk + 1/rows. Without row blocks it goes with
    // 1/chunk alone, so they start to pay when the chunk gets narrower than this.
    const std::int64_t narrowest = std::max(s.chunk * s.rows / (s.chunk + s.rows), s.quantum);
    s.rows_limit = (s.budget - narrowest * ((spec.bias ? 12 : 0) + rounded_row_bytes(spec))) / token_bytes(spec, plan, narrowest);
    return s;
}

/// Bytes that forward's partial sums may take.
std::int64_t partial_bytes(const Plan& plan) { return std::min(kForwardPartialBytes, (plan.scratch_bytes - kReserveBytes) / 2); }

/// The same on cuda_sm80, where only a rounded weight needs room beside them.
std::int64_t sm80_partial_bytes(const Spec& spec, const Plan& plan) {
    return rounds_weight(spec) ? partial_bytes(plan) : kForwardPartialBytes;
}

/// Columns of the vocabulary that a launch of forward computes: all, or a stretch of whole tiles whose rounded weight fits in half of the scratch.
/// Stretches are nearly alike.
std::int64_t forward_stretch(const Spec& spec, const Plan& plan) {
    if (!rounds_weight(spec)) return spec.vocab_size;
    const int few_columns = plan.path == PlanPath::cuda_sm90a ? few_tokens_tile(spec).block_n : 1;
    const std::int64_t quantum = std::lcm(plan.cuda.forward.block_n, few_columns);
    const std::int64_t most = std::max(down(plan.scratch_bytes / 2 / rounded_row_bytes(spec), quantum), quantum);
    const std::int64_t stretches = up(spec.vocab_size, most) / most;
    return up(up(spec.vocab_size, stretches) / stretches, quantum);
}

/// Tiles of a whole stretch.
std::int64_t forward_tiles(const Spec& spec, const Plan& plan, const GemmTile& tile) {
    return up(forward_stretch(spec, plan), tile.block_n) / tile.block_n;
}

/// cuda_sm90a: clusters divide clusters of rows × the vocabulary evenly, so that up to ⌈clusters / row clusters⌉ + 1 of them share rows. Where there
/// are fewer tiles than clusters, each tile has its own.
struct ClusterShare {
    std::int64_t cluster_rows;  ///< tokens of a cluster of rows
    std::int64_t writers;       ///< partial results of a cluster
    std::int64_t tiles;
    std::int64_t clusters;
    std::int64_t row_clusters;  ///< most of a launch

    ClusterShare(const Spec& spec, const Device& device, const Plan& plan, std::int64_t field_bytes) {
        const GemmTile& tile = plan.cuda.forward;
        cluster_rows = std::int64_t{kClusterBlocks} * tile.block_m;
        writers = takes_turns(tile) ? 2 : 1;
        tiles = forward_tiles(spec, plan, tile);
        // Row clusters × splits is at most clusters + 2·row clusters.
        const std::int64_t most = partial_bytes(plan) / (field_bytes * writers * cluster_rows);
        clusters = std::clamp<std::int64_t>(most - 2, 1, device.gpu.sm_count / kClusterBlocks);
        // All rows of a launch are read again for every tile of the vocabulary: they have to stay in L2.
        const std::int64_t row_bytes = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype));
        const std::int64_t cached = std::max<std::int64_t>(device.gpu.l2_bytes / 3 * 2 / (row_bytes * cluster_rows), 2);
        row_clusters = std::clamp<std::int64_t>(std::min((most - clusters) / 2, cached), 1, clusters);
    }
};

/// Blocks of few_tokens_tile in a launch, each of which writes two partial results of its rows; two more are kept empty.
std::int64_t few_tokens_blocks(const Spec& spec, const Device& device, const Plan& plan) {
    const std::int64_t of_block = std::int64_t{4} * partial_fields(spec) * 2 * few_tokens_tile(spec).block_m;
    return std::clamp<std::int64_t>(partial_bytes(plan) / of_block - 1, 1, device.gpu.sm_count);
}

/// Near the golden ratio of `count`, prime to it: neighbours lie far apart.
std::int64_t spreading_stride(std::int64_t count) {
    std::int64_t stride = std::max<std::int64_t>(count * 618 / 1000, 1);
    while (std::gcd(stride, count) != 1) ++stride;
    return stride;
}

}  // namespace

Expr lists_rows(const Plan& plan) {
    if (!has_lists(plan)) return 0;
    return less(kRowThreads, slot(Slot::num_tokens)) && less(slot(Slot::num_tokens), kMostListedRows + 1);
}

std::int64_t workspace_minimum(const Spec& spec, const Plan& plan) {
    const std::int64_t quantum = chunk_quantum(spec, plan);
    return reserve_bytes(spec, plan) + 2 * quantum * (4 * spec.hidden_size + (spec.bias ? 12 : 0) + rounded_row_bytes(spec)) +
           2 * kRowQuantum * token_bytes(spec, plan, quantum);
}

ForwardShare forward_share(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t field_bytes = std::int64_t{4} * partial_fields(spec);
    if (plan.path != PlanPath::cuda_sm90a) {
        const std::int64_t capacity = device.gpu.sm_count * tile_blocks_per_sm(spec, device, plan.path, GemmRole::forward, tile);
        const std::int64_t tiles = forward_tiles(spec, plan, tile);
        const std::int64_t most_blocks = std::max<std::int64_t>(sm80_partial_bytes(spec, plan) / field_bytes / tile.block_m, 1);
        return {choose_splits(max(ceil_div(rows, tile.block_m), 1), capacity, tiles, most_blocks)};
    }
    const ClusterShare share(spec, device, plan, field_bytes);
    const Expr row_clusters = max(ceil_div(rows, share.cluster_rows), 1);
    return {0, min(row_clusters * share.tiles, share.clusters), share.clusters, spreading_stride(share.clusters)};
}

ForwardShare few_tokens_share(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    if (plan.path != PlanPath::cuda_sm90a) return {};
    const std::int64_t blocks = few_tokens_blocks(spec, device, plan);
    const GemmTile tile = few_tokens_tile(spec);
    const std::int64_t tiles = forward_tiles(spec, plan, tile);
    return {0, min(max(ceil_div(rows, tile.block_m), 1) * tiles, blocks), blocks, spreading_stride(blocks)};
}

ForwardLayout forward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t field_bytes = std::int64_t{4} * partial_fields(spec);
    const Expr n = slot(Slot::num_tokens);
    ForwardLayout f;
    Expr partials(0);  // of the fields of all rows, by split
    if (plan.path == PlanPath::cuda_sm90a) {
        const ClusterShare share(spec, device, plan, field_bytes);
        const std::int64_t limit = up(share.row_clusters * share.cluster_rows, kRowThreads);
        f.rows = round_up(ceil_div(n, max(ceil_div(n, limit), 1)), std::max<std::int64_t>(share.cluster_rows, kRowThreads));
        partials = (ceil_div(min(n, f.rows), share.cluster_rows) * 2 + share.clusters) * (share.writers * share.cluster_rows);
        partials = select(less(n, kFewTokens + 1), 2 * (few_tokens_blocks(spec, device, plan) + 1) * round_up(n, 32), partials);
    } else {
        const std::int64_t capacity = device.gpu.sm_count * tile_blocks_per_sm(spec, device, plan.path, GemmRole::forward, tile);
        const std::int64_t wave_rows = capacity * tile.block_m;
        const std::int64_t most_rows = sm80_partial_bytes(spec, plan) / field_bytes;
        f.rows = up(most_rows > wave_rows ? down(most_rows, wave_rows) : most_rows, std::max<int>(kRowThreads, tile.block_m));
        partials = forward_share(spec, device, plan, min(n, f.rows)).splits * round_up(min(n, f.rows), 32);
    }
    const Expr rows = min(n, f.rows);
    f.launches = ceil_div(n, max(f.rows, 1));
    f.partial_rows = round_up(rows, 32);
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    f.shares = *pieces.end().constant();
    if (plan.path == PlanPath::cuda_sm90a) {
        f.share_words = static_cast<std::int64_t>(sizeof(ShareTickets)) / 4 + 2 * ClusterShare(spec, device, plan, field_bytes).clusters;
        pieces.take(f.share_words * 4);
    }
    f.list = pieces.take(lists_rows(plan) * n * kListedRowBytes);
    f.target_logits = pieces.take((rounds_weight(spec) ? n : rows) * 4);
    f.loss_partials = pieces.take(ceil_div(n, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial)));
    f.partials = pieces.take(partials * field_bytes);
    if (rounds_weight(spec)) {
        f.stretch = forward_stretch(spec, plan);
        f.stretches = up(spec.vocab_size, f.stretch) / f.stretch;
        f.rounded_weight = pieces.take(std::min(f.stretch, spec.vocab_size) * rounded_row_bytes(spec));
        f.running_rows = round_up(n, 32);
        f.running = pieces.take(f.running_rows * field_bytes);
    }
    f.total = pieces.end();
    f.compact = pieces.take(n * spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype)));
    f.compacts = lists_rows(plan) && less(pieces.end(), slot(Slot::workspace_bytes) + 1);
    return f;
}

/// Vocabulary rows of a chunk for all tokens at once: what fits, on cuda_sm90a a little less where that makes whole waves, or pairs of chunks that are joined.
static Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const BackwardSizes& s, const Expr& fitting) {
    const Expr widest = min(max(round_down(fitting, s.quantum), s.quantum), s.chunk_limit);
    if (plan.path != PlanPath::cuda_sm90a) return widest;
    const ChunkTime time(spec, device, plan);
    const Expr n = slot(Slot::num_tokens);
    Expr best = widest;
    Expr best_time = time.all(n, widest);
    for (int narrower = 1; narrower < kChunkCandidates; ++narrower) {
        const Expr chunk = max(widest - narrower * s.quantum, s.quantum);
        const Expr chunk_time = time.all(n, chunk);
        best = select(less(chunk_time, best_time), chunk, best);
        best_time = min(chunk_time, best_time);
    }
    if (!joins_chunks(spec, device, plan)) return best;
    const std::int64_t quantum = std::lcm(joined_quantum(plan), s.quantum);
    const Expr pair = round_down(widest, quantum);
    return select(less(pair, 2 * quantum), best, pair);
}

/// Columns of the first chunk of a pair: the wider one, where they cannot be alike.
static Expr first_of_pair(const Plan& plan, const Expr& pair) { return round_up(ceil_div(pair, 2), joined_quantum(plan)); }

RetainedLayout retained_layout(const Spec& spec, const Plan& plan) {
    RetainedLayout r;
    if (plan.strategy != Strategy::retain) return r;
    const Expr n = slot(Slot::num_tokens);
    const std::int64_t all_blocks = retained_blocks(spec);
    const Expr block = max(n, 1) * (kRetainedColumns * static_cast<std::int64_t>(element_bytes(spec.dtype)));
    const std::int64_t gradient_row = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
    Pieces pieces;
    r.references = pieces.take(n * 4);
    r.target_logits = pieces.take(n * 4);
    r.row_scales = pieces.take(n * 4);
    r.stale = pieces.take(ceil_div(n, kOutputRows) * 4);
    r.most = select(less(0, n), pieces.end() + block * all_blocks, 0);
    if (lends_grad_weight(spec, plan.cuda.grad_weight)) r.lendable = select(less(0, n), Expr(spec.vocab_size * gradient_row), 0);

    const Expr bytes = slot(Slot::retained_bytes);
    r.lent = equal(bytes, r.lendable) && less(0, bytes);
    const Expr places = floor_div(bytes, max(block, kRetainedColumns * gradient_row));  // of lent memory, the first of them for the rest
    const Expr lent_stride = floor_div(floor_div(bytes, max(places, 1)), kWorkspaceAlignment) * kWorkspaceAlignment;
    const Expr own_blocks = floor_div(max(bytes - pieces.end(), 0), block);
    r.blocks = min(select(r.lent, max(places - 1, 0), own_blocks), all_blocks);
    r.columns = select(less(0, n), min(r.blocks * kRetainedColumns, spec.vocab_size), 0);
    r.block_bytes = select(r.lent, lent_stride, block);
    r.exponentials = select(r.lent, lent_stride, pieces.end());
    return r;
}

/// The memory of a grad_weight that will be written is free until then: with many tokens, chunks in it can be wider than the workspace allows, and
/// grad_hidden's sum is gone through less often. Wider than this they gain nothing.
static void place_wide_chunks(const Spec& spec, const Device& device, const Plan& plan, const BackwardSizes& s, BackwardLayout& b) {
    // A bias's partial sums have room for a chunk of the workspace's.
    if (spec.grad_weight_mode != GradMode::write || spec.layout != WeightLayout::vocab_major || spec.bias || rounds_weight(spec)) return;
    constexpr std::int64_t kMostDlogits = 256 << 20;
    const Expr row = max(slot(Slot::num_tokens), 1) * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const std::int64_t gradient_row = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
    b.wide_chunk = whole_chunk(spec, device, plan, s, floor_div(kMostDlogits, row));
    const Expr end = Expr(spec.padded_vocab_size * gradient_row) - row * b.wide_chunk;
    b.wide_dlogits = floor_div(max(end, 0), kWorkspaceAlignment) * kWorkspaceAlignment;
    const Expr before = min(floor_div(b.wide_dlogits, gradient_row), spec.vocab_size) - retained_layout(spec, plan).columns;
    const Expr use = equal(b.row_blocks, 1) && less(b.chunk, b.wide_chunk) && less(0, slot(Slot::grad_weight));
    b.wide_chunks = select(use, max(floor_div(before, b.wide_chunk), 0), 0);
}

/// Rows of grad_hidden's sum: more than there are tokens where these have so few tiles that parts of the vocabulary are summed beside each other.
static Expr sum_rows(const Spec& spec, const Device& device, const Plan& plan) {
    const Expr n = slot(Slot::num_tokens);
    // Adding parts up is a launch more: not for a sum that is soon done.
    constexpr std::int64_t kLeastVocabulary = 8192;
    if (!has_lists(plan) || spec.vocab_size < kLeastVocabulary) return n;
    constexpr std::int64_t kMostBytes = 24 << 20;
    const std::int64_t most = std::min(kMostBytes, plan.scratch_bytes / 8 * 3) / (4 * spec.hidden_size);
    const std::int64_t cluster_rows = std::int64_t{kClusterBlocks} * plan.cuda.grad_hidden.block_m;
    const std::int64_t clusters = device.gpu.sm_count / kClusterBlocks;
    const auto tiles_across = [&](const GemmTile& tile) { return up(spec.hidden_size, tile.block_n) / tile.block_n; };
    // Half of the clusters would be idle; joined chunks have other tiles for them, but not for long.
    std::int64_t most_row_clusters = clusters / (2 * tiles_across(plan.cuda.grad_hidden));
    if (joins_chunks(spec, device, plan)) most_row_clusters = std::max(most_row_clusters, clusters / tiles_across(plan.cuda.dlogits));
    const Expr some = min(n, 1) * min(round_up(n, cluster_rows) * SumParts::kMost, most);
    return select(less(n, most_row_clusters * cluster_rows + 1), max(n, some), n);
}

BackwardLayout backward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const BackwardSizes s = backward_sizes(spec, plan);
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Expr n = slot(Slot::num_tokens);
    const Expr cut = less(s.rows_limit, n);
    const Expr bias_row = spec.bias ? (ceil_div(n, rows_of_bias_partial(plan)) + 2) * 4 : Expr(0);
    // All tokens at once have no use for more of the list's place than they are.
    const Expr list_bytes = lists_rows(plan) * n * kListedRowBytes;
    const std::int64_t list_place = has_lists(plan) ? kMostListedRows * kListedRowBytes : 0;
    BackwardLayout b;
    b.sum_rows = sum_rows(spec, device, plan);
    const Expr more_rows = (b.sum_rows - n) * (4 * spec.hidden_size);
    const Expr fitting = floor_div(max(Expr(s.budget + list_place) - n * kRowBytes - list_bytes - more_rows, 0),
                                   max(n * element + bias_row + rounded_row_bytes(spec), 1));

    b.rows = select(cut, round_up(ceil_div(n, max(ceil_div(n, s.rows), 1)), kRowQuantum), max(n, 1));
    b.row_blocks = ceil_div(n, b.rows);
    b.chunk = select(cut, s.chunk, whole_chunk(spec, device, plan, s, fitting));
    b.chunks = ceil_div(spec.vocab_size, b.chunk);
    place_wide_chunks(spec, device, plan, s, b);
    if (joins_chunks(spec, device, plan)) {
        // Whole tiles, of wide chunks too.
        const std::int64_t quantum = joined_quantum(plan);
        const Expr whole = equal(round_down(b.chunk, quantum), b.chunk) && equal(round_down(b.wide_chunk, quantum), b.wide_chunk);
        b.joined = (equal(b.row_blocks, 1) && less(kMostTokensApart, n)) && (less(2 * quantum - 1, b.chunk) && whole);
        b.even_chunk = first_of_pair(plan, b.chunk);
        b.even_wide_chunk = first_of_pair(plan, b.wide_chunk);
        b.progress_bytes = progress_bytes(spec, plan);
    }
    Pieces pieces;
    pieces.take(static_cast<std::int64_t>(sizeof(PassScalars)));
    b.list = pieces.take(list_bytes);
    b.coefficients = pieces.take(b.rows * 16);
    b.row_targets = pieces.take(b.rows * 8);
    if (spec.bias) {
        b.bias_partials = pieces.take(ceil_div(b.rows, rows_of_bias_partial(plan)) * b.chunk * 4);
        b.bias_accumulator = pieces.take(b.chunk * 4);
    }
    b.dlogits = pieces.take(b.rows * b.chunk * element);
    b.rounded_weight = pieces.take(min(b.chunk, spec.vocab_size) * rounded_row_bytes(spec));
    b.weight_accumulator = pieces.take(select(less(1, b.row_blocks), b.chunk * (4 * spec.hidden_size), 0));
    b.progress = pieces.take(b.progress_bytes);
    if (plan.strategy == Strategy::retain) {
        b.counter_count = 2 * kPaceCounters + retained_blocks(spec);
        b.counters = pieces.take(b.counter_count * 4);
    }
    // In fp32 grad_hidden accumulates in place. On cuda_sm90a the place is used for hidden states too: scaled ones beside retained exponentials, those
    // of valid tokens.
    const Expr accumulated = spec.dtype == DType::fp32 ? Expr(0) : plan.path == PlanPath::cuda_sm90a ? Expr(1) : less(1, b.chunks);
    b.hidden_accumulator = pieces.take(select(accumulated, b.sum_rows * (4 * spec.hidden_size), 0));
    b.total = pieces.end();
    return b;
}

}  // namespace flce

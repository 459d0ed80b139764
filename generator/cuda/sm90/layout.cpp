#include "generator/cuda/sm90/layout.hpp"

#include <algorithm>
#include <numeric>

#include "generator/cuda/sm90/chunk_time.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "templates/common/sum_parts.cuh"
#include "templates/common/top_search.cuh"
#include "templates/sm90/chunk_phases.cuh"
#include "templates/sm90/forward_share.cuh"
#include "templates/sm90/params.cuh"
#include "templates/sm90/vocabulary_walk.cuh"

namespace flce::sm90 {
namespace {

constexpr std::int64_t kFewestTokensInHalves = 2048;  // fewest tokens for whose halves a chunk has tiles enough
constexpr std::int64_t kTokensOfGroup = 4096;
constexpr std::int64_t kBesideLists = 4 << 20;  // bytes of forward's places beside lists of classes
constexpr std::int64_t kMostTokensApart = 512;  // tokens up to which chunk by chunk is as quick or quicker
constexpr int kRoundedPlaces = 2;               // pairs of joined chunks whose rounded weight there is room for

/// Bytes for partial sums where every segment of the vocabulary has its own: 4 to 8 KiB a token.
std::int64_t segment_bytes(const Spec& spec, const Plan& plan) {
    constexpr std::int64_t kMost = 32 << 20;
    return std::min(kMost, plan.scratch_bytes / (rounds_weight(spec) ? 4 : 2));  // the rounded weight has a half
}

/// Columns of the vocabulary that a launch of forward computes.
std::int64_t stretch_of(const Spec& spec, const Plan& plan) {
    const std::int64_t block_n = plan.cuda.forward.block_n;
    if (spec.batch_invariant) return forward_stretch(spec, plan, segment_tiles(spec, plan.cuda.forward) * block_n);
    return forward_stretch(spec, plan, std::lcm(block_n, few_tokens_shape(spec, plan).tile.block_n));
}

/// Columns of a stretch of a rounded weight: `stretch_of`, or with more than a few tokens one of the next fewer in steps of a tile. Whole
/// waves of tiles say which takes the least time. `rows`: tokens of a launch.
Expr quickest_stretch(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    const std::int64_t widest = stretch_of(spec, plan);
    if (!rounds_weight(spec) || spec.batch_invariant) return widest;
    constexpr int kCandidates = 16;
    constexpr std::int64_t kLaunches = 32;  // slices of a tile that go by while launches of a stretch begin and end: 15 us on an H200
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t clusters = std::max(device.gpu.sm_count / kClusterBlocks, 1);
    const Expr row_clusters = ceil_div(rows, std::int64_t{kClusterBlocks} * tile.block_m);
    const auto time = [&](std::int64_t columns) {
        const std::int64_t stretches = multiple_above(spec.vocab_size, columns) / columns;
        const Expr waves = ceil_div(row_clusters * (columns / tile.block_n), clusters);
        return (waves * (multiple_above(spec.hidden_size, 64) / 64) + kLaunches) * stretches;
    };
    const Expr many = less(kFewTokens, rows);
    Expr best = widest;
    Expr best_time = time(widest);
    for (int fewer = 1; fewer < kCandidates && widest > fewer * tile.block_n; ++fewer) {
        const std::int64_t columns = widest - fewer * tile.block_n;
        const Expr of_columns = time(columns);
        best = select(many && less(of_columns, best_time), columns, best);
        best_time = min(of_columns, best_time);
    }
    return best;
}

/// Tiles of a whole stretch.
std::int64_t forward_tiles(const Spec& spec, const Plan& plan, const GemmTile& tile) {
    return multiple_above(stretch_of(spec, plan), tile.block_n) / tile.block_n;
}

/// Bytes of forward's partial sums for as few rows as a launch may have, with batch_invariant.
std::int64_t least_segment_bytes(const Spec& spec, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const auto tiles = static_cast<int>(forward_tiles(spec, plan, tile));
    const std::int64_t segments = ForwardShare::segments_of(tiles, segment_tiles(spec, tile));
    const std::int64_t rows = std::int64_t{kClusterBlocks} * tile.block_m;
    return segments * ForwardShare::writers_of(takes_turns(tile)) * rows * partial_fields(spec) * 4;
}

/// Bytes of a list of classes and its state; 0 without a top_k.
std::int64_t top_list_bytes(const Spec& spec) {
    return spec.top_k == 0 ? 0 : top_list_keys(spec.top_k) * 8 + static_cast<std::int64_t>(sizeof(TopState));
}

/// Bytes of the classes of a row that are kept between launches over parts of the vocabulary.
std::int64_t top_kept_bytes(const Spec& spec) { return std::int64_t{8} * most_kept_classes(spec.top_k); }

/// Bytes of a row's classes and sums between launches over parts of the vocabulary.
std::int64_t top_row_bytes(const Spec& spec) {
    return top_kept_bytes(spec) + static_cast<std::int64_t>(sizeof(TopState)) + std::int64_t{4} * partial_fields(spec);
}

/// Bytes of a row's NamedLists.
std::int64_t named_row_bytes(const Spec& spec, const Plan& plan) {
    return picks_named(spec) ? 8 * named_tiles(spec, plan) + std::int64_t{4} * spec.teacher_top_k : 0;
}

/// Clusters divide clusters of rows × the vocabulary evenly, so that up to ⌈clusters / row clusters⌉ + 1 of them share rows. Where
/// there are fewer tiles than clusters, each tile has its own.
struct ClusterShare {
    std::int64_t cluster_rows;  ///< tokens of a cluster of rows
    std::int64_t writers;       ///< partial results of a cluster
    std::int64_t tiles;         ///< or segments
    std::int64_t clusters;
    std::int64_t row_clusters;  ///< most of a launch

    ClusterShare(const Spec& spec, const Device& device, const Plan& plan) {
        const GemmTile& tile = plan.cuda.forward;
        cluster_rows = std::int64_t{kClusterBlocks} * tile.block_m;
        writers = ForwardShare::writers_of(takes_turns(tile));
        tiles = forward_tiles(spec, plan, tile);
        // Row clusters × splits is at most clusters + 2·row clusters.
        const std::int64_t field_bytes = std::int64_t{4} * partial_fields(spec);
        const std::int64_t of_part = field_bytes * writers * cluster_rows;
        const std::int64_t most = partial_bytes(plan) / of_part;
        const std::int64_t all_clusters = device.gpu.sm_count / kClusterBlocks;
        const bool segments = spec.batch_invariant;
        if (segments) tiles = ForwardShare::segments_of(static_cast<int>(tiles), segment_tiles(spec, tile));
        clusters = segments ? all_clusters : std::clamp<std::int64_t>(most - 2, 1, all_clusters);
        // All rows of a launch are read again for every tile of the vocabulary: they have to stay in L2.
        const std::int64_t row_bytes = spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype));
        const std::int64_t cached = std::max<std::int64_t>(device.gpu.l2_bytes / 3 * 2 / (row_bytes * cluster_rows), 2);
        const std::int64_t with_room = segments ? segment_bytes(spec, plan) / (of_part * tiles) : (most - clusters) / 2;
        row_clusters = std::clamp<std::int64_t>(std::min(with_room, cached), 1, clusters);
        if (picks_named(spec)) {
            const std::int64_t of_named = named_row_bytes(spec, plan) * cluster_rows;
            row_clusters = std::clamp<std::int64_t>((plan.scratch_bytes - kBesideLists) / of_named, 1, row_clusters);
        }
        if (spec.top_k == 0) return;
        const std::int64_t of_lists = top_list_bytes(spec) * writers * cluster_rows;
        const std::int64_t left = plan.scratch_bytes - kBesideLists - all_clusters * of_lists;
        row_clusters = std::clamp<std::int64_t>(left / (2 * of_lists + top_row_bytes(spec) * cluster_rows), 1, row_clusters);
    }
};

/// Clusters of a kernel whose tile has all tokens, and the partial results of a row that each of them writes; as many more are kept empty.
struct FewTokensShare {
    std::int64_t writers;
    std::int64_t clusters;

    FewTokensShare(const Spec& spec, const Device& device, const Plan& plan, const ForwardShape& shape)
        : writers(ForwardShare::writers_of(takes_turns(shape.tile))) {
        const std::int64_t of_cluster = std::int64_t{4} * partial_fields(spec) * writers * shape.tile.block_m;
        clusters = std::clamp<std::int64_t>(partial_bytes(plan) / of_cluster - 1, 1, device.gpu.sm_count);
        if (spec.batch_invariant) clusters = device.gpu.sm_count;  // segments have room of their own
    }
    /// Partial results of all rows.
    [[nodiscard]] Expr partials(const Expr& rows) const { return writers * (clusters + 1) * round_up(rows, 32); }
};

/// Most pairs of joined chunks: every pair has at least twice the quantum, and both stretches of the vocabulary may end within one.
std::int64_t most_pairs(const Spec& spec, const Plan& plan) { return spec.vocab_size / (2 * joined_quantum(plan)) + 2; }

/// Bytes of the counters of joined chunks' tiles, behind which those of rounded rows are.
std::int64_t tile_counter_bytes(const Spec& spec, const Plan& plan) { return (1 + 2 * most_pairs(spec, plan) * kChunkKinds) * 4; }

std::int64_t progress_bytes(const Spec& spec, const Plan& plan) {
    const std::int64_t rounded = rounds_weight(spec) ? (1 + most_pairs(spec, plan)) * 4 : 0;
    return multiple_above(tile_counter_bytes(spec, plan) + rounded, kWorkspaceAlignment);
}

/// Counters that backward sets to 0 where exponentials are retained.
std::int64_t counter_count(const Spec& spec) { return std::int64_t{kPaceCounters} + kMostTailTiles + retained_blocks(spec); }

BackwardSizes sizes_of(const Spec& spec, const Plan& plan) {
    const bool retains = plan.strategy == Strategy::retain;
    const std::int64_t retaining = retains ? multiple_above(counter_count(spec) * 4, kWorkspaceAlignment) + smoothing_bytes(spec) : 0;
    return backward_sizes(spec, plan, {.bias_rows = 64, .lists = has_lists(plan), .own_bytes = progress_bytes(spec, plan) + retaining});
}

bool lends(const Spec& spec, const Plan& plan) { return lends_grad_weight(spec, plan.cuda.grad_weight, kClusterBlocks); }

/// Widest chunk that fits, or a little less where that makes whole waves, or pairs of chunks that are joined.
Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const Expr& widest, std::int64_t quantum) {
    const Expr best = ChunkTime(spec, device, plan).quickest(slot(Slot::num_tokens), widest, quantum);
    if (!joins_chunks(spec, device, plan)) return best;
    const std::int64_t both = std::lcm(joined_quantum(plan), quantum);
    const Expr pair = round_down(widest, both);
    return select(less(pair, 2 * both), best, pair);
}

/// More than there are tokens where these have so few tiles that parts of the vocabulary are summed beside each other.
Expr sum_rows(const Spec& spec, const Device& device, const Plan& plan) {
    Expr n = slot(Slot::num_tokens);
    // Adding parts up is a launch more: not for a sum that is soon done.
    constexpr std::int64_t kLeastVocabulary = 8192;
    if (!has_lists(plan) || spec.vocab_size < kLeastVocabulary || spec.batch_invariant) return n;
    constexpr std::int64_t kMostBytes = 40 << 20;
    const std::int64_t most = std::min(kMostBytes, plan.scratch_bytes / 8 * 5) / (4 * spec.hidden_size);
    const std::int64_t cluster_rows = std::int64_t{kClusterBlocks} * plan.cuda.grad_hidden.block_m;
    const std::int64_t clusters = device.gpu.sm_count / kClusterBlocks;
    const auto tiles_across = [&](const GemmTile& tile) { return multiple_above(spec.hidden_size, tile.block_n) / tile.block_n; };
    // Half of the clusters would be idle; joined chunks have other tiles for them, but not for long.
    std::int64_t most_row_clusters = clusters / (2 * tiles_across(plan.cuda.grad_hidden));
    if (joins_chunks(spec, device, plan)) most_row_clusters = std::max(most_row_clusters, clusters / tiles_across(plan.cuda.dlogits));
    const Expr some = min(n, 1) * min(round_up(n, cluster_rows) * SumParts::kMost, most);
    return select(less(n, most_row_clusters * cluster_rows + 1), max(n, some), n);
}

/// Cuts joined chunks, for the numbers of tokens that join them.
void join_chunks(const Spec& spec, const Plan& plan, BackwardLayoutSm90& b) {
    // Whole tiles, of wide chunks too.
    const std::int64_t quantum = joined_quantum(plan);
    const bool pairs = !is_quantized(spec);
    const Expr whole =
        pairs ? equal(round_down(b.chunk, quantum), b.chunk) && equal(round_down(b.wide_chunk, quantum), b.wide_chunk) : Expr(1);
    const Expr n = slot(Slot::num_tokens);
    b.joined = (equal(b.row_blocks, 1) && less(kMostTokensApart, n)) && (less(2 * quantum - 1, b.chunk) && whole);
    if (rounds_weight(spec)) b.joined = b.joined && equal(b.weight_places, kRoundedPlaces);
    // Sums are gone through once a chunk, so that with many tokens groups of them and wide chunks are quicker.
    const std::int64_t step = std::lcm(std::int64_t{plan.cuda.dlogits.block_n}, std::int64_t{kSumSlice});
    b.hidden_groups = select(b.joined && less(kFewestTokensInHalves - 1, n), max(floor_div(n, kTokensOfGroup), 1), 0);
    b.hidden_rows = ceil_div(n, max(b.hidden_groups, 1));
    // Bytes of the places of dlogits and of a rounded weight, and those of a column of a chunk.
    const std::int64_t element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const std::int64_t rounded = rounds_weight(spec) ? kRoundedPlaces * spec.hidden_size * element : 0;
    const Expr room = (n * element + rounded) * b.chunk - (rounded > 0 ? kWorkspaceAlignment : 0);
    const Expr column = max(b.hidden_rows, 1) * element + rounded;
    // At least the chunk, which one group has: there are counters for no more of them.
    const Expr widest = max(round_down(floor_div(room, column), step), b.chunk);
    b.hidden_chunk = min(widest, multiple_above(spec.vocab_size, step));
    b.progress_bytes = progress_bytes(spec, plan);
    b.rounding = tile_counter_bytes(spec, plan);
}

/// Places behind those of every path. The place of grad_hidden's sum is also used to bring hidden states together (scaled ones beside
/// retained exponentials, or those of valid tokens), so that there always is one.
void place_own(const Spec& spec, const Plan& plan, Pieces& pieces, BackwardLayoutSm90& b) {
    b.progress = pieces.take(b.progress_bytes);
    if (plan.strategy == Strategy::retain) {
        b.counter_count = counter_count(spec) + 1;
        b.counters = pieces.take(b.counter_count * 4);
        b.smoothing = pieces.take(smoothing_bytes(spec));
    }
    b.hidden_accumulator = pieces.take(b.sum_rows * (4 * spec.hidden_size));
    b.total = pieces.end();
}

}  // namespace

std::int64_t named_tiles(const Spec& spec, const Plan& plan) {
    const std::int64_t block_n = plan.cuda.forward.block_n;
    return multiple_above(spec.vocab_size, block_n) / block_n;
}

ForwardLayoutSm90 forward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const Expr n = slot(Slot::num_tokens);
    const ClusterShare share(spec, device, plan);
    const std::int64_t limit = multiple_above(share.row_clusters * share.cluster_rows, kRowThreads);
    ForwardCut cut{.most_stretch = stretch_of(spec, plan), .lists = has_lists(plan)};
    cut.rows = round_up(ceil_div(n, max(ceil_div(n, limit), 1)), std::max<std::int64_t>(share.cluster_rows, kRowThreads));
    cut.stretch = quickest_stretch(spec, device, plan, min(n, cut.rows));
    cut.partials = (ceil_div(min(n, cut.rows), share.cluster_rows) * 2 + share.clusters) * (share.writers * share.cluster_rows);
    if (spec.batch_invariant) {
        cut.partials = round_up(min(n, cut.rows), 32) * (share.tiles * share.writers);
    } else {
        const FewTokensShare few(spec, device, plan, few_tokens_shape(spec, plan));
        cut.partials = select(less(n, kFewTokens + 1), few.partials(n), cut.partials);
    }
    cut.counter_words = static_cast<std::int64_t>(sizeof(ShareTickets)) / 4 + 2 * share.clusters;
    ForwardLayoutSm90 f{place_forward(spec, cut), retained_layout(spec, plan, lends(spec, plan))};
    Pieces pieces(f.total);
    if (spec.top_k > 0) {
        const Expr many = (ceil_div(min(n, cut.rows), share.cluster_rows) * 2 + share.clusters) * (share.writers * share.cluster_rows);
        const FewTokensShare few(spec, device, plan, few_tokens_shape(spec, plan));
        const Expr lists = select(less(n, kFewTokens + 1), few.partials(n), many);
        f.top_state_bytes = lists * static_cast<std::int64_t>(sizeof(TopState));
        f.top_states = pieces.take(f.top_state_bytes);
        f.top_keys = pieces.take((lists + 1) * (8 * top_list_keys(spec.top_k)));  // top_keys_at begins with a list
        f.top_kept = pieces.take(min(n, cut.rows) * top_kept_bytes(spec));
        f.top_bounds = pieces.take(min(n, cut.rows) * static_cast<std::int64_t>(sizeof(TopState)));
        f.sums_run = true;
        f.running_rows = f.partial_rows;
        f.running = pieces.take(f.running_rows * (std::int64_t{4} * partial_fields(spec)));
        f.total = pieces.end();
    }
    if (picks_named(spec)) {
        const Expr rows = select(less(n, kFewTokens + 1), 0, min(n, cut.rows));
        f.named_records = pieces.take(rows * (8 * named_tiles(spec, plan)));
        f.named_names = pieces.take(rows * (std::int64_t{4} * spec.teacher_top_k));
        f.total = pieces.end();
    }
    f.compact = pieces.take(n * spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype)));
    f.compacts = f.listing && less(pieces.end(), slot(Slot::workspace_bytes) + 1);
    return f;
}

ForwardGrid forward_grid(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
    const ClusterShare share(spec, device, plan);
    const Expr row_clusters = max(ceil_div(rows, share.cluster_rows), 1);
    return {min(row_clusters * share.tiles, share.clusters), share.clusters, spreading_stride(static_cast<int>(share.clusters))};
}

ForwardGrid few_tokens_grid(const Spec& spec, const Device& device, const Plan& plan, const ForwardShape& shape) {
    const std::int64_t clusters = FewTokensShare(spec, device, plan, shape).clusters;
    std::int64_t tiles = forward_tiles(spec, plan, shape.tile);
    if (spec.batch_invariant) tiles = ForwardShare::segments_of(static_cast<int>(tiles), segment_tiles(spec, shape.tile));
    return {std::min(tiles, clusters), clusters, spreading_stride(static_cast<int>(clusters))};
}

Expr first_of_pair(const Plan& plan, const Expr& pair) { return round_up(ceil_div(pair, 2), joined_quantum(plan)); }

BackwardLayoutSm90 backward_layout(const Spec& spec, const Device& device, const Plan& plan) {
    const BackwardSizes sizes = sizes_of(spec, plan);
    const bool may_join = joins_chunks(spec, device, plan);
    const auto whole = [&](const Expr& widest) { return whole_chunk(spec, device, plan, widest, sizes.quantum); };
    const Expr rows = sum_rows(spec, device, plan);
    Expr chunk = whole(widest_chunk(spec, sizes, rows));
    Expr joins_rounded = 0;
    if (may_join && rounds_weight(spec)) {
        // A quantised weight has grad_hidden alone, which fewer tokens do not join, and which needs no pairs of whole tiles.
        const Expr fewest = is_quantized(spec) ? kFewestTokensInHalves - 1 : kMostTokensApart;
        const Expr widest = widest_chunk(spec, sizes, rows, kRoundedPlaces);
        const Expr joined = is_quantized(spec) ? widest : whole(widest);
        joins_rounded = less(fewest, slot(Slot::num_tokens)) && less(2 * joined_quantum(plan) - 1, joined);
        chunk = select(joins_rounded, joined, chunk);
    }
    BackwardLayoutSm90 b{cut_backward(sizes, chunk), retained_for_backward(spec, plan, lends(spec, plan)), rows};
    b.weight_places = select(joins_rounded && equal(b.row_blocks, 1), kRoundedPlaces, 1);
    // A bias's partial sums have room for a chunk of the workspace's; where chunks are joined there are none.
    const bool may_widen = may_widen_chunks(spec) && (!spec.bias || may_join);
    if (may_widen) add_wide_chunks(spec, whole(widest_wide_chunk(spec, sizes)), b.retained.columns, b);
    if (may_join) join_chunks(spec, plan, b);
    if (spec.bias && may_widen) b.wide_chunks = select(b.joined && less(0, slot(Slot::grad_hidden)), b.wide_chunks, 0);
    Pieces pieces = place_backward(spec, sizes, b);
    place_own(spec, plan, pieces, b);
    return b;
}

std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan) {
    const BackwardSizes sizes = sizes_of(spec, plan);
    const std::int64_t least =
        spec.batch_invariant ? std::max(sizes.least, sizes.reserve + 4 * least_segment_bytes(spec, plan)) : sizes.least;
    if (picks_named(spec)) {
        const std::int64_t cluster_rows = std::int64_t{kClusterBlocks} * plan.cuda.forward.block_m;
        return std::max(least, kBesideLists + named_row_bytes(spec, plan) * cluster_rows);
    }
    if (spec.top_k == 0) return least;
    // Lists for a cluster of rows of every cluster and two more, of the largest GPU, or for as many tokens as forward_few has.
    constexpr std::int64_t kMostClusters = 80;
    const GemmTile& tile = plan.cuda.forward;
    const std::int64_t writers = ForwardShare::writers_of(takes_turns(tile));
    const std::int64_t of_many = (kMostClusters + 2) * writers * kClusterBlocks * tile.block_m;
    const std::int64_t of_few = 2 * (2 * kMostClusters + 1) * kFewTokens;
    return std::max(least, kBesideLists + top_list_bytes(spec) * std::max(of_many, of_few));
}

}  // namespace flce::sm90

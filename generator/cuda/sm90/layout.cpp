#include "generator/cuda/sm90/layout.hpp"

#include <algorithm>
#include <numeric>

#include "generator/cuda/sm90/chunk_time.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "generator/planner.hpp"
#include "templates/common/sum_parts.cuh"
#include "templates/sm90/chunk_phases.cuh"
#include "templates/sm90/forward_share.cuh"
#include "templates/sm90/params.cuh"
#include "templates/sm90/vocabulary_walk.cuh"

namespace flce::sm90 {
namespace {

constexpr std::int64_t kFewestTokensInHalves = 2048;  // fewest tokens for whose halves a chunk has tiles enough
constexpr std::int64_t kTokensOfGroup = 4096;
constexpr std::int64_t kMostTokensApart = 512;  // tokens up to which chunk by chunk is as quick or quicker

/// Bytes for partial sums where every segment of the vocabulary has its own: 4 to 8 KiB a token.
std::int64_t segment_bytes(const Spec& spec, const Plan& plan) {
    constexpr std::int64_t kMost = 32 << 20;
    return std::min(kMost, plan.scratch_bytes / (rounds_weight(spec) ? 4 : 2));  // the rounded weight has a half
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

/// Counters of the tiles of joined chunks: every pair has at least twice the quantum, and both stretches of the vocabulary may end in the
/// middle of one.
std::int64_t progress_bytes(const Spec& spec, const Plan& plan) {
    const std::int64_t pairs = spec.vocab_size / (2 * joined_quantum(plan)) + 2;
    return multiple_above((1 + 2 * pairs * kChunkKinds) * 4, kWorkspaceAlignment);
}

/// Columns of the first chunk of a pair: the wider one, where they cannot be alike.
Expr first_of_pair(const Plan& plan, const Expr& pair) { return round_up(ceil_div(pair, 2), joined_quantum(plan)); }

}  // namespace

std::int64_t stretch_quantum(const Spec& spec, const Plan& plan) {
    if (spec.batch_invariant) return std::int64_t{segment_tiles(spec, plan.cuda.forward)} * plan.cuda.forward.block_n;
    return std::lcm(plan.cuda.forward.block_n, few_tokens_shape(spec, plan).tile.block_n);
}

ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan) {
    const Expr n = slot(Slot::num_tokens);
    const ClusterShare share(spec, device, plan);
    const std::int64_t limit = multiple_above(share.row_clusters * share.cluster_rows, kRowThreads);
    ForwardRows f;
    f.rows = round_up(ceil_div(n, max(ceil_div(n, limit), 1)), std::max<std::int64_t>(share.cluster_rows, kRowThreads));
    f.partials = (ceil_div(min(n, f.rows), share.cluster_rows) * 2 + share.clusters) * (share.writers * share.cluster_rows);
    if (spec.batch_invariant) {
        f.partials = round_up(min(n, f.rows), 32) * (share.tiles * share.writers);
    } else {
        f.partials =
            select(less(n, kFewTokens + 1), FewTokensShare(spec, device, plan, few_tokens_shape(spec, plan)).partials(n), f.partials);
    }
    f.share_words = static_cast<std::int64_t>(sizeof(ShareTickets)) / 4 + 2 * share.clusters;
    return f;
}

std::int64_t least_segment_bytes(const Spec& spec, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const auto tiles = static_cast<int>(forward_tiles(spec, plan, tile));
    const std::int64_t segments = ForwardShare::segments_of(tiles, segment_tiles(spec, tile));
    const std::int64_t rows = std::int64_t{kClusterBlocks} * tile.block_m;
    return segments * ForwardShare::writers_of(takes_turns(tile)) * rows * partial_fields(spec) * 4;
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

BackwardNeeds backward_needs(const Spec& spec, const Plan& plan) {
    // The place of grad_hidden's sum is also used to bring hidden states together: scaled ones beside retained exponentials, or those of
    // valid tokens.
    return {.progress_bytes = progress_bytes(spec, plan), .sums_apart = true};
}

/// Widest chunk that fits, or a little less where that makes whole waves, or pairs of chunks that are joined.
Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const Expr& widest, std::int64_t quantum) {
    const ChunkTime time(spec, device, plan);
    const Expr n = slot(Slot::num_tokens);
    Expr best = widest;
    Expr best_time = time.all(n, widest);
    for (int narrower = 1; narrower < kChunkCandidates; ++narrower) {
        const Expr chunk = max(widest - narrower * quantum, quantum);
        const Expr chunk_time = time.all(n, chunk);
        best = select(less(chunk_time, best_time), chunk, best);
        best_time = min(chunk_time, best_time);
    }
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
    constexpr std::int64_t kMostBytes = 24 << 20;
    const std::int64_t most = std::min(kMostBytes, plan.scratch_bytes / 8 * 3) / (4 * spec.hidden_size);
    const std::int64_t cluster_rows = std::int64_t{kClusterBlocks} * plan.cuda.grad_hidden.block_m;
    const std::int64_t clusters = device.gpu.sm_count / kClusterBlocks;
    const auto tiles_across = [&](const GemmTile& tile) { return multiple_above(spec.hidden_size, tile.block_n) / tile.block_n; };
    // Half of the clusters would be idle; joined chunks have other tiles for them, but not for long.
    std::int64_t most_row_clusters = clusters / (2 * tiles_across(plan.cuda.grad_hidden));
    if (joins_chunks(spec, device, plan)) most_row_clusters = std::max(most_row_clusters, clusters / tiles_across(plan.cuda.dlogits));
    const Expr some = min(n, 1) * min(round_up(n, cluster_rows) * SumParts::kMost, most);
    return select(less(n, most_row_clusters * cluster_rows + 1), max(n, some), n);
}

JoinedChunks joined_chunks(const Spec& spec, const Device& device, const Plan& plan, const BackwardLayout& layout) {
    JoinedChunks j;
    if (!joins_chunks(spec, device, plan)) return j;
    // Whole tiles, of wide chunks too.
    const std::int64_t quantum = joined_quantum(plan);
    const Expr whole =
        equal(round_down(layout.chunk, quantum), layout.chunk) && equal(round_down(layout.wide_chunk, quantum), layout.wide_chunk);
    j.joined =
        (equal(layout.row_blocks, 1) && less(kMostTokensApart, slot(Slot::num_tokens))) && (less(2 * quantum - 1, layout.chunk) && whole);
    j.even_chunk = first_of_pair(plan, layout.chunk);
    j.even_wide_chunk = first_of_pair(plan, layout.wide_chunk);
    // Sums are gone through once a chunk, so that with many tokens groups of them and wide chunks are quicker.
    const Expr n = slot(Slot::num_tokens);
    const std::int64_t step = std::lcm(std::int64_t{plan.cuda.dlogits.block_n}, std::int64_t{kSumSlice});
    j.hidden_groups = select(j.joined && less(kFewestTokensInHalves - 1, n), max(floor_div(n, kTokensOfGroup), 1), 0);
    j.hidden_rows = ceil_div(n, max(j.hidden_groups, 1));
    j.hidden_chunk = min(round_down(floor_div(n * layout.chunk, max(j.hidden_rows, 1)), step), multiple_above(spec.vocab_size, step));
    j.progress_bytes = progress_bytes(spec, plan);
    return j;
}

bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight) {
    return may_lend_grad_weight(spec) && kRetainedColumns % (kClusterBlocks * grad_weight.block_m) == 0;
}

}  // namespace flce::sm90

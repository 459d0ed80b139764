// How the passes of cuda_lt cut their work: a call of the library computes a tile of the plan's, at most block_m tokens by block_n columns.
#include <algorithm>
#include <utility>
#include <vector>

#include "generator/cuda/lt/path.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/lt/params.cuh"

namespace flce::lt {
namespace {

std::int64_t most_sums_bytes(const GemmTile& tile) { return std::int64_t{4} * tile.block_m * tile.block_n; }

Expr sums_bytes(const GemmTile& tile) { return min(slot(Slot::num_tokens), tile.block_m) * (std::int64_t{4} * tile.block_n); }

std::int64_t most_splits(const Plan& plan) { return std::min<std::int64_t>(plan.cuda.forward.block_n / kLtTileColumns, kMostLtSplits); }

std::int64_t heads(const Spec& spec) { return has_teacher_head(spec) ? 2 : 1; }

std::int64_t gradient_row_bytes(const Spec& spec) {
    return spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
}

std::int64_t own_bytes(const Spec& spec, const GemmTile& tile) {
    return heads(spec) * (most_sums_bytes(tile) + kWorkspaceAlignment) + kGemmWorkspaceBytes;
}

/// Most lists of classes of a launch over `rows`: rows have several parts only where they are few (forward_splits).
template <class Number>
Number most_top_lists(const Number& rows, std::int64_t splits) {
    using std::max;
    using std::min;
    constexpr std::int64_t kOfFewRows = 16384;
    return max(rows, min(rows * splits, Number(kOfFewRows)));
}

std::int64_t top_bytes_of_list(const Spec& spec) {
    return spec.top_k == 0 ? 0 : top_list_keys(spec.top_k) * 8 + static_cast<std::int64_t>(sizeof(TopState));
}

/// Scratch of forward's own places, whatever the number of tokens.
std::int64_t forward_bytes(const Spec& spec, const Plan& plan) {
    const std::int64_t lists = most_top_lists<std::int64_t>(plan.cuda.forward.block_m, most_splits(plan));
    return own_bytes(spec, plan.cuda.forward) + lists * top_bytes_of_list(spec) + 2 * kWorkspaceAlignment;
}

bool is_mixture(const Spec& spec) { return divergence_form(spec.divergence_beta) == kMixture; }

/// Sums in scratch of a forward that has grad_weight's memory: as many rows as there, in the room of the plan's; 0 columns: no room.
GemmTile last_sums(const Plan& plan) {
    const std::int64_t room = std::int64_t{plan.cuda.forward.block_m} * plan.cuda.forward.block_n;
    GemmTile tile = plan.cuda.lent;
    tile.block_n = static_cast<int>(multiple_below(room / tile.block_m, kLtTileColumns));
    return tile;
}

/// Scratch of a forward whose sums lie in grad_weight's memory.
std::int64_t lent_forward_bytes(const Spec& spec, const Plan& plan) {
    if (!has_lent_tile(plan)) return 0;
    const Plan wide = with_lent_tile(plan);
    const std::int64_t of_launch = std::int64_t{wide.cuda.forward.block_m} * 4 * (partial_fields(spec) * most_splits(wide) + 1);
    return own_bytes(spec, last_sums(plan)) + of_launch + (64 << 10);
}

/// The plan without the scratch of forward's products.
Plan beside_products(const Spec& spec, Plan plan) {
    plan.scratch_bytes -= forward_bytes(spec, plan);
    return plan;
}

BackwardSizes sizes_of(const Spec& spec, const Plan& plan) {
    return backward_sizes(spec, plan, {.bias_rows = kLtBlockRows, .own_bytes = own_bytes(spec, plan.cuda.dlogits)});
}

bool lends(const Spec& spec, const Plan& plan) { return lends_grad_weight(spec, plan.cuda.grad_weight, 1); }

/// Exponentials, which a divergence has none of: its retained logits have a layout of their own.
RetainedLayout exponentials_layout(const Spec& spec, const Plan& plan) {
    return has_teacher_head(spec) ? RetainedLayout{} : retained_layout(spec, plan, lends(spec, plan));
}

constexpr std::int64_t kWholeWaves = 2048;  // rows of grad_weight, D = 2048, that are nearly a wave of the library's tiles on an H200

/// How a divergence's backward uses grad_weight's memory while it is free.
struct WidePlaces {
    Expr chunk{0};          ///< widest chunk whose dlogits have room in scratch, where its sums lie elsewhere
    Expr dlogits_chunk{0};  ///< chunk whose dlogits lie in grad_weight's memory too; 0: no dlogits lie there
    Expr beside{0};         ///< bytes at the end of the memory that retained logits have to leave free
    Expr bytes{0};          ///< bytes that lent memory has at least
};

WidePlaces wide_places(const Spec& spec, const Plan& plan, const BackwardSizes& sizes, const BackwardLayout& b) {
    constexpr std::int64_t kWorthwhile = 4;  // times as wide a chunk is worth the memory
    const Expr row = max(slot(Slot::num_tokens), 1) * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Expr one_block = equal(b.row_blocks, 1);
    WidePlaces wide;
    wide.chunk = b.chunk;
    if (!spec.bias) {  // a bias's partial sums have room for a chunk of the workspace's
        const Expr room = b.chunk * row + both_sums_bytes(plan.cuda.dlogits);
        const Expr fitting = round_down(floor_div(room, row), sizes.quantum);
        const Expr whole_waves = select(less(fitting, kWholeWaves), fitting, round_down(fitting, kWholeWaves));
        wide.chunk = select(one_block, max(min(whole_waves, sizes.chunk_limit), b.chunk), b.chunk);
        const Expr widest = widest_wide_chunk(spec, sizes);
        wide.dlogits_chunk = select(one_block && less(wide.chunk * kWorthwhile, widest + 1), widest, 0);
    }
    // A mixture's second walk makes sums when logits have been retained, and so does a second launch's; else sums come before them.
    const Expr sums = both_sums_bytes(plan.cuda.lent);
    const Expr dlogits = wide.dlogits_chunk * row + 2 * kWorkspaceAlignment;
    const Expr again = is_mixture(spec) ? Expr(1) : less(plan.cuda.lent.block_m, slot(Slot::num_tokens));
    wide.beside = select(again, sums, 0) + dlogits;
    wide.bytes = sums + dlogits;
    return wide;
}

WidePlaces wide_places(const Spec& spec, const Plan& plan) {
    const BackwardSizes sizes = sizes_of(spec, plan);
    return wide_places(spec, plan, sizes, cut_backward(sizes, widest_chunk(spec, sizes, slot(Slot::num_tokens))));
}

/// Sums in grad_weight's memory, from the plan's down to the narrowest that are larger than `narrow`, those in scratch.
std::vector<GemmTile> lent_sums(const Plan& plan, const GemmTile& narrow) {
    std::vector<GemmTile> tiles;
    for (GemmTile tile = plan.cuda.lent;; tile.block_n /= 2) {
        const bool larger = std::int64_t{tile.block_m} * tile.block_n > std::int64_t{narrow.block_m} * narrow.block_n;
        if (!larger || tile.block_n % kLtTileColumns != 0) return tiles;
        tiles.push_back(tile);
    }
}

}  // namespace

Expr both_sums_bytes(const GemmTile& tile) { return round_up(sums_bytes(tile), kWorkspaceAlignment) * std::int64_t{2}; }

Plan with_lent_tile(Plan plan) {
    plan.cuda.forward = plan.cuda.lent;
    return plan;
}

Expr is_lent() { return slot(Slot::retained_in_grad_weight) && less(0, slot(Slot::retained_bytes)); }

bool may_keep_gradients(const Spec& spec, const Plan& plan) {
    return has_teacher_head(spec) && plan.strategy == Strategy::retain && !spec.bias && !is_shard(spec);
}

RetainedHeads retained_heads(const Spec& spec, const Plan& plan) {
    if (!has_teacher_head(spec) || plan.strategy != Strategy::retain) return {};
    constexpr std::int64_t kRow = std::int64_t{4} * kPairColumns;
    constexpr std::int64_t kReferencesRow = std::int64_t{4} * kPairGroups;
    const Expr n = slot(Slot::num_tokens);
    const Expr own = round_up(max(n, 1) * std::int64_t{kPairBytes}, kWorkspaceAlignment);
    const std::int64_t blocks = (spec.vocab_size + kLtTileColumns - 1) / kLtTileColumns;
    Expr block = own;
    Expr fitting = floor_div(slot(Slot::retained_bytes), own);
    Expr lendable = 0;
    // The last retained columns of a form without a second walk have sums in scratch.
    if (has_lent_tile(plan) && !is_shard(spec) && (is_mixture(spec) || last_sums(plan).block_n > 0)) {
        const std::int64_t gradient = spec.vocab_size * gradient_row_bytes(spec);
        const WidePlaces wide = wide_places(spec, plan);
        block = select(is_lent(), round_up(max(own, kLtTileColumns * gradient_row_bytes(spec)), kWorkspaceAlignment), own);
        fitting = select(is_lent(), floor_div(max(slot(Slot::retained_bytes) - wide.beside, 0), block), fitting);
        lendable = select(less(0, n) && less(wide.bytes, gradient), gradient, 0);
    }
    const Expr columns = min(min(fitting, blocks) * std::int64_t{kLtTileColumns}, vocab_columns(spec));
    // A block makes a row's gradients: few rows would leave most of the GPU without one.
    const Expr all = equal(columns, spec.vocab_size) && less(kFewHeadsRows, n);
    const Expr gradients = may_keep_gradients(spec, plan) ? !is_lent() && all : Expr(0);
    const RetainedPairsAt pairs{.data = slot(Slot::retained),
                                .block_bytes = select(gradients, kRow, block),
                                .row_bytes = select(gradients, blocks * kRow, kRow),
                                .references = n * select(gradients, blocks * kRow, kRow),
                                .reference_block_bytes = select(gradients, kReferencesRow, block),
                                .reference_row_bytes = select(gradients, blocks * kReferencesRow, kReferencesRow),
                                .columns = columns};
    return {pairs, columns, gradients, select(less(0, n), own * blocks, 0), lendable};
}

std::vector<HeadsStretch> heads_stretches(const Spec& spec, const Plan& plan, const BackwardLayoutLt& b) {
    const std::int64_t gradient_row = gradient_row_bytes(spec);
    const BackwardSizes sizes = sizes_of(spec, plan);
    const WidePlaces wide = wide_places(spec, plan, sizes, b);
    const Expr row = max(slot(Slot::num_tokens), 1) * static_cast<std::int64_t>(element_bytes(spec.dtype));
    const Expr columns = vocab_columns(spec);
    const Expr retained = retained_heads(spec, plan).columns;
    const Expr memory = slot(Slot::grad_weight);
    const Expr bytes = select(present(Slot::grad_weight), weight_rows(spec) * gradient_row, 0);
    // Begin of `taken` bytes of the memory at its end, where it has so many; else 0, in front of which nothing can be free.
    const auto place_before = [](const Expr& end, const Expr& taken) { return round_down(max(end - taken, 0), kWorkspaceAlignment); };
    const Expr scratch = workspace_at(b.dlogits);

    // Chunks whose dlogits lie in grad_weight's memory as well. Gradients end where these begin.
    const Expr dlogits_at = place_before(bytes, wide.dlogits_chunk * row);
    const Expr before_dlogits = min(floor_div(dlogits_at, gradient_row), columns);
    const Expr sums_at = place_before(dlogits_at, both_sums_bytes(plan.cuda.lent));
    const Expr divisor = max(wide.dlogits_chunk, 1);
    const auto wide_chunks = [&](const Expr& first, const Expr& end, const Expr& begin_before) {
        const Expr whole = floor_div(max(min(before_dlogits, end) - first, 0), divisor);
        const Expr begun = floor_div(max(begin_before + divisor - first, 0), divisor);
        return select(less(0, wide.dlogits_chunk) && less(0, sums_at), min(whole, begun), 0);
    };
    const auto sums_from = [&](const GemmTile& tile, const Expr& at) {
        return SumsPlace{tile, memory + at, memory + at + round_up(sums_bytes(tile), kWorkspaceAlignment)};
    };
    std::vector<HeadsStretch> all;
    const auto add = [&](const Expr& first, const Expr& end, const Expr& chunks, const Expr& width, const Expr& dlogits,
                         const SumsPlace& sums,
                         bool of_retained) { all.push_back({first, end, chunks, width, dlogits, sums, of_retained}); };
    const bool may_widen = wide.dlogits_chunk.constant() == nullptr;
    if (plan.strategy == Strategy::retain) {
        const Expr chunks = wide_chunks(0, retained, columns);
        const Expr rest = chunks * wide.dlogits_chunk;
        if (may_widen) add(0, retained, chunks, wide.dlogits_chunk, memory + dlogits_at, b.sums, true);
        add(rest, retained, ceil_div(retained - rest, wide.chunk), wide.chunk, scratch, b.sums, true);
    }
    const Expr chunks = wide_chunks(retained, columns, floor_div(sums_at, gradient_row));
    if (may_widen) add(retained, columns, chunks, wide.dlogits_chunk, memory + dlogits_at, sums_from(plan.cuda.lent, sums_at), false);
    // Chunks whose sums alone lie there, narrower ones towards the end of the vocabulary.
    const Expr first = retained + chunks * wide.dlogits_chunk;
    const Expr all_chunks = ceil_div(columns - first, wide.chunk);
    Expr done = 0;
    for (const GemmTile& tile : lent_sums(plan, plan.cuda.dlogits)) {
        const Expr at = place_before(bytes, both_sums_bytes(tile));
        const Expr begun = floor_div(max(floor_div(at, gradient_row) + wide.chunk - first, 0), wide.chunk);
        const Expr end = select(less(0, at), min(begun, all_chunks), 0);
        add(first + done * wide.chunk, columns, max(end - done, 0), wide.chunk, scratch, sums_from(tile, at), false);
        done = max(end, done);
    }
    const Expr rest = min(first + done * wide.chunk, columns);
    add(rest, columns, ceil_div(columns - rest, b.chunk), b.chunk, scratch, b.sums, false);
    return all;
}

ForwardLayoutLt forward_layout(const Spec& spec, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const Expr most = min(slot(Slot::num_tokens), tile.block_m);
    const std::int64_t stretch = forward_stretch(spec, beside_products(spec, plan), tile.block_n);
    ForwardLayoutLt f{
        place_forward(
            spec, {.rows = tile.block_m, .partials = round_up(most, 32) * most_splits(plan), .stretch = stretch, .most_stretch = stretch}),
        exponentials_layout(spec, plan)};
    Pieces pieces(f.total);
    f.sums = {tile, workspace_at(pieces.take(sums_bytes(tile)))};
    if (has_teacher_head(spec)) f.sums.teacher = workspace_at(pieces.take(sums_bytes(tile)));
    f.heads = {{0, vocab_columns(spec), f.sums}};
    f.gemm_workspace = pieces.take(kGemmWorkspaceBytes);
    if (spec.top_k > 0) {
        const Expr lists = most_top_lists<Expr>(round_up(most, 32), most_splits(plan));
        f.top_keys = pieces.take(lists * (8 * top_list_keys(spec.top_k)));
        f.top_states = pieces.take(lists * static_cast<std::int64_t>(sizeof(TopState)));
    }
    f.total = pieces.end();
    return f;
}

ForwardLayoutLt lent_forward_layout(const Spec& spec, const Plan& plan) {
    const Plan wide = with_lent_tile(plan);
    const GemmTile& tile = wide.cuda.forward;
    const Expr most = min(slot(Slot::num_tokens), tile.block_m);
    ForwardLayoutLt f{place_forward(spec, {.rows = tile.block_m,
                                           .partials = round_up(most, 32) * most_splits(wide),
                                           .stretch = spec.vocab_size,
                                           .most_stretch = spec.vocab_size}),
                      {}};
    Pieces pieces(f.total);
    f.gemm_workspace = pieces.take(kGemmWorkspaceBytes);
    const GemmTile last = last_sums(plan);
    f.sums = {last, workspace_at(pieces.take(sums_bytes(last)))};
    f.sums.teacher = workspace_at(pieces.take(sums_bytes(last)));
    f.total = pieces.end();

    // Sums lie at the end of the memory. Columns that are not retained come first, then retained ones as far as their logits leave room.
    const RetainedHeads retained = retained_heads(spec, plan);
    const Expr columns = vocab_columns(spec);
    const auto at_end = [&](const GemmTile& sums) {
        const Expr at = round_down(max(slot(Slot::retained_bytes) - both_sums_bytes(sums), 0), kWorkspaceAlignment);
        const Expr student = slot(Slot::retained) + at;
        return std::pair{at, SumsPlace{sums, student, student + round_up(sums_bytes(sums), kWorkspaceAlignment)}};
    };
    if (is_mixture(spec)) {
        f.heads = {{0, columns, at_end(tile).second}};
        return f;
    }
    f.heads = {{retained.columns, columns, at_end(tile).second}};
    Expr first = 0;
    for (const GemmTile& sums : lent_sums(plan, last)) {
        const auto [at, place] = at_end(sums);
        const Expr end = max(first, min(floor_div(at, retained.pairs.block_bytes) * std::int64_t{kLtTileColumns}, retained.columns));
        f.heads.push_back({first, end, place});
        first = end;
    }
    if (last.block_n > 0) f.heads.push_back({first, retained.columns, f.sums});
    return f;
}

ForwardLayoutLt heads_layout(const Spec& spec, const Device& device) {
    const Expr n = slot(Slot::num_tokens);
    const Expr launches = max(ceil_div(n, kHeadsRows), 1);
    const Expr rows = round_up(ceil_div(n, launches), 256);
    const Expr most = round_up(min(n, rows), 32);
    const Expr splits = heads_splits(spec, device, {.rows = most});
    ForwardLayoutLt f{place_forward(spec, {.rows = rows,
                                           .partials = most * splits,
                                           .stretch = spec.vocab_size,
                                           .most_stretch = spec.vocab_size,
                                           .counter_words = kHeadsCounterWords}),
                      {}};
    Pieces pieces(f.total);
    f.parked = workspace_at(pieces.take(heads_scratch(device).parked_bytes));
    f.total = pieces.end();
    return f;
}

bool has_heads_launches(const Spec& spec, const Device& device, const Plan& plan) {
    if (!has_heads_kernels(spec, device)) return false;
    const HeadsScratch scratch = heads_scratch(device);
    const std::int64_t partials = scratch.partials * 4 * partial_fields(spec);
    return scratch.parked_bytes + partials + 4 * kHeadsRows + (64 << 10) <= plan.scratch_bytes;
}

Expr forward_splits(const Device& device, const Plan& plan, const Expr& rows) {
    // A block has 16 rows. Two blocks an SM are a wave, and each of them has its fixed work for more columns than more blocks would.
    const std::int64_t blocks = std::int64_t{2} * device.gpu.sm_count;
    return min(max(floor_div(blocks, max(ceil_div(rows, 16), 1)), 1), most_splits(plan));
}

BackwardLayoutLt backward_layout(const Spec& spec, const Plan& plan) {
    const BackwardSizes sizes = sizes_of(spec, plan);
    const Expr n = slot(Slot::num_tokens);
    BackwardLayoutLt b{cut_backward(sizes, widest_chunk(spec, sizes, n)),
                       has_teacher_head(spec) ? RetainedLayout{} : retained_for_backward(spec, plan, lends(spec, plan))};
    // A bias's partial sums have room for a chunk of the workspace's.
    const bool widens = may_widen_chunks(spec) && !spec.bias && !has_lent_tile(plan);  // else heads_stretches has wide chunks
    if (widens) add_wide_chunks(spec, widest_wide_chunk(spec, sizes), b.retained.columns, b);
    Pieces pieces = place_backward(spec, sizes, b);
    if (!has_lent_tile(plan)) b.factors = pieces.take(12);
    const Expr sums = pieces.take(sums_bytes(plan.cuda.dlogits));
    b.sums = {plan.cuda.dlogits, workspace_at(sums)};
    if (has_teacher_head(spec)) b.sums.teacher = workspace_at(pieces.take(sums_bytes(plan.cuda.dlogits)));
    if (has_lent_tile(plan)) b.factors = pieces.take(12);  // dlogits may take the place of the sums behind them
    b.gemm_workspace = pieces.take(kGemmWorkspaceBytes);
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const bool own_sum = grad_hidden_dtype(spec) == DType::fp32;
    b.operand = pieces.take(own_sum ? n * (element * spec.hidden_size) : Expr(0));
    b.hidden_accumulator = pieces.take(own_sum ? Expr(0) : n * (4 * spec.hidden_size));
    b.total = pieces.end();
    return b;
}

std::int64_t least_scratch_bytes(const Spec& spec, const Plan& plan) {
    const std::int64_t of_launch = std::int64_t{plan.cuda.forward.block_m} * 4 * (partial_fields(spec) * most_splits(plan) + 1);
    const std::int64_t rounded = rounds_weight(spec) ? 2 * plan.cuda.forward.block_n * spec.hidden_size * std::int64_t{2} : 0;
    const std::int64_t forward = forward_bytes(spec, plan) + of_launch + rounded + (64 << 10);
    return std::max({forward, lent_forward_bytes(spec, plan), sizes_of(spec, plan).least});
}

}  // namespace flce::lt

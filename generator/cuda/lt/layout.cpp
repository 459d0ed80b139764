// How the passes of cuda_lt cut their work: a call of the library computes a tile of the plan's, at most block_m tokens by block_n columns.
#include <algorithm>
#include <utility>

#include "generator/cuda/lt/path.hpp"
#include "templates/lt/params.cuh"

namespace flce::lt {
namespace {

std::int64_t most_sums_bytes(const GemmTile& tile) { return std::int64_t{4} * tile.block_m * tile.block_n; }

Expr sums_bytes(const GemmTile& tile) { return min(slot(Slot::num_tokens), tile.block_m) * (std::int64_t{4} * tile.block_n); }

std::int64_t most_splits(const Plan& plan) { return std::min<std::int64_t>(plan.cuda.forward.block_n / kLtTileColumns, kMostLtSplits); }

std::int64_t heads(const Spec& spec) { return has_teacher_head(spec) ? 2 : 1; }

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

}  // namespace

RetainedHeads retained_heads(const Spec& spec, const Plan& plan) {
    if (!has_teacher_head(spec) || plan.strategy != Strategy::retain) return {};
    const Expr n = slot(Slot::num_tokens);
    const Expr block = round_up(max(n, 1) * std::int64_t{2 * (2 * kLtTileColumns + 4)}, kWorkspaceAlignment);
    const std::int64_t blocks = (spec.vocab_size + kLtTileColumns - 1) / kLtTileColumns;
    const Expr columns = min(floor_div(slot(Slot::retained_bytes), block), blocks) * std::int64_t{kLtTileColumns};
    return {min(columns, vocab_columns(spec)), block, select(less(0, n), block * blocks, 0)};
}

ForwardLayoutLt forward_layout(const Spec& spec, const Plan& plan) {
    const GemmTile& tile = plan.cuda.forward;
    const Expr most = min(slot(Slot::num_tokens), tile.block_m);
    const std::int64_t stretch = forward_stretch(spec, beside_products(spec, plan), tile.block_n);
    ForwardLayoutLt f{place_forward(spec, {.rows = tile.block_m, .partials = round_up(most, 32) * most_splits(plan), .stretch = stretch}),
                      exponentials_layout(spec, plan)};
    Pieces pieces(f.total);
    f.sums = pieces.take(sums_bytes(tile));
    if (has_teacher_head(spec)) f.teacher_sums = pieces.take(sums_bytes(tile));
    f.gemm_workspace = pieces.take(kGemmWorkspaceBytes);
    if (spec.top_k > 0) {
        const Expr lists = most_top_lists<Expr>(round_up(most, 32), most_splits(plan));
        f.top_keys = pieces.take(lists * (8 * top_list_keys(spec.top_k)));
        f.top_states = pieces.take(lists * static_cast<std::int64_t>(sizeof(TopState)));
    }
    f.total = pieces.end();
    return f;
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
    if (may_widen_chunks(spec) && !spec.bias) add_wide_chunks(spec, widest_wide_chunk(spec, sizes), b.retained.columns, b);
    Pieces pieces = place_backward(spec, sizes, b);
    b.factors = pieces.take(12);
    b.sums = pieces.take(sums_bytes(plan.cuda.dlogits));
    if (has_teacher_head(spec)) b.teacher_sums = pieces.take(sums_bytes(plan.cuda.dlogits));
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
    return std::max(forward, sizes_of(spec, plan).least);
}

}  // namespace flce::lt

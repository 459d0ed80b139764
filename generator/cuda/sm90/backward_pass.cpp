#include "generator/cuda/sm90/backward_pass.hpp"

#include <cstddef>

#include "generator/cuda/sm90/rules.hpp"
#include "templates/common/sum_parts.cuh"

namespace flce::sm90 {
namespace {

/// Bytes of the call's hidden states where they lie in the place of grad_hidden's sum, else 0.
Expr hidden_beside_sum(const BackwardPassSm90& pass) {
    return pass.all_retained * round_up(slot(Slot::num_tokens) * (pass.spec.hidden_size * pass.element_bytes), kWorkspaceAlignment);
}

/// BackwardPassSm90's.
Expr puts_chunks_first(const Spec& spec, const Plan& plan, const RetainedLayout& retained) {
    if (!is_shard(spec) || plan.strategy != Strategy::retain) return 0;
    const Expr some = less(0, retained.columns) && less(retained.columns, vocab_columns(spec));
    return (some && !retained.lent) && (present(Slot::grad_hidden) && present(Slot::grad_weight));
}

Expr wants_bias(const Spec& spec) { return spec.bias ? present(Slot::grad_bias) : Expr(0); }

/// A shard without a class retains nothing.
Expr retains_all(const Spec& spec, const RetainedLayout& retained) {
    const Expr all = equal(retained.columns, vocab_columns(spec));
    return is_shard(spec) ? less(0, retained.columns) && all : all;
}

/// Columns of the vocabulary that the first launch of grad_hidden sums over.
Expr first_columns(const BackwardPassSm90& pass) {
    const BackwardLayoutSm90& layout = pass.layout;
    const Expr of_chunk = select(less(0, layout.wide_chunks), layout.wide_chunk, min(layout.chunk, pass.columns - pass.sum_begins));
    return select(and_not(less(0, pass.retained.columns), pass.chunks_first), pass.retained.columns, of_chunk);
}

}  // namespace

BackwardPassSm90::BackwardPassSm90(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                   const BackwardLayoutSm90& layout)
    : BackwardPass(spec, plan, source, layout),
      layout(layout),
      clusters(device.gpu.sm_count / kClusterBlocks),
      retained(layout.retained),
      all_retained(retains_all(spec, retained)),
      chunks_first(puts_chunks_first(spec, plan, retained)),
      defers_hidden(flce::sm90::defers_hidden(spec, plan)
                        ? (all_retained && !(does_first_stage() && does_rest())) && equal(slot(Slot::hidden_ready), 0)
                        : Expr(0)),
      joined(layout.joined && (present(Slot::grad_hidden) && present(Slot::grad_weight))),
      hidden_joined((less(0, layout.hidden_groups) && !all_retained) &&
                    (present(Slot::grad_hidden) && !(present(Slot::grad_weight) || wants_bias(spec)))) {
    if (plan.strategy == Strategy::retain) {
        const Expr both = present(Slot::grad_hidden) && present(Slot::grad_weight);
        scales_behind = and_not(all_retained && (both && scatters_rows(*this)), defers_hidden);
    }
    if (!is_shard(spec)) return;
    hidden_joined = less(0, columns) && hidden_joined;
    sum_begins = select(chunks_first, retained.columns, 0);
    sum_ends = select(chunks_first, -1, columns);
}

RowBlock all_rows() { return {0, 0, slot(Slot::num_tokens)}; }

Expr cluster_grid(const BackwardPassSm90& pass, const GemmTile& tile, const Expr& m, const Expr& n) {
    return min(ceil_div(m, std::int64_t{kClusterBlocks} * tile.block_m) * ceil_div(n, tile.block_n), pass.clusters) * kClusterBlocks;
}

Expr sum_grid(const BackwardPassSm90& pass, const Expr& rows) {
    const Expr of_one_part = cluster_grid(pass, pass.plan.cuda.grad_hidden, rows, pass.spec.hidden_size);
    return min(of_one_part * std::int64_t{SumParts::kMost}, pass.clusters * kClusterBlocks);
}

Expr tickets_at() { return scalars_at() + static_cast<std::int64_t>(offsetof(PassScalars, tickets)); }

Expr compact_hidden_at(const BackwardPassSm90& pass) {
    const Expr summed = present(Slot::grad_hidden) && less(pass.retained.columns, pass.columns);
    return select(summed, slot(Slot::grad_hidden), workspace_at(pass.layout.hidden_accumulator));
}

Expr scaled_hidden_at(const BackwardPassSm90& pass) {
    return select(pass.chunks_first, workspace_at(pass.layout.hidden_accumulator), compact_hidden_at(pass));
}

Expr does_retained_weight(const BackwardPassSm90& pass) {
    return select(pass.all_retained || pass.chunks_first, does_rest(), does_first_stage());
}

Expr scatters_rows(const BackwardPassSm90& pass) {
    const Expr scatters = pass.layout.listing || less(slot(Slot::num_tokens), pass.layout.sum_rows);
    return is_shard(pass.spec) ? scatters && less(0, pass.columns) : scatters;
}

MappedMatrix hidden_matrix(const BackwardPassSm90& pass, const RowBlock& rows) {
    const std::int64_t hidden_size = pass.spec.hidden_size;
    return {compact_hidden_at(pass) + rows.first * (hidden_size * pass.element_bytes), hidden_size, rows.count, hidden_size};
}

Expr sum_at(const BackwardPassSm90& pass) { return workspace_at(pass.layout.hidden_accumulator) + hidden_beside_sum(pass); }

Expr sum_room(const BackwardPassSm90& pass) {
    const std::int64_t row_bytes = 4 * pass.spec.hidden_size;
    return floor_div(pass.layout.sum_rows * row_bytes - hidden_beside_sum(pass), row_bytes);
}

MappedMatrix sum_matrix(const BackwardPassSm90& pass, const Expr& first, const Expr& rows) {
    return {sum_at(pass) + first * (pass.spec.hidden_size * 4), pass.spec.hidden_size, rows, pass.spec.hidden_size};
}

SumShareFields sum_share(const BackwardPassSm90& pass) {
    const BackwardLayoutSm90& layout = pass.layout;
    const GemmTile& tile = pass.plan.cuda.grad_hidden;
    const GemmTile& joined = pass.plan.cuda.dlogits;
    const auto tiles_across = [&](const GemmTile& t) { return (pass.spec.hidden_size + t.block_n - 1) / t.block_n; };
    // Parts lie where either kernel's clusters of rows begin.
    const Expr apart = tile.block_m == joined.block_m ? Expr(0) : layout.joined;
    const Expr undivided = pass.spec.batch_invariant ? Expr(1) : apart || pass.hidden_joined;
    return {
        .room = select(less(1, layout.row_blocks) || scatters_groups(pass), 0, sum_room(pass)),  // row blocks have tiles enough
        .cluster_rows = std::int64_t{kClusterBlocks} * tile.block_m,
        .column_tiles = select(layout.joined && equal(pass.retained.columns, 0), tiles_across(joined), tiles_across(tile)),
        .clusters = pass.clusters,
        .slices = select(undivided, 0, ceil_div(first_columns(pass), 64)),
    };
}

Expr scatters_groups(const BackwardPassSm90& pass) {
    return pass.hidden_joined && (pass.layout.listing && less(1, pass.layout.hidden_groups));
}

Expr scatters_sum(const BackwardPassSm90& pass) {
    return pass.layout.listing && (less(1, pass.layout.row_blocks) && !(pass.all_retained || pass.chunks_first));
}

}  // namespace flce::sm90

#include <utility>

#include "generator/cuda/sm90/backward_pass.hpp"
#include "generator/cuda/sm90/maps.hpp"
#include "templates/sm90/params.cuh"

namespace flce::sm90 {
namespace {

using Params = BackwardChunksSm90Params;

/// Work of a launch: a stretch of the vocabulary, and some of the tokens.
struct JoinedWork {
    KernelRole kernel;
    RowBlock rows;
    Expr first_column;
    Expr columns;
    Expr width;       ///< columns of a pair of chunks, or of the chunk of both halves
    Expr even_width;  ///< columns of the first chunk of a pair
    Expr dlogits;     ///< address
    Expr rounded;     ///< address of the places of a rounded weight
    Expr writes;      ///< grad_hidden, where the stretch is the last one
};

/// Rows of the stretch in the weight or its gradient.
MappedMatrix columns_of(const BackwardPassSm90& pass, const JoinedWork& work, Slot tensor, std::int64_t element_bytes) {
    return weight_matrix(pass.spec, slot(tensor) + work.first_column * (pass.spec.hidden_size * element_bytes), work.columns);
}

/// The weight of the stretch, or the two places of one that is rounded.
MappedMatrix weight_of(const BackwardPassSm90& pass, const JoinedWork& work) {
    if (!rounds_weight(pass.spec)) return columns_of(pass, work, Slot::weight, pass.element_bytes);
    return {work.rounded, pass.spec.hidden_size, work.width * 2, pass.spec.hidden_size};
}

/// Sets everything but grad_weight's parameters.
LaunchBuilder<Params> joined_launch(const BackwardPassSm90& pass, const JoinedWork& work) {
    const Spec& spec = pass.spec;
    const BackwardLayoutSm90& layout = pass.layout;
    const GemmTile& tile = pass.plan.cuda.dlogits;
    const RowBlock& rows = work.rows;
    const MappedMatrix hidden = hidden_matrix(pass, rows);
    const MappedMatrix weight = weight_of(pass, work);
    const MappedMatrix dlogits{work.dlogits, work.width, rows.count, work.width};
    // columns of the last pair of chunks, or of half of one
    const Expr last_columns = work.columns - (ceil_div(work.columns, work.width) - 1) * work.width;
    const MappedMatrix sum = sum_matrix(pass, rows.first, rows.first.constant() != nullptr ? sum_room(pass) : rows.count);
    LaunchBuilder<Params> launch(pass.source.kernel(work.kernel), pass.clusters * kClusterBlocks);
    set_share(launch, pass);
    launch.set(&Params::bias, advanced(slot(Slot::bias), work.first_column, pass.element_bytes))
        .set(&Params::class_weight, advanced(slot(Slot::class_weight), work.first_column, 4))
        .set(&Params::class_offset, advanced(slot(Slot::class_offset), work.first_column, 4))
        .set(&Params::scalars, scalars_at())
        .set(&Params::coefficients, workspace_at(layout.coefficients) + rows.first * 16)
        .set(&Params::row_targets, workspace_at(layout.row_targets) + rows.first * 8)
        .set(&Params::first_column, work.first_column)
        .set(&Params::rows, rows.count)
        .set(&Params::columns, work.columns)
        .set_transform(&Params::transform, spec)
        .set(&Params::accumulator, sum.address)
        .set(&Params::grad_hidden, slot(Slot::grad_hidden) + caller_row(pass, rows.first) * (spec.hidden_size * pass.grad_hidden_bytes))
        .set(&Params::taken, workspace_at(layout.progress))
        .set(&Params::progress, workspace_at(layout.progress) + 4)
        .set(&Params::even_width, work.even_width)
        .set(&Params::pair_width, work.width)
        .set(&Params::first, equal(work.first_column, pass.sum_begins))
        .set(&Params::last, equal(work.first_column + work.columns, pass.sum_ends) && work.writes)
        .set_map(&Params::hidden_map, hidden, tile.block_m)
        .set_map(&Params::weight_map, weight, tile.block_n / kClusterBlocks)
        .set_map(&Params::dlogits_map, dlogits, kFirstRows)
        .set_map(&Params::dlogits_sum_map, dlogits, tile.block_m)
        .set_map(&Params::last_dlogits_sum_map, {dlogits.address, last_columns, rows.count, work.width}, tile.block_m)
        .set_map(&Params::weight_sum_map, weight, kSecondRows)
        .set_map(&Params::accumulator_map, sum, kFirstRows, 4)
        .set_list(&Params::list, pass.list, rows.first);
    return launch;
}

/// The launch. `grad_bias`: address, at the first column.
template <class Of>
Statement build(const BackwardPassSm90& pass, LaunchBuilder<Of> launch, const Expr& first_row, const Expr& grad_bias) {
    const RowNumbers numbers = row_numbers_at(pass.layout, first_row);
    if (!pass.spec.bias) return build_with_rows(std::move(launch), pass.spec, numbers);
    LaunchBuilder<WithGradBias<Of>> biased(std::move(launch));
    biased.set(&WithGradBias<Of>::grad_bias, grad_bias);
    return build_with_rows(std::move(biased), pass.spec, numbers);
}

/// The launch, its counters set to 0 before.
std::vector<Statement> with_counters(const BackwardPassSm90& pass, const JoinedWork& work, LaunchBuilder<Params> launch,
                                     const Expr& grad_bias) {
    const Expr& first_row = work.rows.first;
    const Expr counters_at = workspace_at(pass.layout.progress);
    const Statement counters{MemsetZero{counters_at, pass.layout.progress_bytes}};
    if (!rounds_weight(pass.spec)) return {counters, build(pass, std::move(launch), first_row, grad_bias)};
    using Rounded = RoundedChunksSm90Params;
    LaunchBuilder<Rounded> rounding(std::move(launch));
    rounding.set(&Rounded::of, &WeightToRound::weight, slot(Slot::weight))
        .set(&Rounded::of, &WeightToRound::scale, is_quantized(pass.spec) ? slot(Slot::weight_scale) : Expr(0))
        .set(&Rounded::of, &WeightToRound::tensor_scale, is_quantized(pass.spec) ? slot(Slot::weight_tensor_scale) : Expr(0))
        .set(&Rounded::rounded, work.rounded)
        .set(&Rounded::rounding, counters_at + pass.layout.rounding);
    return {counters, build(pass, std::move(rounding), first_row, grad_bias)};
}

}  // namespace

std::vector<Statement> backward_chunks_steps(const BackwardPassSm90& pass, const Stretch& stretch) {
    const RowBlock rows = all_rows();
    const Expr columns = min(pass.columns - stretch.first_column, stretch.chunks * stretch.width);
    const JoinedWork work{KernelRole::backward_chunks,
                          rows,
                          stretch.first_column,
                          columns,
                          stretch.width,
                          first_of_pair(pass.plan, stretch.width),
                          stretch.dlogits,
                          workspace_at(pass.layout.rounded_weight),
                          1};
    LaunchBuilder<Params> launch = joined_launch(pass, work);
    launch.set_map(&Params::hidden_sum_map, hidden_matrix(pass, rows), kSecondRows)
        .set_map(&Params::grad_weight_map, columns_of(pass, work, Slot::grad_weight, pass.grad_element_bytes), kFirstRows,
                 pass.grad_element_bytes);
    return with_counters(pass, work, std::move(launch), advanced(slot(Slot::grad_bias), stretch.first_column, pass.grad_element_bytes));
}

Statement hidden_chunks_groups(const BackwardPassSm90& pass) {
    const BackwardLayoutSm90& layout = pass.layout;
    const Expr first = variable(kRowBlockLoop) * layout.hidden_rows;
    const RowBlock rows{variable(kRowBlockLoop), first, min(slot(Slot::num_tokens) - first, layout.hidden_rows)};
    const Expr from = pass.retained.columns;
    const Expr dlogits = workspace_at(layout.dlogits);
    const Expr behind = dlogits + round_up(layout.hidden_rows * layout.hidden_chunk * pass.element_bytes, kWorkspaceAlignment);
    const JoinedWork work{KernelRole::hidden_chunks, rows,    from,   pass.columns - from,   layout.hidden_chunk,
                          layout.hidden_chunk,       dlogits, behind, !scatters_groups(pass)};
    return {Loop{kRowBlockLoop, layout.hidden_groups, with_counters(pass, work, joined_launch(pass, work), 0)}};
}

}  // namespace flce::sm90

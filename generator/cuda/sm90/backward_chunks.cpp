#include "generator/cuda/sm90/backward_chunks.hpp"

#include <utility>

#include "generator/cuda/sm90/maps.hpp"
#include "templates/sm90/params.cuh"

namespace flce::sm90 {

std::vector<Statement> backward_chunks_steps(const BackwardPassSm90& pass, const Stretch& stretch) {
    using Params = BackwardChunksSm90Params;
    const Spec& spec = pass.spec;
    const BackwardLayout& layout = pass.layout;
    const GemmTile& tile = pass.plan.cuda.dlogits;
    const RowBlock rows = all_rows();
    const Expr columns = min(Expr(spec.vocab_size) - stretch.first_column, stretch.chunks * stretch.width);
    const auto columns_of = [&](Slot tensor, std::int64_t element_bytes) {
        return weight_matrix(spec, slot(tensor) + stretch.first_column * (spec.hidden_size * element_bytes), columns);
    };
    const MappedMatrix hidden = hidden_matrix(pass, rows);
    const MappedMatrix weight = columns_of(Slot::weight, pass.element_bytes);
    const MappedMatrix dlogits{stretch.dlogits, stretch.width, rows.count, stretch.width};
    // Of the last pair of chunks, or half of one.
    const Expr last_columns = columns - (ceil_div(columns, stretch.width) - 1) * stretch.width;
    const MappedMatrix sum = sum_matrix(pass, 0, sum_room(pass));
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::backward_chunks), pass.clusters * kClusterBlocks);
    launch.set_share(&Params::share, sum_share(pass))
        .set(&Params::class_weight, advanced(slot(Slot::class_weight), stretch.first_column, 4))
        .set(&Params::scalars, workspace_at(layout.scalars))
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::first_column, stretch.first_column)
        .set(&Params::rows, rows.count)
        .set(&Params::columns, columns)
        .set_transform(&Params::transform, spec)
        .set(&Params::accumulator, sum.address)
        .set(&Params::grad_hidden, slot(Slot::grad_hidden))
        .set(&Params::taken, workspace_at(layout.progress))
        .set(&Params::progress, workspace_at(layout.progress) + 4)
        .set(&Params::even_width, stretch.even_width)
        .set(&Params::pair_width, stretch.width)
        .set(&Params::first, equal(stretch.first_column, 0))
        .set(&Params::last, equal(stretch.first_column + columns, spec.vocab_size))
        .set_map(&Params::hidden_map, hidden, tile.block_m)
        .set_map(&Params::weight_map, weight, tile.block_n / kClusterBlocks)
        .set_map(&Params::dlogits_map, dlogits, kFirstRows)
        .set_map(&Params::hidden_sum_map, hidden, kSecondRows)
        .set_map(&Params::dlogits_sum_map, dlogits, tile.block_m)
        .set_map(&Params::last_dlogits_sum_map, {dlogits.address, last_columns, rows.count, stretch.width}, tile.block_m)
        .set_map(&Params::weight_sum_map, weight, kSecondRows)
        .set_map(&Params::accumulator_map, sum, kFirstRows, 4)
        .set_map(&Params::grad_weight_map, columns_of(Slot::grad_weight, pass.grad_element_bytes), kFirstRows, pass.grad_element_bytes)
        .set_list(&Params::list, pass.list, workspace_at(layout.scalars), 0);
    return {Statement{MemsetZero{workspace_at(layout.progress), layout.progress_bytes}},
            build_tempered(std::move(launch), spec, workspace_at(layout.row_temperatures))};
}

}  // namespace flce::sm90

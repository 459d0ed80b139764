#include <utility>

#include "generator/cuda/sm90/backward_pass.hpp"
#include "generator/cuda/sm90/maps.hpp"
#include "templates/sm90/params.cuh"

namespace flce::sm90 {
namespace {

/// BlockedMap's shift where the columns of dlogits are one block.
constexpr int kOneBlock = 31;

MappedMatrix weight_of_chunk(const BackwardPassSm90& pass, const Chunk& chunk) {
    return operand_matrix(pass.spec, weight_operand(pass, chunk), chunk.columns);
}

MappedMatrix dlogits_result(const Chunk& chunk, const RowBlock& rows) { return {chunk.dlogits, chunk.columns, rows.count, chunk.width}; }

/// Dlogits as an operand: where exponentials may be in its place, one block, which is as they lie.
MappedMatrix dlogits_operand(const BackwardPassSm90& pass, const Chunk& chunk, const RowBlock& rows) {
    MappedMatrix m = dlogits_result(chunk, rows);
    if (pass.plan.strategy == Strategy::retain) {
        m.blocks = 1;
        m.block_bytes = kWorkspaceAlignment;
    }
    return m;
}

/// The launch of grad_weight, whose kernel has parameters of grad_bias where it adds up grad_bias of exponentials. For a chunk dlogits does
/// so.
template <class Params>
Statement build_unbiased(const BackwardPassSm90& pass, LaunchBuilder<Params> launch) {
    if (!sums_retained_bias(pass.spec, pass.plan)) return launch.build();
    return LaunchBuilder<WithScaledBias<Params>>(std::move(launch)).build();
}

Statement dlogits_step(const BackwardPassSm90& pass, const Chunk& chunk, const RowBlock& rows) {
    using Params = DlogitsSm90Params;
    const GemmTile& tile = pass.plan.cuda.dlogits;
    LaunchBuilder<Params> launch(dlogits_launch(pass, chunk, rows, cluster_grid(pass, tile, rows.count, chunk.columns)));
    launch.set_map(&Params::hidden_map, hidden_matrix(pass, rows), tile.block_m)
        .set_map(&Params::weight_map, weight_of_chunk(pass, chunk),
                 reads_vocab_major(pass.spec) ? tile.block_n / kClusterBlocks : kSecondRows)
        .set_map(&Params::dlogits_map, dlogits_result(chunk, rows), kFirstRows)
        .set(&Params::tickets, tickets_at())
        .set_list(&Params::list, pass.list, rows.first);
    return build_with_rows(std::move(launch), pass.spec, row_numbers_at(pass.layout, 0));
}

Statement grad_hidden_step(const BackwardPassSm90& pass, const Chunk& chunk, const RowBlock& rows) {
    using Params = GradHiddenSm90Params;
    const GemmTile& tile = pass.plan.cuda.grad_hidden;
    // Parts of the sum lie below each other; row blocks have one part.
    const Expr sum_rows = select(less(1, pass.layout.row_blocks), rows.count, sum_room(pass));
    const MappedMatrix sum = sum_matrix(pass, rows.first, sum_rows);
    const Expr last = equal(chunk.first_column + chunk.columns, pass.sum_ends) && !scatters_sum(pass);
    LaunchBuilder<Params> launch(grad_hidden_launch(pass, chunk, rows, sum_grid(pass, rows.count), sum.address, last));
    launch.set(&Params::column_shift, kOneBlock)
        .set(&Params::tickets, tickets_at())
        .set_map(&Params::dlogits_map, dlogits_operand(pass, chunk, rows), tile.block_m)
        .set_map(&Params::weight_map, weight_of_chunk(pass, chunk),
                 reads_vocab_major(pass.spec) ? kSecondRows : tile.block_n / kClusterBlocks)
        .set_map(&Params::accumulator_map, sum, kFirstRows, 4);
    set_share(launch, pass);
    launch.set_list(&Params::list, pass.list, rows.first);
    // Gradients of a chunk lack nothing where label smoothing meets retained exponentials.
    if (!smooths_retained(pass.spec, pass.plan)) return launch.build();
    return LaunchBuilder<SmoothedGradHiddenSm90Params>(std::move(launch)).build();
}

Statement grad_weight_step(const BackwardPassSm90& pass, const Chunk& chunk, const RowBlock& rows) {
    using Params = GradWeightSm90Params;
    const bool vocab_major = pass.spec.layout == WeightLayout::vocab_major;
    const GradWeightExtents of = grad_weight_extents(pass.spec, chunk.columns);
    const Expr gradient = chunk_at(pass, chunk, Slot::grad_weight, pass.grad_element_bytes);
    LaunchBuilder<Params> launch(grad_weight_launch(pass, chunk, rows, cluster_grid(pass, pass.plan.cuda.grad_weight, of.m, of.n)));
    launch.set(&Params::column_shift, kOneBlock)
        .set(&Params::tickets, tickets_at())
        .set_map(&Params::dlogits_map, dlogits_operand(pass, chunk, rows), vocab_major ? kFirstRows : kSecondRows)
        .set_map(&Params::hidden_map, hidden_matrix(pass, rows), vocab_major ? kSecondRows : kFirstRows)
        .set_map(&Params::grad_weight_map, weight_matrix(pass.spec, gradient, chunk.columns), kFirstRows, pass.grad_element_bytes)
        .set_list(&Params::list, pass.list, rows.first);
    if (!smooths_retained(pass.spec, pass.plan)) return build_unbiased(pass, std::move(launch));
    return build_unbiased(pass, LaunchBuilder<SmoothedGradWeightSm90Params>(std::move(launch)));
}

}  // namespace

ChunkGemms chunk_gemms(const BackwardPassSm90& pass, const Stretch& stretch) {
    const Chunk chunk = chunk_of(stretch);
    const RowBlock rows = row_block(pass, kRowBlockLoop);
    return {
        .dlogits = dlogits_step(pass, chunk, rows),
        .grad_weight = grad_weight_step(pass, chunk, rows),
        .grad_hidden = grad_hidden_step(pass, chunk, rows),
    };
}

}  // namespace flce::sm90

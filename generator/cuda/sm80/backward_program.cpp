#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/sm80/path.hpp"

namespace flce::sm80 {
namespace {

/// A block a tile of m × n results.
Expr tile_grid(const GemmTile& tile, const Expr& m, const Expr& n) { return ceil_div(m, tile.block_m) * ceil_div(n, tile.block_n); }

ChunkGemms chunk_gemms(const BackwardPass& pass, const Stretch& stretch) {
    const Spec& spec = pass.spec;
    const CudaPlan& tiles = pass.plan.cuda;
    const Chunk chunk = chunk_of(pass, stretch);
    const RowBlock rows = row_block(pass, kRowBlockLoop);
    const GradWeightExtents weight = grad_weight_extents(spec, chunk.columns);
    // fp32 sums in place.
    const Expr sums = grad_hidden_dtype(spec) == DType::fp32 ? slot(Slot::grad_hidden) : workspace_at(pass.layout.hidden_accumulator);
    const Expr sum = sums + rows.first * (spec.hidden_size * 4);
    const Expr last = equal(chunk.first_column + chunk.columns, pass.sum_ends);
    return {
        .dlogits = build_tempered(dlogits_launch(pass, chunk, rows, tile_grid(tiles.dlogits, rows.count, chunk.columns)), spec,
                                  workspace_at(pass.layout.row_temperatures)),
        .grad_weight = grad_weight_launch(pass, chunk, rows, tile_grid(tiles.grad_weight, weight.m, weight.n)).build(),
        .grad_hidden = grad_hidden_launch(pass, chunk, rows, tile_grid(tiles.grad_hidden, rows.count, spec.hidden_size), sum, last).build(),
    };
}

}  // namespace

LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayout& layout) {
    const BackwardPass pass(spec, plan, source, layout);
    std::vector<Statement> steps = coefficient_steps(pass);
    std::vector<Statement> chunks;
    for (const Stretch& stretch : stretches(pass, 0)) {
        chunks.push_back(chunk_by_chunk(pass, stretch, chunk_gemms(pass, stretch)));
    }
    steps.push_back({If{any_gradient(), std::move(chunks)}});
    if (is_shard(spec)) steps.push_back(zero_without_class(pass));
    std::ranges::move(zero_the_rest(pass), std::back_inserter(steps));
    // Both gradients go along with each other, chunk by chunk.
    return {.body = {{If{does_first_stage(), std::move(steps)}}}, .variable_count = kBackwardLoops};
}

}  // namespace flce::sm80

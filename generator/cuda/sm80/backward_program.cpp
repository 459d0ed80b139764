#include "generator/cuda/sm80/backward_program.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/backward_steps.hpp"

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
    const Expr sum = spec.dtype == DType::fp32 ? slot(Slot::grad_hidden) + rows.first * (spec.hidden_size * pass.element_bytes)
                                               : workspace_at(pass.layout.hidden_accumulator) + rows.first * (spec.hidden_size * 4);
    const Expr last = equal(chunk.first_column + chunk.columns, spec.vocab_size);
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
    LaunchProgram program{.body = coefficient_steps(pass), .variable_count = kBackwardLoops};
    std::vector<Statement> chunks;
    for (const Stretch& stretch : stretches(pass, 0)) {
        chunks.push_back(chunk_by_chunk(pass, stretch, chunk_gemms(pass, stretch)));
    }
    program.body.push_back({If{any_gradient(), std::move(chunks)}});
    std::ranges::move(zero_the_rest(pass), std::back_inserter(program.body));
    return program;
}

}  // namespace flce::sm80

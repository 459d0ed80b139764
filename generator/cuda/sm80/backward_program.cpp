#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/sm80/path.hpp"
#include "generator/cuda/sm80/retained_gemms.hpp"

namespace flce::sm80 {
namespace {

ChunkGemms chunk_gemms(const BackwardPassSm80& pass, const Stretch& stretch) {
    const Spec& spec = pass.spec;
    const CudaPlan& tiles = pass.plan.cuda;
    const Chunk chunk = chunk_of(stretch);
    const RowBlock rows = row_block(pass, kRowBlockLoop);
    const GradWeightExtents weight = grad_weight_extents(spec, chunk.columns);
    const Expr sum = sum_at(pass) + rows.first * (spec.hidden_size * 4);
    const Expr last = equal(chunk.first_column + chunk.columns, pass.sum_ends);
    return {
        .dlogits = build_with_rows(dlogits_launch(pass, chunk, rows, tile_grid(tiles.dlogits, rows.count, chunk.columns)), spec,
                                   row_numbers_at(pass.layout, 0)),
        .grad_weight = build_extended<RetainGradWeightParams>(
            pass, grad_weight_launch(pass, chunk, rows, tile_grid(tiles.grad_weight, weight.m, weight.n))),
        .grad_hidden = build_extended<RetainGradHiddenParams>(
            pass, grad_hidden_launch(pass, chunk, rows, tile_grid(tiles.grad_hidden, rows.count, spec.hidden_size), sum, last)),
    };
}

/// Gradients of the part that is not retained, chunk by chunk. Both go along with each other.
std::vector<Statement> chunk_steps(const BackwardPassSm80& pass) {
    std::vector<Statement> chunks;
    for (const Stretch& stretch : stretches(pass, pass.retained.columns)) {
        chunks.push_back(chunk_by_chunk(pass, stretch, chunk_gemms(pass, stretch)));
    }
    return chunks;
}

}  // namespace

// A call's stage decides which of these steps it does. Where everything is retained, grad_weight is left for the second stage.
LaunchProgram backward_program(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayoutSm80& layout) {
    const BackwardPassSm80 pass(spec, plan, source, layout);
    std::vector<Statement> steps = coefficient_steps(pass);
    const bool retains = plan.strategy == Strategy::retain;
    const Expr any = less(0, pass.retained.columns) && less(0, slot(Slot::num_tokens));
    if (retains) {
        steps.push_back({If{any, retained_hidden_steps(pass)}});
        steps.push_back({If{and_not(any, pass.all_retained), {retained_weight_step(pass)}}});
    }
    steps.push_back({If{any_gradient(), chunk_steps(pass)}});
    if (is_shard(spec)) steps.push_back(zero_without_class(pass));
    if (!retains) {
        std::ranges::move(zero_the_rest(pass), std::back_inserter(steps));
        return {.body = {{If{does_first_stage(), std::move(steps)}}}, .variable_count = kBackwardLoops};
    }
    LaunchProgram program{.body = {{If{does_first_stage(), std::move(steps)}}}, .variable_count = kBackwardLoops};
    program.body.push_back({If{does_rest() && (any && pass.all_retained), {retained_weight_step(pass)}}});
    program.body.push_back({If{select(pass.all_retained, does_rest(), does_first_stage()), zero_the_rest(pass)}});
    return program;
}

}  // namespace flce::sm80

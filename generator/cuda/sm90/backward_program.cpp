#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/sm90/backward_pass.hpp"
#include "generator/cuda/sm90/maps.hpp"
#include "generator/cuda/sm90/path.hpp"

namespace flce::sm90 {
namespace {

/// The hidden states that the chunks' GEMMs read.
Statement gather_hidden_launch(const BackwardPassSm90& pass) {
    LaunchBuilder<GatherRowsParams> launch(pass.source.kernel(KernelRole::gather_rows), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    launch.set(&GatherRowsParams::hidden, slot(Slot::hidden))
        .set(&GatherRowsParams::compact, compact_hidden_at(pass))
        .set(&GatherRowsParams::rows, slot(Slot::num_tokens))
        .set_targets(&GatherRowsParams::targets, pass.spec, 0)
        .set(&GatherRowsParams::temperature, slot(Slot::temperature))
        .set_list(&GatherRowsParams::list, pass.list, 0);
    return launch.build();
}

/// grad_hidden from sums of several parts, or of listed rows.
Statement scatter_grad_hidden_launch(const BackwardPassSm90& pass) {
    const Expr last_chunk_wrote_it = less(1, pass.layout.row_blocks) && !scatters_sum(pass);
    LaunchBuilder<ScatterRowsParams> launch(pass.source.kernel(KernelRole::scatter_rows),
                                            ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    set_share(launch, pass);
    launch.set(&ScatterRowsParams::accumulator, select(last_chunk_wrote_it, 0, sum_at(pass)))
        .set(&ScatterRowsParams::grad_hidden, slot(Slot::grad_hidden))
        .set(&ScatterRowsParams::scalars, scalars_at())
        .set(&ScatterRowsParams::rows, slot(Slot::num_tokens))
        .set_list(&ScatterRowsParams::list, pass.list, 0);
    if (pass.plan.strategy == Strategy::retain) {
        launch.set(&ScatterRowsParams::hidden, slot(Slot::hidden))
            .set(&ScatterRowsParams::row_scales, retained_at(pass.retained.row_scales))
            .set(&ScatterRowsParams::scaled_hidden, select(pass.scales_behind, compact_hidden_at(pass), 0))
            .set(&ScatterRowsParams::rows_scaled, workspace_at(pass.layout.counters) + (pass.layout.counter_count - 1) * 4);
    }
    return launch.build();
}

/// The stretch's chunks one by one or, where the layout allows it and the call wants both gradients, joined.
void add_chunks(const BackwardPassSm90& pass, const Stretch& stretch, std::vector<Statement>& to) {
    Statement one_by_one = chunk_by_chunk(pass, stretch, chunk_gemms(pass, stretch));
    if (pass.layout.joined.constant() != nullptr) {  // they never are
        to.push_back(std::move(one_by_one));
        return;
    }
    to.push_back({If{!pass.joined && !pass.hidden_joined, {std::move(one_by_one)}}});
    if (is_quantized(pass.spec)) return;  // it has no gradient of the weight
    to.push_back({If{pass.joined && less(0, stretch.chunks), backward_chunks_steps(pass, stretch)}});
}

/// Makes grad_hidden alone, of the unretained part.
Statement hidden_chunks_step(const BackwardPassSm90& pass) { return {If{pass.hidden_joined, {hidden_chunks_groups(pass)}}}; }

/// Makes gradients of the unretained part, chunk by chunk.
std::vector<Statement> chunk_steps(const BackwardPassSm90& pass) {
    std::vector<Statement> chunks;
    // Listed hidden states may be written over memory of the retained part, which is not needed any more.
    chunks.push_back({If{less(0, slot(Slot::num_tokens)) && less(pass.retained.columns, pass.columns), {gather_hidden_launch(pass)}}});
    for (const Stretch& stretch : stretches(pass, pass.retained.columns)) add_chunks(pass, stretch, chunks);
    if (pass.layout.joined.constant() == nullptr) chunks.push_back(hidden_chunks_step(pass));
    return chunks;
}

/// The rest of grad_hidden when the sum over the vocabulary is there.
std::vector<Statement> finish_grad_hidden_steps(const BackwardPassSm90& pass) {
    std::vector<Statement> steps = {{If{scatters_rows(pass) && present(Slot::grad_hidden), {scatter_grad_hidden_launch(pass)}}}};
    if (is_shard(pass.spec)) steps.push_back(zero_without_class(pass));
    return steps;
}

/// grad_weight where no chunk is computed: after grad_hidden, with which its hidden states may have been scaled.
std::vector<Statement> all_retained_weight_steps(const BackwardPassSm90& pass) {
    if (!is_shard(pass.spec)) return {retained_weight_step(pass)};
    std::vector<Statement> ready = {{If{!does_first_stage(), {make_room_step(pass)}}}, retained_weight_step(pass)};
    if (!defers_hidden(pass.spec, pass.plan)) return ready;
    return {{If{pass.defers_hidden, retained_weight_with_rows_steps(pass)}}, {If{!pass.defers_hidden, std::move(ready)}}};
}

}  // namespace

// A call's stage decides which of these steps it does. Only the retained columns' part of grad_weight can be left for the second stage:
// both gradients of a chunk are made together.
LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                               const BackwardLayoutSm90& layout) {
    const BackwardPassSm90 pass(spec, device, plan, source, layout);
    const bool retains = plan.strategy == Strategy::retain;
    const bool may_put_chunks_first = pass.chunks_first.constant() == nullptr;
    const Expr any = less(0, pass.retained.columns) && less(0, slot(Slot::num_tokens));
    LaunchProgram program{.body = {{If{does_first_stage(), coefficient_steps(pass)}}}, .variable_count = kBackwardLoops};
    const auto retained_hidden = [&](const Expr& now) { return Statement{If{does_first_stage() && now, retained_hidden_steps(pass)}}; };
    if (retains) {
        const Expr now = any && !pass.chunks_first;
        program.body.push_back(retained_hidden(now));
        program.body.push_back({If{does_first_stage() && (now && !pass.all_retained), {retained_weight_step(pass)}}});
    }
    program.body.push_back({If{does_first_stage() && any_gradient(), chunk_steps(pass)}});
    if (may_put_chunks_first) program.body.push_back(retained_hidden(any && pass.chunks_first));
    program.body.push_back({If{does_first_stage(), finish_grad_hidden_steps(pass)}});
    if (retains) program.body.push_back({If{does_rest() && (any && pass.all_retained), all_retained_weight_steps(pass)}});
    if (may_put_chunks_first) {
        program.body.push_back({If{does_rest() && (any && pass.chunks_first), retained_weight_with_rows_steps(pass)}});
    }
    program.body.push_back({If{retains ? does_retained_weight(pass) : does_first_stage(), zero_the_rest(pass)}});
    return program;
}

}  // namespace flce::sm90

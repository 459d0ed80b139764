#include "generator/cuda/common/backward_steps.hpp"

#include <cmath>
#include <utility>

#include "generator/cuda/common/prepare.hpp"
#include "generator/logit_transforms.hpp"

namespace flce {
namespace {

/// Whether the divisor of a mean has to be counted.
Expr counts_tokens() {
    return select(present(Slot::num_valid), 0, reduces_by(ReductionCode::mean) || reduces_by(ReductionCode::weighted_mean));
}

/// Whether one block of row_coefficients has every token, so that it does prepare's part as well: a launch less.
Expr prepares_with_rows(const BackwardPass& pass) {
    if (sums_class_weights(pass.spec)) return 0;
    return equal(pass.layout.row_blocks, 1) && less(slot(Slot::num_tokens), kRowThreads + 1);
}

Expr is_last(const BackwardPass& pass, const RowBlock& rows) { return equal(rows.number + 1, pass.layout.row_blocks); }

Statement grad_bias_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows) {
    const BackwardLayout& layout = pass.layout;
    LaunchBuilder<GradBiasParams> launch(pass.source.kernel(KernelRole::grad_bias), ceil_div(chunk.columns, kRowThreads));
    launch.set(&GradBiasParams::bias_partials, workspace_at(layout.bias_partials))
        .set(&GradBiasParams::scalars, scalars_at())
        .set(&GradBiasParams::accumulator, workspace_at(layout.bias_accumulator))
        .set(&GradBiasParams::grad_bias, slot(Slot::grad_bias) + chunk.first_column * pass.grad_element_bytes)
        .set(&GradBiasParams::ld, chunk.width)
        .set_list(&GradBiasParams::list, pass.list, rows.first)
        .set(&GradBiasParams::rows, rows.count)
        .set(&GradBiasParams::block_rows, layout.bias_rows)
        .set(&GradBiasParams::columns, chunk.columns)
        .set(&GradBiasParams::first, equal(rows.number, 0))
        .set(&GradBiasParams::last, is_last(pass, rows));
    return launch.build();
}

/// Launch for the classes in the chunk that the rows' teacher names: in dlogits, or (teacher_bias) in the partial sums of grad_bias.
Statement teacher_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows, KernelRole kernel, const Expr& grid) {
    using Params = TeacherRowsParams;
    const BackwardLayout& layout = pass.layout;
    LaunchBuilder<Params> launch(pass.source.kernel(kernel), grid);
    launch.set(&Params::scalars, scalars_at())
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::row_weights, workspace_at(layout.row_teacher_weights))
        .set(&Params::row_temperatures, pass.spec.temperature ? workspace_at(layout.row_temperatures) : Expr(0))
        .set(&Params::dlogits, chunk.dlogits)
        .set(&Params::bias_partials, pass.spec.bias ? workspace_at(layout.bias_partials) : Expr(0))
        .set_teacher(&Params::teacher, pass.spec, caller_row(pass, rows.first))
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::ld, chunk.width)
        .set(&Params::first_column, chunk.first_column)
        .set_slope(&Params::slope, logit_slope(pass.spec))
        .set(&Params::class_offset, slot(Slot::class_offset))
        .set(&Params::rows, rows.count)
        .set(&Params::columns, chunk.columns);
    return launch.build();
}

}  // namespace

BackwardPass::BackwardPass(const Spec& spec, const Plan& plan, const CudaSource& source, const BackwardLayout& layout)
    : spec(spec),
      plan(plan),
      source(source),
      layout(layout),
      list(select(layout.listing, workspace_at(layout.list), 0)),
      element_bytes(static_cast<std::int64_t>(flce::element_bytes(spec.dtype))),
      grad_element_bytes(static_cast<std::int64_t>(flce::element_bytes(spec.grad_weight_dtype))),
      grad_hidden_bytes(static_cast<std::int64_t>(flce::element_bytes(grad_hidden_dtype(spec)))),
      columns(vocab_columns(spec)),
      sum_ends(columns) {}

RowBlock row_block(const BackwardPass& pass, int loop) {
    const Expr first = variable(loop) * pass.layout.rows;
    return {variable(loop), first, min(slot(Slot::num_tokens) - first, pass.layout.rows)};
}

RowNumbers row_numbers_at(const BackwardLayout& layout, const Expr& row) {
    return {workspace_at(layout.row_temperatures) + row * 4, workspace_at(layout.row_groups) + row * 4};
}

Expr caller_row(const BackwardPass& pass, const Expr& row) { return select(pass.layout.listing, 0, row); }

std::vector<Stretch> stretches(const BackwardPass& pass, const Expr& first_column) {
    const BackwardLayout& layout = pass.layout;
    const Stretch wide{first_column, layout.wide_chunks, layout.wide_chunk, slot(Slot::grad_weight) + layout.wide_dlogits, pass.columns};
    const Expr rest = first_column + wide.chunks * wide.width;
    const Stretch narrow{rest, ceil_div(pass.columns - rest, layout.chunk), layout.chunk, workspace_at(layout.dlogits), pass.columns};
    if (wide.chunks.constant() != nullptr) return {narrow};  // there is no memory for wide ones
    return {wide, narrow};
}

Chunk chunk_of(const Stretch& stretch) {
    const Expr first = stretch.first_column + variable(kChunkLoop) * stretch.width;
    return {first, min(stretch.end - first, stretch.width), stretch.width, stretch.dlogits};
}

Expr chunk_at(const BackwardPass& pass, const Chunk& chunk, Slot tensor, std::int64_t element_bytes) {
    const std::int64_t step = pass.spec.layout == WeightLayout::vocab_major ? pass.spec.hidden_size : 1;
    return slot(tensor) + chunk.first_column * (step * element_bytes);
}

Expr weight_operand(const BackwardPass& pass, const Chunk& chunk) {
    return rounds_weight(pass.spec) ? workspace_at(pass.layout.rounded_weight) : chunk_at(pass, chunk, Slot::weight, pass.element_bytes);
}

GradWeightExtents grad_weight_extents(const Spec& spec, const Expr& columns) {
    if (spec.layout == WeightLayout::vocab_major) return {columns, spec.hidden_size};
    return {spec.hidden_size, columns};
}

LaunchBuilder<DlogitsParams> dlogits_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows, const Expr& grid) {
    const BackwardLayout& layout = pass.layout;
    const Expr bias_partials = pass.spec.bias ? select(present(Slot::grad_bias), workspace_at(layout.bias_partials), 0) : Expr(0);
    LaunchBuilder<DlogitsParams> launch(pass.source.kernel(KernelRole::dlogits), grid);
    launch.set(&DlogitsParams::hidden, slot(Slot::hidden) + rows.first * (pass.spec.hidden_size * pass.element_bytes))
        .set(&DlogitsParams::weight, weight_operand(pass, chunk))
        .set(&DlogitsParams::bias, advanced(slot(Slot::bias), chunk.first_column, pass.element_bytes))
        .set(&DlogitsParams::class_weight, advanced(slot(Slot::class_weight), chunk.first_column, 4))
        .set(&DlogitsParams::class_offset, advanced(slot(Slot::class_offset), chunk.first_column, 4))
        .set(&DlogitsParams::scalars, scalars_at())
        .set(&DlogitsParams::coefficients, workspace_at(layout.coefficients))
        .set(&DlogitsParams::row_targets, workspace_at(layout.row_targets))
        .set(&DlogitsParams::dlogits, chunk.dlogits)
        .set(&DlogitsParams::bias_partials, bias_partials)
        .set(&DlogitsParams::ld, chunk.width)
        .set(&DlogitsParams::first_column, chunk.first_column)
        .set(&DlogitsParams::rows, rows.count)
        .set(&DlogitsParams::columns, chunk.columns)
        .set_transform(&DlogitsParams::transform, pass.spec);
    return launch;
}

LaunchBuilder<GradHiddenParams> grad_hidden_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows, const Expr& grid,
                                                   const Expr& sum, const Expr& last) {
    const std::int64_t row_bytes = pass.spec.hidden_size * pass.grad_hidden_bytes;
    LaunchBuilder<GradHiddenParams> launch(pass.source.kernel(KernelRole::grad_hidden), grid);
    launch.set(&GradHiddenParams::dlogits, chunk.dlogits)
        .set(&GradHiddenParams::weight, weight_operand(pass, chunk))
        .set(&GradHiddenParams::scalars, scalars_at())
        .set(&GradHiddenParams::accumulator, sum)
        .set(&GradHiddenParams::grad_hidden, slot(Slot::grad_hidden) + caller_row(pass, rows.first) * row_bytes)
        .set(&GradHiddenParams::ld, chunk.width)
        .set(&GradHiddenParams::rows, rows.count)
        .set(&GradHiddenParams::columns, chunk.columns)
        .set(&GradHiddenParams::first, equal(chunk.first_column, pass.sum_begins))
        .set(&GradHiddenParams::last, last);
    return launch;
}

LaunchBuilder<GradWeightParams> grad_weight_launch(const BackwardPass& pass, const Chunk& chunk, const RowBlock& rows, const Expr& grid) {
    const BackwardLayout& layout = pass.layout;
    const bool vocab_major = pass.spec.layout == WeightLayout::vocab_major;
    LaunchBuilder<GradWeightParams> launch(pass.source.kernel(KernelRole::grad_weight), grid);
    launch.set(&GradWeightParams::dlogits, chunk.dlogits)
        .set(&GradWeightParams::hidden, slot(Slot::hidden) + rows.first * (pass.spec.hidden_size * pass.element_bytes))
        .set(&GradWeightParams::scalars, scalars_at())
        .set(&GradWeightParams::accumulator, select(less(1, layout.row_blocks), workspace_at(layout.weight_accumulator), 0))
        .set(&GradWeightParams::grad_weight, chunk_at(pass, chunk, Slot::grad_weight, pass.grad_element_bytes))
        .set(&GradWeightParams::ld, chunk.width)
        .set(&GradWeightParams::accumulator_ld, vocab_major ? Expr(pass.spec.hidden_size) : chunk.width)
        .set(&GradWeightParams::rows, rows.count)
        .set(&GradWeightParams::columns, chunk.columns)
        .set(&GradWeightParams::first, equal(rows.number, 0))
        .set(&GradWeightParams::last, is_last(pass, rows))
        .set(&GradWeightParams::row_targets, workspace_at(layout.row_targets));
    return launch;
}

Statement chunk_by_chunk(const BackwardPass& pass, const Stretch& stretch, const ChunkGemms& gemms) {
    const Chunk chunk = chunk_of(stretch);
    const RowBlock rows = row_block(pass, kRowBlockLoop);
    std::vector<Statement> of_rows;
    of_rows.push_back({If{less(1, pass.layout.row_blocks), {coefficients_launch(pass, rows)}}});
    of_rows.push_back(gemms.dlogits);
    if (pass.spec.teacher_top_k > 0) {
        const Expr blocks = ceil_div(rows.count, kRowThreads / pass.source.named_threads);
        of_rows.push_back(teacher_launch(pass, chunk, rows, KernelRole::teacher_dlogits, blocks));
    }
    // grad_weight first: hidden states may lie in grad_hidden.
    of_rows.push_back({If{present(Slot::grad_weight), {gemms.grad_weight}}});
    of_rows.push_back({If{present(Slot::grad_hidden), {gemms.grad_hidden}}});
    if (pass.spec.bias) {
        std::vector<Statement> bias;
        if (pass.spec.teacher_top_k > 0) {
            bias.push_back(teacher_launch(pass, chunk, rows, KernelRole::teacher_bias, ceil_div(chunk.columns, kTeacherColumns)));
        }
        bias.push_back(grad_bias_launch(pass, chunk, rows));
        of_rows.push_back({If{present(Slot::grad_bias), std::move(bias)}});
    }
    std::vector<Statement> of_chunk;
    if (rounds_weight(pass.spec)) {
        of_chunk.push_back(round_weight_launch(pass.spec, pass.source, chunk.first_column, chunk.columns, weight_operand(pass, chunk)));
    }
    of_chunk.push_back({Loop{kRowBlockLoop, pass.layout.row_blocks, std::move(of_rows)}});
    return {Loop{kChunkLoop, stretch.chunks, std::move(of_chunk)}};
}

std::vector<Statement> coefficient_steps(const BackwardPass& pass) {
    const Preparation preparation{.want_count = counts_tokens(), .list = pass.list};
    const RowBlock rows = row_block(pass, kCoefficientsLoop);
    return {{If{!prepares_with_rows(pass), {prepare_launch(pass.spec, pass.source, preparation)}}},
            {Loop{kCoefficientsLoop, pass.layout.row_blocks, {coefficients_launch(pass, rows)}}}};
}

Statement coefficients_launch(const BackwardPass& pass, const RowBlock& rows) {
    const Spec& spec = pass.spec;
    const Expr row = caller_row(pass, rows.first);
    const Expr prepares = prepares_with_rows(pass);
    const Expr block_rows = spec.teacher_top_k > 0 ? select(prepares, kRowThreads, kTaughtRows) : Expr(kRowThreads);
    LaunchBuilder<RowCoefficientsParams> launch(pass.source.kernel(KernelRole::row_coefficients), ceil_div(rows.count, block_rows));
    launch
        .set(&RowCoefficientsParams::class_weight,
             is_shard(spec) ? advanced(slot(Slot::target_class_weight), row, 4) : slot(Slot::class_weight))
        .set(&RowCoefficientsParams::scalars, scalars_at())
        .set_targets(&RowCoefficientsParams::targets, spec, row)
        .set_list(&RowCoefficientsParams::list, pass.list, rows.first)
        .set_count(&RowCoefficientsParams::count)
        .set(&RowCoefficientsParams::lse, slot(Slot::lse) + row * 4)
        .set(&RowCoefficientsParams::entropy, advanced(slot(has_teacher_head(spec) ? Slot::student_divergence : Slot::entropy), row, 4))
        .set(&RowCoefficientsParams::temperature, advanced(slot(Slot::temperature), row, 4))
        .set(&RowCoefficientsParams::row_temperatures, spec.temperature ? workspace_at(pass.layout.row_temperatures) : Expr(0))
        .set(&RowCoefficientsParams::token_weight, advanced(slot(Slot::token_weight), row, 4))
        .set(&RowCoefficientsParams::logprobs, spec.dft ? advanced(slot(Slot::logprobs), row, 4) : Expr(0))
        .set(&RowCoefficientsParams::grad_loss, advanced(slot(Slot::grad_loss), reduces_by(ReductionCode::none) * row, 4))
        .set(&RowCoefficientsParams::grad_lse, advanced(slot(Slot::grad_lse), row, 4))
        .set(&RowCoefficientsParams::grad_logprobs, advanced(slot(Slot::grad_logprobs), row, 4))
        .set(&RowCoefficientsParams::grad_entropy, advanced(slot(Slot::grad_entropy), row, 4))
        .set_teacher(&RowCoefficientsParams::teacher, spec, row)
        .set(&RowCoefficientsParams::row_teacher_weights, spec.teacher_top_k > 0 ? workspace_at(pass.layout.row_teacher_weights) : Expr(0))
        .set(&RowCoefficientsParams::coefficients, workspace_at(pass.layout.coefficients))
        .set(&RowCoefficientsParams::row_targets, workspace_at(pass.layout.row_targets))
        .set(&RowCoefficientsParams::rows, rows.count)
        .set(&RowCoefficientsParams::prepares, prepares)
        .set(&RowCoefficientsParams::block_rows, block_rows)
        .set(&RowCoefficientsParams::want_count, counts_tokens())
        .set_float(&RowCoefficientsParams::label_smoothing, static_cast<float>(spec.label_smoothing))
        .set_float(&RowCoefficientsParams::smoothing_per_class,
                   static_cast<float>(spec.label_smoothing / static_cast<double>(whole_vocab_size(spec))))
        .set_float(&RowCoefficientsParams::z_loss_weight, static_cast<float>(spec.z_loss))
        .set_float(&RowCoefficientsParams::absent_grad_loss, spec.outputs.loss ? 1.0F : 0.0F)
        .set_float(&RowCoefficientsParams::derivative_bound, std::abs(logit_slope(spec).scale))
        .set_float(&RowCoefficientsParams::hard_weight, static_cast<float>(spec.hard_weight));
    if (!spec.class_groups) return launch.build();
    LaunchBuilder<GroupedRowCoefficientsParams> grouped(std::move(launch));
    grouped.set(&GroupedRowCoefficientsParams::groups, advanced(slot(Slot::row_group), row, 4))
        .set(&GroupedRowCoefficientsParams::row_groups, workspace_at(pass.layout.row_groups));
    return grouped.build();
}

Expr any_gradient() { return present(Slot::grad_hidden) || (present(Slot::grad_weight) || present(Slot::grad_bias)); }

std::vector<Statement> zero_the_rest(const BackwardPass& pass) {
    const Spec& spec = pass.spec;
    if (spec.grad_weight_mode != GradMode::write) return {};
    const Expr rows = weight_rows(spec);
    const std::int64_t row_bytes = spec.hidden_size * pass.grad_element_bytes;
    const Expr no_token = equal(slot(Slot::num_tokens), 0);
    std::vector<Statement> weight;
    weight.push_back({If{no_token, {Statement{MemsetZero{slot(Slot::grad_weight), rows * row_bytes}}}}});
    if (zeroes_columns(spec)) {
        const Expr count = (spec.padded_vocab_size - pass.columns) * spec.hidden_size;
        LaunchBuilder<ZeroColumnsParams> launch(pass.source.kernel(KernelRole::zero_columns), ceil_div(count, kRowThreads));
        launch.set(&ZeroColumnsParams::data, slot(Slot::grad_weight))
            .set(&ZeroColumnsParams::columns, spec.padded_vocab_size)
            .set(&ZeroColumnsParams::first_column, pass.columns)
            .set(&ZeroColumnsParams::rows, spec.hidden_size);
        weight.push_back(launch.build());
    } else if (is_shard(spec) || spec.padded_vocab_size > spec.vocab_size) {
        weight.push_back({MemsetZero{slot(Slot::grad_weight) + pass.columns * row_bytes, (rows - pass.columns) * row_bytes}});
    }
    std::vector<Statement> steps = {{If{present(Slot::grad_weight), std::move(weight)}}};
    if (!spec.bias) return steps;
    // A shard's has an element for each row of the weight.
    const Expr biases = is_shard(spec) ? rows : pass.columns;
    std::vector<Statement> bias = {{If{no_token, {Statement{MemsetZero{slot(Slot::grad_bias), biases * pass.grad_element_bytes}}}}}};
    if (is_shard(spec)) {
        bias.push_back(
            {MemsetZero{slot(Slot::grad_bias) + pass.columns * pass.grad_element_bytes, (rows - pass.columns) * pass.grad_element_bytes}});
    }
    steps.push_back({If{present(Slot::grad_bias), std::move(bias)}});
    return steps;
}

Statement zero_without_class(const BackwardPass& pass) {
    const Expr bytes = slot(Slot::num_tokens) * (pass.spec.hidden_size * pass.grad_hidden_bytes);
    return {If{present(Slot::grad_hidden) && equal(pass.columns, 0), {Statement{MemsetZero{slot(Slot::grad_hidden), bytes}}}}};
}

}  // namespace flce

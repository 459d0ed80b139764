// The order of a backward pass, and its kernels over rows.
#include <algorithm>
#include <cmath>
#include <utility>

#include "generator/cuda/backward_writer.hpp"

namespace flce {

LaunchProgram BackwardWriter::program() {
    LaunchProgram program;
    program.variable_count = 3;
    program.body.push_back({If{!prepared_with_rows(), {prepare_launch(spec_, source_, {layout_.scalars, counted(), list_})}}});
    program.body.push_back({Loop{kFirstPass, layout_.row_blocks, {coefficients(variable(kFirstPass))}}});
    const Expr wanted = present(Slot::grad_hidden) || (present(Slot::grad_weight) || present(Slot::grad_bias));
    if (retains()) program.body.push_back({If{less(0, kept_) && less(0, slot(Slot::num_tokens)), retained_steps()}});
    std::vector<Statement> chunks;
    // What the retained part has left where listed hidden states are to lie is not needed any more.
    if (sm90()) chunks.push_back({If{less(0, slot(Slot::num_tokens)) && less(kept_, spec_.vocab_size), {gather_hidden()}}});
    const Stretch wide{kept_, layout_.wide_chunk, layout_.wide_chunks, slot(Slot::grad_weight) + layout_.wide_dlogits,
                       layout_.even_wide_chunk};
    if (wide.chunks.constant() == nullptr) add_chunks(wide, chunks);
    const Expr rest = kept_ + wide.chunks * wide.width;
    add_chunks({rest, layout_.chunk, ceil_div(Expr(spec_.vocab_size) - rest, layout_.chunk), at(layout_.dlogits), layout_.even_chunk},
               chunks);
    program.body.push_back({If{wanted, std::move(chunks)}});
    if (sm90()) {
        const Expr finishes = listing_ || less(slot(Slot::num_tokens), layout_.sum_rows);
        program.body.push_back({If{finishes && present(Slot::grad_hidden), {scatter_grad_hidden()}}});
    }
    if (spec_.grad_weight_mode == GradMode::write) zero_the_rest(program);
    return program;
}

void BackwardWriter::add_chunks(const Stretch& stretch, std::vector<Statement>& to) {
    stretch_ = stretch;
    std::vector<Statement> chunk;
    if (rounds_weight(spec_)) chunk.push_back(round_weight_launch(spec_, source_, first_column(), column_count(), weight_operand()));
    chunk.push_back({Loop{kRowBlock, layout_.row_blocks, chunk_steps()}});
    std::vector<Statement> one_by_one = {{Loop{kChunk, stretch.chunks, std::move(chunk)}}};
    if (layout_.joined.constant() != nullptr) {  // they never are
        to.push_back(std::move(one_by_one.front()));
        return;
    }
    to.push_back({If{!joined_, std::move(one_by_one)}});
    to.push_back({If{joined_ && less(0, stretch.chunks), joined_steps()}});
}

Statement BackwardWriter::gather_hidden() const {
    LaunchBuilder<GatherRowsParams> launch(source_.kernel("gather_rows"), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    launch.set(&GatherRowsParams::hidden, slot(Slot::hidden))
        .set(&GatherRowsParams::compact, compact_hidden())
        .set(&GatherRowsParams::rows, slot(Slot::num_tokens))
        .set_targets(&GatherRowsParams::targets, 0);
    list(launch, 0);
    return launch.build();
}

Statement BackwardWriter::scatter_grad_hidden() const {
    LaunchBuilder<ScatterRowsParams> launch(source_.kernel("scatter_rows"), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    share(launch, &ScatterRowsParams::share);
    launch.set(&ScatterRowsParams::accumulator, select(less(1, layout_.row_blocks) && !scatters_sum(), 0, sum_at()))
        .set(&ScatterRowsParams::grad_hidden, slot(Slot::grad_hidden))
        .set(&ScatterRowsParams::scalars, at(layout_.scalars))
        .set(&ScatterRowsParams::rows, slot(Slot::num_tokens));
    list(launch, 0);
    return launch.build();
}

Statement BackwardWriter::coefficients(const Expr& block) const {
    const Expr row = from_row(first_row(block));
    const Expr none = equal(slot(Slot::reduction), static_cast<std::int64_t>(ReductionCode::none));
    LaunchBuilder<RowCoefficientsParams> launch(source_.kernel("row_coefficients"), ceil_div(row_count(block), kRowThreads));
    launch.set(&RowCoefficientsParams::class_weight, slot(Slot::class_weight))
        .set(&RowCoefficientsParams::scalars, at(layout_.scalars))
        .set_targets(&RowCoefficientsParams::targets, row)
        .set_list(&RowCoefficientsParams::list, list_, at(layout_.scalars), first_row(block))
        .set_count(&RowCoefficientsParams::count)
        .set(&RowCoefficientsParams::lse, slot(Slot::lse) + row * 4)
        .set(&RowCoefficientsParams::entropy, advanced(slot(Slot::entropy), row, 4))
        .set(&RowCoefficientsParams::grad_loss, advanced(slot(Slot::grad_loss), none * row, 4))
        .set(&RowCoefficientsParams::grad_lse, advanced(slot(Slot::grad_lse), row, 4))
        .set(&RowCoefficientsParams::grad_logprob, advanced(slot(Slot::grad_logprob), row, 4))
        .set(&RowCoefficientsParams::grad_entropy, advanced(slot(Slot::grad_entropy), row, 4))
        .set(&RowCoefficientsParams::coefficients, at(layout_.coefficients))
        .set(&RowCoefficientsParams::row_targets, at(layout_.row_targets))
        .set(&RowCoefficientsParams::rows, row_count(block))
        .set(&RowCoefficientsParams::prepares, prepared_with_rows())
        .set(&RowCoefficientsParams::want_count, counted())
        .set_float(&RowCoefficientsParams::label_smoothing, static_cast<float>(spec_.label_smoothing))
        .set_float(&RowCoefficientsParams::smoothing_per_class,
                   static_cast<float>(spec_.label_smoothing / static_cast<double>(spec_.vocab_size)))
        .set_float(&RowCoefficientsParams::z_loss_weight, static_cast<float>(spec_.z_loss))
        .set_float(&RowCoefficientsParams::absent_grad_loss, spec_.outputs.loss ? 1.0F : 0.0F)
        .set_float(&RowCoefficientsParams::derivative_bound, static_cast<float>(std::abs(spec_.logit_scale)));
    return launch.build();
}

Statement BackwardWriter::grad_bias() const {
    LaunchBuilder<GradBiasParams> launch(source_.kernel("grad_bias"), ceil_div(column_count(), kRowThreads));
    launch.set(&GradBiasParams::bias_partials, at(layout_.bias_partials))
        .set(&GradBiasParams::scalars, at(layout_.scalars))
        .set(&GradBiasParams::accumulator, at(layout_.bias_accumulator))
        .set(&GradBiasParams::grad_bias, slot(Slot::grad_bias) + first_column() * grad_element_)
        .set(&GradBiasParams::ld, stretch_.width)
        .set_list(&GradBiasParams::list, list_, at(layout_.scalars), first_row(variable(kRowBlock)))
        .set(&GradBiasParams::rows, row_count(variable(kRowBlock)))
        .set(&GradBiasParams::block_rows, cuda_path(plan_.path).rows_of_bias_partial(plan_))
        .set(&GradBiasParams::columns, column_count())
        .set(&GradBiasParams::first, equal(variable(kRowBlock), 0))
        .set(&GradBiasParams::last, is_last(kRowBlock, layout_.row_blocks));
    return launch.build();
}

void BackwardWriter::zero_the_rest(LaunchProgram& program) const {
    const std::int64_t weight_bytes = spec_.padded_vocab_size * spec_.hidden_size * grad_element_;
    const Expr no_token = equal(slot(Slot::num_tokens), 0);
    std::vector<Statement> weight;
    weight.push_back({If{no_token, {Statement{MemsetZero{slot(Slot::grad_weight), weight_bytes}}}}});
    if (zeroes_columns(spec_)) {
        const std::int64_t count = (spec_.padded_vocab_size - spec_.vocab_size) * spec_.hidden_size;
        LaunchBuilder<ZeroColumnsParams> launch(source_.kernel("zero_columns"), ceil_div(count, kRowThreads));
        launch.set(&ZeroColumnsParams::data, slot(Slot::grad_weight))
            .set(&ZeroColumnsParams::columns, spec_.padded_vocab_size)
            .set(&ZeroColumnsParams::first_column, spec_.vocab_size)
            .set(&ZeroColumnsParams::rows, spec_.hidden_size);
        weight.push_back(launch.build());
    } else if (spec_.padded_vocab_size > spec_.vocab_size) {
        const std::int64_t kept = spec_.vocab_size * spec_.hidden_size * grad_element_;
        weight.push_back({MemsetZero{slot(Slot::grad_weight) + kept, weight_bytes - kept}});
    }
    program.body.push_back({If{present(Slot::grad_weight), std::move(weight)}});
    if (spec_.bias) {
        const Expr empty = no_token && present(Slot::grad_bias);
        program.body.push_back({If{empty, {Statement{MemsetZero{slot(Slot::grad_bias), spec_.vocab_size * grad_element_}}}}});
    }
}

LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                               const BackwardLayout& layout) {
    return BackwardWriter(spec, device, plan, source, layout).program();
}

}  // namespace flce

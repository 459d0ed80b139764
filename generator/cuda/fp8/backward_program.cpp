#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/fp8/logits_launch.hpp"

namespace flce::fp8 {
namespace {

struct BackwardPassFp8 : BackwardPass {
    const BackwardLayoutFp8& layout;  ///< BackwardPass's, with this path's places
    const Device& device;
    const Gemms& gemms;
    Expr retains;         ///< whether there are retained exponentials
    Expr weight_largest;  ///< address of the bits of the weight's largest number, and so is the next one
    Expr hidden_largest;
    Expr leaves_weight;  ///< whether grad_weight and grad_bias are left for the second of two stages: a shard's with everything retained
    bool smooths;        ///< whether gradients of exponentials lack label smoothing's terms
    SmoothingSums smoothing;

    BackwardPassFp8(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source, const BackwardLayoutFp8& layout)
        : BackwardPass(spec, plan, source, layout),
          layout(layout),
          device(device),
          gemms(gemms_of(plan.path)),
          retains(less(0, layout.retained.columns)),
          weight_largest(workspace_at(layout.largest)),
          hidden_largest(workspace_at(layout.largest) + static_cast<std::int64_t>(offsetof(Fp8Largest, hidden))),
          leaves_weight(is_shard(spec) ? retains && equal(layout.retained.columns, columns) : Expr(0)),
          smooths(spec.label_smoothing > 0),
          smoothing(spec, layout.smoothing) {}

    [[nodiscard]] Expr tokens() const { return slot(Slot::num_tokens); }
};

/// Columns whose exponentials exist, and addresses: [N, pitch] and [columns, token_positions].
struct Columns {
    Expr first;
    Expr count;
    Expr exponentials;
    Expr pitch;
    Expr turned;
};

Statement rows_launch(const BackwardPassFp8& pass) {
    using Params = Fp8RowsParams;
    const BackwardLayoutFp8& layout = pass.layout;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_rows), warps_grid(pass.tokens()));
    launch.set(&Params::hidden, slot(Slot::hidden))
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::retained_powers, select(pass.retains, retained_at(layout.retained.powers), 0))
        .set(&Params::retained_target_logits, retained_at(layout.retained.target_logits))
        .set(&Params::retained_largest, slot(Slot::retained))
        .set(&Params::target_logits, workspace_at(layout.target_logits))
        .set(&Params::powers, workspace_at(layout.powers))
        .set(&Params::factors, workspace_at(layout.factors))
        .set(&Params::largest, workspace_at(layout.largest))
        .set(&Params::rows, pass.tokens())
        .set_float(&Params::derivative, static_cast<float>(pass.spec.logit_scale));
    if (pass.smooths) launch.set(&Params::row_smoothing, workspace_at(layout.row_smoothing));
    if (pass.spec.outputs.entropy) launch.set(&Params::row_shares, workspace_at(layout.row_shares));
    return launch.build();
}

/// Steps behind all chunks, of which logits in e4m3 come; integer sums are those of single rows.
std::vector<Statement> target_dz_steps(const BackwardPassFp8& pass) {
    using Params = Fp8TargetDzParams;
    const BackwardLayoutFp8& layout = pass.layout;
    const Expr logits = workspace_at(layout.target_logits);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_target_dz), ceil_div(pass.tokens(), kRowThreads));
    launch.set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::row_temperatures, pass.spec.temperature ? workspace_at(layout.row_temperatures) : Expr(0))
        .set(&Params::target_logits, logits)
        .set(&Params::target_dz, workspace_at(layout.target_dz))
        .set_transform(&Params::transform, pass.spec)
        .set(&Params::rows, pass.tokens())
        .set_float(&Params::derivative, static_cast<float>(pass.spec.logit_scale));
    std::vector<Statement> steps;
    if (pass.spec.fp8 == Fp8Operands::int8) steps.push_back({If{!pass.retains, {targets_launch(pass.spec, pass.source, logits)}}});
    steps.push_back(launch.build());
    return steps;
}

/// Scales of the weight's rows whose logits are made again, and their largest number: of the retained ones rows_launch has it.
Statement scales_step(const BackwardPassFp8& pass) {
    const BackwardLayoutFp8& layout = pass.layout;
    const Expr& first = layout.retained.columns;
    return scales_launch(pass.spec, pass.source,
                         {.from = weight_row_at(pass.spec, first),
                          .rows = pass.columns - first,
                          .codes = 0,
                          .scales = workspace_at(layout.class_scales) + first * 4,
                          .given_scale = Slot::fp8_weight_scale,
                          .largest = workspace_at(layout.largest),
                          .factors = workspace_at(layout.class_factors) + first * 4});
}

/// Scales of a weight of codes, and its largest number, which forward has not looked for.
Statement given_scales_step(const BackwardPassFp8& pass) {
    return given_scales_launch(pass.source,
                               {.from = slot(Slot::weight),
                                .rows = pass.columns,
                                .codes = 0,
                                .scales = workspace_at(pass.layout.class_scales),
                                .given_scale = Slot::fp8_weight_scale,
                                .largest = select(present(Slot::grad_hidden), workspace_at(pass.layout.largest), 0)},
                               0);
}

/// A product of codes [a.rows, b.rows], and where its result lies.
struct Product {
    MappedMatrix a;
    MappedMatrix b;
    Expr result;
    Expr pitch;  ///< elements from one row of the result to the next
    std::int64_t element_bytes;
};
/// Fields of Fp8GradientOf that differ between the two gradients.
struct GradientFields {
    Expr row_factors;
    Expr largest;
    Expr adds;
    bool smooths = false;  ///< whether there are the fields of SmoothedFp8GradientOf
    Expr hidden_sum{0};
    Expr class_weight{0};
    bool adds_by_threads = false;  ///< whether there are the fields of WithResult
};

template <class Params>
Statement build_gradient(LaunchBuilder<Params> launch, const Product& product, const GradientFields& fields) {
    if (!fields.adds_by_threads) return launch.build();
    LaunchBuilder<WithResult<Params>> with_result(std::move(launch));
    return with_result.set(&WithResult<Params>::result, product.result).build();
}

template <class Matrix>
Statement gradient_launch_of(const BackwardPassFp8& pass, KernelRole kernel, const Product& product, const GradientFields& fields) {
    using Params = Fp8GradientOf<Matrix>;
    const GemmTile& tile = pass.gemms.gradient;
    const Expr& rows = product.a.rows;
    const Expr& columns = product.b.rows;
    LaunchBuilder<Params> launch(pass.source.kernel(kernel), grid_of(pass.gemms, pass.device, tile, rows, columns));
    set_matrix(launch, &Params::a_map, product.a, tile.block_m, 1);
    set_matrix(launch, &Params::b_map, product.b, tile.block_n / pass.gemms.cluster_blocks, 1);
    set_matrix(launch, &Params::result_map, {product.result, columns, rows, product.pitch}, 64, product.element_bytes);
    launch.set(&Params::m, rows)
        .set(&Params::n, columns)
        .set(&Params::k, product.a.columns)
        .set(&Params::row_factors, fields.row_factors)
        .set(&Params::largest, fields.largest)
        .set(&Params::adds, fields.adds);
    if (!fields.smooths) return build_gradient(std::move(launch), product, fields);
    using Smoothed = SmoothedFp8GradientOf<Matrix>;
    LaunchBuilder<Smoothed> smoothed(std::move(launch));
    smoothed.set(&Smoothed::hidden_sum, fields.hidden_sum).set(&Smoothed::class_weight, fields.class_weight);
    return build_gradient(std::move(smoothed), product, fields);
}
Statement gradient_launch(const BackwardPassFp8& pass, KernelRole kernel, const Product& product, const GradientFields& fields) {
    if (pass.gemms.maps) return gradient_launch_of<TensorMap>(pass, kernel, product, fields);
    return gradient_launch_of<PlainMatrix>(pass, kernel, product, fields);
}

/// Both codes of a chunk's weight.
Statement both_codes_launch(const BackwardPassFp8& pass, const Columns& of, const ChunkPlaces& places) {
    using Params = Fp8TurnParams;
    const Expr turned = select(present(Slot::grad_hidden), places.turned_weight, 0);
    LaunchBuilder<Params> launch = turn_launch(pass.spec, pass.source, KernelRole::fp8_both_codes,
                                               {weight_row_at(pass.spec, of.first), of.count, turned, of.pitch, pass.weight_largest});
    launch.set(&Params::row_codes, places.weight_codes).set(&Params::row_factors, workspace_at(pass.layout.class_factors) + of.first * 4);
    return launch.build();
}

/// The weight's columns turned over to `codes`, of rows of `width` positions.
Statement turn_weight_step(const BackwardPassFp8& pass, const Columns& of, const Expr& codes, const Expr& width) {
    LaunchBuilder<Fp8TurnParams> turn = turn_launch(pass.spec, pass.source, KernelRole::fp8_turn_weight,
                                                    {weight_row_at(pass.spec, of.first), of.count, codes, width, pass.weight_largest});
    if (is_quantized(pass.spec)) turn.set(&Fp8TurnParams::factors, workspace_at(pass.layout.class_scales) + of.first * 4);
    return turn.build();
}

/// Makes what logits of a chunk and grad_hidden read of the weight.
Statement chunk_weight_step(const BackwardPassFp8& pass, const Columns& of, const ChunkPlaces& places) {
    if (!is_quantized(pass.spec)) return both_codes_launch(pass, of, places);
    return {If{present(Slot::grad_hidden), {turn_weight_step(pass, of, places.turned_weight, of.pitch)}}};
}

/// grad_hidden's sum over columns whose weight has been turned over.
Statement hidden_step(const BackwardPassFp8& pass, const Columns& of, const Expr& turned_weight, const Expr& width) {
    const BackwardLayoutFp8& layout = pass.layout;
    const Expr positions = round_up(of.count, kFp8ClassGroup);
    return gradient_launch(pass, KernelRole::grad_hidden,
                           {.a = {of.exponentials, positions, pass.tokens(), of.pitch},
                            .b = {turned_weight, positions, pass.spec.hidden_size, width},
                            .result = workspace_at(layout.sum),
                            .pitch = pass.spec.hidden_size,
                            .element_bytes = 4},
                           {.row_factors = workspace_at(layout.factors), .largest = pass.weight_largest, .adds = less(0, of.first)});
}

Expr class_weights_at(const Expr& column) { return advanced(slot(Slot::class_weight), column, 4); }

Statement weight_step(const BackwardPassFp8& pass, const Columns& of) {
    const Spec& spec = pass.spec;
    const Expr positions = token_positions();
    const bool hidden_major = is_hidden_major(spec);
    Product product{.a = {of.turned, positions, of.count, positions},
                    .b = {workspace_at(pass.layout.hidden_turned), positions, spec.hidden_size, positions},
                    .result = slot(Slot::grad_weight) + of.first * ((hidden_major ? 1 : spec.hidden_size) * pass.grad_element_bytes),
                    .pitch = hidden_major ? spec.padded_vocab_size : spec.hidden_size,
                    .element_bytes = pass.grad_element_bytes};
    if (hidden_major) std::swap(product.a, product.b);
    GradientFields fields{.row_factors = 0,
                          .largest = pass.hidden_largest,
                          .adds = spec.grad_weight_mode == GradMode::accumulate ? 1 : 0,
                          .smooths = pass.smooths};
    fields.adds_by_threads = adds_by_threads(pass.gemms, spec);
    if (pass.smooths) {
        fields.hidden_sum = pass.smoothing.hidden_sum;
        fields.class_weight = class_weights_at(of.first);
    }
    return {If{present(Slot::grad_weight), {gradient_launch(pass, KernelRole::grad_weight, product, fields)}}};
}

std::vector<Statement> bias_steps(const BackwardPassFp8& pass, const Columns& of) {
    if (!pass.spec.bias) return {};
    using Params = Fp8BiasParams;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_bias), warps_grid(of.count));
    launch.set(&Params::turned, of.turned)
        .set(&Params::factors, workspace_at(pass.layout.factors))
        .set(&Params::grad_bias, slot(Slot::grad_bias) + of.first * pass.grad_element_bytes)
        .set(&Params::positions, token_positions())
        .set(&Params::columns, of.count)
        .set(&Params::rows, pass.tokens());
    if (pass.smooths) {
        launch.set(&Params::smoothing_total, pass.smoothing.smoothing_total).set(&Params::class_weight, class_weights_at(of.first));
    }
    return {{If{present(Slot::grad_bias), {launch.build()}}}};
}

/// `steps`, which make grad_weight and grad_bias, where they are not left for the second stage.
std::vector<Statement> unless_left(const BackwardPassFp8& pass, std::vector<Statement> steps) {
    if (!is_shard(pass.spec)) return steps;
    return {{If{!pass.leaves_weight, std::move(steps)}}};
}

/// hidden turned over, which grad_weight reads.
Statement turn_hidden_step(const BackwardPassFp8& pass) {
    LaunchBuilder<Fp8TurnParams> turn =
        turn_launch(pass.spec, pass.source, KernelRole::fp8_turn_hidden,
                    {slot(Slot::hidden), pass.tokens(), workspace_at(pass.layout.hidden_turned), token_positions(), pass.hidden_largest});
    turn.set(&Fp8TurnParams::factors, workspace_at(pass.layout.factors));
    return {If{present(Slot::grad_weight), {turn.build()}}};
}

/// grad_weight and grad_bias of the retained columns.
std::vector<Statement> retained_weight_steps(const BackwardPassFp8& pass) {
    const RetainedFp8& retained = pass.layout.retained;
    const Columns all{0, retained.columns, retained_at(retained.exponentials), retained.pitch, retained_at(retained.turned)};
    std::vector<Statement> steps = {weight_step(pass, all)};
    for (Statement& step : bias_steps(pass, all)) steps.push_back(std::move(step));
    return steps;
}

/// Gradients of the retained columns.
Statement retained_steps(const BackwardPassFp8& pass) {
    const BackwardLayoutFp8& layout = pass.layout;
    const RetainedFp8& retained = layout.retained;
    const Expr exponentials = retained_at(retained.exponentials);
    const Expr first = variable(kChunkLoop) * layout.kept.width;
    const Columns chunk{first, min(retained.columns - first, layout.kept.width), exponentials + first, retained.pitch, 0};
    const Expr& turned_weight = layout.kept_places.turned_weight;
    Statement hidden{Loop{
        kChunkLoop,
        layout.kept.count,
        {turn_weight_step(pass, chunk, turned_weight, layout.kept.width), hidden_step(pass, chunk, turned_weight, layout.kept.width)}}};
    // grad_hidden first: what it reads, exponentials or the weight turned over, may lie where grad_weight will.
    std::vector<Statement> steps = {{If{present(Slot::grad_hidden), {std::move(hidden)}}}};
    for (Statement& step : unless_left(pass, retained_weight_steps(pass))) steps.push_back(std::move(step));
    return {If{pass.retains, std::move(steps)}};
}

/// Logits of a chunk again, and their exponentials.
std::vector<Statement> logits_again(const BackwardPassFp8& pass, const Columns& chunk, const ChunkPlaces& places) {
    const Spec& spec = pass.spec;
    const BackwardLayoutFp8& layout = pass.layout;
    LogitsAt at;
    at.first = chunk.first;
    at.columns = at.stored = chunk.count;
    at.hidden_codes = workspace_at(layout.hidden_codes);
    at.row_scales = workspace_at(layout.row_scales);
    at.weight_codes = is_quantized(spec) ? weight_row_at(spec, chunk.first) : places.weight_codes;
    at.column_scales = workspace_at(layout.class_scales) + chunk.first * 4;
    at.powers = workspace_at(layout.powers);
    at.exponentials = chunk.exponentials;
    at.turned = chunk.turned;
    at.pitch = chunk.pitch;
    if (spec.outputs.entropy) at.row_shares = select(present(Slot::grad_entropy), workspace_at(layout.row_shares), 0);
    LaunchBuilder<ForwardParams> launch(pass.source.kernel(KernelRole::forward), logits_grid(pass.gemms, spec, pass.device, chunk.count));
    launch.set(&ForwardParams::bias, slot(Slot::bias))
        .set(&ForwardParams::class_offset, slot(Slot::class_offset))
        .set_targets(&ForwardParams::targets, spec, 0)
        .set(&ForwardParams::target_logits, workspace_at(layout.target_logits))
        .set(&ForwardParams::rows, pass.tokens())
        .set_transform(&ForwardParams::transform, spec);
    if (pass.smooths) launch.set(&ForwardParams::class_weight, slot(Slot::class_weight));
    return {chunk_weight_step(pass, chunk, places), logits_launch(pass.gemms, spec, std::move(launch), at)};
}

/// Gradients of columns whose logits are made again, chunk by chunk.
Statement chunks_loop(const BackwardPassFp8& pass, const Cut& cut, const ChunkPlaces& places) {
    const Expr first = cut.first + variable(kChunkLoop) * cut.width;
    const Columns chunk{first, min(cut.end - first, cut.width), places.exponentials, cut.width, places.turned};
    std::vector<Statement> steps = logits_again(pass, chunk, places);
    steps.push_back({If{present(Slot::grad_hidden), {hidden_step(pass, chunk, places.turned_weight, cut.width)}}});
    steps.push_back(weight_step(pass, chunk));
    for (Statement& step : bias_steps(pass, chunk)) steps.push_back(std::move(step));
    return {Loop{kChunkLoop, cut.count, std::move(steps)}};
}

Statement finish_step(const BackwardPassFp8& pass) {
    using Params = Fp8FinishParams;
    const BackwardLayoutFp8& layout = pass.layout;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::fp8_finish), warps_grid(pass.tokens()));
    launch.set(&Params::sum, workspace_at(layout.sum))
        .set(&Params::weight, slot(Slot::weight))
        .set(&Params::largest, pass.weight_largest)
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::target_dz, workspace_at(layout.target_dz))
        .set(&Params::grad_hidden, slot(Slot::grad_hidden))
        .set(&Params::rows, pass.tokens());
    if (pass.smooths) {
        launch.set(&Params::row_smoothing, workspace_at(layout.row_smoothing)).set(&Params::weight_sum, pass.smoothing.weight_sum);
    }
    if (!is_quantized(pass.spec)) return {If{present(Slot::grad_hidden), {launch.build()}}};
    LaunchBuilder<Fp8FinishOfCodesParams> of_codes(std::move(launch));
    of_codes.set(&Fp8FinishOfCodesParams::class_scales, slot(Slot::weight_scale));
    return {If{present(Slot::grad_hidden), {of_codes.build()}}};
}

/// The targets' elements of grad_weight and grad_bias.
Statement target_rows_step(const BackwardPassFp8& pass) {
    const BackwardLayoutFp8& layout = pass.layout;
    const Expr n = pass.tokens();
    LaunchBuilder<Fp8OrderParams> order(pass.source.kernel(KernelRole::fp8_order), ceil_div(n, kRowThreads / 32 * 4));
    order.set(&Fp8OrderParams::row_targets, workspace_at(layout.row_targets))
        .set(&Fp8OrderParams::order, workspace_at(layout.order))
        .set(&Fp8OrderParams::rows, n);
    using Params = Fp8TargetRowsParams;
    LaunchBuilder<Params> rows(pass.source.kernel(KernelRole::fp8_target_rows), warps_grid(n), (pass.spec.hidden_size + 255) / 256);
    rows.set(&Params::hidden, slot(Slot::hidden))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::target_dz, workspace_at(layout.target_dz))
        .set(&Params::order, workspace_at(layout.order))
        .set(&Params::grad_weight, slot(Slot::grad_weight))
        .set(&Params::grad_bias, slot(Slot::grad_bias))
        .set(&Params::rows, n);
    return {If{present(Slot::grad_weight) || present(Slot::grad_bias), {order.build(), rows.build()}}};
}

/// Label smoothing's sums.
std::vector<Statement> smoothing_of(const BackwardPassFp8& pass, const SmoothingTerms& terms) {
    if (!is_quantized(pass.spec)) return smoothing_steps(pass, terms, pass.spec.bias);
    using Params = SmoothingSumsOfCodesParams;
    LaunchBuilder<Params> sums(smoothing_sums_launch(pass, terms));
    sums.set(&Params::class_scales, slot(Slot::weight_scale));
    return {sums.build(), smoothing_totals_step(pass, terms, pass.spec.bias)};
}

/// Everything of a call that has tokens, classes and gradients, but for what is left for the second stage.
std::vector<Statement> gradient_steps(const BackwardPassFp8& pass) {
    const BackwardLayoutFp8& layout = pass.layout;
    std::vector<Statement> steps = coefficient_steps(pass);
    steps.push_back({MemsetZero{workspace_at(layout.largest), static_cast<std::int64_t>(sizeof(Fp8Largest))}});
    steps.push_back(rows_launch(pass));
    if (pass.smooths) {
        const SmoothingTerms terms{workspace_at(layout.row_smoothing), pass.columns, pass.smoothing};
        std::ranges::move(smoothing_of(pass, terms), std::back_inserter(steps));
    }
    std::ranges::move(unless_left(pass, {turn_hidden_step(pass)}), std::back_inserter(steps));
    if (is_quantized(pass.spec)) steps.push_back(given_scales_step(pass));
    steps.push_back(retained_steps(pass));
    std::vector<Statement> of_again;
    if (!is_quantized(pass.spec)) of_again.push_back(scales_step(pass));
    of_again.push_back(hidden_codes_launch(pass.spec, pass.source, workspace_at(layout.hidden_codes), workspace_at(layout.row_scales)));
    steps.push_back({If{less(layout.retained.columns, pass.columns), std::move(of_again)}});
    for (std::size_t i = 0; i < layout.again.size(); ++i) steps.push_back(chunks_loop(pass, layout.again[i], layout.again_places[i]));
    std::ranges::move(target_dz_steps(pass), std::back_inserter(steps));
    steps.push_back(finish_step(pass));
    std::ranges::move(unless_left(pass, {target_rows_step(pass)}), std::back_inserter(steps));
    return steps;
}

}  // namespace

// Chunks need their columns' logits for both gradients, so that grad_weight goes along with grad_hidden there.
LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                               const BackwardLayoutFp8& layout) {
    const BackwardPassFp8 pass(spec, device, plan, source, layout);
    const Expr any = any_gradient() && less(0, pass.tokens());
    std::vector<Statement> body = {{If{any, with_columns(spec, gradient_steps(pass))}}};
    if (is_shard(spec)) body.push_back(zero_without_class(pass));
    std::ranges::move(zero_the_rest(pass), std::back_inserter(body));
    LaunchProgram program{.body = {{If{does_first_stage(), std::move(body)}}}, .variable_count = kBackwardLoops};
    if (!is_shard(spec)) return program;
    std::vector<Statement> left = {turn_hidden_step(pass)};
    std::ranges::move(retained_weight_steps(pass), std::back_inserter(left));
    left.push_back(target_rows_step(pass));
    program.body.push_back({If{does_rest() && (pass.leaves_weight && any), std::move(left)}});
    return program;
}

}  // namespace flce::fp8

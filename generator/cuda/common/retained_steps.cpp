#include "generator/cuda/common/retained_steps.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace flce {
namespace {

/// A number near each row's logits, to which exponentials are relative. Hidden states of listed tokens are brought together, too.
Statement references_launch(const ForwardPass& pass, const RetainedLaunch& retained, const Expr& compact) {
    using Params = ReferencesParams;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::references), ceil_div(rows.count, kRowThreads / 32));
    launch.set(&Params::hidden, hidden_row_at(pass.spec, rows.base))
        .set(&Params::weight, slot(Slot::weight))
        .set(&Params::bias, slot(Slot::bias))
        .set_targets(&Params::targets, pass.spec, rows.base)
        .set_teacher(&Params::teacher, pass.spec, rows.base)
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::references, retained.references)
        .set(&Params::compact, compact)
        .set(&Params::temperature, temperatures_at(rows))
        .set_transform(&Params::transform, pass.spec)
        .set(&Params::rows, rows.count)
        .set(&Params::tokens, slot(Slot::num_tokens));
    return launch.build();
}

}  // namespace

RetainedLaunch::RetainedLaunch(const RetainedLayout& layout, const LaunchRows& rows)
    : layout(layout),
      references(retained_at(layout.references) + rows.first * 4),
      target_logits(retained_at(layout.target_logits) + rows.first * 4),
      stale(retained_at(layout.stale) + floor_div(rows.first, kOutputRows) * 4) {}

Expr RetainedLaunch::if_retained(const Expr& address) const { return select(less(0, layout.columns), address, 0); }

std::vector<Statement> retaining_steps(const ForwardPass& pass, const RetainedLaunch& retained, const Expr& compact,
                                       const std::function<std::vector<Statement>(bool again)>& gemm) {
    const Expr any = less(0, retained.layout.columns);
    std::vector<Statement> steps = pass.named.empty() ? teacher_logits_steps(pass) : pass.named;
    steps.push_back({If{any, {references_launch(pass, retained, compact)}}});
    std::ranges::move(with_columns(pass.spec, gemm(false)), std::back_inserter(steps));
    steps.push_back(row_outputs_launch(pass, {retained.if_retained(retained.references), retained.if_retained(retained.target_logits),
                                              retained.if_retained(retained.stale)}));
    // Exponentials of rows whose logits turned out to be far above their reference. There are hardly ever any, and then the launch ends at
    // once. No output comes of it.
    steps.push_back({If{any, gemm(true)}});
    return steps;
}

LaunchBuilder<RetainedRowsParams> retained_rows_launch(const BackwardPass& pass, const RetainedPlaces& places, const RowBlock& rows,
                                                       const Expr& scaled_hidden) {
    using Params = RetainedRowsParams;
    const RetainedLayout& retained = places.layout;
    const BackwardLayout& layout = pass.layout;
    const std::int64_t row_bytes = pass.spec.hidden_size * pass.element_bytes;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::retained_rows),
                                 ceil_div(rows.count, kRowThreads / pass.source.named_threads));
    launch.set(&Params::hidden, slot(Slot::hidden) + caller_row(pass, rows.first) * row_bytes)
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::scalars, scalars_at())
        .set(&Params::references, retained_at(retained.references) + rows.first * 4)
        .set(&Params::target_logits, retained_at(retained.target_logits) + rows.first * 4)
        .set(&Params::exponentials,
             retained_at(retained.exponentials) + rows.first * (cuda_path(pass.plan.path).retained_columns * pass.element_bytes))
        .set(&Params::scaled_hidden, advanced(scaled_hidden, rows.first, row_bytes))
        .set(&Params::row_scales, retained_at(retained.row_scales) + rows.first * 4)
        .set(&Params::row_smoothing, retained_at(retained.row_smoothing) + rows.first * 4)
        .set(&Params::row_temperatures, workspace_at(layout.row_temperatures))
        .set(&Params::row_teacher_weights, pass.spec.teacher_top_k > 0 ? workspace_at(layout.row_teacher_weights) : Expr(0))
        .set_teacher(&Params::teacher, pass.spec, caller_row(pass, rows.first))
        .set_slope(&Params::slope, {.scale = 1.0F, .inverse_softcap = logit_slope(pass.spec).inverse_softcap})
        .set_transform(&Params::transform, pass.spec)
        .set(&Params::counters, workspace_at(places.counters))
        .set(&Params::counter_count, places.counter_count)
        .set(&Params::block_bytes, retained.block_bytes)
        .set(&Params::rows, rows.count)
        .set(&Params::columns, retained.columns)
        .set_float(&Params::derivative, static_cast<float>(pass.spec.logit_scale));
    return launch;
}

Statement retained_rows_step(const BackwardPass& pass, const std::function<Statement(const RowBlock& rows)>& rows_launch) {
    const RowBlock rows = row_block(pass, kRowBlockLoop);
    std::vector<Statement> of_rows;
    of_rows.push_back({If{less(1, pass.layout.row_blocks), {coefficients_launch(pass, rows)}}});
    of_rows.push_back(rows_launch(rows));
    return {Loop{kRowBlockLoop, pass.layout.row_blocks, std::move(of_rows)}};
}

SmoothingSums::SmoothingSums(const Spec& spec, const Expr& smoothing) {
    const std::int64_t bytes = spec.hidden_size * 4;
    weight_sum = workspace_at(smoothing);
    hidden_sum = weight_sum + bytes;
    weight_sums = hidden_sum + bytes;
    hidden_sums = weight_sums + kSmoothingParts * bytes;
    smoothing_total = hidden_sums + kSmoothingParts * bytes;
}

SmoothingTerms retained_smoothing(const BackwardPass& pass, const RetainedPlaces& places) {
    return {retained_at(places.layout.row_smoothing), places.layout.columns, SmoothingSums(pass.spec, places.smoothing)};
}

LaunchBuilder<SmoothingSumsParams> smoothing_sums_launch(const BackwardPass& pass, const SmoothingTerms& terms) {
    const SmoothingSums& at = terms.sums;
    LaunchBuilder<SmoothingSumsParams> sums(pass.source.kernel(KernelRole::smoothing_sums), 2 * kSmoothingParts);
    sums.set(&SmoothingSumsParams::weight, slot(Slot::weight))
        .set(&SmoothingSumsParams::hidden, slot(Slot::hidden))
        .set(&SmoothingSumsParams::class_weight, slot(Slot::class_weight))
        .set(&SmoothingSumsParams::row_smoothing, terms.row_smoothing)
        .set(&SmoothingSumsParams::weight_sums, at.weight_sums)
        .set(&SmoothingSumsParams::hidden_sums, at.hidden_sums)
        .set_list(&SmoothingSumsParams::list, pass.list, 0)
        .set(&SmoothingSumsParams::columns, terms.columns)
        .set(&SmoothingSumsParams::rows, slot(Slot::num_tokens));
    return sums;
}

Statement smoothing_totals_step(const BackwardPass& pass, const SmoothingTerms& terms, bool of_bias) {
    const SmoothingSums& at = terms.sums;
    LaunchBuilder<SmoothingTotalsParams> totals(pass.source.kernel(KernelRole::smoothing_totals),
                                                2 * ((pass.spec.hidden_size + 31) / 32) + (of_bias ? 1 : 0));
    totals.set(&SmoothingTotalsParams::weight_sums, at.weight_sums)
        .set(&SmoothingTotalsParams::hidden_sums, at.hidden_sums)
        .set(&SmoothingTotalsParams::weight_sum, at.weight_sum)
        .set(&SmoothingTotalsParams::hidden_sum, at.hidden_sum);
    if (of_bias) {
        totals.set(&SmoothingTotalsParams::row_smoothing, terms.row_smoothing)
            .set(&SmoothingTotalsParams::smoothing_total, at.smoothing_total)
            .set_list(&SmoothingTotalsParams::list, pass.list, 0)
            .set(&SmoothingTotalsParams::rows, slot(Slot::num_tokens));
    }
    return totals.build();
}

std::vector<Statement> smoothing_steps(const BackwardPass& pass, const SmoothingTerms& terms, bool of_bias) {
    return {smoothing_sums_launch(pass, terms).build(), smoothing_totals_step(pass, terms, of_bias)};
}

Statement retained_bias_launch(const BackwardPass& pass, const RetainedLayout& retained) {
    using Params = RetainedBiasParams;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::retained_bias), ceil_div(retained.columns, kBiasColumns));
    launch.set(&Params::exponentials, retained_at(retained.exponentials))
        .set(&Params::row_scales, retained_at(retained.row_scales))
        .set(&Params::row_smoothing, retained_at(retained.row_smoothing))
        .set(&Params::class_weight, slot(Slot::class_weight))
        .set(&Params::scalars, scalars_at())
        .set(&Params::grad_bias, slot(Slot::grad_bias))
        .set_list(&Params::list, pass.list, 0)
        .set(&Params::block_bytes, retained.block_bytes)
        .set(&Params::rows, slot(Slot::num_tokens))
        .set(&Params::columns, retained.columns);
    return launch.build();
}

}  // namespace flce

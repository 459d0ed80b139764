#include "generator/cuda/common/forward_steps.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/prepare.hpp"
#include "generator/shard_layout.hpp"
#include "templates/common/divergence_math.cuh"

namespace flce {
namespace {

/// Whether the call wants losses token by token.
Expr loss_of_each() { return reduces_by(ReductionCode::none); }

/// Whether one block of row_outputs has every token, so that it can write the scalar loss itself: a launch less.
Expr one_block() { return less(slot(Slot::num_tokens), kOutputRows + 1); }

/// Sums of a launch's rows over all columns of the vocabulary so far: one part. Where the weight is rounded there are sums of all tokens.
Expr running_at(const ForwardPass& pass) {
    return workspace_at(pass.layout.running) + (rounds_weight(pass.spec) ? pass.rows.first * 4 : Expr(0));
}

/// Where the weight is rounded, target logits of all tokens stay from one stretch to the next; else only target logits of a launch do.
Expr target_logits_at(const ForwardPass& pass) {
    return workspace_at(pass.layout.target_logits) + (rounds_weight(pass.spec) ? pass.rows.first * 4 : Expr(0));
}

Statement merge_stretch_launch(const ForwardPass& pass) {
    const ForwardLayout& layout = pass.layout;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<MergeStretchParams> launch(pass.source.kernel(KernelRole::merge_stretch), ceil_div(rows.count, kRowThreads));
    launch.set(&MergeStretchParams::partials, workspace_at(layout.partials))
        .set(&MergeStretchParams::running, running_at(pass))
        .set(&MergeStretchParams::scalars, scalars_at())
        .set_list(&MergeStretchParams::list, pass.list, rows.first)
        .set(&MergeStretchParams::partial_rows, layout.partial_rows)
        .set(&MergeStretchParams::running_rows, layout.running_rows)
        .set(&MergeStretchParams::rows, rows.count)
        .set(&MergeStretchParams::splits, pass.splits)
        .set(&MergeStretchParams::first, equal(variable(kStretchLoop), 0));
    return launch.build();
}

LaunchRows rows_of_launch(const ForwardLayout& layout) {
    const Expr first = variable(kRowsLoop) * layout.rows;
    return {first, min(slot(Slot::num_tokens) - first, layout.rows), select(layout.listing, 0, first)};
}

}  // namespace

ForwardPass::ForwardPass(const Spec& spec, const Plan& plan, const CudaSource& source, const ForwardLayout& layout)
    : spec(spec),
      plan(plan),
      source(source),
      layout(layout),
      list(select(layout.listing, workspace_at(layout.list), 0)),
      rows(rows_of_launch(layout)),
      columns{0, vocab_columns(spec)} {
    if (!rounds_weight(spec)) return;
    columns.first = variable(kStretchLoop) * layout.stretch;
    columns.count = min(vocab_columns(spec) - columns.first, layout.stretch);
}

int forward_loops(const Spec& spec) noexcept { return rounds_weight(spec) ? 2 : 1; }

Expr temperatures_at(const LaunchRows& rows) { return advanced(slot(Slot::temperature), rows.base, 4); }

RowNumbers row_numbers_at(const LaunchRows& rows) { return {temperatures_at(rows), advanced(slot(Slot::row_group), rows.base, 4)}; }

Expr hidden_row_at(const Spec& spec, const Expr& row) {
    return slot(Slot::hidden) + row * (spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype)));
}

Expr weight_at(const ForwardPass& pass) { return rounds_weight(pass.spec) ? workspace_at(pass.layout.rounded_weight) : slot(Slot::weight); }

LaunchBuilder<ForwardParams> forward_launch(const ForwardPass& pass, KernelRole kernel, const Expr& grid_x, const Expr& grid_y) {
    const ForwardLayout& layout = pass.layout;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<ForwardParams> launch(pass.source.kernel(kernel), grid_x, grid_y);
    launch.set(&ForwardParams::hidden, hidden_row_at(pass.spec, rows.base))
        .set(&ForwardParams::weight, weight_at(pass))
        .set(&ForwardParams::bias, slot(Slot::bias))
        .set(&ForwardParams::class_weight, slot(Slot::class_weight))
        .set(&ForwardParams::class_offset, slot(Slot::class_offset))
        .set_targets(&ForwardParams::targets, pass.spec, rows.base)
        .set(&ForwardParams::partials, workspace_at(layout.partials))
        .set(&ForwardParams::target_logits, target_logits_at(pass))
        .set(&ForwardParams::partial_rows, layout.partial_rows)
        .set(&ForwardParams::rows, rows.count)
        .set(&ForwardParams::splits, pass.splits)
        .set_transform(&ForwardParams::transform, pass.spec);
    return launch;
}

LaunchBuilder<TeacherLogitsParams> teacher_logits_launch(const ForwardPass& pass, KernelRole kernel) {
    using Params = TeacherLogitsParams;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<Params> launch(pass.source.kernel(kernel), rows.count);
    launch.set(&Params::hidden, hidden_row_at(pass.spec, rows.base))
        .set(&Params::weight, slot(Slot::weight))
        .set(&Params::bias, slot(Slot::bias))
        .set(&Params::class_offset, slot(Slot::class_offset))
        .set_targets(&Params::targets, pass.spec, rows.base)
        .set_teacher(&Params::teacher, pass.spec, rows.base)
        .set(&Params::invalid_label, slot(Slot::invalid_label))
        .set(&Params::temperature, temperatures_at(rows))
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::first_row, rows.base)
        .set_transform(&Params::transform, pass.spec);
    return launch;
}

std::vector<Statement> teacher_logits_steps(const ForwardPass& pass) {
    if (pass.spec.teacher_top_k == 0) return {};
    return {teacher_logits_launch(pass, KernelRole::teacher_logits).build()};
}

namespace {

/// Sets the addresses at which row_outputs or merge writes outputs of a launch's rows, and their parts of the loss.
template <class Params>
void set_outputs(LaunchBuilder<Params>& launch, const Spec& spec, const LaunchRows& rows, const Expr& partials, const ClassRange& classes) {
    const Expr each = loss_of_each();
    const Expr scalar_here = and_not(one_block(), each);
    const Expr loss_partials = workspace_at(partials) + floor_div(rows.first, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial));
    launch.set_targets(&Params::targets, spec, rows.base, classes)
        .set(&Params::token_weight, advanced(slot(Slot::token_weight), rows.base, 4))
        .set(&Params::temperature, temperatures_at(rows))
        .set_teacher(&Params::teacher, spec, rows.base, classes)
        .set(&Params::loss, select(each, advanced(slot(Slot::loss), rows.base, 4), 0))
        .set(&Params::z_loss, select(each, advanced(slot(Slot::z_loss), rows.base, 4), 0))
        .set(&Params::lse, slot(Slot::lse) + rows.base * 4)
        .set(&Params::logprobs, advanced(slot(Slot::logprobs), rows.base, 4))
        .set(&Params::entropy, advanced(slot(Slot::entropy), rows.base, 4))
        .set(&Params::log_sum_sq_probs, advanced(slot(Slot::log_sum_sq_probs), rows.base, 4))
        .set(&Params::top1, advanced(slot(Slot::top1), rows.base, 8))
        .set(&Params::top_logprobs, advanced(slot(Slot::top_logprobs), rows.base, 4 * spec.top_k))
        .set(&Params::top_ids, advanced(slot(Slot::top_ids), rows.base, 8 * spec.top_k))
        .set(&Params::loss_partials, select(each || one_block(), 0, loss_partials))
        .set(&Params::scalar_loss, select(scalar_here, slot(Slot::loss), 0))
        .set(&Params::scalar_z_loss, select(scalar_here, slot(Slot::z_loss), 0))
        .set_count(&Params::count)
        .set(&Params::invalid_label, slot(Slot::invalid_label))
        .set(&Params::first_row, rows.base)
        .set(&Params::rows, rows.count)
        .set_float(&Params::label_smoothing, static_cast<float>(spec.label_smoothing))
        .set_float(&Params::smoothing_per_class, static_cast<float>(spec.label_smoothing / static_cast<double>(whole_vocab_size(spec))))
        .set_float(&Params::z_loss_weight, static_cast<float>(spec.z_loss))
        .set(&Params::dft, spec.dft ? 1 : 0)
        .set_float(&Params::hard_weight, static_cast<float>(spec.hard_weight));
}

/// Sets the addresses of forward's sums of a launch's rows.
template <class Params>
void set_found(LaunchBuilder<Params>& launch, const ForwardPass& pass, const RetainedRowsAt& retained) {
    const ForwardLayout& layout = pass.layout;
    const LaunchRows& rows = pass.rows;
    const bool running = layout.sums_run;
    const Expr partials = running ? running_at(pass) : workspace_at(layout.partials);
    launch.set(&Params::found, &SplitSumsParams::partials, partials)
        .set(&Params::found, &SplitSumsParams::target_logits, target_logits_at(pass))
        .set(&Params::found, &SplitSumsParams::scalars, scalars_at())
        .set(&Params::found, &SplitSumsParams::references, retained.references)
        .set(&Params::found, &SplitSumsParams::retained_target_logits, retained.target_logits)
        .set(&Params::found, &SplitSumsParams::stale, retained.stale)
        .set(&Params::found, &SplitSumsParams::partial_rows, running ? layout.running_rows : layout.partial_rows)
        .set(&Params::found, &SplitSumsParams::splits, running ? Expr(1) : pass.splits)
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::class_weight, slot(Slot::class_weight));
}

Statement shard_sums_launch(const ForwardPass& pass, const RetainedRowsAt& retained) {
    using Params = ShardSumsParams;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::shard_sums), ceil_div(rows.count, kOutputRows));
    set_found(launch, pass, retained);
    launch.set_targets(&Params::targets, pass.spec, rows.base)
        .set(&Params::temperature, temperatures_at(rows))
        .set(&Params::sums, slot(Slot::partial_sums) + rows.base * 4)
        .set(&Params::ld, slot(Slot::num_tokens))
        .set(&Params::rows, rows.count)
        .set(&Params::top_k, pass.spec.teacher_top_k);
    return launch.build();
}

/// The scalar loss of a pass, where no block has written it.
Statement reduce_loss_launch(const CudaSource& source, const Expr& partials) {
    LaunchBuilder<ReduceLossParams> launch(source.kernel(KernelRole::reduce_loss), Expr(1));
    launch.set(&ReduceLossParams::loss_partials, workspace_at(partials))
        .set(&ReduceLossParams::loss, slot(Slot::loss))
        .set(&ReduceLossParams::z_loss, slot(Slot::z_loss))
        .set_count(&ReduceLossParams::count)
        .set(&ReduceLossParams::blocks, ceil_div(slot(Slot::num_tokens), kOutputRows));
    // A call without tokens has no block either.
    return {If{and_not(equal(slot(Slot::num_tokens), 0) || !one_block(), loss_of_each()), {launch.build()}}};
}

}  // namespace

Statement row_outputs_launch(const ForwardPass& pass, const RetainedRowsAt& retained) {
    if (is_shard(pass.spec)) return shard_sums_launch(pass, retained);
    LaunchBuilder<RowOutputsParams> launch(pass.source.kernel(KernelRole::row_outputs), ceil_div(pass.rows.count, kOutputRows));
    set_found(launch, pass, retained);
    set_outputs(launch, pass.spec, pass.rows, pass.layout.loss_partials, all_classes(pass.spec));
    return launch.build();
}

Statement top_classes_launch(const ForwardPass& pass, const TopClassesAt& at) {
    using Params = TopClassesParams;
    const Spec& spec = pass.spec;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::top_classes), ceil_div(rows.count, kTopThreads / 32));
    launch.set(&Params::keys, at.keys)
        .set(&Params::states, at.states)
        .set(&Params::dense, at.dense)
        .set(&Params::kept, at.kept)
        .set(&Params::bounds, at.bounds)
        .set(&Params::running, pass.layout.sums_run ? running_at(pass) : Expr(0))
        .set(&Params::running_rows, pass.layout.running_rows)
        .set(&Params::partials, workspace_at(pass.layout.partials))
        .set(&Params::scalars, scalars_at())
        .set_targets(&Params::targets, spec, rows.base)
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::temperature, temperatures_at(rows))
        .set(&Params::logprobs, advanced(slot(Slot::top_logprobs), rows.base, 4 * spec.top_k))
        .set(&Params::ids, advanced(slot(Slot::top_ids), rows.base, 8 * spec.top_k))
        .set(&Params::shard_sums, advanced(slot(Slot::partial_sums), rows.base, 4))
        .set(&Params::ld, slot(Slot::num_tokens))
        .set(&Params::partial_rows, pass.layout.partial_rows)
        .set(&Params::rows, rows.count)
        .set(&Params::splits, pass.splits)
        .set(&Params::first_field, shard_fields(spec).top_logits)
        .set(&Params::dense_columns, at.columns)
        .set(&Params::kept_before, at.has_kept)
        .set(&Params::last, at.last ? 1 : 0);
    return launch.build();
}

namespace {

/// Where sums of a divergence lie: parts of a launch's rows, or of all shards.
struct DivergenceParts {
    Expr partials;
    Expr count;
    Expr stride;  ///< numbers from one part to the next
    Expr rows;    ///< and from one field to the next
};

Statement divergence_outputs_launch(const Spec& spec, const CudaSource& source, const LaunchRows& rows, const Expr& loss_partials,
                                    const DivergenceParts& parts, bool mixture) {
    using Params = DivergenceOutputsParams;
    const bool last = mixture || divergence_form(spec.divergence_beta) != kMixture;
    LaunchBuilder<Params> launch(source.kernel(KernelRole::divergence_outputs), ceil_div(rows.count, kOutputRows));
    set_outputs(launch, spec, rows, loss_partials, all_classes(spec));
    launch.set(&Params::partials, parts.partials)
        .set(&Params::split_stride, parts.stride)
        .set(&Params::partial_rows, parts.rows)
        .set(&Params::splits, parts.count)
        .set(&Params::mixture, mixture ? 1 : 0)
        .set(&Params::last, last ? 1 : 0)
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + rows.base * 4)
        .set(&Params::teacher_entropy, advanced(slot(Slot::teacher_entropy), rows.base, 4))
        .set(&Params::student_divergence, slot(Slot::student_divergence) + rows.base * 4);
    return launch.build();
}

Statement divergence_shard_sums_launch(const ForwardPass& pass, bool mixture) {
    using Params = DivergenceShardSumsParams;
    const LaunchRows& rows = pass.rows;
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::divergence_shard_sums), ceil_div(rows.count, kOutputRows));
    launch.set(&Params::partials, workspace_at(pass.layout.partials))
        .set_targets(&Params::targets, pass.spec, rows.base)
        .set(&Params::temperature, temperatures_at(rows))
        .set(&Params::sums, slot(Slot::partial_sums) + rows.base * 4)
        .set(&Params::ld, slot(Slot::num_tokens))
        .set(&Params::partial_rows, pass.layout.partial_rows)
        .set(&Params::rows, rows.count)
        .set(&Params::splits, pass.splits)
        .set(&Params::mixture, mixture ? 1 : 0);
    return launch.build();
}

}  // namespace

Statement divergence_outputs_launch(const ForwardPass& pass, bool mixture) {
    if (is_shard(pass.spec)) return divergence_shard_sums_launch(pass, mixture);
    const std::int64_t fields = (mixture ? sizeof(MixtureTerm) : sizeof(DivergenceSums)) / sizeof(float);
    const Expr& rows = pass.layout.partial_rows;
    return divergence_outputs_launch(pass.spec, pass.source, pass.rows, pass.layout.loss_partials,
                                     {workspace_at(pass.layout.partials), pass.splits, rows * fields, rows}, mixture);
}

std::vector<Statement> with_columns(const Spec& spec, std::vector<Statement> steps) {
    if (!is_shard(spec)) return steps;
    return {{If{less(0, vocab_columns(spec)), std::move(steps)}}};
}

std::vector<Statement> for_all_rows(const ForwardPass& pass, std::vector<Statement> steps) {
    std::vector<Statement> body = {{Loop{kRowsLoop, pass.layout.launches, std::move(steps)}}};
    if (!is_shard(pass.spec)) body.push_back(reduce_loss_launch(pass.source, pass.layout.loss_partials));  // else merge has the loss
    return body;
}

std::vector<Statement> outputs_of_gemm(const ForwardPass& pass, std::vector<Statement> gemm, std::vector<Statement> before) {
    std::vector<Statement> body;
    std::vector<Statement> steps;
    if (rounds_weight(pass.spec)) {
        gemm.push_back(merge_stretch_launch(pass));
        std::vector<Statement> of_stretch;
        of_stretch.push_back(round_weight_launch(pass.spec, pass.source, pass.columns.first, pass.columns.count, weight_at(pass)));
        of_stretch.push_back({Loop{kRowsLoop, pass.layout.launches, std::move(gemm)}});
        body.push_back({Loop{kStretchLoop, pass.layout.stretches, std::move(of_stretch)}});
    } else {
        steps = pass.named;
        std::ranges::move(with_columns(pass.spec, std::move(gemm)), std::back_inserter(steps));
    }
    if (pass.named.empty()) std::ranges::move(teacher_logits_steps(pass), std::back_inserter(steps));
    std::ranges::move(before, std::back_inserter(steps));
    steps.push_back(row_outputs_launch(pass, {}));
    std::ranges::move(for_all_rows(pass, std::move(steps)), std::back_inserter(body));
    return body;
}

namespace {

constexpr std::int64_t kMostMergeRows = std::int64_t{1} << 30;  // rows of a launch

LaunchRows merge_rows() {
    const Expr first = variable(kRowsLoop) * kMostMergeRows;
    return {first, min(slot(Slot::num_tokens) - first, kMostMergeRows), first};
}

/// Outputs of a launch's rows from all shards' sums.
std::vector<Statement> merge_steps(const Spec& spec, const CudaSource& source) {
    using Params = MergeShardsParams;
    const LaunchRows rows = merge_rows();
    const ShardFields fields = shard_fields(spec);
    const Expr sums = slot(Slot::all_partial_sums) + rows.base * 4;
    const Expr stride = slot(Slot::num_tokens) * fields.count;
    if (has_teacher_head(spec)) {
        const DivergenceParts parts{sums, slot(Slot::num_shards), stride, slot(Slot::num_tokens)};
        const Expr mixture = equal(slot(Slot::walk), static_cast<std::int64_t>(WalkCode::mixture));
        std::vector<Statement> steps = {{If{!mixture, {divergence_outputs_launch(spec, source, rows, 0, parts, false)}}}};
        if (divergence_form(spec.divergence_beta) == kMixture) {
            steps.push_back({If{mixture, {divergence_outputs_launch(spec, source, rows, 0, parts, true)}}});
        }
        return steps;
    }
    LaunchBuilder<Params> launch(source.kernel(KernelRole::merge_shards), ceil_div(rows.count, kOutputRows));
    set_outputs(launch, spec, rows, 0, all_classes(spec));
    launch.set(&Params::sums, sums)
        .set(&Params::target_class_weight, advanced(slot(Slot::target_class_weight), rows.base, 4))
        .set(&Params::class_weight_total, slot(Slot::class_weight_total))
        .set(&Params::ld, slot(Slot::num_tokens))
        .set(&Params::stride, stride)
        .set(&Params::shards, slot(Slot::num_shards))
        .set(&Params::top_field, fields.top_logits);
    return {launch.build()};
}

/// Outputs from all shards' sums; empty where the spec is not a shard's. The workspace has parts of the loss alone.
LaunchProgram merge_program(const Spec& spec, const CudaSource& source) {
    if (!is_shard(spec)) return {};
    LaunchProgram program{.body = {}, .variable_count = kRowsLoop + 1};
    program.body.push_back({Loop{kRowsLoop, ceil_div(slot(Slot::num_tokens), kMostMergeRows), merge_steps(spec, source)}});
    const bool twice = has_teacher_head(spec) && divergence_form(spec.divergence_beta) == kMixture;
    const Expr has_loss = twice ? equal(slot(Slot::walk), static_cast<std::int64_t>(WalkCode::mixture)) : Expr(1);
    program.body.push_back({If{has_loss, {reduce_loss_launch(source, 0)}}});
    if (shard_fields(spec).class_weight_total >= 0) {  // a row of merge writes it, but there may be no row
        program.body.push_back({If{equal(slot(Slot::num_tokens), 0), {Statement{MemsetZero{slot(Slot::class_weight_total), 4}}}}});
    }
    return program;
}

}  // namespace

CudaProgram program_of(const Spec& spec, const CudaSource& source) {
    CudaProgram program{.units = source.units, .options = source.options, .kernels = source.kernels};
    program.merge = merge_program(spec, source);
    const Expr loss_bytes = ceil_div(slot(Slot::num_tokens), kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial));
    if (is_shard(spec)) program.merge_workspace_bytes = round_up(loss_bytes, kWorkspaceAlignment);
    return program;
}

}  // namespace flce

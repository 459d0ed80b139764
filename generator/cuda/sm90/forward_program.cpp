#include "generator/cuda/sm90/forward_program.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/sm90/layout.hpp"
#include "generator/cuda/sm90/maps.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "templates/sm90/params.cuh"

namespace flce::sm90 {
namespace {

/// Partial sums of a row: only the device knows how many (PassScalars::splits).
constexpr std::int64_t kDeviceSplits = 0;

/// One of the GEMM's kernels, and how a launch of it divides its work.
struct ForwardKernel {
    KernelRole role;
    ForwardShape shape;
    ForwardGrid grid;
    Expr takes;  ///< whether the kernel is for this number of tokens, and for this amount of retained memory
};

/// Whether `prepare` runs before: for sums over the class weights, or where there are tokens enough for lists of rows and for sharing work
/// out anew.
Expr prepares_forward(const Spec& spec) { return sums_class_weights(spec) ? Expr(1) : less(kRowThreads, slot(Slot::num_tokens)); }

/// An address, or 0 where the caller has no memory to retain in.
Expr if_retained(const RetainedLayout& retained, const Expr& address) { return select(less(0, retained.columns), address, 0); }

Expr references_at(const RetainedLayout& retained, const LaunchRows& rows) { return retained_at(retained.references) + rows.first * 4; }

Expr stale_at(const RetainedLayout& retained, const LaunchRows& rows) {
    return retained_at(retained.stale) + floor_div(rows.first, kOutputRows) * 4;
}

LaunchBuilder<ForwardSm90Params> gemm_launch(const ForwardPass& pass, const LaunchRows& rows, const ForwardKernel& kernel) {
    using Params = ForwardSm90Params;
    const Spec& spec = pass.spec;
    const ForwardLayout& layout = pass.layout;
    const auto& [role, tile, cluster] = kernel.shape;
    const bool few = cluster == 1;
    const Expr blocks = kernel.grid.clusters * cluster;
    // Few tokens are copied as many as there are: the copy engine takes long to fill in rows that do not exist.
    const Expr hidden_box = few ? rows.count : Expr(tile.block_m);
    const int weight_box = (reads_vocab_major(spec) ? tile.block_n : 64) / cluster;
    const Expr compact = select(layout.compacts, workspace_at(layout.compact), slot(Slot::hidden));
    const Expr hidden_rows = select(equal(pass.list, 0), rows.count, slot(Slot::num_tokens));
    const MappedMatrix weight = rounds_weight(spec) ? rounded_matrix(spec, workspace_at(layout.rounded_weight), stretch_columns(pass).count)
                                                    : weight_matrix(spec, slot(Slot::weight), vocab_columns(spec));
    LaunchBuilder<Params> launch(forward_launch(pass, rows, kernel.role, blocks, 1, kDeviceSplits));
    launch.set_map(&Params::compact_map, {compact, spec.hidden_size, slot(Slot::num_tokens), spec.hidden_size}, tile.block_m)
        .set(&Params::compact_rows, layout.compacts * slot(Slot::num_tokens))
        .set_map(&Params::hidden_map, {hidden_row_at(spec, rows.base), spec.hidden_size, hidden_rows, spec.hidden_size}, hidden_box)
        .set_map(&Params::weight_map, weight, weight_box)
        .set(&Params::scalars, workspace_at(layout.scalars))
        .set(&Params::shares, few ? Expr(0) : select(prepares_forward(spec), workspace_at(layout.shares), 0))
        .set_list(&Params::list, pass.list, workspace_at(layout.scalars), rows.first)
        .set(&Params::clusters, kernel.grid.most_clusters)
        .set(&Params::stride, kernel.grid.stride);
    return launch;
}

/// Runs forward over one stretch of a vocabulary whose weight is rounded.
Statement forward_stretch_launch(const ForwardPass& pass, const LaunchRows& rows, const ForwardKernel& kernel) {
    const ColumnRange columns = stretch_columns(pass);
    LaunchBuilder<ForwardStretchSm90Params> launch(gemm_launch(pass, rows, kernel));
    launch.set(&ForwardStretchSm90Params::first_column, columns.first).set(&ForwardStretchSm90Params::columns, columns.count);
    return build_tempered(std::move(launch), pass.spec, temperatures_at(rows));
}

/// Retains exponentials. `again`: only of stale rows, and nothing else.
Statement forward_retain_launch(const ForwardPass& pass, const LaunchRows& rows, const ForwardKernel& kernel,
                                const RetainedLayout& retained, bool again) {
    using Params = ForwardSm90Params;
    // There is always something to map; where nothing is retained it is not used.
    const Expr any = less(0, retained.columns);
    const Expr exponentials = retained_at(retained.exponentials) + rows.first * (std::int64_t{kRetainedColumns} * 2);
    const MappedMatrix blocks{select(any, exponentials, hidden_row_at(pass.spec, rows.first)),
                              select(any, kRetainedColumns, pass.spec.hidden_size),
                              rows.count,
                              select(any, kRetainedColumns, pass.spec.hidden_size),
                              max(retained.blocks, 1),
                              select(any, retained.block_bytes, kWorkspaceAlignment)};
    LaunchBuilder<Params> launch = gemm_launch(pass, rows, kernel);
    launch.set_map(&Params::retained_map, blocks, 64)
        .set(&Params::references, if_retained(retained, references_at(retained, rows)))
        .set(&Params::stale, if_retained(retained, stale_at(retained, rows)))
        .set(&Params::retained_columns, retained.columns)
        .set(&Params::again, again ? 1 : 0);
    return build_tempered(std::move(launch), pass.spec, temperatures_at(rows));
}

/// A number near each row's logits, to which exponentials are relative. Hidden states of listed tokens are brought together, too.
Statement references_launch(const ForwardPass& pass, const LaunchRows& rows, const RetainedLayout& retained) {
    LaunchBuilder<ReferencesParams> launch(pass.source.kernel(KernelRole::references), ceil_div(rows.count, kRowThreads / 32));
    launch.set(&ReferencesParams::hidden, hidden_row_at(pass.spec, rows.base))
        .set(&ReferencesParams::weight, slot(Slot::weight))
        .set(&ReferencesParams::bias, slot(Slot::bias))
        .set_targets(&ReferencesParams::targets, pass.spec, rows.base)
        .set_teacher(&ReferencesParams::teacher, pass.spec, rows.base)
        .set_list(&ReferencesParams::list, pass.list, workspace_at(pass.layout.scalars), rows.first)
        .set(&ReferencesParams::references, references_at(retained, rows))
        .set(&ReferencesParams::compact, select(pass.layout.compacts, workspace_at(pass.layout.compact), 0))
        .set(&ReferencesParams::temperature, temperatures_at(rows))
        .set_transform(&ReferencesParams::transform, pass.spec)
        .set(&ReferencesParams::rows, rows.count)
        .set(&ReferencesParams::tokens, slot(Slot::num_tokens));
    return launch.build();
}

/// Brings the hidden states of listed tokens together.
Statement gather_compact_launch(const ForwardPass& pass) {
    LaunchBuilder<GatherRowsParams> launch(pass.source.kernel(KernelRole::gather_rows), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    launch.set(&GatherRowsParams::hidden, slot(Slot::hidden))
        .set(&GatherRowsParams::compact, workspace_at(pass.layout.compact))
        .set_list(&GatherRowsParams::list, pass.list, workspace_at(pass.layout.scalars), 0)
        .set(&GatherRowsParams::rows, slot(Slot::num_tokens))
        .set(&GatherRowsParams::unless_all, 1);
    return launch.build();
}

using ForwardKernels = std::vector<ForwardKernel>;

ForwardKernels forward_kernels(const ForwardPass& pass, const Device& device, const LaunchRows& rows) {
    const Spec& spec = pass.spec;
    const Plan& plan = pass.plan;
    const Expr few = less(slot(Slot::num_tokens), kFewTokens + 1);
    const ForwardShape few_tokens = few_tokens_shape(spec, plan);
    return {{KernelRole::forward_few, few_tokens, few_tokens_grid(spec, device, plan, few_tokens), few},
            {KernelRole::forward, forward_shape(plan), forward_grid(spec, device, plan, rows.count), !few}};
}

/// One of them, by the number of tokens.
template <class MakeLaunch>
std::vector<Statement> by_tokens(const ForwardKernels& kernels, const MakeLaunch& launch) {
    std::vector<Statement> statements;
    for (const ForwardKernel& kernel : kernels) statements.push_back({If{kernel.takes, {launch(kernel)}}});
    return statements;
}

Statement forward_gemm_launch(const ForwardPass& pass, const LaunchRows& rows, const ForwardKernel& kernel) {
    if (rounds_weight(pass.spec)) return forward_stretch_launch(pass, rows, kernel);
    return build_tempered(gemm_launch(pass, rows, kernel), pass.spec, temperatures_at(rows));
}

/// The GEMM and what follows from it of one launch's rows, where exponentials are retained.
std::vector<Statement> retaining_steps(const ForwardPass& pass, const Device& device, const LaunchRows& rows) {
    const RetainedLayout retained = retained_layout(pass.spec, pass.plan);
    const Expr any = less(0, retained.columns);
    const ForwardKernels kernels = forward_kernels(pass, device, rows);
    const auto gemm = [&](bool again) {
        return by_tokens(kernels, [&](const ForwardKernel& kernel) { return forward_retain_launch(pass, rows, kernel, retained, again); });
    };
    const RetainedRowsAt retained_rows{if_retained(retained, references_at(retained, rows)),
                                       if_retained(retained, retained_at(retained.target_logits) + rows.first * 4),
                                       if_retained(retained, stale_at(retained, rows))};
    std::vector<Statement> steps = teacher_logits_steps(pass, rows);
    steps.push_back({If{any, {references_launch(pass, rows, retained)}}});
    std::ranges::move(with_columns(pass.spec, gemm(false)), std::back_inserter(steps));
    steps.push_back(row_outputs_launch(pass, rows, kDeviceSplits, retained_rows));
    // Exponentials of rows whose logits turned out to be far above their reference. There are hardly ever any, and then the launch ends at
    // once. No output comes of it.
    steps.push_back({If{any, gemm(true)}});
    return steps;
}

}  // namespace

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayout& layout) {
    const ForwardPass pass(spec, plan, source, layout);
    const LaunchRows rows = launch_rows(pass);
    const Preparation preparation{
        .scalars = layout.scalars, .list = pass.list, .outputs = true, .counters = layout.shares, .counter_count = layout.share_words};
    std::vector<Statement> body = {{If{prepares_forward(spec), {prepare_launch(spec, source, preparation)}}}};
    std::vector<Statement> steps;
    if (plan.strategy == Strategy::retain) {
        const Expr retains = less(0, retained_layout(spec, plan).columns);  // then `references` does it
        body.push_back({If{and_not(layout.compacts, retains), {gather_compact_launch(pass)}}});
        steps = retaining_steps(pass, device, rows);
    } else {
        body.push_back({If{layout.compacts, {gather_compact_launch(pass)}}});
        const auto gemm = [&](const ForwardKernel& kernel) { return forward_gemm_launch(pass, rows, kernel); };
        std::vector<Statement> gemms = by_tokens(forward_kernels(pass, device, rows), gemm);
        if (rounds_weight(spec)) {
            body.push_back(stretch_loop(pass, rows, kDeviceSplits, std::move(gemms)));
        } else {
            steps = with_columns(spec, std::move(gemms));
        }
        std::ranges::move(teacher_logits_steps(pass, rows), std::back_inserter(steps));
        steps.push_back(row_outputs_launch(pass, rows, kDeviceSplits, {}));
    }
    body.push_back({Loop{kRowsLoop, layout.launches, std::move(steps)}});
    std::ranges::move(reduce_loss_steps(pass), std::back_inserter(body));
    return {.body = std::move(body), .variable_count = forward_loops(spec)};
}

}  // namespace flce::sm90

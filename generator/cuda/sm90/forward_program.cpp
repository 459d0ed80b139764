#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/prepare.hpp"
#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/sm90/maps.hpp"
#include "generator/cuda/sm90/path.hpp"
#include "templates/sm90/params.cuh"

namespace flce::sm90 {
namespace {

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

struct ForwardPassSm90 : ForwardPass {
    const ForwardLayoutSm90& layout;  ///< ForwardPass's, with this path's places
    RetainedLaunch retained;          ///< memory of the layout
    std::vector<ForwardKernel> kernels;

    ForwardPassSm90(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source, const ForwardLayoutSm90& layout)
        : ForwardPass(spec, plan, source, layout), layout(layout), retained(layout.retained, rows) {
        const Expr few = less(slot(Slot::num_tokens), kFewTokens + 1);
        const ForwardShape few_tokens = few_tokens_shape(spec, plan);
        kernels = {{KernelRole::forward_few, few_tokens, few_tokens_grid(spec, device, plan, few_tokens), few},
                   {KernelRole::forward, forward_shape(plan), forward_grid(spec, device, plan, rows.count), !few}};
    }
};

/// Sets `lists`, a field of Params, to the lists of named classes by tiles.
template <class Params, class Holder>
void set_named(LaunchBuilder<Params>& launch, const ForwardPassSm90& pass, NamedLists Holder::* lists) {
    launch.set(lists, &NamedLists::records, workspace_at(pass.layout.named_records))
        .set(lists, &NamedLists::names, workspace_at(pass.layout.named_names))
        .set(lists, &NamedLists::tiles, named_tiles(pass.spec, pass.plan));
}

/// Steps before the GEMM: named classes are sorted by its tiles. Few tokens have products with single rows of the weight instead.
std::vector<Statement> named_steps(const ForwardPassSm90& pass) {
    if (!picks_named(pass.spec)) return {};
    using Params = NamedTilesParams;
    LaunchBuilder<Params> launch(teacher_logits_launch(pass, KernelRole::named_tiles));
    launch.set(&Params::rows, pass.rows.count).set(&Params::tile_columns, pass.plan.cuda.forward.block_n);
    set_named(launch, pass, &Params::named);
    return {{If{pass.kernels.front().takes, teacher_logits_steps(pass)}}, {If{pass.kernels.back().takes, {launch.build()}}}};
}

/// The launch of one of the GEMM's kernels.
Statement build_forward(const ForwardPassSm90& pass, const ForwardKernel& kernel, LaunchBuilder<ForwardSm90Params> launch) {
    if (!picks_named(pass.spec) || kernel.role != KernelRole::forward) return build_gemm<ForwardStretchSm90Params>(pass, std::move(launch));
    using Params = WithNamed<ForwardSm90Params>;
    LaunchBuilder<Params> picking(std::move(launch));
    picking.set_teacher(&Params::teacher, pass.spec, pass.rows.base);
    set_named(picking, pass, &Params::named);
    return build_with_rows(std::move(picking), pass.spec, row_numbers_at(pass.rows));
}

/// Bytes from a column of the weight that is read as it is to the next; where it is rounded, the launch's columns begin the rounded part.
std::int64_t column_stride(const Spec& spec) {
    if (rounds_weight(spec)) return 0;
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    return spec.layout == WeightLayout::vocab_major ? spec.hidden_size * element : element;
}

/// Lists of classes, each of which lies within a block that is aligned to its size (ptx::put_global_v2_if_above).
Expr top_keys_at(const ForwardPassSm90& pass) { return round_up(workspace_at(pass.layout.top_keys), 8 * top_list_keys(pass.spec.top_k)); }

/// Knowledge of the largest logits of columns before, or the place where all logits of a launch go.
struct TopBefore {
    Expr bounds{0};  ///< ForwardSm90Params::top_bounds
    Expr dense{0};   ///< ForwardSm90Params::top_dense
};

/// The number of a row's partial sums is known to the device alone (PassScalars::splits).
LaunchBuilder<ForwardSm90Params> gemm_launch(const ForwardPassSm90& pass, const ForwardKernel& kernel, const TopBefore& of_lists = {}) {
    using Params = ForwardSm90Params;
    const Spec& spec = pass.spec;
    const LaunchRows& rows = pass.rows;
    const ForwardLayoutSm90& layout = pass.layout;
    const auto& [role, tile, cluster] = kernel.shape;
    const bool few = cluster == 1;
    const Expr blocks = kernel.grid.clusters * cluster;
    // Few tokens are copied as many as there are: the copy engine takes long to fill in rows that do not exist.
    const Expr hidden_box = few ? rows.count : Expr(tile.block_m);
    const Expr weight = weight_at(pass) + pass.columns.first * column_stride(spec);
    const int weight_box = (reads_vocab_major(spec) ? tile.block_n : 64) / cluster;
    const Expr compact = select(layout.compacts, workspace_at(layout.compact), slot(Slot::hidden));
    const Expr hidden_rows = select(equal(pass.list, 0), rows.count, slot(Slot::num_tokens));
    LaunchBuilder<Params> launch(forward_launch(pass, kernel.role, blocks, 1));
    launch.set_map(&Params::compact_map, {compact, spec.hidden_size, slot(Slot::num_tokens), spec.hidden_size}, tile.block_m)
        .set(&Params::compact_rows, layout.compacts * slot(Slot::num_tokens))
        .set_map(&Params::hidden_map, {hidden_row_at(spec, rows.base), spec.hidden_size, hidden_rows, spec.hidden_size}, hidden_box)
        .set_map(&Params::weight_map, operand_matrix(spec, weight, pass.columns.count), weight_box)
        .set(&Params::scalars, scalars_at())
        .set(&Params::shares, few || spec.top_k > 0 ? Expr(0) : select(prepares_forward(spec), workspace_at(layout.counters), 0))
        .set(&Params::top_keys, spec.top_k > 0 ? top_keys_at(pass) : Expr(0))
        .set(&Params::top_states, spec.top_k > 0 ? workspace_at(layout.top_states) : Expr(0))
        .set(&Params::top_bounds, of_lists.bounds)
        .set(&Params::top_dense, of_lists.dense)
        .set_list(&Params::list, pass.list, rows.first)
        .set(&Params::clusters, kernel.grid.most_clusters)
        .set(&Params::stride, kernel.grid.stride);
    return launch;
}

/// Retains exponentials. `again`: only of stale rows, and nothing else.
Statement forward_retain_launch(const ForwardPassSm90& pass, const ForwardKernel& kernel, bool again) {
    using Params = ForwardSm90Params;
    const RetainedLayout& retained = pass.retained.layout;
    const LaunchRows& rows = pass.rows;
    // There is always something to map; where nothing is retained it is not used.
    const Expr any = less(0, retained.columns);
    const Expr exponentials = retained_at(retained.exponentials) + rows.first * (std::int64_t{kRetainedColumns} * 2);
    const MappedMatrix blocks{select(any, exponentials, hidden_row_at(pass.spec, rows.first)),
                              select(any, kRetainedColumns, pass.spec.hidden_size),
                              rows.count,
                              select(any, kRetainedColumns, pass.spec.hidden_size),
                              max(retained.blocks, 1),
                              select(any, retained.block_bytes, kWorkspaceAlignment)};
    LaunchBuilder<Params> launch = gemm_launch(pass, kernel);
    launch.set_map(&Params::retained_map, blocks, 64)
        .set(&Params::references, pass.retained.if_retained(pass.retained.references))
        .set(&Params::stale, pass.retained.if_retained(pass.retained.stale))
        .set(&Params::retained_columns, retained.columns)
        .set(&Params::again, again ? 1 : 0);
    return build_forward(pass, kernel, std::move(launch));
}

/// Brings the hidden states of listed tokens together.
Statement gather_compact_launch(const ForwardPassSm90& pass) {
    LaunchBuilder<GatherRowsParams> launch(pass.source.kernel(KernelRole::gather_rows), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    launch.set(&GatherRowsParams::hidden, slot(Slot::hidden))
        .set(&GatherRowsParams::compact, workspace_at(pass.layout.compact))
        .set_list(&GatherRowsParams::list, pass.list, 0)
        .set(&GatherRowsParams::rows, slot(Slot::num_tokens))
        .set(&GatherRowsParams::unless_all, 1);
    return launch.build();
}

/// One of the GEMM's kernels, by the number of tokens.
template <class MakeLaunch>
std::vector<Statement> by_tokens(const ForwardPassSm90& pass, const MakeLaunch& launch) {
    std::vector<Statement> statements;
    for (const ForwardKernel& kernel : pass.kernels) statements.push_back({If{kernel.takes, {launch(kernel)}}});
    return statements;
}

/// The GEMM and what follows from it of one launch's rows, where exponentials are retained.
std::vector<Statement> retaining_steps(const ForwardPassSm90& pass) {
    const Expr compact = select(pass.layout.compacts, workspace_at(pass.layout.compact), 0);
    return flce::retaining_steps(pass, pass.retained, compact, [&](bool again) {
        return by_tokens(pass, [&](const ForwardKernel& kernel) { return forward_retain_launch(pass, kernel, again); });
    });
}

/// A pass over these columns of the vocabulary alone.
ForwardPassSm90 over(const ForwardPassSm90& pass, const Expr& begin, const Expr& end) {
    ForwardPassSm90 part = pass;
    part.columns = {begin, end - begin};
    return part;
}

/// Columns of the vocabulary whose largest logits bound those behind them.
constexpr std::int64_t kBoundedTopColumns = 16512;

/// Launches that find classes of the largest logits, but for the last top_classes, of which `last` tells what it has to know. More than a
/// few tokens go through the vocabulary in three launches. The first one's logits are all written down, in the place of lists, and the
/// largest of them are found: a bound that few logits of the second launch exceed. From both follows a bound for the third. So lists stay
/// short, and hardly any has to be narrowed. top_classes zeroes the states of the lists that follow.
std::vector<Statement> top_steps(const ForwardPassSm90& pass, TopClassesAt& last) {
    const ForwardKernel& few = pass.kernels.front();
    const ForwardKernel& many = pass.kernels.back();
    const Expr columns = vocab_columns(pass.spec);
    const Expr lists = top_keys_at(pass);
    const Expr bounds = workspace_at(pass.layout.top_bounds);
    const Statement no_list{MemsetZero{workspace_at(pass.layout.top_states), pass.layout.top_state_bytes}};
    const auto gemm = [&](const ForwardKernel& kernel, const Expr& begin, const Expr& end, const TopBefore& before) {
        const ForwardPassSm90 part = over(pass, begin, end);
        return build_forward(part, kernel, gemm_launch(part, kernel, before));
    };
    last = {.keys = lists, .states = workspace_at(pass.layout.top_states), .kept = workspace_at(pass.layout.top_kept), .bounds = bounds};
    if (pass.spec.batch_invariant) {  // segments have sums of their own, which no launch divides
        return {no_list, {If{few.takes, {gemm(few, 0, columns, {})}}}, {If{many.takes, {gemm(many, 0, columns, {})}}}};
    }
    const Statement of_few{If{few.takes, {no_list, gemm(few, 0, columns, {})}}};
    const std::int64_t second = multiple_above(kDenseTopColumns, pass.plan.cuda.forward.block_n);
    const std::int64_t third = multiple_above(kBoundedTopColumns, pass.plan.cuda.forward.block_n);
    const Expr has_second = less(second, columns);
    TopClassesAt found = last;
    found.last = false;
    found.has_kept = 1;
    const Statement behind{If{less(third, columns), {top_classes_launch(pass, found), gemm(many, third, columns, {.bounds = bounds})}}};
    found.has_kept = 0;
    found.dense = lists;
    found.columns = second;
    const Statement then{
        If{has_second, {top_classes_launch(pass, found), gemm(many, second, min(columns, third), {.bounds = bounds}), behind}}};
    const Expr all_dense = and_not(many.takes, has_second);
    last.dense = select(all_dense, lists, 0);
    last.columns = columns;
    last.has_kept = many.takes && has_second;
    return {of_few, {If{many.takes, {gemm(many, 0, min(columns, second), {.dense = lists}), then}}}};
}

}  // namespace

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayoutSm90& layout) {
    ForwardPassSm90 pass(spec, device, plan, source, layout);
    pass.named = named_steps(pass);
    const Preparation preparation{.list = pass.list, .outputs = true, .counters = layout.counters, .counter_count = layout.counter_words};
    const bool may_retain = plan.strategy == Strategy::retain;
    const Expr retains = less(0, layout.retained.columns);  // then `references` brings hidden states together
    const auto gemm = [&](const ForwardKernel& kernel) { return build_forward(pass, kernel, gemm_launch(pass, kernel)); };
    std::vector<Statement> body = {{If{prepares_forward(spec), {prepare_launch(spec, source, preparation)}}}};
    body.push_back({If{may_retain ? and_not(layout.compacts, retains) : layout.compacts, {gather_compact_launch(pass)}}});
    const auto steps = [&] {
        if (spec.top_k == 0) return outputs_of_gemm(pass, by_tokens(pass, gemm));
        TopClassesAt last;
        std::vector<Statement> gemms = top_steps(pass, last);
        return outputs_of_gemm(pass, std::move(gemms), {top_classes_launch(pass, last)});
    };
    std::ranges::move(may_retain ? for_all_rows(pass, retaining_steps(pass)) : steps(), std::back_inserter(body));
    return {.body = std::move(body), .variable_count = forward_loops(spec)};
}

}  // namespace flce::sm90

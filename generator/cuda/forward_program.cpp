#include <algorithm>
#include <iterator>
#include <utility>

#include "generator/cuda/launch_builder.hpp"
#include "generator/cuda/programs.hpp"
#include "generator/cuda/tile_rules.hpp"

namespace flce {
namespace {

Expr at(const Expr& offset) { return slot(Slot::workspace) + offset; }

Expr is_none() { return equal(slot(Slot::reduction), static_cast<std::int64_t>(ReductionCode::none)); }

/// Whether one block of row_outputs has every token, so that it can write the scalar loss itself: a launch less.
Expr one_block() { return less(slot(Slot::num_tokens), kOutputRows + 1); }

/// Whether `prepare` runs before: for sums over the class weights, or where there are tokens enough for lists of rows and for sharing work out anew.
Expr prepares(const Spec& spec, PlanPath path) {
    if (spec.class_weight && spec.label_smoothing > 0) return 1;
    return path == PlanPath::cuda_sm90a ? less(kRowThreads, slot(Slot::num_tokens)) : Expr(0);
}

/// The tokens of one launch of forward, the kernel for them, and how it divides its work.
struct Rows {
    Expr first;  ///< in the list, where there is one
    Expr count;
    Expr list;  ///< address, or 0
    Expr base;  ///< the row at which the caller's tensors are taken to begin: the call's first where there is a list
    ForwardShare share;
    GemmTile tile;
    const char* kernel;
    int cluster_blocks;
};

/// The columns of the vocabulary that a launch of forward computes, where the weight is rounded a stretch at a time.
struct Columns {
    Expr first;
    Expr count;
};
constexpr int kRowsLoop = 0;  ///< variable of the loop over launches of rows
constexpr int kStretchLoop = 1;

Columns stretch_columns(const Spec& spec, const ForwardLayout& layout) {
    const Expr first = variable(kStretchLoop) * layout.stretch;
    return {first, min(Expr(spec.vocab_size) - first, layout.stretch)};
}

Expr hidden_at(const Spec& spec, const Expr& row) {
    return slot(Slot::hidden) + row * (spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.dtype)));
}

/// Of the launch's rows; where the vocabulary is cut into stretches every token has one that stays.
Expr target_logits_at(const Spec& spec, const ForwardLayout& layout, const Rows& rows) {
    return at(layout.target_logits) + (rounds_weight(spec) ? rows.first * 4 : Expr(0));
}

/// The fields that every path's forward kernel has.
template <class Params>
LaunchBuilder<Params> forward_fields(const Spec& spec, LaunchBuilder<Params> launch, const ForwardLayout& layout, const Rows& rows) {
    launch.set(&ForwardParams::hidden, hidden_at(spec, rows.base))
        .set(&ForwardParams::weight, rounds_weight(spec) ? at(layout.rounded_weight) : slot(Slot::weight))
        .set(&ForwardParams::bias, slot(Slot::bias))
        .set(&ForwardParams::class_weight, slot(Slot::class_weight))
        .set_targets(&Params::targets, rows.base)
        .set(&ForwardParams::partials, at(layout.partials))
        .set(&ForwardParams::target_logits, target_logits_at(spec, layout, rows))
        .set(&ForwardParams::partial_rows, layout.partial_rows)
        .set(&ForwardParams::rows, rows.count)
        .set(&ForwardParams::splits, rows.share.splits)
        .set_transform(&Params::transform, spec);
    return launch;
}

/// `retained`: what is kept of this call, nothing where the caller has no place for it. `again`: see ForwardSm90Params.
struct Retained {
    RetainedLayout layout;
    Expr columns;

    [[nodiscard]] Expr at(const Expr& offset) const { return slot(Slot::retained) + offset; }
    /// An address, or null where nothing is retained.
    [[nodiscard]] Expr if_any(const Expr& address) const { return select(less(0, columns), address, 0); }
};

Statement sm80_forward_launch(const Spec& spec, const CudaSource& source, const ForwardLayout& layout, const Rows& rows) {
    const int kernel = source.kernel(rows.kernel);
    const Expr row_blocks = ceil_div(rows.count, rows.tile.block_m);
    if (!rounds_weight(spec))
        return forward_fields(spec, LaunchBuilder<ForwardParams>(kernel, row_blocks, rows.share.splits), layout, rows).build();
    const Columns columns = stretch_columns(spec, layout);
    auto launch = forward_fields(spec, LaunchBuilder<ForwardStretchParams>(kernel, row_blocks, rows.share.splits), layout, rows);
    launch.set(&ForwardStretchParams::first_column, columns.first).set(&ForwardStretchParams::columns, columns.count);
    return launch.build();
}

/// The weight as the copy engine sees it.
template <class Params>
typename LaunchBuilder<Params>::Matrix weight_matrix(const Spec& spec, const ForwardLayout& layout) {
    if (rounds_weight(spec)) {
        return {at(layout.rounded_weight), spec.hidden_size, stretch_columns(spec, layout).count, spec.hidden_size};
    }
    if (spec.layout == WeightLayout::vocab_major) return {slot(Slot::weight), spec.hidden_size, spec.vocab_size, spec.hidden_size};
    return {slot(Slot::weight), spec.vocab_size, spec.hidden_size, spec.padded_vocab_size};
}

/// The fields that forward has on cuda_sm90a alone, but for what is retained.
template <class Params>
LaunchBuilder<Params> sm90_forward_fields(const Spec& spec, const CudaSource& source, const ForwardLayout& layout, const Rows& rows) {
    const GemmTile& tile = rows.tile;
    const bool vocab_major = spec.layout == WeightLayout::vocab_major || rounds_weight(spec);
    LaunchBuilder<Params> launch =
        forward_fields(spec, LaunchBuilder<Params>(source.kernel(rows.kernel), rows.share.clusters * rows.cluster_blocks), layout, rows);
    // Few tokens are copied as many as there are: the copy engine takes long to fill in rows that do not exist.
    const Expr hidden_rows = rows.cluster_blocks == 1 ? rows.count : Expr(tile.block_m);
    const Expr compact = select(layout.compacts, at(layout.compact), slot(Slot::hidden));
    launch.set_map(&Params::compact_map, {compact, spec.hidden_size, slot(Slot::num_tokens), spec.hidden_size}, tile.block_m)
        .set(&ForwardSm90Params::compact_rows, layout.compacts * slot(Slot::num_tokens))
        .set_map(&Params::hidden_map,
                 {hidden_at(spec, rows.base), spec.hidden_size, select(equal(rows.list, 0), rows.count, slot(Slot::num_tokens)),
                  spec.hidden_size},
                 hidden_rows)
        .set_map(&Params::weight_map, weight_matrix<Params>(spec, layout), (vocab_major ? tile.block_n : 64) / rows.cluster_blocks)
        .set(&ForwardSm90Params::scalars, at(layout.scalars))
        .set(&ForwardSm90Params::shares,
             rows.cluster_blocks == 1 ? Expr(0) : select(prepares(spec, PlanPath::cuda_sm90a), at(layout.shares), 0))
        .set_list(&ForwardSm90Params::list, rows.list, at(layout.scalars), rows.first)
        .set(&ForwardSm90Params::clusters, rows.share.most_clusters)
        .set(&ForwardSm90Params::stride, rows.share.stride);
    return launch;
}

Statement forward_launch(const Spec& spec, const Plan& plan, const CudaSource& source, const ForwardLayout& layout, const Rows& rows,
                         const Retained& retained, bool again) {
    if (plan.path != PlanPath::cuda_sm90a) return sm80_forward_launch(spec, source, layout, rows);
    if (rounds_weight(spec)) {
        const Columns columns = stretch_columns(spec, layout);
        auto launch = sm90_forward_fields<ForwardStretchSm90Params>(spec, source, layout, rows);
        launch.set(&ForwardStretchSm90Params::first_column, columns.first).set(&ForwardStretchSm90Params::columns, columns.count);
        return launch.build();
    }
    auto launch = sm90_forward_fields<ForwardSm90Params>(spec, source, layout, rows);
    if (plan.strategy == Strategy::retain) {
        // There is always something to map; where nothing is retained it is not used.
        const Expr any = less(0, retained.columns);
        const Expr exponentials = retained.at(retained.layout.exponentials) + rows.first * (kRetainedColumns * 2);
        launch
            .set_map(&ForwardSm90Params::retained_map,
                     {select(any, exponentials, hidden_at(spec, rows.first)), select(any, kRetainedColumns, spec.hidden_size), rows.count,
                      select(any, kRetainedColumns, spec.hidden_size), max(retained.layout.blocks, 1),
                      select(any, retained.layout.block_bytes, kWorkspaceAlignment)},
                     64)
            .set(&ForwardSm90Params::references, retained.if_any(retained.at(retained.layout.references) + rows.first * 4))
            .set(&ForwardSm90Params::stale, retained.if_any(retained.at(retained.layout.stale) + floor_div(rows.first, kOutputRows) * 4))
            .set(&ForwardSm90Params::retained_columns, retained.columns)
            .set(&ForwardSm90Params::again, again ? 1 : 0);
    }
    return launch.build();
}

Statement references_launch(const Spec& spec, const CudaSource& source, const ForwardLayout& layout, const Rows& rows,
                            const Retained& retained) {
    LaunchBuilder<ReferencesParams> launch(source.kernel("references"), ceil_div(rows.count, kRowThreads / 32));
    launch.set(&ReferencesParams::hidden, hidden_at(spec, rows.base))
        .set(&ReferencesParams::weight, slot(Slot::weight))
        .set_targets(&ReferencesParams::targets, rows.base)
        .set_list(&ReferencesParams::list, rows.list, at(layout.scalars), rows.first)
        .set(&ReferencesParams::references, retained.at(retained.layout.references) + rows.first * 4)
        .set_transform(&ReferencesParams::transform, spec)
        .set(&ReferencesParams::rows, rows.count);
    return launch.build();
}

Statement gather_launch(const CudaSource& source, const ForwardLayout& layout, const Expr& list) {
    LaunchBuilder<GatherRowsParams> launch(source.kernel("gather_rows"), ceil_div(slot(Slot::num_tokens), kRowThreads / 32));
    launch.set(&GatherRowsParams::hidden, slot(Slot::hidden))
        .set(&GatherRowsParams::compact, at(layout.compact))
        .set_list(&GatherRowsParams::list, list, at(layout.scalars), 0)
        .set(&GatherRowsParams::rows, slot(Slot::num_tokens))
        .set(&GatherRowsParams::unless_all, 1);
    return launch.build();
}

Statement row_outputs_launch(const Spec& spec, const CudaSource& source, const ForwardLayout& layout, const Rows& rows,
                             const Retained& retained) {
    const Expr partials = at(layout.loss_partials) + floor_div(rows.first, kOutputRows) * static_cast<std::int64_t>(sizeof(LossPartial));
    const Expr scalar_here = and_not(one_block(), is_none());
    LaunchBuilder<RowOutputsParams> launch(source.kernel("row_outputs"), ceil_div(rows.count, kOutputRows));
    const bool running = rounds_weight(spec);  // over the stretches of the vocabulary: one part
    launch.set(&RowOutputsParams::partials, running ? at(layout.running) + rows.first * 4 : at(layout.partials))
        .set(&RowOutputsParams::target_logits, target_logits_at(spec, layout, rows))
        .set(&RowOutputsParams::class_weight, slot(Slot::class_weight))
        .set(&RowOutputsParams::scalars, at(layout.scalars))
        .set_targets(&RowOutputsParams::targets, rows.base)
        .set_list(&RowOutputsParams::list, rows.list, at(layout.scalars), rows.first)
        .set(&RowOutputsParams::loss, select(is_none(), advanced(slot(Slot::loss), rows.base, 4), 0))
        .set(&RowOutputsParams::z_loss, select(is_none(), advanced(slot(Slot::z_loss), rows.base, 4), 0))
        .set(&RowOutputsParams::lse, slot(Slot::lse) + rows.base * 4)
        .set(&RowOutputsParams::logprob, advanced(slot(Slot::logprob), rows.base, 4))
        .set(&RowOutputsParams::entropy, advanced(slot(Slot::entropy), rows.base, 4))
        .set(&RowOutputsParams::loss_partials, select(is_none() || one_block(), 0, partials))
        .set(&RowOutputsParams::scalar_loss, select(scalar_here, slot(Slot::loss), 0))
        .set(&RowOutputsParams::scalar_z_loss, select(scalar_here, slot(Slot::z_loss), 0))
        .set_count(&RowOutputsParams::count)
        .set(&RowOutputsParams::references, retained.if_any(retained.at(retained.layout.references) + rows.first * 4))
        .set(&RowOutputsParams::retained_target_logits, retained.if_any(retained.at(retained.layout.target_logits) + rows.first * 4))
        .set(&RowOutputsParams::stale, retained.if_any(retained.at(retained.layout.stale) + floor_div(rows.first, kOutputRows) * 4))
        .set(&RowOutputsParams::invalid_label, slot(Slot::invalid_label))
        .set(&RowOutputsParams::first_row, rows.base)
        .set(&RowOutputsParams::partial_rows, running ? layout.running_rows : layout.partial_rows)
        .set(&RowOutputsParams::rows, rows.count)
        .set(&RowOutputsParams::splits, running ? Expr(1) : rows.share.splits)
        .set_float(&RowOutputsParams::label_smoothing, static_cast<float>(spec.label_smoothing))
        .set_float(&RowOutputsParams::smoothing_per_class, static_cast<float>(spec.label_smoothing / static_cast<double>(spec.vocab_size)))
        .set_float(&RowOutputsParams::z_loss_weight, static_cast<float>(spec.z_loss));
    return launch.build();
}

Statement merge_stretch_launch(const CudaSource& source, const ForwardLayout& layout, const Rows& rows) {
    LaunchBuilder<MergeStretchParams> launch(source.kernel("merge_stretch"), ceil_div(rows.count, kRowThreads));
    launch.set(&MergeStretchParams::partials, at(layout.partials))
        .set(&MergeStretchParams::running, at(layout.running) + rows.first * 4)
        .set(&MergeStretchParams::scalars, at(layout.scalars))
        .set_list(&MergeStretchParams::list, rows.list, at(layout.scalars), rows.first)
        .set(&MergeStretchParams::partial_rows, layout.partial_rows)
        .set(&MergeStretchParams::running_rows, layout.running_rows)
        .set(&MergeStretchParams::rows, rows.count)
        .set(&MergeStretchParams::splits, rows.share.splits)
        .set(&MergeStretchParams::first, equal(variable(kStretchLoop), 0));
    return launch.build();
}

Statement reduce_loss_launch(const CudaSource& source, const ForwardLayout& layout) {
    LaunchBuilder<ReduceLossParams> launch(source.kernel("reduce_loss"), Expr(1));
    launch.set(&ReduceLossParams::loss_partials, at(layout.loss_partials))
        .set(&ReduceLossParams::loss, slot(Slot::loss))
        .set(&ReduceLossParams::z_loss, slot(Slot::z_loss))
        .set_count(&ReduceLossParams::count)
        .set(&ReduceLossParams::blocks, ceil_div(slot(Slot::num_tokens), kOutputRows));
    // With no token there is no block of row_outputs either.
    return {If{and_not(equal(slot(Slot::num_tokens), 0) || !one_block(), is_none()), {launch.build()}}};
}

}  // namespace

Statement prepare_launch(const Spec& spec, const CudaSource& source, const Preparation& preparation) {
    LaunchBuilder<PrepareParams> launch(source.kernel("prepare"), Expr(1));
    launch.set(&PrepareParams::class_weight, slot(Slot::class_weight))
        .set(&PrepareParams::scalars, at(preparation.scalars))
        .set_targets(&PrepareParams::targets, 0)
        .set_count(&PrepareParams::count)
        .set(&PrepareParams::list, preparation.list)
        .set(&PrepareParams::counters, at(preparation.counters))
        .set(&PrepareParams::counter_count, preparation.counter_count)
        .set(&PrepareParams::num_tokens, slot(Slot::num_tokens))
        .set(&PrepareParams::want_class_weights, spec.class_weight && spec.label_smoothing > 0 ? 1 : 0)
        .set(&PrepareParams::want_count, preparation.want_count);
    if (preparation.outputs) {
        const Expr outputs[kRowOutputs] = {select(is_none(), slot(Slot::loss), 0), select(is_none(), slot(Slot::z_loss), 0),
                                           slot(Slot::lse), slot(Slot::logprob), slot(Slot::entropy)};
        for (std::size_t i = 0; i < kRowOutputs; ++i) launch.set_element(&PrepareParams::outputs, i, outputs[i]);
        launch.set(&PrepareParams::invalid_label, slot(Slot::invalid_label));
    }
    return launch.build();
}

LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                              const ForwardLayout& layout) {
    LaunchProgram program;
    program.variable_count = rounds_weight(spec) ? 2 : 1;
    const Expr list = select(lists_rows(plan), at(layout.list), 0);
    const Preparation preparation{
        .scalars = layout.scalars, .list = list, .outputs = true, .counters = layout.shares, .counter_count = layout.share_words};
    program.body.push_back({If{prepares(spec, plan.path), {prepare_launch(spec, source, preparation)}}});
    if (plan.path == PlanPath::cuda_sm90a) program.body.push_back({If{layout.compacts, {gather_launch(source, layout, list)}}});
    const Expr first = variable(kRowsLoop) * layout.rows;
    const Expr count = min(slot(Slot::num_tokens) - first, layout.rows);
    const Expr base = select(lists_rows(plan), 0, first);
    ForwardShare share = cuda_path(plan.path).forward_share(spec, device, plan, count);
    if (rounds_weight(spec)) {  // the last stretch may have fewer tiles than parts
        share.splits = min(share.splits, ceil_div(stretch_columns(spec, layout).count, plan.cuda.forward.block_n));
    }
    const Rows rows{first, count, list, base, share, plan.cuda.forward, "forward", kClusterBlocks};
    const Rows few_rows{first, count, list, base, few_tokens_share(spec, device, plan, count), few_tokens_tile(spec), "forward_few", 1};
    const bool sm90 = plan.path == PlanPath::cuda_sm90a;
    const Expr few = sm90 ? less(slot(Slot::num_tokens), kFewTokens + 1) : Expr(0);
    const RetainedLayout retained_parts = retained_layout(spec, plan);
    const Retained retained{retained_parts, retained_parts.columns};
    std::vector<Statement> steps;
    const auto if_retained = [&](Statement statement) { steps.push_back({If{less(0, retained.columns), {std::move(statement)}}}); };
    const bool retains = plan.strategy == Strategy::retain;
    if (retains) if_retained(references_launch(spec, source, layout, rows, retained));
    const auto add_forward = [&](bool again) {
        std::vector<Statement> either;
        if (sm90) either.push_back({If{few, {forward_launch(spec, plan, source, layout, few_rows, retained, again)}}});
        either.push_back({If{!few, {forward_launch(spec, plan, source, layout, rows, retained, again)}}});
        return either;
    };
    if (rounds_weight(spec)) {
        const Columns columns = stretch_columns(spec, layout);
        std::vector<Statement> of_rows = add_forward(false);
        of_rows.push_back(merge_stretch_launch(source, layout, rows));
        std::vector<Statement> of_stretch = {round_weight_launch(spec, source, columns.first, columns.count, at(layout.rounded_weight))};
        of_stretch.push_back({Loop{kRowsLoop, layout.launches, std::move(of_rows)}});
        program.body.push_back({Loop{kStretchLoop, Expr(layout.stretches), std::move(of_stretch)}});
    } else {
        std::ranges::move(add_forward(false), std::back_inserter(steps));
    }
    steps.push_back(row_outputs_launch(spec, source, layout, rows, retained));
    // Rows whose logits turned out to be far above their reference; hardly ever any, and then this launch ends at once.
    if (retains) {
        for (Statement& launch : add_forward(true)) if_retained(std::move(launch));
    }
    program.body.push_back({Loop{kRowsLoop, layout.launches, std::move(steps)}});
    program.body.push_back(reduce_loss_launch(source, layout));
    return program;
}

}  // namespace flce

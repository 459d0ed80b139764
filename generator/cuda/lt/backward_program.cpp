#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/common/retained_steps.hpp"
#include "generator/cuda/lt/gemms.hpp"
#include "generator/cuda/lt/path.hpp"
#include "templates/lt/params.cuh"

namespace flce::lt {
namespace {

// Loops within a chunk: over the rows and columns that one call of the library computes, and over blocks of retained exponentials.
constexpr int kPieceRowsLoop = kBackwardLoops;
constexpr int kPieceColumnsLoop = kBackwardLoops + 1;
constexpr int kBlockLoop = kBackwardLoops + 2;

struct Pass : BackwardPass {
    const Device& device;
    const BackwardLayoutLt& layout;
    const RetainedLayout& retained;
    Expr all_retained;   ///< whether no column is computed again
    bool hidden_major;   ///< layout of the weight's gradient
    bool own_sum;        ///< whether grad_hidden is its own fp32 sum
    bool retains_heads;  ///< whether logits of both heads may be retained

    Pass(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source, const BackwardLayoutLt& layout)
        : BackwardPass(spec, plan, source, layout),
          device(device),
          layout(layout),
          retained(layout.retained),
          all_retained(plan.strategy == Strategy::retain
                           ? equal(layout.retained.columns, vocab_columns(spec)) && less(0, layout.retained.columns)
                           : Expr(0)),
          hidden_major(spec.layout == WeightLayout::hidden_major),
          own_sum(grad_hidden_dtype(spec) == DType::fp32),
          retains_heads(has_teacher_head(spec) && plan.strategy == Strategy::retain) {}

    [[nodiscard]] Expr sum() const { return own_sum ? slot(Slot::grad_hidden) : workspace_at(layout.hidden_accumulator); }
    /// Hidden states that grad_weight's products read: in grad_hidden where that is written last, else in the place of its sum, which is
    /// not wanted, or not any more.
    [[nodiscard]] Expr operand() const {
        if (own_sum) return workspace_at(layout.operand);
        return select(present(Slot::grad_hidden) && !all_retained, slot(Slot::grad_hidden), sum());
    }
    [[nodiscard]] Expr gemm_workspace() const { return workspace_at(layout.gemm_workspace); }
    [[nodiscard]] Expr factors() const { return workspace_at(layout.factors); }
    [[nodiscard]] Expr adds_weight() const { return spec.grad_weight_mode == GradMode::accumulate ? 1 : 0; }
    [[nodiscard]] Matrix grad_weight_from(const Expr& column) const {
        const std::int64_t step = hidden_major ? 1 : spec.hidden_size;
        return weight_matrix(spec, hidden_major, slot(Slot::grad_weight) + column * (step * grad_element_bytes));
    }
};

// ---- Chunks that are computed again.

/// Rows and columns of a chunk that one call of the library computes.
struct Piece {
    RowBlock rows;
    Chunk columns;
    Expr row_in_block;  ///< place of the piece's first row
    Expr column_in_chunk;
};

Piece piece_of(const Pass& pass, const Chunk& chunk, const RowBlock& block, const GemmTile& tile) {
    const Expr row = variable(kPieceRowsLoop) * std::int64_t{tile.block_m};
    const Expr column = variable(kPieceColumnsLoop) * std::int64_t{tile.block_n};
    const Expr at = chunk.dlogits + (row * chunk.width + column) * pass.element_bytes;
    return {.rows = {block.number, block.first + row, min(block.count - row, tile.block_m)},
            .columns = {chunk.first_column + column, min(chunk.columns - column, tile.block_n), chunk.width, at},
            .row_in_block = row,
            .column_in_chunk = column};
}

LaunchBuilder<LtDlogitsParams> dlogits_launch(const Pass& pass, const Piece& piece, const SumsPlace& sums) {
    using Params = LtDlogitsParams;
    const Spec& spec = pass.spec;
    const BackwardLayoutLt& layout = pass.layout;
    const Expr& row = piece.row_in_block;
    const Expr partials =
        workspace_at(layout.bias_partials) + (floor_div(row, kLtBlockRows) * piece.columns.width + piece.column_in_chunk) * std::int64_t{4};
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::dlogits), ceil_div(piece.rows.count, kLtBlockRows),
                                 ceil_div(piece.columns.columns, kLtTileColumns));
    launch.set(&Params::bias, advanced(slot(Slot::bias), piece.columns.first_column, pass.element_bytes))
        .set(&Params::class_weight, advanced(slot(Slot::class_weight), piece.columns.first_column, 4))
        .set(&Params::class_offset, advanced(slot(Slot::class_offset), piece.columns.first_column, 4))
        .set(&Params::scalars, scalars_at())
        .set(&Params::coefficients, workspace_at(layout.coefficients) + row * 16)
        .set(&Params::row_targets, workspace_at(layout.row_targets) + row * 8)
        .set(&Params::dlogits, piece.columns.dlogits)
        .set(&Params::bias_partials, spec.bias ? select(present(Slot::grad_bias), partials, 0) : Expr(0))
        .set(&Params::ld, piece.columns.width)
        .set(&Params::first_column, piece.columns.first_column)
        .set(&Params::rows, piece.rows.count)
        .set(&Params::columns, piece.columns.columns)
        .set_transform(&Params::transform, spec)
        .set(&Params::sums, sums.student)
        .set(&Params::sums_ld, sums.tile.block_n)
        .set(&Params::factors, pass.factors());
    return launch;
}

Statement dlogits_of_piece(const Pass& pass, const Piece& piece, const SumsPlace& sums) {
    const Spec& spec = pass.spec;
    const RowNumbers numbers = row_numbers_at(pass.layout, piece.row_in_block);
    LaunchBuilder<LtDlogitsParams> launch = dlogits_launch(pass, piece, sums);
    if (!has_teacher_head(spec)) return build_with_rows(std::move(launch), spec, numbers);
    using Params = LtDivergenceDlogitsParams;
    LaunchBuilder<Params> of_heads(std::move(launch));
    of_heads.set(&Params::teacher_sums, sums.teacher)
        .set(&Params::teacher_bias, advanced(slot(Slot::teacher_bias), piece.columns.first_column, pass.element_bytes))
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + piece.rows.first * 4)
        .set(&Params::student_divergence, slot(Slot::student_divergence) + piece.rows.first * 4)
        .set_transform(&Params::teacher_transform, teacher_head(spec))
        .set_float(&Params::beta, static_cast<float>(spec.divergence_beta));
    return build_with_rows(std::move(of_heads), spec, numbers);
}

Matrix chunk_weight(const Pass& pass, const Chunk& chunk, const Expr& column_in_chunk) {
    const bool hidden_major = pass.hidden_major && !rounds_weight(pass.spec);
    const std::int64_t step = hidden_major ? 1 : pass.spec.hidden_size;
    return weight_matrix(pass.spec, hidden_major, weight_operand(pass, chunk) + column_in_chunk * (step * pass.element_bytes));
}

/// dlogits of the chunk and the row block, by the library's products, piece by piece.
Statement library_dlogits_step(const Pass& pass, const Chunk& chunk, const RowBlock& block, const SumsPlace& sums) {
    const GemmTile& tile = sums.tile;
    const Piece piece = piece_of(pass, chunk, block, tile);
    const bool hidden_major = pass.hidden_major && !rounds_weight(pass.spec);
    const Expr hidden = slot(Slot::hidden) + piece.rows.first * (pass.spec.hidden_size * pass.element_bytes);
    std::vector<Statement> steps = {logits_gemm(pass.spec, pass.plan, piece.rows.count, piece.columns.columns, hidden,
                                                chunk_weight(pass, chunk, piece.column_in_chunk), hidden_major,
                                                {sums.student, tile.block_n}, pass.gemm_workspace())};
    if (has_teacher_head(pass.spec)) {
        steps.push_back(teacher_gemm(pass.spec, pass.plan, {piece.rows.first, piece.rows.count},
                                     {piece.columns.first_column, piece.columns.columns}, {sums.teacher, tile.block_n},
                                     pass.gemm_workspace()));
    }
    steps.push_back(dlogits_of_piece(pass, piece, sums));
    std::vector<Statement> columns = {{Loop{kPieceColumnsLoop, ceil_div(chunk.columns, std::int64_t{tile.block_n}), std::move(steps)}}};
    return {Loop{kPieceRowsLoop, ceil_div(block.count, std::int64_t{tile.block_m}), std::move(columns)}};
}

/// dlogits of the chunk and the row block. A launch that makes both heads' products parks the student's in the place of sums.
Statement dlogits_step(const Pass& pass, const Chunk& chunk, const RowBlock& block, const SumsPlace& sums) {
    Statement by_library = library_dlogits_step(pass, chunk, block, sums);
    if (!has_heads_dlogits(pass.spec, pass.device) || !has_heads_launches(pass.spec, pass.device, pass.plan)) return by_library;
    const Expr room = less(heads_scratch(pass.device).parked_bytes, both_sums_bytes(sums.tile) + 1);
    const Expr takes = room && less(kFewHeadsRows, block.count);
    const Expr tickets = scalars_at() + static_cast<std::int64_t>(offsetof(PassScalars, tickets));
    const HeadsDlogits of{.parked = sums.student, .tickets = tickets, .factors = pass.factors()};
    std::vector<Statement> steps = {{If{takes, heads_dlogits_steps(pass, pass.device, chunk, block, of)}},
                                    {If{!takes, {std::move(by_library)}}}};
    return {If{1, std::move(steps)}};
}

/// dlogits of a chunk of retained logits.
Statement retained_dlogits_step(const Pass& pass, const RetainedHeads& retained, const Chunk& chunk, const RowBlock& block) {
    using Params = LtDivergenceDlogitsParams;
    const Spec& spec = pass.spec;
    const BackwardLayoutLt& layout = pass.layout;
    const Expr partials = workspace_at(layout.bias_partials);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::divergence_retained), ceil_div(block.count, kLtBlockRows),
                                 ceil_div(chunk.columns, kLtTileColumns));
    launch.set(&Params::scalars, scalars_at())
        .set(&Params::coefficients, workspace_at(layout.coefficients))
        .set(&Params::row_targets, workspace_at(layout.row_targets))
        .set(&Params::dlogits, chunk.dlogits)
        .set(&Params::bias_partials, spec.bias ? select(present(Slot::grad_bias), partials, 0) : Expr(0))
        .set(&Params::ld, chunk.width)
        .set(&Params::first_column, chunk.first_column)
        .set(&Params::rows, block.count)
        .set(&Params::columns, chunk.columns)
        .set_transform(&Params::transform, spec)
        .set(&Params::factors, pass.factors())
        .set(&Params::teacher_lse, slot(Slot::teacher_lse) + block.first * 4)
        .set(&Params::student_divergence, slot(Slot::student_divergence) + block.first * 4)
        .set_float(&Params::beta, static_cast<float>(spec.divergence_beta))
        .set_float(&Params::derivative, static_cast<float>(spec.logit_scale));
    set_pairs(launch, retained.from_row(block.first));
    return build_with_rows(std::move(launch), spec, row_numbers_at(layout, 0));
}

/// dlogits of a chunk of a divergence: of logits that are all retained, or computed again.
Statement heads_dlogits_step(const Pass& pass, const Chunk& chunk, const RowBlock& block) {
    const RetainedHeads retained = retained_heads(pass.spec, pass.plan);
    const Expr kept = less(chunk.first_column + chunk.columns, retained.columns + 1);
    std::vector<Statement> steps = {{If{kept, {retained_dlogits_step(pass, retained, chunk, block)}}},
                                    {If{!kept, {dlogits_step(pass, chunk, block, pass.layout.sums)}}}};
    return {If{1, std::move(steps)}};
}

/// grad_weight of a chunk: at once, or summed up over row blocks.
Statement grad_weight_step(const Pass& pass, const Chunk& chunk, const RowBlock& block) {
    using Params = LtFinishWeightParams;
    const Matrix dlogits{chunk.dlogits, chunk.width};
    const Expr hidden = pass.operand() + block.first * (pass.spec.hidden_size * pass.element_bytes);
    const Matrix sums{workspace_at(pass.layout.weight_accumulator), pass.hidden_major ? chunk.width : Expr(pass.spec.hidden_size)};
    const Matrix result = pass.grad_weight_from(chunk.first_column);
    const Expr one_block = equal(pass.layout.row_blocks, 1);
    const Expr across = pass.hidden_major ? chunk.columns : Expr(pass.spec.hidden_size);
    LaunchBuilder<Params> finish(pass.source.kernel(KernelRole::finish_weight),
                                 pass.hidden_major ? Expr(pass.spec.hidden_size) : chunk.columns, ceil_div(across, kRowThreads));
    finish.set(&Params::sums, sums.address)
        .set(&Params::grad_weight, result.address)
        .set(&Params::scalars, scalars_at())
        .set(&Params::ld, sums.ld)
        .set(&Params::columns, chunk.columns);
    const Expr last = equal(block.number + 1, pass.layout.row_blocks);
    std::vector<Statement> steps;
    steps.push_back({If{one_block,
                        {grad_weight_gemm(pass.spec, pass.plan, block.count, chunk.columns, dlogits, hidden, pass.spec.grad_weight_dtype,
                                          result, pass.adds_weight(), pass.factors(), pass.gemm_workspace())}}});
    steps.push_back({If{!one_block,
                        {grad_weight_gemm(pass.spec, pass.plan, block.count, chunk.columns, dlogits, hidden, DType::fp32, sums,
                                          less(0, block.number), 0, pass.gemm_workspace()),
                         {If{last, {finish.build()}}}}}});
    return {If{1, std::move(steps)}};
}

/// Rows of grad_hidden's sum times `row_scales`, which may be 0 for none; `last`: the result is written.
Statement finish_hidden_launch(const Pass& pass, const Expr& row_scales, const Expr& last) {
    using Params = LtFinishHiddenParams;
    const Expr n = slot(Slot::num_tokens);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::finish_hidden), ceil_div(n, kRowThreads / 32));
    launch.set(&Params::sums, pass.sum())
        .set(&Params::grad_hidden, select(last, slot(Slot::grad_hidden), 0))
        .set(&Params::row_scales, row_scales)
        .set(&Params::scalars, scalars_at())
        .set(&Params::rows, n);
    return launch.build();
}

/// Both gradients, each as one product, from the gradients by logits that forward has left.
std::vector<Statement> kept_gradients_steps(const Pass& pass, const RetainedHeads& retained) {
    using Params = DivergenceScalesParams;
    const Spec& spec = pass.spec;
    const Expr n = slot(Slot::num_tokens);
    const std::int64_t row_bytes = spec.hidden_size * pass.element_bytes;
    const auto scales = [&](const RowBlock& rows) {
        LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::divergence_scales), ceil_div(rows.count, kRowThreads / 32));
        launch.set(&Params::hidden, slot(Slot::hidden) + rows.first * row_bytes)
            .set(&Params::scaled, select(present(Slot::grad_weight), pass.operand() + rows.first * row_bytes, 0))
            .set(&Params::student_divergence, slot(Slot::student_divergence) + rows.first * 4)
            .set(&Params::coefficients, workspace_at(pass.layout.coefficients))
            .set(&Params::row_targets, workspace_at(pass.layout.row_targets))
            .set(&Params::scalars, scalars_at())
            .set(&Params::row_scales, retained.row_scales() + rows.first * 4)
            .set(&Params::factors, pass.factors())
            .set(&Params::rows, rows.count)
            .set_float(&Params::derivative, static_cast<float>(spec.logit_scale));
        return launch.build();
    };
    const Matrix slopes{slot(Slot::retained), floor_div(retained.pairs.row_bytes, pass.element_bytes)};
    const Matrix weight = weight_matrix(spec, pass.hidden_major, slot(Slot::weight));
    Statement of_weight = grad_weight_gemm(spec, pass.plan, n, pass.columns, slopes, pass.operand(), spec.grad_weight_dtype,
                                           pass.grad_weight_from(0), pass.adds_weight(), pass.factors(), pass.gemm_workspace());
    Statement of_hidden =
        grad_hidden_gemm(spec, pass.plan, n, pass.columns, slopes, weight, pass.hidden_major, pass.sum(), 0, pass.gemm_workspace());
    return {retained_rows_step(pass, scales),
            {If{present(Slot::grad_weight), {std::move(of_weight)}}},
            {If{present(Slot::grad_hidden), {std::move(of_hidden), finish_hidden_launch(pass, retained.row_scales(), 1)}}}};
}

/// Hidden states with zeros for ignored tokens, whose dlogits are 0: 0 times NaN is not.
Statement gather_launch(const Pass& pass) {
    using Params = GatherRowsParams;
    const Expr n = slot(Slot::num_tokens);
    LaunchBuilder<Params> launch(pass.source.kernel(KernelRole::gather_rows), ceil_div(n, kRowThreads / 32));
    launch.set(&Params::hidden, slot(Slot::hidden))
        .set(&Params::compact, pass.operand())
        .set_targets(&Params::targets, pass.spec, 0)
        .set(&Params::temperature, slot(Slot::temperature))
        .set(&Params::rows, n);
    return launch.build();
}

/// Both gradients of a stretch. `dlogits`: the step that makes dlogits of its chunk.
Statement stretch_step(const Pass& pass, const Stretch& stretch, const RowBlock& block, Statement dlogits) {
    const Chunk chunk = chunk_of(stretch);
    const bool hidden_major = pass.hidden_major && !rounds_weight(pass.spec);
    const Expr sum = pass.sum() + block.first * (pass.spec.hidden_size * 4);
    return chunk_by_chunk(pass, stretch,
                          {.dlogits = std::move(dlogits),
                           .grad_weight = grad_weight_step(pass, chunk, block),
                           .grad_hidden = grad_hidden_gemm(pass.spec, pass.plan, block.count, chunk.columns, {chunk.dlogits, chunk.width},
                                                           chunk_weight(pass, chunk, 0), hidden_major, sum, less(0, chunk.first_column),
                                                           pass.gemm_workspace())});
}

/// Gradients of a divergence whose sums may lie in grad_weight's memory.
std::vector<Statement> lent_steps(const Pass& pass, const RowBlock& block) {
    const RetainedHeads retained = retained_heads(pass.spec, pass.plan);
    std::vector<Statement> steps;
    for (const HeadsStretch& of : heads_stretches(pass.spec, pass.plan, pass.layout)) {
        const Stretch stretch{of.first, of.chunks, of.width, of.dlogits, of.end};
        const Chunk chunk = chunk_of(stretch);
        Statement dlogits = of.retained ? retained_dlogits_step(pass, retained, chunk, block) : dlogits_step(pass, chunk, block, of.sums);
        steps.push_back(stretch_step(pass, stretch, block, std::move(dlogits)));
    }
    return steps;
}

/// Gradients of the part that is not retained, chunk by chunk.
std::vector<Statement> chunk_steps(const Pass& pass) {
    const RowBlock block = row_block(pass, kRowBlockLoop);
    std::vector<Statement> steps;
    steps.push_back({If{present(Slot::grad_weight), {gather_launch(pass)}}});
    if (has_lent_tile(pass.plan)) {
        std::ranges::move(lent_steps(pass, block), std::back_inserter(steps));
    } else {
        for (const Stretch& stretch : stretches(pass, pass.retained.columns)) {
            const Chunk chunk = chunk_of(stretch);
            steps.push_back(stretch_step(
                pass, stretch, block,
                pass.retains_heads ? heads_dlogits_step(pass, chunk, block) : dlogits_step(pass, chunk, block, pass.layout.sums)));
        }
    }
    steps.push_back({If{present(Slot::grad_hidden), {finish_hidden_launch(pass, 0, 1)}}});
    return steps;
}

// ---- Retained exponentials.

/// The columns of kBlockLoop's block of exponentials.
struct RetainedBlock {
    Expr first;
    Expr columns;
    Matrix exponentials;
};
RetainedBlock retained_block(const Pass& pass) {
    const Expr first = variable(kBlockLoop) * std::int64_t{kLtRetainedColumns};
    return {first,
            min(pass.retained.columns - first, kLtRetainedColumns),
            {retained_at(pass.retained.exponentials) + variable(kBlockLoop) * pass.retained.block_bytes, kLtRetainedColumns}};
}
Statement for_all_blocks(const Pass& pass, Statement step) {
    return {Loop{kBlockLoop, ceil_div(pass.retained.columns, kLtRetainedColumns), {std::move(step)}}};
}

std::vector<Statement> retained_hidden_steps(const Pass& pass) {
    const Spec& spec = pass.spec;
    // The path has no counters; what would set them to 0 writes none.
    const RetainedPlaces places{pass.retained, pass.layout.factors, 0, 0};
    std::vector<Statement> steps = {
        retained_rows_step(pass, [&](const RowBlock& rows) { return retained_rows_launch(pass, places, rows, 0).build(); })};
    if (spec.bias) steps.push_back({If{present(Slot::grad_bias), {retained_bias_launch(pass, pass.retained)}}});
    const RetainedBlock block = retained_block(pass);
    const std::int64_t step = pass.hidden_major ? 1 : spec.hidden_size;
    const Matrix weight = weight_matrix(spec, pass.hidden_major, slot(Slot::weight) + block.first * (step * pass.element_bytes));
    const Statement product = grad_hidden_gemm(spec, pass.plan, slot(Slot::num_tokens), block.columns, block.exponentials, weight,
                                               pass.hidden_major, pass.sum(), less(0, block.first), pass.gemm_workspace());
    steps.push_back(
        {If{present(Slot::grad_hidden),
            {for_all_blocks(pass, product), finish_hidden_launch(pass, retained_at(pass.retained.row_scales), pass.all_retained)}}});
    using Params = LtScaledHiddenParams;
    const Expr n = slot(Slot::num_tokens);
    LaunchBuilder<Params> scaled(pass.source.kernel(KernelRole::scaled_hidden), ceil_div(n, kRowThreads / 32));
    scaled.set(&Params::hidden, slot(Slot::hidden))
        .set(&Params::scaled, pass.operand())
        .set(&Params::row_scales, retained_at(pass.retained.row_scales))
        .set(&Params::scalars, scalars_at())
        .set(&Params::factors, pass.factors())
        .set(&Params::rows, n);
    steps.push_back({If{present(Slot::grad_weight), {scaled.build()}}});
    return steps;
}

Statement retained_weight_step(const Pass& pass) {
    const RetainedBlock block = retained_block(pass);
    const Statement product = grad_weight_gemm(pass.spec, pass.plan, slot(Slot::num_tokens), block.columns, block.exponentials,
                                               pass.operand(), pass.spec.grad_weight_dtype, pass.grad_weight_from(block.first),
                                               pass.adds_weight(), pass.factors(), pass.gemm_workspace());
    return {If{present(Slot::grad_weight), {for_all_blocks(pass, product)}}};
}

}  // namespace

// A call's stage decides which of these steps it does. Where everything is retained, grad_weight is left for the second stage.
LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                               const BackwardLayoutLt& layout) {
    const Pass pass(spec, device, plan, source, layout);
    std::vector<Statement> steps = coefficient_steps(pass);
    const bool retains = plan.strategy == Strategy::retain && !has_teacher_head(spec);
    const Expr tokens = less(0, slot(Slot::num_tokens));
    const Expr any = less(0, pass.retained.columns) && tokens;
    if (retains) {
        steps.push_back({If{any, retained_hidden_steps(pass)}});
        steps.push_back({If{and_not(any, pass.all_retained), {retained_weight_step(pass)}}});
    }
    const Expr some_again = less(pass.retained.columns, pass.columns) && tokens;
    std::vector<Statement> of_chunks = chunk_steps(pass);
    if (may_keep_gradients(spec, plan)) {
        const RetainedHeads heads = retained_heads(spec, plan);
        of_chunks = {{If{heads.gradients, kept_gradients_steps(pass, heads)}}, {If{!heads.gradients, std::move(of_chunks)}}};
    }
    steps.push_back({If{any_gradient() && some_again, std::move(of_chunks)}});
    if (is_shard(spec)) steps.push_back(zero_without_class(pass));
    const int variables = kBlockLoop + 1;
    if (!retains) {
        std::ranges::move(zero_the_rest(pass), std::back_inserter(steps));
        return {.body = {{If{does_first_stage(), std::move(steps)}}}, .variable_count = variables};
    }
    LaunchProgram program{.body = {{If{does_first_stage(), std::move(steps)}}}, .variable_count = variables};
    program.body.push_back({If{does_rest() && (any && pass.all_retained), {retained_weight_step(pass)}}});
    program.body.push_back({If{select(pass.all_retained, does_rest(), does_first_stage()), zero_the_rest(pass)}});
    return program;
}

}  // namespace flce::lt

// The part of the vocabulary that forward retained, all tokens at once: plain GEMMs, with the rows' scales in hidden and in grad_hidden's epilogue.
#include <algorithm>
#include <cmath>
#include <utility>

#include "generator/cuda/backward_writer.hpp"

namespace flce {

std::vector<Statement> BackwardWriter::retained_steps() const {
    std::vector<Statement> rows;
    rows.push_back({If{less(1, layout_.row_blocks), {coefficients(variable(kRowBlock))}}});
    rows.push_back(retained_rows());
    std::vector<Statement> steps;
    steps.push_back({Loop{kRowBlock, layout_.row_blocks, std::move(rows)}});
    // grad_hidden first: grad_weight may take the place of what it reads.
    steps.push_back({If{present(Slot::grad_hidden), {retained_grad_hidden()}}});
    steps.push_back({If{present(Slot::grad_weight), {retained_grad_weight()}}});
    return steps;
}

Statement BackwardWriter::retained_rows() const {
    const Expr row = first_row(variable(kRowBlock));
    const Expr rows = row_count(variable(kRowBlock));
    LaunchBuilder<RetainedRowsParams> launch(source_.kernel("retained_rows"), ceil_div(rows, kRowThreads / 32));
    launch.set(&RetainedRowsParams::hidden, slot(Slot::hidden) + from_row(row) * (spec_.hidden_size * element_))
        .set_list(&RetainedRowsParams::list, list_, at(layout_.scalars), row)
        .set(&RetainedRowsParams::coefficients, at(layout_.coefficients))
        .set(&RetainedRowsParams::row_targets, at(layout_.row_targets))
        .set(&RetainedRowsParams::scalars, at(layout_.scalars))
        .set(&RetainedRowsParams::references, retained_at(retained_.references) + row * 4)
        .set(&RetainedRowsParams::target_logits, retained_at(retained_.target_logits) + row * 4)
        .set(&RetainedRowsParams::exponentials, retained_at(retained_.exponentials) + row * (kRetainedColumns * element_))
        .set(&RetainedRowsParams::scaled_hidden, compact_hidden() + row * (spec_.hidden_size * element_))
        .set(&RetainedRowsParams::row_scales, retained_at(retained_.row_scales) + row * 4)
        .set(&RetainedRowsParams::counters, at(layout_.counters))
        .set(&RetainedRowsParams::counter_count, layout_.counter_count)
        .set(&RetainedRowsParams::block_bytes, retained_.block_bytes)
        .set(&RetainedRowsParams::rows, rows)
        .set(&RetainedRowsParams::columns, kept_)
        .set_float(&RetainedRowsParams::derivative, static_cast<float>(spec_.logit_scale));
    return launch.build();
}

Statement BackwardWriter::retained_grad_hidden() const {
    const GemmTile& tile = plan_.cuda.grad_hidden;
    const Expr n = slot(Slot::num_tokens);
    const Matrix sum{sum_at(), spec_.hidden_size, max(room(), 1), spec_.hidden_size};
    LaunchBuilder<GradHiddenSm90Params> launch(source_.kernel("grad_hidden"), sum_grid(n));
    share(launch, &GradHiddenSm90Params::share);
    launch.set(&GradHiddenParams::scalars, at(layout_.scalars))
        .set(&GradHiddenParams::accumulator, sum.address)
        .set(&GradHiddenParams::grad_hidden, slot(Slot::grad_hidden))
        .set(&GradHiddenParams::rows, n)
        .set(&GradHiddenParams::columns, kept_)
        .set(&GradHiddenParams::first, 1)
        .set(&GradHiddenParams::last, equal(kept_, spec_.vocab_size))
        .set(&GradHiddenSm90Params::row_scales, retained_at(retained_.row_scales))
        .set(&GradHiddenSm90Params::pace, at(layout_.counters))
        .set(&GradHiddenSm90Params::tickets, tickets())
        .set(&GradHiddenSm90Params::column_shift, kRetainedShift);
    map(launch, &GradHiddenSm90Params::dlogits_map, exponentials(), tile.block_m);
    map(launch, &GradHiddenSm90Params::weight_map, weight_matrix(slot(Slot::weight), kept_),
        vocab_major() ? kSecondRows : tile.block_n / kClusterBlocks);
    map(launch, &GradHiddenSm90Params::accumulator_map, sum, kFirstRows, 4);
    list(launch, 0);
    return launch.build();
}

Statement BackwardWriter::retained_grad_weight() const {
    const GemmTile& tile = plan_.cuda.grad_weight;
    const Expr n = slot(Slot::num_tokens);
    const Matrix hidden{compact_hidden(), spec_.hidden_size, n, spec_.hidden_size};
    LaunchBuilder<GradWeightSm90Params> launch(source_.kernel("grad_weight"), grid(tile, vocab_major() ? kept_ : Expr(spec_.hidden_size),
                                                                                   vocab_major() ? Expr(spec_.hidden_size) : kept_));
    const Expr lent = equal(slot(Slot::retained), slot(Slot::grad_weight));  // tiles wait for those that read what they write over
    // Two consumers have half of each tile, or each has half of the tiles.
    const std::int64_t warps = takes_turns(tile) ? 4 : 8;
    const std::int64_t readers = kRetainedColumns / tile.block_m * ((spec_.hidden_size + tile.block_n - 1) / tile.block_n) * warps;
    launch.set(&GradWeightParams::scalars, at(layout_.scalars))
        .set(&GradWeightParams::grad_weight, slot(Slot::grad_weight))
        .set(&GradWeightParams::rows, n)
        .set(&GradWeightParams::columns, kept_)
        .set(&GradWeightParams::first, 1)
        .set(&GradWeightParams::last, 1)
        .set(&GradWeightSm90Params::readers, select(lent, at(layout_.counters) + 2 * kPaceCounters * 4, 0))
        .set(&GradWeightSm90Params::pace, at(layout_.counters) + kPaceCounters * 4)
        .set(&GradWeightSm90Params::tickets, tickets())
        .set(&GradWeightSm90Params::block_bytes, retained_.block_bytes)
        .set(&GradWeightSm90Params::readers_of_block, readers)
        .set(&GradWeightSm90Params::column_shift, kRetainedShift);
    map(launch, &GradWeightSm90Params::dlogits_map, exponentials(), vocab_major() ? kFirstRows : kSecondRows);
    map(launch, &GradWeightSm90Params::hidden_map, hidden, vocab_major() ? kSecondRows : kFirstRows);
    map(launch, &GradWeightSm90Params::grad_weight_map, weight_matrix(slot(Slot::grad_weight), kept_), kFirstRows,
        static_cast<int>(grad_element_));
    list(launch, 0);
    return launch.build();
}

}  // namespace flce

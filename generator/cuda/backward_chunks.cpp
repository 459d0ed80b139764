// The GEMMs of a chunk of the vocabulary, on both paths.
#include <algorithm>
#include <cmath>
#include <utility>

#include "generator/cuda/backward_writer.hpp"

namespace flce {

std::vector<Statement> BackwardWriter::chunk_steps() const {
    std::vector<Statement> steps;
    steps.push_back({If{less(1, layout_.row_blocks), {coefficients(variable(kRowBlock))}}});
    steps.push_back(dlogits());
    // grad_weight first: hidden states may lie in grad_hidden.
    steps.push_back({If{present(Slot::grad_weight), {grad_weight()}}});
    steps.push_back({If{present(Slot::grad_hidden), {grad_hidden()}}});
    if (spec_.bias) steps.push_back({If{present(Slot::grad_bias), {grad_bias()}}});
    return steps;
}

Statement BackwardWriter::dlogits() const {
    if (!sm90()) return dlogits_launch<DlogitsParams>().build();
    const GemmTile& tile = plan_.cuda.dlogits;
    auto launch = dlogits_launch<DlogitsSm90Params>();
    map(launch, &DlogitsSm90Params::hidden_map, hidden_matrix(), tile.block_m);
    map(launch, &DlogitsSm90Params::weight_map, weight_chunk(), reads_vocab_major() ? tile.block_n / kClusterBlocks : kSecondRows);
    map(launch, &DlogitsSm90Params::dlogits_map, dlogits_matrix(), kFirstRows);
    launch.set(&DlogitsSm90Params::tickets, tickets());
    list(launch, first_row(variable(kRowBlock)));
    return launch.build();
}

template <class Params>
LaunchBuilder<Params> BackwardWriter::dlogits_launch() const {
    const Expr rows = row_count(variable(kRowBlock));
    const Expr bias_partials = spec_.bias ? select(present(Slot::grad_bias), at(layout_.bias_partials), 0) : Expr(0);
    LaunchBuilder<Params> launch(source_.kernel("dlogits"), grid(plan_.cuda.dlogits, rows, column_count()));
    launch.set(&DlogitsParams::hidden, hidden_at(variable(kRowBlock)))
        .set(&DlogitsParams::weight, weight_operand())
        .set(&DlogitsParams::bias, advanced(slot(Slot::bias), first_column(), element_))
        .set(&DlogitsParams::class_weight, advanced(slot(Slot::class_weight), first_column(), 4))
        .set(&DlogitsParams::scalars, at(layout_.scalars))
        .set(&DlogitsParams::coefficients, at(layout_.coefficients))
        .set(&DlogitsParams::row_targets, at(layout_.row_targets))
        .set(&DlogitsParams::dlogits, stretch_.dlogits)
        .set(&DlogitsParams::bias_partials, bias_partials)
        .set(&DlogitsParams::ld, stretch_.width)
        .set(&DlogitsParams::first_column, first_column())
        .set(&DlogitsParams::rows, rows)
        .set(&DlogitsParams::columns, column_count())
        .set_transform(&Params::transform, spec_);
    return launch;
}

Statement BackwardWriter::grad_hidden() const {
    if (!sm90()) return grad_hidden_launch<GradHiddenParams>().build();
    const GemmTile& tile = plan_.cuda.grad_hidden;
    auto launch = grad_hidden_launch<GradHiddenSm90Params>();
    launch.set(&GradHiddenSm90Params::column_shift, kOneBlock).set(&GradHiddenSm90Params::tickets, tickets());
    map(launch, &GradHiddenSm90Params::dlogits_map, dlogits_operand(), tile.block_m);
    map(launch, &GradHiddenSm90Params::weight_map, weight_chunk(), reads_vocab_major() ? kSecondRows : tile.block_n / kClusterBlocks);
    const Expr row = first_row(variable(kRowBlock));
    const Expr sum_rows = select(less(1, layout_.row_blocks), row_count(variable(kRowBlock)), room());
    const Matrix sum{sum_at() + row * (spec_.hidden_size * 4), spec_.hidden_size, sum_rows, spec_.hidden_size};
    map(launch, &GradHiddenSm90Params::accumulator_map, sum, kFirstRows, 4);
    share(launch, &GradHiddenSm90Params::share);
    list(launch, row);
    return launch.build();
}

template <class Params>
LaunchBuilder<Params> BackwardWriter::grad_hidden_launch() const {
    const Expr row = first_row(variable(kRowBlock));
    const Expr rows = row_count(variable(kRowBlock));
    const Expr result = slot(Slot::grad_hidden) + from_row(row) * (spec_.hidden_size * element_);
    // fp32 sums in place.
    const Expr sum = spec_.dtype == DType::fp32 ? result : sum_at() + row * (spec_.hidden_size * 4);
    LaunchBuilder<Params> launch(source_.kernel("grad_hidden"), sum_grid(rows));
    launch.set(&GradHiddenParams::dlogits, stretch_.dlogits)
        .set(&GradHiddenParams::weight, weight_operand())
        .set(&GradHiddenParams::scalars, at(layout_.scalars))
        .set(&GradHiddenParams::accumulator, sum)
        .set(&GradHiddenParams::grad_hidden, result)
        .set(&GradHiddenParams::ld, stretch_.width)
        .set(&GradHiddenParams::rows, rows)
        .set(&GradHiddenParams::columns, column_count())
        .set(&GradHiddenParams::first, equal(first_column(), 0))
        .set(&GradHiddenParams::last, equal(first_column() + column_count(), spec_.vocab_size) && !scatters_sum());
    return launch;
}

Statement BackwardWriter::grad_weight() const {
    if (!sm90()) return grad_weight_launch<GradWeightParams>().build();
    auto launch = grad_weight_launch<GradWeightSm90Params>();
    launch.set(&GradWeightSm90Params::column_shift, kOneBlock).set(&GradWeightSm90Params::tickets, tickets());
    map(launch, &GradWeightSm90Params::dlogits_map, dlogits_operand(), vocab_major() ? kFirstRows : kSecondRows);
    map(launch, &GradWeightSm90Params::hidden_map, hidden_matrix(), vocab_major() ? kSecondRows : kFirstRows);
    map(launch, &GradWeightSm90Params::grad_weight_map, weight_matrix(weight_at(Slot::grad_weight, grad_element_), column_count()),
        kFirstRows, static_cast<int>(grad_element_));
    list(launch, first_row(variable(kRowBlock)));
    return launch.build();
}

template <class Params>
LaunchBuilder<Params> BackwardWriter::grad_weight_launch() const {
    const Expr accumulator = select(less(1, layout_.row_blocks), at(layout_.weight_accumulator), 0);
    LaunchBuilder<Params> launch(source_.kernel("grad_weight"),
                                 grid(plan_.cuda.grad_weight, vocab_major() ? column_count() : Expr(spec_.hidden_size),
                                      vocab_major() ? Expr(spec_.hidden_size) : column_count()));
    launch.set(&GradWeightParams::dlogits, stretch_.dlogits)
        .set(&GradWeightParams::hidden, hidden_at(variable(kRowBlock)))
        .set(&GradWeightParams::scalars, at(layout_.scalars))
        .set(&GradWeightParams::accumulator, accumulator)
        .set(&GradWeightParams::grad_weight, weight_at(Slot::grad_weight, grad_element_))
        .set(&GradWeightParams::ld, stretch_.width)
        .set(&GradWeightParams::accumulator_ld, vocab_major() ? Expr(spec_.hidden_size) : stretch_.width)
        .set(&GradWeightParams::rows, row_count(variable(kRowBlock)))
        .set(&GradWeightParams::columns, column_count())
        .set(&GradWeightParams::first, equal(variable(kRowBlock), 0))
        .set(&GradWeightParams::last, is_last(kRowBlock, layout_.row_blocks))
        .set(&GradWeightParams::row_targets, at(layout_.row_targets));
    return launch;
}

}  // namespace flce

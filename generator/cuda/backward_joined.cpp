// All chunks of a stretch of the vocabulary in one launch, which orders its tiles by counters.
#include <utility>

#include "generator/cuda/backward_writer.hpp"

namespace flce {

std::vector<Statement> BackwardWriter::joined_steps() const {
    using Params = BackwardChunksSm90Params;
    const GemmTile& tile = plan_.cuda.dlogits;
    const Expr n = slot(Slot::num_tokens);
    const Expr columns = min(Expr(spec_.vocab_size) - stretch_.begin, stretch_.chunks * stretch_.width);
    const auto weight_of = [&](Slot which, std::int64_t element) { return slot(which) + stretch_.begin * (spec_.hidden_size * element); };
    const Matrix hidden{compact_hidden(), spec_.hidden_size, n, spec_.hidden_size};
    const Matrix weight = weight_matrix(weight_of(Slot::weight, element_), columns);
    const Matrix dlogits{stretch_.dlogits, stretch_.width, n, stretch_.width};
    // Of the last pair of chunks, or half of one.
    const Expr last = columns - (ceil_div(columns, stretch_.width) - 1) * stretch_.width;
    const Matrix sum{sum_at(), spec_.hidden_size, room(), spec_.hidden_size};
    LaunchBuilder<Params> launch(source_.kernel("backward_chunks"), clusters_ * kClusterBlocks);
    share(launch, &Params::share);
    launch.set(&Params::class_weight, advanced(slot(Slot::class_weight), stretch_.begin, 4))
        .set(&Params::scalars, at(layout_.scalars))
        .set(&Params::coefficients, at(layout_.coefficients))
        .set(&Params::row_targets, at(layout_.row_targets))
        .set(&Params::first_column, stretch_.begin)
        .set(&Params::rows, n)
        .set(&Params::columns, columns)
        .set_transform(&Params::transform, spec_)
        .set(&Params::accumulator, sum.address)
        .set(&Params::grad_hidden, slot(Slot::grad_hidden))
        .set(&Params::taken, at(layout_.progress))
        .set(&Params::progress, at(layout_.progress) + 4)
        .set(&Params::even_width, stretch_.even)
        .set(&Params::pair_width, stretch_.width)
        .set(&Params::first, equal(stretch_.begin, 0))
        .set(&Params::last, equal(stretch_.begin + columns, spec_.vocab_size));
    map(launch, &Params::hidden_map, hidden, tile.block_m);
    map(launch, &Params::weight_map, weight, tile.block_n / kClusterBlocks);
    map(launch, &Params::dlogits_map, dlogits, kFirstRows);
    map(launch, &Params::hidden_sum_map, hidden, kSecondRows);
    map(launch, &Params::dlogits_sum_map, dlogits, tile.block_m);
    map(launch, &Params::last_dlogits_sum_map, {dlogits.address, last, n, stretch_.width}, tile.block_m);
    map(launch, &Params::weight_sum_map, weight, kSecondRows);
    map(launch, &Params::accumulator_map, sum, kFirstRows, 4);
    map(launch, &Params::grad_weight_map, weight_matrix(weight_of(Slot::grad_weight, grad_element_), columns), kFirstRows,
        static_cast<int>(grad_element_));
    list(launch, 0);
    return {Statement{MemsetZero{at(layout_.progress), layout_.progress_bytes}}, launch.build()};
}

}  // namespace flce

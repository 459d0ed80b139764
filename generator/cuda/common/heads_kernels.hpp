// Kernels of Hopper that have both products of a divergence's logits, and their epilogue, in one launch: for the path of library products,
// whose set has them beside its own. They stand on the main loop of cuda_sm90a and are written where that path's are
// (generator/cuda/sm90/heads_kernels.cpp).
#pragma once

#include <cstdint>

#include "flce/device.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/backward_steps.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/launch_program.hpp"
#include "templates/common/heads_params.cuh"

namespace flce {

/// Tokens up to which the library's products are quicker: the tiles of a cluster would be empty for the most part.
inline constexpr std::int64_t kFewHeadsRows = 128;

/// Whether the device has these kernels for `spec`.
[[nodiscard]] bool has_heads_kernels(const Spec& spec, const Device& device);
/// Adds them to a set.
void write_heads_kernels(KernelWriter& writer, const Spec& spec);

inline constexpr std::int64_t kHeadsRows = 4096;  ///< most tokens of a launch of heads_sums
/// Words of tickets, and of counters of a launch's blocks of rows.
inline constexpr std::int64_t kHeadsCounterWords = sizeof(Tickets) / 4 + kHeadsRows / 128;

/// Scratch of a launch, whatever its number of tokens: bytes of the student's products, and partial results of all rows.
struct HeadsScratch {
    std::int64_t parked_bytes = 0;
    std::int64_t partials = 0;
};
[[nodiscard]] HeadsScratch heads_scratch(const Device& device);

/// Fields of a RetainedPairs.
struct RetainedPairsAt {
    Expr data{0};
    Expr block_bytes{0};
    Expr row_bytes{0};
    Expr references{0};
    Expr reference_block_bytes{0};
    Expr reference_row_bytes{0};
    Expr columns{0};
    Expr first_row{0};
};
/// `member` of Params.
template <class Params>
void set_pairs(LaunchBuilder<Params>& launch, const RetainedPairsAt& pairs) {
    launch.set(&Params::retained, &RetainedPairs::data, pairs.data)
        .set(&Params::retained, &RetainedPairs::block_bytes, pairs.block_bytes)
        .set(&Params::retained, &RetainedPairs::row_bytes, pairs.row_bytes)
        .set(&Params::retained, &RetainedPairs::references, pairs.references)
        .set(&Params::retained, &RetainedPairs::reference_block_bytes, pairs.reference_block_bytes)
        .set(&Params::retained, &RetainedPairs::reference_row_bytes, pairs.reference_row_bytes)
        .set(&Params::retained, &RetainedPairs::first_row, pairs.first_row)
        .set(&Params::retained, &RetainedPairs::columns, pairs.columns);
}

/// A launch over the vocabulary's columns from `first_column` on, of which there is one at least.
struct HeadsLaunch {
    Expr first_column{0};
    Expr rows{0};    ///< most rows of a launch, by which all of them divide the columns
    Expr parked{0};  ///< address, and so is `tickets`, of kHeadsCounterWords words
    Expr tickets{0};
    RetainedPairsAt retained;
    Expr leaves_gradients{0};  ///< whether gradients are left in the place of all pairs
};
/// Rows of heads_sums, from the first of `rows` on, whose gradients the launch leaves itself: all but those of the last block.
[[nodiscard]] Expr heads_gradient_rows(const Spec& spec, const Device& device, const Expr& rows, const HeadsLaunch& launch);
/// Partial results of each row.
[[nodiscard]] Expr heads_splits(const Spec& spec, const Device& device, const HeadsLaunch& launch);
/// The launch of `kernel`, heads_sums or heads_mixture, over the rows of `pass`.
[[nodiscard]] std::vector<Statement> heads_steps(const ForwardPass& pass, const Device& device, KernelRole kernel,
                                                 const HeadsLaunch& launch);

/// A launch that makes dlogits of a chunk, for a spec without a student's bias.
struct HeadsDlogits {
    Expr parked{0};
    Expr tickets{0};
    Expr factors{0};  ///< Gemm::factors of grad_weight
};
[[nodiscard]] bool has_heads_dlogits(const Spec& spec, const Device& device);
[[nodiscard]] std::vector<Statement> heads_dlogits_steps(const BackwardPass& pass, const Device& device, const Chunk& chunk,
                                                         const RowBlock& rows, const HeadsDlogits& of);

}  // namespace flce

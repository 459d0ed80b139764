// Matrices that tensor maps of Hopper's launches show, and numbers of rows that one copy takes.
#pragma once

#include "flce/spec.hpp"
#include "generator/cuda/common/launch_builder.hpp"
#include "generator/cuda/sm90/rules.hpp"

namespace flce::sm90 {

// Rows of a copy. An operand that is contiguous along the sum is copied as its part of the tile, any other 64 elements of the sum at a
// time. The second operand comes in as many parts as a cluster has blocks.
inline constexpr int kFirstRows = 64;
inline constexpr int kSecondRows = 64 / kClusterBlocks;

/// `columns` of the vocabulary from `address` on, of the weight or of its gradient.
[[nodiscard]] inline MappedMatrix weight_matrix(const Spec& spec, const Expr& address, const Expr& columns) {
    if (spec.layout == WeightLayout::vocab_major) return {address, spec.hidden_size, columns, spec.hidden_size};
    return {address, columns, spec.hidden_size, spec.padded_vocab_size};
}
/// The weight's columns as GEMMs read them: rounded rows are vocab_major whatever the weight is.
[[nodiscard]] inline MappedMatrix operand_matrix(const Spec& spec, const Expr& address, const Expr& columns) {
    return rounds_weight(spec) ? MappedMatrix{address, spec.hidden_size, columns, spec.hidden_size} : weight_matrix(spec, address, columns);
}
/// Whether the weight that GEMMs read is vocab_major.
[[nodiscard]] inline bool reads_vocab_major(const Spec& spec) noexcept {
    return spec.layout == WeightLayout::vocab_major || rounds_weight(spec);
}

}  // namespace flce::sm90

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
[[nodiscard]] MappedMatrix weight_matrix(const Spec& spec, const Expr& address, const Expr& columns);

/// Matrix of rounded rows, which are vocab_major whatever the weight is.
[[nodiscard]] MappedMatrix rounded_matrix(const Spec& spec, const Expr& address, const Expr& columns);

/// An address in retained memory.
[[nodiscard]] Expr retained_at(const Expr& offset);

/// Whether the weight that GEMMs read is vocab_major.
[[nodiscard]] bool reads_vocab_major(const Spec& spec) noexcept;

}  // namespace flce::sm90

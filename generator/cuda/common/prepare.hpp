// Launches that both passes have: the one that a pass over many tokens starts with (totals of class weights, the divisors of a mean, the
// list of valid tokens), and the one that rounds an fp32 or quantised weight of a 16-bit dtype into the workspace.
#pragma once

#include <cstdint>

#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/launch_program.hpp"

namespace flce {

struct Preparation {
    Expr want_count{0};         ///< whether the divisors of a mean are computed
    Expr list{0};               ///< address of the list, or 0
    bool outputs = false;       ///< whether forward's outputs of tokens that are not listed become 0
    std::int64_t counters = 0;  ///< offset of words that are set to 0
    std::int64_t counter_count = 0;
};

/// Whether class weights are summed over the vocabulary, so that `prepare` runs before every pass.
[[nodiscard]] bool sums_class_weights(const Spec& spec) noexcept;

[[nodiscard]] Statement prepare_launch(const Spec& spec, const CudaSource& source, const Preparation& preparation);

/// Rounds weight rows (hidden_major: columns) [first, first + rows) of the vocabulary to `rounded`, an address.
[[nodiscard]] Statement round_weight_launch(const Spec& spec, const CudaSource& source, const Expr& first, const Expr& rows,
                                            const Expr& rounded);

}  // namespace flce

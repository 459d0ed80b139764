// The launch that a pass over many tokens starts with: totals of class weights, the divisors of a mean, the list of valid tokens.
#pragma once

#include <cstdint>

#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/launch_program.hpp"

namespace flce {

struct Preparation {
    std::int64_t scalars = 0;   ///< offset of PassScalars in the workspace
    Expr want_count{0};         ///< whether the divisors of a mean are computed
    Expr list{0};               ///< address of the list, or 0
    bool outputs = false;       ///< whether forward's outputs of tokens that are not listed become 0
    std::int64_t counters = 0;  ///< offset of words that are set to 0
    std::int64_t counter_count = 0;
};

/// Whether class weights are summed over the vocabulary, so that `prepare` runs before every pass.
[[nodiscard]] bool sums_class_weights(const Spec& spec) noexcept;

[[nodiscard]] Statement prepare_launch(const Spec& spec, const CudaSource& source, const Preparation& preparation);

}  // namespace flce

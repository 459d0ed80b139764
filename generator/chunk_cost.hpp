// Costs of chunks of the vocabulary in backward, on a CPU and on a GPU alike.
#pragma once

#include <algorithm>
#include <cmath>

#include "flce/plan.hpp"
#include "flce/spec.hpp"

namespace flce {

[[nodiscard]] inline double up_div(double a, double b) { return std::ceil(a / b); }

/// Vocabulary rows of a chunk, in multiples of `unit`, that scratch has room for where each takes `column_elements` elements of the spec's
/// dtype.
[[nodiscard]] inline double chunk_rows_that_fit(const Spec& spec, const Plan& plan, double unit, double column_elements) {
    const double column_bytes = column_elements * static_cast<double>(element_bytes(spec.dtype));
    const double fits = std::floor(static_cast<double>(plan.scratch_bytes) / column_bytes / unit) * unit;
    return std::min({std::max(fits, unit), static_cast<double>(plan.vocab_chunk), static_cast<double>(spec.vocab_size)});
}

/// Bytes that backward moves to and from memory beyond the operands of the recomputed logits.
[[nodiscard]] inline double chunked_backward_bytes(const Spec& spec, double num_tokens, double chunks) {
    const double n = num_tokens;
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const double element = static_cast<double>(element_bytes(spec.dtype));
    const double grad_element = static_cast<double>(element_bytes(spec.grad_weight_dtype));
    const double grad_passes = spec.grad_weight_mode == GradMode::accumulate ? 2.0 : 1.0;
    return 3.0 * n * v * element               // dlogits: written once, read by two GEMMs
           + v * d * element                   // weight, again, for grad_hidden
           + n * d * (element + 8.0) * chunks  // hidden again; grad_hidden's accumulator read and written
           + v * d * grad_element * grad_passes;
}

}  // namespace flce

// Who lends memory to what forward leaves to backward, and how much: Kernel::choose_retained from sizes, so that explanations need no
// kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flce/flce.hpp"

namespace flce {

/// Bytes for one step.
struct RetainedRoom {
    std::size_t most = 0;       ///< most bytes that there is a use for, in memory of its own
    std::size_t lendable = 0;   ///< bytes of grad_weight that may be lent; 0: its memory will not do, or may not be lent
    std::size_t workspace = 0;  ///< workspace of either pass; memory of its own is at most the rest of the limit
};

/// Kernel::choose_retained. Preconditions: num_tokens and the options are not negative.
[[nodiscard]] Retained choose_retained(const Spec& spec, const Plan& plan, std::int64_t num_tokens, const RetainedRoom& room,
                                       const RetainOptions& options);

}  // namespace flce

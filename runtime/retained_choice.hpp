// Who lends memory to what forward leaves to backward, and how much: Kernel::choose_retained from sizes, so that explanations need no
// kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flce/flce.hpp"

namespace flce {

/// Bytes for one step.
struct RetainedRoom {
    std::size_t most = 0;       ///< that there is a use for, in memory of its own
    std::size_t lendable = 0;   ///< of grad_weight; 0: its memory will not do, or may not be lent
    std::size_t workspace = 0;  ///< of either pass; what it leaves of the limit is memory of its own
};

/// Kernel::choose_retained. Preconditions: num_tokens and the options are not negative.
[[nodiscard]] Retained choose_retained(const Spec& spec, const Plan& plan, std::int64_t num_tokens, const RetainedRoom& room,
                                       const RetainOptions& options);

}  // namespace flce

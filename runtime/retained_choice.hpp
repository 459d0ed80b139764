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

/// Values that forward leaves to backward: exponentials on a GPU, logits on a CPU.
struct KeptPart {
    double part = 0;         ///< part of the vocabulary
    std::int64_t bytes = 0;  ///< bytes beside grad_weight's memory
};

// Parts by bounds, for the cost model; num_tokens is positive.

/// Part that grad_weight's memory holds.
[[nodiscard]] KeptPart lent_part(const Spec& spec, const Plan& plan, std::int64_t num_tokens);
/// Part that at most `bytes` of own memory hold.
[[nodiscard]] KeptPart own_part(const Spec& spec, const Plan& plan, std::int64_t num_tokens, double bytes);
/// Part that Kernel::choose_retained keeps beside a workspace, under a limit; 0: no limit.
[[nodiscard]] KeptPart kept_by_default(const Spec& spec, const Plan& plan, std::int64_t num_tokens, std::int64_t workspace_bytes,
                                       std::int64_t workspace_limit_bytes);

}  // namespace flce

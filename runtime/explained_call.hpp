// A call of a layer on a device, explained: the plan, its memory, its times, and the effect of other limits on memory. Computed without
// kernels, and the device need not be here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flce/flce.hpp"
#include "runtime/plan_choice.hpp"
#include "runtime/retained_choice.hpp"

namespace flce {

/// Part that forward leaves to backward: nothing, the part of Kernel::choose_retained, as much as grad_weight's memory holds, as much as
/// there is a use for, or at most a number of bytes.
enum class Keep : std::uint8_t { nothing, automatic, grad_weight, all, bytes };

struct CallQuestion {
    Spec spec{};  ///< normalized
    Device device{};
    std::int64_t num_tokens = kTypicalTokens;
    std::int64_t scratch_bytes = kDefaultScratchBytes;
    int threads = 0;                         ///< threads of CPU kernels; 0: one on each core
    std::string plan{};                      ///< the user's plan; empty: a session's choice
    std::int64_t workspace_limit_bytes = 0;  ///< limit on everything beyond inputs and gradients; 0: none
    Keep keep = Keep::automatic;
    std::int64_t keep_bytes = 0;  ///< most bytes to keep, with Keep::bytes
};

/// A plan, the memory of a call, and what the cost model expects of it.
struct CallPoint {
    Plan plan;
    std::int64_t workspace_bytes = 0;  ///< bound: scratch, the fp32 sum of grad_hidden, and kept values beside grad_weight's memory
    KeptPart kept;
    Cost forward;
    Cost backward;
    [[nodiscard]] double seconds() const { return forward.seconds + backward.seconds; }
};

struct ExplainedCall {
    PlanChoice choice;
    CallPoint point;                       ///< this call
    std::optional<MeasuredTime> measured;  ///< time of exactly this call: plan, number of tokens, memory
    bool guessed = false;                  ///< nobody has measured the cost model's rates on such a GPU
    /// Calls with less and more memory, by the cost model alone: ascending bytes, descending times.
    std::vector<CallPoint> curve;
    std::optional<std::size_t> place;  ///< number of this call on the curve; absent: less memory does better, by the model
};

/// Throws SpecError, PlanError (also where the limit is too small for the workspace), and ArgumentError where sizes overflow, or where the
/// kept part cannot lie in grad_weight's memory. Values kept by Keep::all and Keep::bytes may be over the limit.
[[nodiscard]] ExplainedCall explained_call(const CallQuestion& question);

}  // namespace flce

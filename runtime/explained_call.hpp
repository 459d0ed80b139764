// What a call of a layer comes to on a device: the plan, its memory, its times, and what other limits on memory would do. Computed without
// kernels, and the device need not be here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flce/flce.hpp"
#include "runtime/plan_choice.hpp"

namespace flce {

/// What forward leaves to backward: nothing, what Kernel::choose_retained says, as much as grad_weight's memory holds, as much as there is
/// a use for, or at most a number of bytes.
enum class Keep : std::uint8_t { nothing, automatic, grad_weight, all, bytes };

struct CallQuestion {
    Spec spec{};  ///< normalized
    Device device{};
    std::int64_t num_tokens = kTypicalTokens;
    std::int64_t scratch_bytes = kDefaultScratchBytes;
    int threads = 0;               ///< of CPU kernels; 0: one on each core
    std::string plan{};            ///< the user's; empty: what a session chooses
    std::int64_t limit_bytes = 0;  ///< on everything beyond inputs and gradients; 0: none
    Keep keep = Keep::automatic;
    std::int64_t keep_bytes = 0;  ///< where that is bytes
};

/// What forward leaves to backward: exponentials on a GPU, logits on a CPU.
struct KeptPart {
    double part = 0;         ///< of the vocabulary
    std::int64_t bytes = 0;  ///< beside grad_weight's memory
};

/// A plan, the memory of a call, and what the cost model expects of it.
struct CallPoint {
    Plan plan;
    std::int64_t workspace_bytes = 0;  ///< bound: scratch, the fp32 sum of grad_hidden, and what is kept beside grad_weight's memory
    KeptPart kept;
    Cost forward;
    Cost backward;
    [[nodiscard]] double seconds() const { return forward.seconds + backward.seconds; }
};

struct ExplainedCall {
    PlanChoice choice;
    CallPoint point;                       ///< this call
    std::optional<MeasuredTime> measured;  ///< of exactly this call: plan, number of tokens, memory
    bool guessed = false;                  ///< nobody has measured the cost model's rates on such a GPU
    /// What calls with less and more memory come to, by the cost model alone: ascending bytes, descending times.
    std::vector<CallPoint> curve;
    std::optional<std::size_t> place;  ///< of this call on the curve; absent: less memory does better than it, by the model
};

/// Throws SpecError, PlanError (also where the limit is too small for the workspace), and ArgumentError where sizes overflow, or where what
/// is to be kept cannot lie in grad_weight's memory. What is kept by Keep::all and Keep::bytes may be over the limit.
[[nodiscard]] ExplainedCall explained_call(const CallQuestion& question);

}  // namespace flce

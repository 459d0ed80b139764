// What flce explain says of a layer on a device: the plan, its memory, its times, and what other limits on memory would do. Computed
// without kernels.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.hpp"
#include "flce/flce.hpp"
#include "runtime/session.hpp"

namespace flce::cli {

struct Question {
    Spec spec;      ///< normalized
    Device device;  ///< need not be here
    std::int64_t num_tokens = kTypicalTokens;
    std::int64_t scratch_bytes = kDefaultScratchBytes;
    int threads = 0;               ///< of CPU kernels; 0: one on each core
    std::string plan;              ///< the user's; empty: what a session chooses
    std::int64_t limit_bytes = 0;  ///< on everything beyond inputs and gradients; 0: none
    std::string retain = "auto";   ///< what forward leaves to backward: none, auto, all, grad_weight, or a number of bytes
};

/// What forward leaves to backward: exponentials on a GPU, logits on a CPU.
struct Kept {
    double part = 0;         ///< of the vocabulary
    std::int64_t bytes = 0;  ///< beside grad_weight's memory
};

/// A plan, the memory of a call, and what the cost model expects of it.
struct Point {
    Plan plan;
    std::int64_t workspace_bytes = 0;  ///< bound: scratch, the fp32 sum of grad_hidden, and what is kept beside grad_weight's memory
    Kept kept;
    Cost forward;
    Cost backward;
    [[nodiscard]] double seconds() const { return forward.seconds + backward.seconds; }
};

struct ExplainedCall {
    PlanChoice choice;
    Point point;                           ///< this call
    std::optional<MeasuredTime> measured;  ///< of exactly this call: plan, number of tokens, memory
    /// What calls with less and more memory come to, by the cost model alone: ascending bytes, descending times.
    std::vector<Point> curve;
    std::optional<std::size_t> place;  ///< of this call on the curve; absent: less memory does better than it, by the model
};

/// Throws SpecError, PlanError, and UsageError for a `retain` that there is none of, that memory will not do or that is over the limit.
[[nodiscard]] ExplainedCall explained_call(const Question& question);

}  // namespace flce::cli

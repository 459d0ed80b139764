// A call's requests to the planner, from its own options and its session's.
#pragma once

#include "flce/flce.hpp"

namespace flce {

/// The requests of one call. Limits are rounded down to steps and numbers of tokens are buckets, so that calls which differ a little ask
/// alike.
struct CallRequests {
    PlanRequest first;  ///< scratch as the options have it, less where the limit leaves less
    PlanRequest wide;   ///< scratch as large as the limit allows and is of use, where that is more: for a layer that retains nothing, for
                        ///< a divergence, and where it gains more than as many bytes of retained exponentials
    friend bool operator==(const CallRequests&, const CallRequests&) = default;
};

/// A call's options, completed with its session's scratch and limit.
[[nodiscard]] PlanRequest completed(const KernelOptions& options, const PlanRequest& session);

/// `session`: its scratch and limit. Throws PlanError where the limit leaves nothing for scratch, ArgumentError for a bad num_tokens.
[[nodiscard]] CallRequests call_requests(const Spec& spec, const Device& device, const KernelOptions& options, const PlanRequest& session);

}  // namespace flce

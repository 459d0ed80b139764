#include "runtime/call_requests.hpp"

#include <algorithm>

#include "generator/planner.hpp"
#include "runtime/scratch_steps.hpp"

namespace flce {
namespace {

constexpr std::int64_t kRoomForAll = std::int64_t{1} << 60;

/// The request as calls that differ a little share it. Limits with room for everything retained are one.
PlanRequest shared(const Spec& normalized, const Device& device, PlanRequest request) {
    if (request.workspace_limit_bytes > 0) {
        request.workspace_limit_bytes =
            retains_apart(normalized, device, request) ? kRoomForAll : round_down_to_step(request.workspace_limit_bytes);
    }
    request.num_tokens = token_bucket(request.num_tokens);
    return request;
}

}  // namespace

PlanRequest completed(const KernelOptions& options, const PlanRequest& session) {
    return {.scratch_bytes = options.scratch_bytes == 0 ? session.scratch_bytes : options.scratch_bytes,
            .workspace_limit_bytes = options.workspace_limit_bytes == 0 ? session.workspace_limit_bytes : options.workspace_limit_bytes,
            .num_tokens = options.num_tokens};
}

CallRequests call_requests(const Spec& spec, const Device& device, const KernelOptions& options, const PlanRequest& session) {
    PlanRequest call = completed(options, session);
    if (call.workspace_limit_bytes == 0) {
        call.num_tokens = token_bucket(call.num_tokens);
        return {call, call};
    }
    const Spec normalized = spec.normalized();
    if (!options.plan.empty()) {  // has scratch of its own
        const PlanRequest request = shared(normalized, device, call);
        return {request, request};
    }
    const std::int64_t room = scratch_room(spec, call.workspace_limit_bytes, call.num_tokens);
    const std::int64_t most = round_down_to_step(room);
    if (room < call.scratch_bytes) call.scratch_bytes = most;
    const PlanRequest first = shared(normalized, device, call);
    const std::int64_t wide = std::min(most, most_useful_scratch(call.num_tokens));
    if (options.scratch_bytes != 0 || wide <= call.scratch_bytes) return {first, first};
    call.scratch_bytes = wide;
    return {first, shared(normalized, device, call)};
}

}  // namespace flce

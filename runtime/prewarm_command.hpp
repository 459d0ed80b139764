// What to type on a machine with compilers, for a session that may not compile.
#pragma once

#include <string>
#include <string_view>

#include "flce/flce.hpp"

namespace flce {

/// The `flce prewarm` that compiles what get_kernel asks for on `device`, quoted for a shell. `plan`: the caller's, empty for the
/// planner's. `request`: the call's, with the session's defaults in it; those that are flce's own are left out. `threads`: the session's,
/// which decide what record a CPU's plan is from; 0: one on each core.
[[nodiscard]] std::string prewarm_command(const Spec& spec, const Device& device, std::string_view plan, const PlanRequest& request,
                                          int threads = 0);

}  // namespace flce

// Command to type on a machine with compilers, for a session that may not compile.
#pragma once

#include <string>
#include <string_view>

#include "flce/flce.hpp"

namespace flce {

/// The `flce prewarm` that compiles the kernels of a get_kernel call on `device`, quoted for a shell. `plan`: the caller's, empty for the
/// planner's. `request`: the call's, with the session's defaults in it; flce's own defaults are left out. `threads`: the session's, since a
/// CPU's plan may be from a record for its number of threads; 0: one on each core.
[[nodiscard]] std::string prewarm_command(const Spec& spec, const Device& device, std::string_view plan, const PlanRequest& request,
                                          int threads = 0);

}  // namespace flce

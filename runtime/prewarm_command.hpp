// What to type on a machine with compilers, for a session that may not compile.
#pragma once

#include <string>

#include "flce/flce.hpp"

namespace flce {

/// The `flce prewarm` that compiles what get_kernel(spec, options) asks for on `device`, quoted for a shell. `options` with the session's defaults in it:
/// those that are flce's own are left out. `threads`: the session's, which decide what record a CPU's plan is from; 0: one on each core.
[[nodiscard]] std::string prewarm_command(const Spec& spec, const Device& device, const KernelOptions& options, int threads = 0);

}  // namespace flce

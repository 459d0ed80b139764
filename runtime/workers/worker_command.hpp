// The program that library calls start their workers from: the flce command with a hidden subcommand.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/workers/worker_process.hpp"

namespace flce {

/// Identity that a worker must share with the library that starts it: version and kernels. A worker of another build would measure other
/// kernels.
[[nodiscard]] std::string build_identity();

/// `command`, or where it is empty bin/flce beside the folder of libflce, made a worker by `subcommand` and `arguments`. Throws
/// EnvironmentError where there is no such program, or where it is none of this library's build.
[[nodiscard]] WorkerCommand worker_command(const std::filesystem::path& command, std::string_view subcommand,
                                           const std::vector<std::string>& arguments = {});

}  // namespace flce

#include "runtime/workers/worker_command.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <chrono>
#include <system_error>

#include "flce/flce.hpp"
#include "records/kernel_version.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

/// The flce command of the tree that libflce lies in.
fs::path command_beside_library() {
    Dl_info info{};
    if (::dladdr(reinterpret_cast<const void*>(&command_beside_library), &info) == 0 || info.dli_fname == nullptr) return {};
    std::error_code ignored;
    return fs::canonical(info.dli_fname, ignored).parent_path().parent_path() / "bin" / "flce";
}

/// A worker of another build would measure other kernels, and fill caches with them.
void check_build(const WorkerCommand& worker) {
    constexpr std::chrono::seconds kPatience{30};
    const Reply reply = WorkerProcess(worker).ask({{kHello, true}}, kPatience);
    const bool answered = reply.kind == Reply::Kind::answer && reply.answer.is_object() && reply.answer.contains(kHello);
    if (!answered) throw EnvironmentError(fmt::format("{} does not work as a worker of flce: {}", worker.program.string(), reply.why));
    const auto built_as = reply.answer[kHello].get<std::string>();
    if (built_as == build_identity()) return;
    throw EnvironmentError(fmt::format("{} is of another build ({}) than this library ({}): name its own flce command (`command`)",
                                       worker.program.string(), built_as, build_identity()));
}

}  // namespace

std::string build_identity() {
    return fmt::format("{}/{}/{}", version(), kernel_version(DeviceKind::cuda), kernel_version(DeviceKind::cpu));
}

WorkerCommand worker_command(const fs::path& command, std::string_view subcommand, const std::vector<std::string>& arguments) {
    const fs::path program = command.empty() ? command_beside_library() : command;
    std::error_code error;
    if (!fs::is_regular_file(program, error)) {
        throw EnvironmentError(
            fmt::format("there is no flce command at {}, which worker processes are started from: name it (`command`)", program.string()));
    }
    WorkerCommand worker{program, {std::string(subcommand)}};
    worker.arguments.insert(worker.arguments.end(), arguments.begin(), arguments.end());
    if (!fs::equivalent(program, "/proc/self/exe", error)) check_build(worker);
    return worker;
}

}  // namespace flce

#include "runtime/prewarm_command.hpp"

#include <fmt/format.h>

#include <optional>

namespace flce {
namespace {

std::optional<Device> described(const std::string& name) {
    try {
        return describe_device(name);
    } catch (const EnvironmentError&) {
        return std::nullopt;
    }
}

/// The name by which a machine without this device knows it. A CPU that was not asked for by name is compiled for as it is: on its like.
std::string name_elsewhere(const Device& device) {
    const std::optional<Device> known = described(device.name);
    if (device.kind == DeviceKind::cpu) return known && known->cpu.features == device.cpu.features ? device.name : "cpu";
    return known && known->gpu.arch == device.gpu.arch ? device.name : device.gpu.arch;
}

}  // namespace

std::string prewarm_command(const Spec& spec, const Device& device, std::string_view plan, const PlanRequest& request, int threads) {
    std::string command;
    if (device.kind == DeviceKind::cpu && threads > 0) command = fmt::format("FLCE_NUM_THREADS={} ", threads);
    command += fmt::format("flce prewarm --spec '{}' --device '{}'", spec.normalized().text(), name_elsewhere(device));
    if (!plan.empty()) command += fmt::format(" --plan '{}'", plan);
    if (request.scratch_bytes != kDefaultScratchBytes) command += fmt::format(" --workspace {}", request.scratch_bytes);
    if (request.workspace_limit_bytes != 0) command += fmt::format(" --workspace-limit {}", request.workspace_limit_bytes);
    if (request.num_tokens != 0) command += fmt::format(" --num-tokens {}", request.num_tokens);
    return command;
}

}  // namespace flce

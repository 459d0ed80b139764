#include "autotune/provenance.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <ctime>
#include <random>

#include "flce/flce.hpp"
#include "runtime/text.hpp"

namespace flce {
namespace {

/// The first line that a command prints; empty where there is no such command.
std::string first_output_line(const char* command) {
    std::string line;
    std::FILE* pipe = ::popen(command, "r");
    if (pipe == nullptr) return line;
    std::array<char, 512> buffer{};
    if (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) line = first_line(buffer.data());
    ::pclose(pipe);
    return line;
}

}  // namespace

TuningRun provenance(const Device& device, const std::string& commit) {
    std::array<char, 32> date{};
    const std::time_t now = std::time(nullptr);
    std::tm utc{};
    static_cast<void>(std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &utc)));
    TuningRun run{.date = date.data(), .version = std::string(version()), .commit = commit, .device = device.name};
    if (device.kind == DeviceKind::cuda) {
        run.driver = first_output_line("nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null");
        run.clocks = first_output_line("nvidia-smi --query-gpu=clocks.max.sm,clocks.max.mem,power.limit --format=csv,noheader 2>/dev/null");
    }
    return run;
}

std::string run_id(const TuningRun& run) { return fmt::format("{} {:08x}", run.date, std::random_device{}()); }

}  // namespace flce

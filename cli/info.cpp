// flce info: what this machine offers and how flce is set up on it.
#include <dlfcn.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <optional>

#include "autotune/kernel_version.hpp"
#include "cli/command.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/host/host_code.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce::cli {
namespace {

/// The highest CUDA version that the installed driver serves: 13000 is 13.0. Absent without a driver.
std::optional<int> driver_version() {
    const char* path = std::getenv("FLCE_LIBCUDA");
    void* library = ::dlopen(path != nullptr && *path != '\0' ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    using GetVersion = int (*)(int*);
    const auto get = reinterpret_cast<GetVersion>(library == nullptr ? nullptr : ::dlsym(library, "cuDriverGetVersion"));
    int version = 0;
    if (get == nullptr || get(&version) != 0) return std::nullopt;
    return version;
}

struct NvrtcReport {
    std::shared_ptr<const Nvrtc> library;
    std::string why;  ///< not
};

NvrtcReport find_nvrtc() {
    try {
        return {Nvrtc::load(), ""};
    } catch (const Error& e) {
        return {nullptr, e.what()};
    }
}

struct DiskUse {
    std::int64_t files = 0;
    std::int64_t bytes = 0;
};

DiskUse disk_use(const std::filesystem::path& folder) {
    DiskUse use;
    std::error_code error;
    auto it = std::filesystem::recursive_directory_iterator(folder, std::filesystem::directory_options::skip_permission_denied, error);
    for (; !error && it != std::filesystem::recursive_directory_iterator(); it.increment(error)) {
        std::error_code ignored;
        if (!it->is_regular_file(ignored)) continue;
        const auto bytes = it->file_size(ignored);
        if (ignored) continue;
        ++use.files;
        use.bytes += static_cast<std::int64_t>(bytes);
    }
    return use;
}

struct Info {
    Device cpu = native_cpu();
    std::string why_no_gpu;
    std::vector<Device> gpus = cuda_devices(&why_no_gpu);
    std::optional<int> driver = driver_version();
    NvrtcReport nvrtc = find_nvrtc();
    std::filesystem::path cache_dir;
    std::filesystem::path records_dir;
    bool disk_cache = false;
    DiskUse disk;

    Info() {
        const Session session({.device = "cpu"});
        cache_dir = session.cache_dir();
        records_dir = session.records_dir();
        disk_cache = !cache_dir.empty();
        if (disk_cache) disk = disk_use(cache_dir);
    }
};

void report_json(const Info& info) {
    Json devices = Json::array();
    for (std::size_t i = 0; i < info.gpus.size(); ++i) {
        const GpuProperties& gpu = info.gpus[i].gpu;
        devices.push_back({{"device", fmt::format("cuda:{}", i)},
                           {"name", info.gpus[i].name},
                           {"arch", gpu.arch},
                           {"sm_count", gpu.sm_count},
                           {"l2_bytes", gpu.l2_bytes},
                           {"memory_bytes", gpu.memory_bytes}});
    }
    const CpuProperties& cpu = info.cpu.cpu;
    devices.push_back({{"device", "cpu"},
                       {"name", info.cpu.name},
                       {"llvm_cpu", cpu.cpu},
                       {"vector_bits", cpu.vector_bits},
                       {"fma", cpu.fma},
                       {"bf16_dot", cpu.bf16_dot},
                       {"cores", cpu.cores},
                       {"l1d_bytes", cpu.l1d_bytes},
                       {"l2_bytes", cpu.l2_bytes},
                       {"l3_bytes", cpu.l3_bytes},
                       {"features", cpu.features}});
    Json nvrtc{{"found", info.nvrtc.library != nullptr}};
    if (info.nvrtc.library) {
        const auto [major, minor] = info.nvrtc.library->version();
        nvrtc["version"] = fmt::format("{}.{}", major, minor);
        nvrtc["path"] = info.nvrtc.library->path().string();
        nvrtc["architectures"] = info.nvrtc.library->supported_architectures();
    } else {
        nvrtc["why"] = info.nvrtc.why;
    }
    Json environment = Json::object();
    for (const EnvironmentVariable& variable : environment_variables()) {
        environment[variable.name] = {{"value", variable.value ? Json(*variable.value) : Json(nullptr)},
                                      {"default", variable.default_value},
                                      {"meaning", variable.meaning}};
    }
    print_json({{"version", version()},
                {"devices", devices},
                {"cuda_driver", info.driver ? Json(fmt::format("{}.{}", *info.driver / 1000, *info.driver % 1000 / 10)) : Json(nullptr)},
                {"why_no_gpu", info.gpus.empty() ? Json(info.why_no_gpu) : Json(nullptr)},
                {"nvrtc", nvrtc},
                {"llvm", llvm_version()},
                {"kernel_versions", {{"cuda", kernel_version(DeviceKind::cuda)}, {"cpu", kernel_version(DeviceKind::cpu)}}},
                {"cache",
                 {{"layers", info.disk_cache ? Json{"memory", "disk"} : Json{"memory"}},
                  {"disk_dir", info.disk_cache ? Json(info.cache_dir.string()) : Json(nullptr)},
                  {"disk_files", info.disk.files},
                  {"disk_bytes", info.disk.bytes}}},
                {"records_dir", info.records_dir.empty() ? Json(nullptr) : Json(info.records_dir.string())},
                {"environment", environment}});
}

void report_text(const Info& info) {
    fmt::print("flce          {}\n\n", version());
    for (std::size_t i = 0; i < info.gpus.size(); ++i) {
        const GpuProperties& gpu = info.gpus[i].gpu;
        fmt::print("cuda:{}        {} ({}, {} SMs, {} memory, {} L2)\n", i, info.gpus[i].name, gpu.arch, gpu.sm_count,
                   human_bytes(static_cast<double>(gpu.memory_bytes)), human_bytes(static_cast<double>(gpu.l2_bytes)));
    }
    if (info.gpus.empty()) fmt::print("cuda          none: {}\n", info.why_no_gpu);
    const CpuProperties& cpu = info.cpu.cpu;
    fmt::print("cpu           {} ({} thread{}, {}-bit vectors{}{}; L1d {}, L2 {}, L3 {})\n", info.cpu.name, cpu.cores,
               cpu.cores == 1 ? "" : "s", cpu.vector_bits, cpu.fma ? ", FMA" : "", cpu.bf16_dot ? ", bf16 dot products" : "",
               human_bytes(static_cast<double>(cpu.l1d_bytes)), human_bytes(static_cast<double>(cpu.l2_bytes)),
               human_bytes(static_cast<double>(cpu.l3_bytes)));
    fmt::print("CUDA driver   {}\n",
               info.driver ? fmt::format("serves CUDA {}.{}", *info.driver / 1000, *info.driver % 1000 / 10) : "none");
    if (info.nvrtc.library) {
        const auto [major, minor] = info.nvrtc.library->version();
        fmt::print("NVRTC         {}.{}, {}\n", major, minor, info.nvrtc.library->path().string());
        fmt::print("              compiles for {}\n", fmt::join(info.nvrtc.library->supported_architectures(), " "));
    } else {
        fmt::print("NVRTC         none: {}\n", info.nvrtc.why);
    }
    fmt::print("LLVM          {}\n", llvm_version());
    fmt::print("kernels       {} (CUDA), {} (CPU)\n", kernel_version(DeviceKind::cuda), kernel_version(DeviceKind::cpu));
    fmt::print("cache         memory, of each process\n");
    fmt::print("              disk, {}\n", info.disk_cache ? fmt::format("{}: {} files, {}", info.cache_dir.string(), info.disk.files,
                                                                         human_bytes(static_cast<double>(info.disk.bytes)))
                                                           : std::string("switched off"));
    fmt::print("records       {}\n", info.records_dir.empty() ? "none of the user's" : info.records_dir.string());
    fmt::print("\nenvironment variables\n");
    for (const EnvironmentVariable& variable : environment_variables()) {
        fmt::print("  {:<20} {:<22} {}\n", variable.name, variable.value ? *variable.value : "(not set)", variable.meaning);
    }
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
    auto json = std::make_shared<bool>(false);
    CLI::App* command = app.add_subcommand("info", "Devices, driver, NVRTC, LLVM, CPU features, cache, environment variables");
    command->footer("\nExamples:\n  flce info\n  flce info --json");
    command->add_flag("--json", *json, "one JSON object on stdout");
    command->callback([json, &action] {
        action = [json] {
            const Info info;
            *json ? report_json(info) : report_text(info);
            return static_cast<int>(kDone);
        };
    });
}

}  // namespace flce::cli

// flce info: what this machine offers and how flce is set up on it.
#include <dlfcn.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "cli/command.hpp"
#include "records/kernel_version.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/first_use.hpp"
#include "runtime/host/host_code.hpp"
#include "runtime/kernel_factory.hpp"
#include "runtime/setup_report.hpp"

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

/// "13.1.0" of 130100.
std::string version_text(int version) { return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100); }

struct Info {
    SetupReport setup = report_setup();  // first: the others read the environment, too
    Device cpu = native_cpu();
    std::string why_no_gpu;
    std::vector<Device> gpus = cuda_devices(&why_no_gpu);
    std::optional<int> driver = driver_version();
    NvrtcReport nvrtc = find_nvrtc();
    std::string why_no_cublaslt;
    std::string cublaslt = real_backends().has_cublaslt(&why_no_cublaslt) ? version_text(cublaslt_version()) : "";
};

Json null_where_empty(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json cache_json(const SetupReport& setup) {
    Json packs = Json::array();
    for (const PackReport& pack : setup.packs) {
        packs.push_back(
            {{"path", pack.path.string()}, {"entries", pack.entries}, {"bytes", pack.bytes}, {"fault", null_where_empty(pack.fault)}});
    }
    return {{"layers", setup.cache.path.empty() ? Json{"memory"} : Json{"memory", "disk"}},
            {"disk_dir", null_where_empty(setup.cache.path.string())},
            {"disk_fault", null_where_empty(setup.cache.fault)},
            {"disk_files", setup.cache.files},
            {"disk_bytes", setup.cache.bytes},
            {"packs", packs},
            {"remote", null_where_empty(setup.remote)}};
}

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
    Json faults = Json::array();
    for (const SettingFault& fault : info.setup.faults) faults.push_back({{"variable", fault.variable}, {"message", fault.message}});
    print_json({{"version", version()},
                {"devices", devices},
                {"cuda_driver", info.driver ? Json(fmt::format("{}.{}", *info.driver / 1000, *info.driver % 1000 / 10)) : Json(nullptr)},
                {"why_no_gpu", info.gpus.empty() ? Json(info.why_no_gpu) : Json(nullptr)},
                {"nvrtc", nvrtc},
                {"cublaslt", {{"version", null_where_empty(info.cublaslt)}, {"why", null_where_empty(info.why_no_cublaslt)}}},
                {"llvm", llvm_version()},
                {"kernel_versions", {{"cuda", kernel_version(DeviceKind::cuda)}, {"cpu", kernel_version(DeviceKind::cpu)}}},
                {"cache", cache_json(info.setup)},
                {"records_dir", null_where_empty(info.setup.records_dir.string())},
                {"faults", faults},
                {"unknown_variables", info.setup.unknown_variables},
                {"environment", environment}});
}

void print_cache(const SetupReport& setup) {
    const DirectoryReport& cache = setup.cache;
    fmt::print("cache         memory, of each process\n");
    if (cache.path.empty()) {
        fmt::print("              disk, {}\n", cache.fault);
    } else if (!cache.fault.empty()) {
        // Some reasons begin with the path.
        const std::string path = cache.path.string();
        fmt::print("              disk, {}\n", cache.fault.starts_with(path) ? cache.fault : fmt::format("{} {}", path, cache.fault));
    } else {
        fmt::print("              disk, {}: {}\n", cache.path.string(),
                   cache.exists ? fmt::format("{} files, {}", cache.files, human_bytes(static_cast<double>(cache.bytes)))
                                : "made when the first kernel is kept");
    }
    for (const PackReport& pack : setup.packs) {
        if (pack.fault.empty()) {
            fmt::print("              pack, {}: {} entries, {}\n", pack.path.string(), pack.entries,
                       human_bytes(static_cast<double>(pack.bytes)));
        } else {
            fmt::print("              pack, {}: not used\n", pack.path.string());
        }
    }
    if (!setup.remote.empty()) fmt::print("              remote, {}\n", setup.remote);
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
    fmt::print("cuBLASLt      {}\n", info.cublaslt.empty() ? "none: " + first_line(info.why_no_cublaslt) : info.cublaslt);
    fmt::print("LLVM          {}\n", llvm_version());
    fmt::print("kernels       {} (CUDA), {} (CPU)\n", kernel_version(DeviceKind::cuda), kernel_version(DeviceKind::cpu));
    print_cache(info.setup);
    fmt::print("records       {}\n", info.setup.records_dir.empty() ? "none of the user's" : info.setup.records_dir.string());
    for (const SettingFault& fault : info.setup.faults) fmt::print("WRONG         {}: {}\n", fault.variable, first_line(fault.message));
    for (const std::string& name : info.setup.unknown_variables) {
        fmt::print("UNKNOWN       {} is set, and flce reads no variable of that name\n", name);
    }
    fmt::print("\nenvironment variables\n");
    for (const EnvironmentVariable& variable : environment_variables()) {
        fmt::print("  {:<20} {:<22} {}\n", variable.name, variable.value ? *variable.value : "(not set)", variable.meaning);
    }
}

constexpr const char* kCheckedLayer = "D=1024,V=32000,dtype=bf16";

Json check_json(const PathCheck& check) {
    Json differences = Json::array();
    for (const Difference& each : check.differences) {
        differences.push_back({{"output", each.output}, {"relative", each.relative}, {"allowed", each.allowed}});
    }
    return {{"device", fmt::format("cuda:{}", check.device.index)},
            {"name", check.name},
            {"path", check.path},
            {"skipped", null_where_empty(check.skipped)},
            {"fault", null_where_empty(check.fault)},
            {"other_fault", null_where_empty(check.other_fault)},
            {"differences", differences},
            {"seconds", check.seconds}};
}

std::string check_line(const PathCheck& check) {
    if (!check.skipped.empty()) return "not compared: " + first_line(check.skipped);
    if (!check.fault.empty()) return "WRONG: " + first_line(check.fault);
    const std::string other =
        check.other_fault.empty() ? "" : fmt::format("; a fault of {} is known: compare that layer", check.other_fault);
    return fmt::format("agrees with the CPU backend, {:.1f} s{}", check.seconds, other);
}

/// Compares kernels of every GPU's paths with the CPU backend's.
int check_first_use(const Spec& spec, bool json) {
    std::string why;
    const std::vector<PathCheck> checks = check_paths(spec, environment(), real_backends(), &why);
    const auto any = [&](const auto& of) { return std::ranges::any_of(checks, of); };
    const bool wrong = any([](const PathCheck& check) { return !check.fault.empty() || !check.other_fault.empty(); });
    const bool compared = any([](const PathCheck& check) { return check.skipped.empty(); });
    if (json) {
        Json list = Json::array();
        for (const PathCheck& check : checks) list.push_back(check_json(check));
        print_json({{"spec", spec.text()},
                    {"num_tokens", kComparedTokens},
                    {"checks", list},
                    {"why_no_gpu", checks.empty() ? Json(why) : Json(nullptr)}});
    } else if (checks.empty()) {
        fmt::print("no GPU whose kernels could be compared with the CPU backend's: {}\n", why);
    } else {
        fmt::print("{} over {} random tokens\n", spec.text(), kComparedTokens);
        for (const PathCheck& check : checks) {
            fmt::print("cuda:{:<8} {}, {}: {}\n", check.device.index, check.name, check.path, check_line(check));
        }
    }
    return wrong ? kFailedCheck : compared ? kDone : kEnvironment;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
    auto json = std::make_shared<bool>(false);
    auto check = std::make_shared<bool>(false);
    auto spec = std::make_shared<std::string>(kCheckedLayer);
    CLI::App* command = app.add_subcommand("info", "Devices, driver, NVRTC, LLVM, CPU features, cache, environment variables");
    command->footer("\nExamples:\n  flce info\n  flce info --json\n  flce info --check");
    command->add_flag("--json", *json, "one JSON object on stdout");
    CLI::Option* checks = command->add_flag(
        "--check", *check, "compare a step of each path of each GPU with the CPU backend's, as the first use of a new architecture is");
    command->add_option("--spec", *spec, std::string("the layer that is compared; ") + kSpecHelp)->needs(checks)->capture_default_str();
    command->callback([json, check, spec, &action] {
        action = [json, check, spec] {
            if (*check) return check_first_use(read_spec(*spec), *json);
            const Info info;
            *json ? report_json(info) : report_text(info);
            return static_cast<int>(kDone);
        };
    });
}

}  // namespace flce::cli

// Devices of this machine by their names.
#include <fmt/format.h>

#include <charconv>
#include <mutex>

#include "cache/log.hpp"
#include "generator/device_tables.hpp"
#include "runtime/cuda/cublaslt.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/session.hpp"

namespace flce {
namespace {

/// Whether a library is here; else `why` not.
template <class Library>
bool is_here(std::string* why) {
    try {
        (void)Library::load();
        return true;
    } catch (const EnvironmentError& error) {
        *why = error.what();
        return false;
    }
}

LocalDevice cuda_device(const std::string& name, const Backends& backends) {
    int index = 0;
    if (name != "cuda") {
        const char* end = name.data() + name.size();
        const auto [stop, error] = std::from_chars(name.data() + 5, end, index);
        if (error != std::errc() || stop != end || index < 0) {
            throw EnvironmentError(fmt::format("device is \"{}\"; a CUDA device is \"cuda\" or \"cuda:0\", \"cuda:1\", …", name));
        }
    }
    std::string why;
    std::vector<Device> devices = backends.cuda_devices(&why);
    if (devices.empty()) throw EnvironmentError(fmt::format("device is \"{}\", but no CUDA device can be used: {}", name, why));
    if (static_cast<std::size_t>(index) >= devices.size()) {
        throw EnvironmentError(fmt::format("device is \"{}\"; this machine has cuda:0 to cuda:{}", name, devices.size() - 1));
    }
    return {std::move(devices[static_cast<std::size_t>(index)]), {DeviceKind::cuda, index}};
}

LocalDevice best_device(const Backends& backends, bool has_compiled_kernels) {
    std::string why;
    std::vector<Device> devices = backends.cuda_devices(&why);
    if (!devices.empty()) {
        if (has_compiled_kernels || backends.has_nvrtc(&why)) return {std::move(devices[0]), {DeviceKind::cuda, 0}};
        static std::once_flag warned;
        std::call_once(warned, [&] { logger().warn("{} is not used, kernels run on the CPU: {}", devices[0].name, why); });
    }
    return {backends.native_cpu(), {}};
}

// A described CPU can run here if it has nothing that this machine lacks. Its cores are this machine's.
LocalDevice described_cpu(const std::string& name, const Backends& backends) {
    Device device = describe_device(name);
    if (device.kind != DeviceKind::cpu) {
        throw EnvironmentError(
            fmt::format("device is \"{}\", which kernels can be compiled for but not run on by name; allowed are cpu, "
                        "cuda, cuda:i and CPUs like x86-64-v3 or aarch64",
                        name));
    }
    const Device native = backends.native_cpu();
    const CpuProperties& have = native.cpu;
    CpuProperties& want = device.cpu;
    if (want.triple != have.triple) {
        throw EnvironmentError(
            fmt::format("device is \"{}\", a CPU of {}; this machine's {} is one of {}", name, want.triple, have.cpu, have.triple));
    }
    // Arm's names say more than the width of vectors, such as SVE2.
    if (want.triple.starts_with(kAarch64) && want.cpu != have.cpu && want.cpu != "generic") {
        throw EnvironmentError(fmt::format("device is \"{}\", and this machine is a {}; allowed are that and aarch64", name, have.cpu));
    }
    if (want.vector_bits > have.vector_bits || want.fma > have.fma || want.bf16_dot > have.bf16_dot) {
        throw EnvironmentError(fmt::format("device is \"{}\" ({}-bit vectors), but this machine's {} has {}-bit vectors{}{}", name,
                                           want.vector_bits, have.cpu, have.vector_bits, have.fma ? "" : ", no FMA",
                                           have.bf16_dot ? "" : ", no bf16 dot product"));
    }
    want.cores = have.cores;
    return {std::move(device), {}};
}

}  // namespace

namespace {

std::string compilers_here(bool library) {
    std::string why;
    return fmt::format("{} {}", is_here<Nvrtc>(&why) ? Nvrtc::load()->build_id() : "", library ? cublaslt_version() : 0);
}

}  // namespace

const Backends& real_backends() {
    static const Backends backends{
        .make_cpu = [](const BuildRequest& request, ArtifactCache& cache) { return make_cpu_kernel(request, cache); },
        .make_cuda = [](const BuildRequest& request, ArtifactCache& cache) { return make_cuda_kernel(request, cache); },
        .compile_cpu = [](const BuildRequest& request, ArtifactCache& cache) { compile_cpu_kernel(request, cache); },
        .compile_cuda = [](const BuildRequest& request, ArtifactCache& cache) { compile_cuda_kernel(request, cache); },
        .native_cpu = [] { return native_cpu(); },
        .cuda_devices = [](std::string* why) { return cuda_devices(why); },
        .has_nvrtc = is_here<Nvrtc>,
        .has_cublaslt = is_here<CublasLt>,
        .cuda_driver_version = [] { return CudaDriver::load()->version(); },
        .cuda_compilers = compilers_here,
        .compare = compare_steps,
    };
    return backends;
}

LocalDevice resolve_local_device(const std::string& name, const Backends& backends, bool has_compiled_kernels) {
    if (name.empty()) return best_device(backends, has_compiled_kernels);
    if (name == "cpu" || name == "native") return {backends.native_cpu(), {}};
    if (name == "cuda" || name.starts_with("cuda:")) return cuda_device(name, backends);
    return described_cpu(name, backends);
}

Device resolve_device(std::string_view name) {
    const std::string wanted(name.empty() ? std::string_view(environment().device) : name);
    if (wanted.empty() || wanted == "cpu" || wanted == "native" || wanted == "cuda" || wanted.starts_with("cuda:")) {
        return resolve_local_device(wanted, real_backends()).device;
    }
    return describe_device(wanted);
}

}  // namespace flce

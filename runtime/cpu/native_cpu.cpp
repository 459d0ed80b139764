// The machine's CPU as LLVM and the operating system describe it.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "generator/device_tables.hpp"
#include "llvm/ADT/StringMap.h"
#include "llvm/Config/llvm-config.h"
#include "llvm/TargetParser/Host.h"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

std::int64_t cache_bytes(int name, std::int64_t otherwise) {
    const long bytes = sysconf(name);
    return bytes > 0 ? bytes : otherwise;
}

/// Processors' worth of time that the control group grants; 0 where it sets no limit.
double cgroup_processors() {
    if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file) {  // version 2: "max 100000" or "200000 100000"
        std::string quota;
        double period = 0;
        if (file >> quota >> period && quota != "max" && period > 0) return std::strtod(quota.c_str(), nullptr) / period;
        return 0;
    }
    double quota = 0;
    double period = 0;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
    return quota > 0 && period > 0 ? quota / period : 0;
}

/// Threads that may run at once: what the affinity mask and the control group leave.
int usable_cores() {
    int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof(mask), &mask) == 0) cores = std::max(1, CPU_COUNT(&mask));
    const double granted = cgroup_processors();
    if (granted > 0) cores = std::clamp(static_cast<int>(std::ceil(granted)), 1, cores);
    return cores;
}

llvm::StringMap<bool> host_features() {
#if LLVM_VERSION_MAJOR >= 19
    return llvm::sys::getHostCPUFeatures();
#else
    llvm::StringMap<bool> features;
    llvm::sys::getHostCPUFeatures(features);
    return features;
#endif
}

#if defined(__x86_64__)
void set_vectors(CpuProperties& cpu, const std::map<std::string, bool>& features) {
    // LLVM reports a feature only if the operating system saves the registers it needs.
    const auto has = [&](const char* name) { return features.contains(name) && features.at(name); };
    // The emitter converts fp16 in hardware wherever there is FMA; no CPU has one without the other, but a hypervisor could hide it.
    cpu.fma = has("fma") && has("avx2") && has("f16c");
    const bool avx512 = cpu.fma && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl");
    cpu.vector_bits = avx512 ? 512 : cpu.fma ? 256 : 128;
    cpu.bf16_dot = avx512 && has("avx512bf16");
}
#elif defined(__aarch64__)
/// NEON, which every 64-bit Arm Linux has. SVE is left alone: its vectors are as wide on most CPUs, and no quicker on the others.
void set_vectors(CpuProperties& cpu, const std::map<std::string, bool>& /*features*/) { cpu.fma = true; }
#endif

}  // namespace

std::string native_triple() {
#if defined(__x86_64__)
    return linux_triple(kX86_64);
#elif defined(__aarch64__)
    return linux_triple(kAarch64);
#endif
}

Device native_cpu() {
    std::map<std::string, bool> features;  // sorted, so that the text is canonical
    for (const auto& feature : host_features()) features.emplace(feature.first().str(), feature.second);

    Device device{.kind = DeviceKind::cpu, .name = llvm::sys::getHostCPUName().str()};
    CpuProperties& cpu = device.cpu;
    cpu.triple = native_triple();
    cpu.cpu = device.name;
    for (const auto& [name, present] : features) {
        if (!cpu.features.empty()) cpu.features += ',';
        cpu.features += present ? '+' : '-';
        cpu.features += name;
    }
    set_vectors(cpu, features);
    cpu.cores = usable_cores();
    cpu.l1d_bytes = cache_bytes(_SC_LEVEL1_DCACHE_SIZE, cpu.l1d_bytes);
    cpu.l2_bytes = cache_bytes(_SC_LEVEL2_CACHE_SIZE, cpu.l2_bytes);
    cpu.l3_bytes = cache_bytes(_SC_LEVEL3_CACHE_SIZE, cpu.l3_bytes);
    return device;
}

}  // namespace flce

// How a Session turns a planned Spec into a Kernel: one factory per backend, both reading and filling the same cache.
#pragma once

#include <memory>

#include "cache/artifact_cache.hpp"
#include "flce/flce.hpp"

namespace flce {

struct BuildRequest {
    Spec spec;  ///< normalized
    Device device;
    Plan plan;  ///< legal for spec and device
    DeviceRef device_ref;
    int threads = 0;  ///< CPU backend; 0: every core
    Kernel::Reasons reasons;
};

/// Compiles (or takes from the cache) and loads. Throws CompileError, DeviceError, EnvironmentError.
[[nodiscard]] std::shared_ptr<const Kernel> make_cpu_kernel(const BuildRequest& request, ArtifactCache& cache);
[[nodiscard]] std::shared_ptr<const Kernel> make_cuda_kernel(const BuildRequest& request, ArtifactCache& cache);

/// Compiles into the cache without loading anything or needing the device.
void compile_cpu_kernel(const BuildRequest& request, ArtifactCache& cache);
void compile_cuda_kernel(const BuildRequest& request, ArtifactCache& cache);

/// The machine's devices. cuda_devices() is empty, with the reason in `why`, where there is no driver or no GPU.
[[nodiscard]] Device native_cpu();
/// CpuProperties::triple of native_cpu(), without asking the CPU for its features.
[[nodiscard]] std::string native_triple();
[[nodiscard]] std::vector<Device> cuda_devices(std::string* why = nullptr);
/// Version of the cuBLASLt that is here (130100 is 13.1.0); 0: there is none.
[[nodiscard]] int cublaslt_version();

/// Rates of a GPU of this machine, measured for about `seconds` after NVRTC has compiled what they need. Throws EnvironmentError,
/// CompileError, DeviceError.
[[nodiscard]] MeasuredRates measure_rates_of(int ordinal, double seconds);

}  // namespace flce

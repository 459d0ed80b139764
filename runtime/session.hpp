// Parts of a Session, for the C ABI and for tests. Backends are functions, so that a test can stand in for compilers and devices.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "flce/flce.hpp"
#include "runtime/environment.hpp"
#include "runtime/kernel_factory.hpp"
#include "runtime/layer/agreement.hpp"
#include "runtime/plan_choice.hpp"

namespace flce {

struct Backends {
    using Make = std::function<std::shared_ptr<const Kernel>(const BuildRequest&, ArtifactCache&)>;
    using Compile = std::function<void(const BuildRequest&, ArtifactCache&)>;
    Make make_cpu;
    Make make_cuda;
    Compile compile_cpu;
    Compile compile_cuda;
    std::function<Device()> native_cpu;
    std::function<std::vector<Device>(std::string* why)> cuda_devices;
    std::function<bool(std::string* why)> has_nvrtc;
    std::function<bool(std::string* why)> has_cublaslt;
    std::function<int()> cuda_driver_version;
    /// Builds of the NVRTC that is here, and of the cuBLASLt where `library` asks for that; a part is empty where there is none.
    std::function<std::string(bool library)> cuda_compilers;
    std::function<std::vector<Difference>(const Kernel& kernel, const Kernel& reference)> compare;
};

/// The real ones, of runtime/kernel_factory.hpp.
[[nodiscard]] const Backends& real_backends();

/// A device that this machine has, and where.
struct LocalDevice {
    Device device;
    DeviceRef ref;
};
/// `name` as in SessionOptions::device, already completed from the environment; empty: the best there is. A GPU is only that if its kernels
/// can be had: there is an NVRTC, or the caller has compiled ones from elsewhere.
[[nodiscard]] LocalDevice resolve_local_device(const std::string& name, const Backends& backends, bool has_compiled_kernels = false);

struct SessionAccess {
    [[nodiscard]] static Session make(SessionOptions options, const Environment& environment, Backends backends);
    [[nodiscard]] static DeviceRef device_ref(const Session& session);
    /// Statistics of each tier for get_kernel; kernels found in the session's own memory are hits of "memory" too.
    [[nodiscard]] static std::vector<TierStatistics> tiers(const Session& session);
    /// The plan whose kernels a session like this one on `device` would ask for. Compiles nothing.
    [[nodiscard]] static Plan plan(Session& session, const Spec& spec, const Device& device, const KernelOptions& options);
    /// Plans of such sessions over every number of tokens that the limit has room for, whatever options.num_tokens is.
    [[nodiscard]] static std::vector<Plan> plans_for_any_tokens(Session& session, const Spec& spec, const Device& device,
                                                                KernelOptions options);
    /// Time of a call by the records: of exactly that plan, request (num_tokens is the call's, not a bucket) and RecordKey::retained.
    /// Compiles nothing.
    [[nodiscard]] static std::optional<MeasuredTime> measured_time(Session& session, const Spec& spec, const Device& device,
                                                                   const Plan& plan, const PlanRequest& request, std::string_view retained);
    /// Session::prewarm, with each cache entry that was used told to `on_use`.
    using OnUse = std::function<void(const CacheKey&, std::span<const std::byte> entry)>;
    static PrewarmResult prewarm(Session& session, const Spec& spec, const Device& device, const KernelOptions& options,
                                 const OnUse& on_use);
};

/// The process's, made at the first call. Never destroyed: kernels and the CUDA driver may be in use while the process exits.
[[nodiscard]] Session& default_session();

}  // namespace flce

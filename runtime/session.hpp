// What a Session is made of, for the C ABI and for tests. Backends are functions, so that a test can stand in for compilers and devices.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "flce/flce.hpp"
#include "runtime/environment.hpp"
#include "runtime/kernel_factory.hpp"

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
};

/// The real ones, of runtime/kernel_factory.hpp.
[[nodiscard]] const Backends& real_backends();

/// A device that this machine has, and where.
struct LocalDevice {
    Device device;
    DeviceRef ref;
};
/// `name` as in SessionOptions::device, already completed from the environment; empty: the best there is. A GPU is only that if its kernels can be
/// had: there is an NVRTC, or the caller has compiled ones from elsewhere.
[[nodiscard]] LocalDevice resolve_local_device(const std::string& name, const Backends& backends, bool has_compiled_kernels = false);

struct SessionAccess {
    [[nodiscard]] static Session make(SessionOptions options, const Environment& environment, Backends backends);
    [[nodiscard]] static DeviceRef device_ref(const Session& session);
};

/// The process's, made at the first call. Never destroyed: kernels and the CUDA driver may be in use while the process exits.
[[nodiscard]] Session& default_session();

}  // namespace flce

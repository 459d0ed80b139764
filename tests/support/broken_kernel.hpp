// Kernels that are at fault on purpose, for tests of a process that has to outlive one.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "flce/flce.hpp"

namespace flce::test {

enum class KernelFault : std::uint8_t { endless, illegal_write };

/// CUDA source of the kernel of either kind.
[[nodiscard]] std::string_view broken_kernel_source();

class BrokenKernel {
public:
    /// Compiles and loads it. Throws EnvironmentError where there is no such GPU or no NVRTC.
    BrokenKernel(DeviceRef device, KernelFault fault);
    /// Submits the kernel, to all of the GPU. An endless kernel ends with its process; after an illegal write nothing runs in this process
    /// any more.
    void launch(Stream stream) const;

private:
    struct State;
    std::shared_ptr<const State> state_;
};

}  // namespace flce::test

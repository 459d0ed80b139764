// Loads cubins as modules of a GPU, and checks them before a kernel of them is launched.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "generator/cuda_program.hpp"
#include "runtime/cuda/driver.hpp"

namespace flce {

/// Compares the generator's parameter blocks with the kernels' own, past which a launch would read otherwise. Returns the fault; empty:
/// none.
[[nodiscard]] std::string param_block_fault(const CudaProgram& program, std::span<const std::byte> cubin);

/// Loads `cubin` and each of `kernels`. Returns why the driver refuses the image; empty: the image is in `module`. Throws DeviceError for a
/// fault of the device, which says nothing about the image.
[[nodiscard]] std::string load_fault(const std::shared_ptr<const CudaContext>& context, std::span<const std::byte> cubin,
                                     std::span<const KernelEntry> kernels, std::unique_ptr<CudaModule>& module);

/// Loads cubins into a GPU's context as they come, on whichever threads. Without a context it reads them only.
class CubinLoader {
public:
    /// Refers to the program.
    CubinLoader(const CudaProgram& program, std::string arch, std::shared_ptr<const CudaContext> context);

    /// Why `cubin` cannot serve unit `unit`; if it can, it is loaded. Throws DeviceError for a fault of the device.
    [[nodiscard]] std::string fault_of(std::size_t unit, const Artifact& cubin);
    /// The unit's module, of `cubin` if none is loaded yet. Throws DeviceError.
    [[nodiscard]] std::unique_ptr<CudaModule> take(std::size_t unit, const Artifact& cubin);

private:
    const CudaProgram& program_;
    std::string arch_;
    std::shared_ptr<const CudaContext> context_;
    std::mutex mutex_;  // one load at a time: drivers do no more anyway
    std::vector<std::unique_ptr<CudaModule>> modules_;
};

}  // namespace flce

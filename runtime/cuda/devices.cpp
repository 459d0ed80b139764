// The machine's GPUs as Devices.
#include <fmt/format.h>

#include <optional>

#include "flce/error.hpp"
#include "runtime/cuda/driver.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

std::optional<Device> described(const std::string& name) {
    try {
        return describe_device(name);
    } catch (const EnvironmentError&) {
        return std::nullopt;
    }
}

/// Completes the driver's figures with published ones: the exact target for this compute capability, and the rates of this product; for a
/// part of a product or an unknown one, the rates of its architecture in proportion to its SMs.
void complete(Device& device) {
    GpuProperties& gpu = device.gpu;
    const std::string plain = fmt::format("sm_{}", gpu.compute_capability);
    const auto arch = described(plain);
    gpu.arch = arch ? arch->gpu.arch : plain;
    const auto product = described(device.name);
    if (product && product->kind == DeviceKind::cuda && product->gpu.sm_count == gpu.sm_count) {
        gpu.bandwidth_bytes_per_s = product->gpu.bandwidth_bytes_per_s;
        gpu.bf16_flops = product->gpu.bf16_flops;
        // Drivers report part of the L2 of some products. Planning on the published figure gives the plan, and so the cache entry, that
        // prewarming for this product by name gives.
        gpu.l2_bytes = product->gpu.l2_bytes;
        return;
    }
    const Device like = arch ? *arch : describe_device("sm_80");
    gpu.bf16_flops = like.gpu.bf16_flops / like.gpu.sm_count * gpu.sm_count;
    if (gpu.bandwidth_bytes_per_s <= 0) gpu.bandwidth_bytes_per_s = like.gpu.bandwidth_bytes_per_s;
}

}  // namespace

Device CudaDriver::device(int ordinal) const {
    const std::scoped_lock lock(mutex_);
    const auto known = devices_.find(ordinal);
    return known != devices_.end() ? known->second : devices_.emplace(ordinal, ask_for_device(ordinal)).first->second;
}

Device CudaDriver::ask_for_device(int ordinal) const {
    const CUdevice handle = handle_of(ordinal);
    const auto attribute = [&](CUdevice_attribute which) {
        int value = 0;
        check(functions_.cuDeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
        return value;
    };
    const int major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    const int minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    char name[256] = {};
    check(functions_.cuDeviceGetName(name, sizeof(name), handle), "cuDeviceGetName");
    std::size_t memory_bytes = 0;
    check(functions_.cuDeviceTotalMem(&memory_bytes, handle), "cuDeviceTotalMem");

    Device device;
    device.kind = DeviceKind::cuda;
    device.name = name;
    GpuProperties& gpu = device.gpu;
    gpu.compute_capability = major * 10 + minor;
    gpu.sm_count = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    gpu.smem_per_block_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    gpu.smem_per_sm_bytes = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    gpu.l2_bytes = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    gpu.memory_bytes = static_cast<std::int64_t>(memory_bytes);
    // Clock in kHz, bus in bits, two transfers a clock.
    gpu.bandwidth_bytes_per_s =
        2e3 * attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) * attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8;
    complete(device);
    return device;
}

std::vector<Device> cuda_devices(std::string* why) {
    std::vector<Device> devices;
    try {
        const auto driver = CudaDriver::load();
        const int count = driver->device_count();
        for (int ordinal = 0; ordinal < count; ++ordinal) devices.push_back(driver->device(ordinal));
        if (count == 0 && why != nullptr) *why = "the CUDA driver sees no device";
    } catch (const Error& error) {
        devices.clear();
        if (why != nullptr) *why = error.what();
    }
    return devices;
}

}  // namespace flce

// A CUDA driver of one imaginary GPU that records the calls to it, so that everything above the driver runs on machines without one.
#pragma once

#include <cuda.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/cuda/driver.hpp"

namespace flce::test {

struct FakeGpu {
    struct Launch {
        std::string kernel;
        unsigned grid[3];
        unsigned block_threads;
        unsigned dynamic_smem_bytes;
        CUstream stream;
        std::vector<std::byte> params;
        CUcontext current;  // context at the call
    };
    struct Memset {
        CUdeviceptr address;
        std::size_t bytes;
        CUstream stream;
    };

    // Properties.
    CUresult init = CUDA_SUCCESS;
    int device_count = 1;
    std::string name = "NVIDIA H200";
    std::map<int, int> attributes = {{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
                                     {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
                                     {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
                                     {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
                                     {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
                                     {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 62914560},
                                     {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
                                     {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144}};
    std::string lacks;  // a function that this driver is too old to have
    std::optional<std::size_t> fail_launch;
    std::vector<CUresult> load_results;  // results of the next modules' loading; afterwards: success
    int blocks_per_sm = 2;

    // Recorded calls.
    int retained = 0;
    int modules = 0;
    std::vector<CUcontext> context_stack;
    std::vector<Launch> launches;
    std::vector<Memset> memsets;
    std::vector<std::byte> last_module;  // only its first bytes
    std::map<std::string, int> dynamic_smem;
    std::map<std::string, std::string> functions;  // names that handles point to
    int forbidden_calls = 0;                       // synchronisation or allocation

    /// Sizes of the kernels' parameter blocks, as a real driver would know them from the cubin.
    std::map<std::string, std::size_t> param_bytes;

    /// The GPU that the functions below act on.
    static inline FakeGpu* current = nullptr;
    FakeGpu() { current = this; }
    ~FakeGpu() { current = nullptr; }
    FakeGpu(const FakeGpu&) = delete;
    FakeGpu& operator=(const FakeGpu&) = delete;

    [[nodiscard]] static CUcontext primary() { return reinterpret_cast<CUcontext>(0x1000); }
    [[nodiscard]] static std::shared_ptr<const CudaDriver> driver() { return CudaDriver::bind(&get_proc_address, "fake libcuda"); }

    static CUresult get_proc_address(const char* name, void** function, int interface, cuuint64_t flags, CUdriverProcAddressQueryResult*);
};

namespace fake {

inline FakeGpu& gpu() { return *FakeGpu::current; }

inline CUresult init(unsigned) { return gpu().init; }
inline CUresult driver_version(int* version) { return *version = 13000, CUDA_SUCCESS; }
inline CUresult error_name(CUresult result, const char** text) {
    *text = result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
            : result == CUDA_ERROR_NO_DEVICE   ? "CUDA_ERROR_NO_DEVICE"
                                               : nullptr;
    return *text == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
inline CUresult error_string(CUresult result, const char** text) {
    *text = result == CUDA_ERROR_LAUNCH_FAILED ? "unspecified launch failure" : "no CUDA-capable device is detected";
    return CUDA_SUCCESS;
}
inline CUresult device_count(int* count) { return *count = gpu().device_count, CUDA_SUCCESS; }
inline CUresult device_get(CUdevice* device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
inline CUresult device_name(char* name, int size, CUdevice) {
    std::strncpy(name, gpu().name.c_str(), static_cast<std::size_t>(size));
    return CUDA_SUCCESS;
}
inline CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice) {
    const auto found = gpu().attributes.find(attribute);
    if (found == gpu().attributes.end()) return CUDA_ERROR_INVALID_VALUE;
    *value = found->second;
    return CUDA_SUCCESS;
}
inline CUresult total_memory(std::size_t* bytes, CUdevice) { return *bytes = std::size_t{150} << 30, CUDA_SUCCESS; }
inline CUresult retain(CUcontext* context, CUdevice) {
    ++gpu().retained;
    *context = FakeGpu::primary();
    return CUDA_SUCCESS;
}
inline CUresult release(CUdevice) { return --gpu().retained, CUDA_SUCCESS; }
inline CUresult get_current(CUcontext* context) {
    *context = gpu().context_stack.empty() ? nullptr : gpu().context_stack.back();
    return CUDA_SUCCESS;
}
inline CUresult push(CUcontext context) { return gpu().context_stack.push_back(context), CUDA_SUCCESS; }
inline CUresult pop(CUcontext* context) {
    *context = gpu().context_stack.back();
    gpu().context_stack.pop_back();
    return CUDA_SUCCESS;
}
inline CUresult module_load(CUmodule* module, const void* image) {
    if (gpu().context_stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    const auto* bytes = static_cast<const std::byte*>(image);
    gpu().last_module.assign(bytes, bytes + 4);
    if (!gpu().load_results.empty()) {
        const CUresult result = gpu().load_results.front();
        gpu().load_results.erase(gpu().load_results.begin());
        if (result != CUDA_SUCCESS) return result;
    }
    ++gpu().modules;
    *module = reinterpret_cast<CUmodule>(0x2000);
    return CUDA_SUCCESS;
}
inline CUresult module_unload(CUmodule) { return --gpu().modules, CUDA_SUCCESS; }
inline CUresult module_function(CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(&gpu().functions.try_emplace(name, name).first->second);
    return CUDA_SUCCESS;
}
inline std::string name_of(CUfunction function) { return *reinterpret_cast<std::string*>(function); }
inline CUresult get_attribute(int* value, CUfunction_attribute attribute, CUfunction) {
    *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 128 : 0;
    return CUDA_SUCCESS;
}
inline CUresult set_attribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) gpu().dynamic_smem[name_of(function)] = value;
    return CUDA_SUCCESS;
}
inline CUresult occupancy(int* blocks, CUfunction, int, std::size_t) { return *blocks = gpu().blocks_per_sm, CUDA_SUCCESS; }
inline CUresult launch_kernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned, unsigned, unsigned smem,
                              CUstream stream, void** params, void**) {
    const auto* bytes = static_cast<const std::byte*>(params[0]);
    FakeGpu::Launch launch{name_of(function), {gx, gy, gz}, bx, smem, stream, {}, nullptr};
    launch.params.assign(bytes, bytes + gpu().param_bytes[launch.kernel]);
    get_current(&launch.current);
    gpu().launches.push_back(std::move(launch));
    return gpu().fail_launch && *gpu().fail_launch + 1 == gpu().launches.size() ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}
inline CUresult launch_kernel_ex(const CUlaunchConfig* c, CUfunction function, void** params, void** extra) {
    return launch_kernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
                         c->hStream, params, extra);
}
inline CUresult memset_async(CUdeviceptr address, unsigned char, std::size_t bytes, CUstream stream) {
    return gpu().memsets.push_back({address, bytes, stream}), CUDA_SUCCESS;
}
/// Stands in for a CUtensorMap.
inline void write_map(std::byte* at, cuuint32_t rank, std::int64_t address, const cuuint64_t* extents, const cuuint64_t* strides,
                      const cuuint32_t* box) {
    std::int64_t words[] = {address,
                            static_cast<std::int64_t>(extents[0]),
                            static_cast<std::int64_t>(extents[1]),
                            static_cast<std::int64_t>(strides[0]),
                            std::int64_t{box[0]},
                            std::int64_t{box[1]},
                            0,
                            0};
    if (rank == 3) {
        words[6] = static_cast<std::int64_t>(extents[2]);
        words[7] = static_cast<std::int64_t>(strides[1]);
    }
    std::memcpy(at, words, sizeof words);
}
inline CUresult tensor_map_encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address, const cuuint64_t* extents,
                                  const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                  CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    if ((rank != 2 && rank != 3) || swizzle != CU_TENSOR_MAP_SWIZZLE_128B) return CUDA_ERROR_INVALID_VALUE;
    if (rank == 3 && (extents[2] == 0 || box[2] != 1)) return CUDA_ERROR_INVALID_VALUE;
    write_map(reinterpret_cast<std::byte*>(map), rank, reinterpret_cast<std::int64_t>(address), extents, strides, box);
    return CUDA_SUCCESS;
}
/// Everything that a kernel must never call while it runs.
inline CUresult forbidden() { return ++gpu().forbidden_calls, CUDA_ERROR_NOT_SUPPORTED; }

inline const std::map<std::string, void*>& table() {
    static const std::map<std::string, void*> functions = {
        {"cuInit", reinterpret_cast<void*>(&init)},
        {"cuDriverGetVersion", reinterpret_cast<void*>(&driver_version)},
        {"cuGetErrorName", reinterpret_cast<void*>(&error_name)},
        {"cuGetErrorString", reinterpret_cast<void*>(&error_string)},
        {"cuDeviceGetCount", reinterpret_cast<void*>(&device_count)},
        {"cuDeviceGet", reinterpret_cast<void*>(&device_get)},
        {"cuDeviceGetName", reinterpret_cast<void*>(&device_name)},
        {"cuDeviceGetAttribute", reinterpret_cast<void*>(&device_attribute)},
        {"cuDeviceTotalMem", reinterpret_cast<void*>(&total_memory)},
        {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain)},
        {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&release)},
        {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
        {"cuCtxPushCurrent", reinterpret_cast<void*>(&push)},
        {"cuCtxPopCurrent", reinterpret_cast<void*>(&pop)},
        {"cuModuleLoadData", reinterpret_cast<void*>(&module_load)},
        {"cuModuleUnload", reinterpret_cast<void*>(&module_unload)},
        {"cuModuleGetFunction", reinterpret_cast<void*>(&module_function)},
        {"cuFuncGetAttribute", reinterpret_cast<void*>(&get_attribute)},
        {"cuFuncSetAttribute", reinterpret_cast<void*>(&set_attribute)},
        {"cuOccupancyMaxActiveBlocksPerMultiprocessor", reinterpret_cast<void*>(&occupancy)},
        {"cuLaunchKernel", reinterpret_cast<void*>(&launch_kernel)},
        {"cuLaunchKernelEx", reinterpret_cast<void*>(&launch_kernel_ex)},
        {"cuMemsetD8Async", reinterpret_cast<void*>(&memset_async)},
        {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&tensor_map_encode)},
    };
    return functions;
}

}  // namespace fake

inline CUresult FakeGpu::get_proc_address(const char* name, void** function, int interface, cuuint64_t, CUdriverProcAddressQueryResult*) {
    *function = nullptr;
    if (interface > 12000 || current->lacks == name) return CUDA_ERROR_NOT_FOUND;
    const auto found = fake::table().find(name);
    *function = found != fake::table().end() ? found->second : reinterpret_cast<void*>(&fake::forbidden);
    return CUDA_SUCCESS;
}

}  // namespace flce::test

// The CUDA driver, loaded at run time: one build runs with and without a GPU, and links no CUDA library.
#pragma once

#include <cuda.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "flce/device.hpp"

namespace flce {

// Every driver function that flce calls. cuda.h renames some to a versioned symbol; they are asked for by their plain name and the
// interface of CUDA 12.0 (kDriverInterface), whose prototypes the functions below kept in every later header.
#define FLCE_CUDA_DRIVER_FUNCTIONS(X)              \
    X(cuInit)                                      \
    X(cuDriverGetVersion)                          \
    X(cuGetErrorName)                              \
    X(cuGetErrorString)                            \
    X(cuDeviceGetCount)                            \
    X(cuDeviceGet)                                 \
    X(cuDeviceGetName)                             \
    X(cuDeviceGetAttribute)                        \
    X(cuDeviceTotalMem)                            \
    X(cuDevicePrimaryCtxRetain)                    \
    X(cuDevicePrimaryCtxRelease)                   \
    X(cuCtxGetCurrent)                             \
    X(cuCtxPushCurrent)                            \
    X(cuCtxPopCurrent)                             \
    X(cuCtxSynchronize)                            \
    X(cuModuleLoadData)                            \
    X(cuModuleUnload)                              \
    X(cuModuleGetFunction)                         \
    X(cuFuncGetAttribute)                          \
    X(cuFuncSetAttribute)                          \
    X(cuLaunchKernel)                              \
    X(cuLaunchKernelEx)                            \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    X(cuMemAlloc)                                  \
    X(cuMemFree)                                   \
    X(cuMemGetInfo)                                \
    X(cuMemcpyHtoD)                                \
    X(cuMemcpyDtoH)                                \
    X(cuMemsetD8)                                  \
    X(cuMemsetD8Async)                             \
    X(cuTensorMapEncodeTiled)                      \
    X(cuStreamCreate)                              \
    X(cuStreamDestroy)                             \
    X(cuStreamSynchronize)                         \
    X(cuStreamBeginCapture)                        \
    X(cuStreamEndCapture)                          \
    X(cuGraphInstantiateWithFlags)                 \
    X(cuGraphDestroy)                              \
    X(cuGraphExecDestroy)                          \
    X(cuGraphLaunch)                               \
    X(cuEventCreate)                               \
    X(cuEventDestroy)                              \
    X(cuEventRecord)                               \
    X(cuEventSynchronize)                          \
    X(cuStreamWaitEvent)                           \
    X(cuEventElapsedTime)

inline constexpr int kDriverInterface = 12000;

struct CudaFunctions {
#define FLCE_DECLARE(name) decltype(&::name) name = nullptr;
    FLCE_CUDA_DRIVER_FUNCTIONS(FLCE_DECLARE)
#undef FLCE_DECLARE
};

class CudaContext;

/// libcuda, initialised. Thread-safe.
class CudaDriver : public std::enable_shared_from_this<CudaDriver> {
public:
    /// The process's driver: libcuda.so.1 of the loader's path, or what FLCE_LIBCUDA names. Throws EnvironmentError where there is no
    /// driver, it is older than CUDA 12.0, or it has no device to serve.
    [[nodiscard]] static std::shared_ptr<const CudaDriver> load();
    /// The driver in this file, or of this name on the loader's path.
    [[nodiscard]] static std::shared_ptr<const CudaDriver> open(const std::filesystem::path& file);
    using GetProcAddress = CUresult (*)(const char* name, void** function, int interface, cuuint64_t flags,
                                        CUdriverProcAddressQueryResult*);
    /// A driver given by its cuGetProcAddress; `path` is for messages.
    [[nodiscard]] static std::shared_ptr<const CudaDriver> bind(GetProcAddress get_proc_address, const std::filesystem::path& path);

    /// The functions themselves, for callers that read the result.
    [[nodiscard]] const CudaFunctions& functions() const noexcept { return functions_; }
    /// A function that is not in the table, or nullptr; `interface` as of cuGetProcAddress (12000 is CUDA 12.0).
    [[nodiscard]] void* find(const char* name, int interface = kDriverInterface) const noexcept;

    /// "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
    [[nodiscard]] std::string describe(CUresult result) const;
    /// Throws DeviceError "<call> failed: <name> (<text>)" unless `result` is CUDA_SUCCESS.
    void check(CUresult result, const char* call) const;

    [[nodiscard]] int version() const;  ///< highest CUDA version it serves, 13000 for 13.0
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

    [[nodiscard]] int device_count() const;
    /// Device `ordinal` by the driver's figures, completed by describe_device for rates that the driver does not know. Throws
    /// EnvironmentError for an ordinal that does not exist. Asked once: some figures take the driver tenths of a millisecond.
    [[nodiscard]] Device device(int ordinal) const;

    /// The primary context of a device, shared by everyone who holds it (and with the CUDA runtime of a framework).
    [[nodiscard]] std::shared_ptr<const CudaContext> context(int ordinal) const;

private:
    CudaDriver() = default;
    void bind_functions();
    [[nodiscard]] CUdevice handle_of(int ordinal) const;
    [[nodiscard]] Device ask_for_device(int ordinal) const;

    CudaFunctions functions_;
    GetProcAddress get_proc_address_ = nullptr;
    std::filesystem::path path_;
    mutable std::mutex mutex_;
    mutable std::map<int, std::weak_ptr<const CudaContext>> contexts_;
    mutable std::map<int, Device> devices_;
};

/// A retained primary context. Released with its last owner.
class CudaContext {
public:
    CudaContext(std::shared_ptr<const CudaDriver> driver, CUdevice device, int ordinal);
    ~CudaContext();
    CudaContext(const CudaContext&) = delete;
    CudaContext& operator=(const CudaContext&) = delete;

    [[nodiscard]] const CudaDriver& driver() const noexcept { return *driver_; }
    [[nodiscard]] const CudaFunctions& functions() const noexcept { return driver_->functions(); }
    [[nodiscard]] CUcontext handle() const noexcept { return context_; }
    [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

private:
    std::shared_ptr<const CudaDriver> driver_;
    CUdevice device_ = 0;
    int ordinal_ = 0;
    CUcontext context_ = nullptr;
};

/// Makes a context current on this thread for a scope; does nothing where it is already. Never synchronises.
class ContextScope {
public:
    explicit ContextScope(const CudaContext& context);
    ~ContextScope();
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

private:
    const CudaContext& context_;
    bool pushed_ = false;
};

/// Resources that one kernel uses on its device, from the driver.
struct FunctionUse {
    int registers = 0;  ///< per thread
    int static_smem_bytes = 0;
    int local_bytes = 0;    ///< per thread: stack and spills
    int blocks_per_sm = 0;  ///< occupancy at its block size and dynamic shared memory
};

/// A loaded cubin. Functions stay valid as long as it lives.
class CudaModule {
public:
    CudaModule(std::shared_ptr<const CudaContext> context, std::span<const std::byte> cubin);
    ~CudaModule();
    CudaModule(const CudaModule&) = delete;
    CudaModule& operator=(const CudaModule&) = delete;

    [[nodiscard]] const std::shared_ptr<const CudaContext>& context() const noexcept { return context_; }
    /// The kernel `name`, loaded now (not at its first launch, which may be inside a graph capture) and allowed `dynamic_smem_bytes`.
    [[nodiscard]] CUfunction function(const std::string& name, std::uint32_t dynamic_smem_bytes) const;
    [[nodiscard]] FunctionUse use(CUfunction function, std::uint32_t block_threads, std::uint32_t dynamic_smem_bytes) const;

private:
    std::shared_ptr<const CudaContext> context_;
    CUmodule module_ = nullptr;
};

/// One launch outside a compiled launcher.
struct LaunchConfig {
    unsigned grid[3] = {1, 1, 1};
    unsigned block_threads = 1;
    unsigned dynamic_smem_bytes = 0;
    unsigned cluster_x = 1;         ///< blocks of a thread-block cluster along x (sm_90 and newer)
    bool overlap_previous = false;  ///< programmatic dependent launch: may start before the kernel in front of it on the stream has ended
};
/// Launches through cuLaunchKernelEx with the attributes that `config` asks for; `params` is the whole parameter block.
void launch(const CudaContext& context, CUfunction function, const LaunchConfig& config, std::span<const std::byte> params,
            CUstream stream);

}  // namespace flce

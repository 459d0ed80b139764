#include "runtime/cuda/driver.hpp"

#include <fmt/format.h>

#include "cache/dynamic_library.hpp"
#include "flce/error.hpp"
#include "runtime/environment.hpp"

namespace flce {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

}  // namespace

std::shared_ptr<const CudaDriver> CudaDriver::load() {
    // Never destroyed: libcuda cannot be unloaded, and objects that outlive main still use it.
    static std::mutex mutex;
    static auto& loaded = *new std::shared_ptr<const CudaDriver>();
    const std::scoped_lock lock(mutex);
    if (loaded == nullptr) loaded = open(environment().libcuda.empty() ? std::filesystem::path(kLibrary) : environment().libcuda);
    return loaded;
}

std::shared_ptr<const CudaDriver> CudaDriver::open(const std::filesystem::path& file) {
    std::string why;
    const DynamicLibrary library = DynamicLibrary::open(file, &why);
    if (!library) throw EnvironmentError(fmt::format("no CUDA driver: {} cannot be loaded ({})", file.string(), why));
    GetProcAddress get_proc_address = nullptr;
    if (!library.bind(get_proc_address, "cuGetProcAddress_v2")) {
        throw EnvironmentError(
            fmt::format("{} is no CUDA driver of CUDA 12.0 or newer (R525): it has no cuGetProcAddress_v2", library.path().string()));
    }
    return bind(get_proc_address, library.path());
}

std::shared_ptr<const CudaDriver> CudaDriver::bind(GetProcAddress get_proc_address, const std::filesystem::path& path) {
    std::shared_ptr<CudaDriver> driver(new CudaDriver());
    driver->get_proc_address_ = get_proc_address;
    driver->path_ = path;
    driver->bind_functions();
    return driver;
}

void CudaDriver::bind_functions() {
    std::string missing;
    const auto bind_one = [&](auto& target, const char* name) {
        target = reinterpret_cast<std::remove_reference_t<decltype(target)>>(find(name));
        if (target == nullptr) missing += fmt::format(" {}", name);
    };
#define FLCE_BIND(name) bind_one(functions_.name, #name);
    FLCE_CUDA_DRIVER_FUNCTIONS(FLCE_BIND)
#undef FLCE_BIND
    if (!missing.empty())
        throw EnvironmentError(fmt::format("the CUDA driver {} lacks{}: CUDA 12.0 or newer is needed", path_.string(), missing));
    if (const CUresult result = functions_.cuInit(0); result != CUDA_SUCCESS) {
        throw EnvironmentError(fmt::format("the CUDA driver {} serves no GPU here: cuInit failed: {}", path_.string(), describe(result)));
    }
}

void* CudaDriver::find(const char* name, int interface) const noexcept {
    void* function = nullptr;
    const CUresult result = get_proc_address_(name, &function, interface, CU_GET_PROC_ADDRESS_LEGACY_STREAM, nullptr);
    return result == CUDA_SUCCESS ? function : nullptr;
}

std::string CudaDriver::describe(CUresult result) const {
    const char* name = nullptr;
    const char* text = nullptr;
    functions_.cuGetErrorName(result, &name);
    functions_.cuGetErrorString(result, &text);
    if (name == nullptr) return fmt::format("CUresult {}", static_cast<int>(result));
    return text == nullptr ? std::string(name) : fmt::format("{} ({})", name, text);
}

void CudaDriver::check(CUresult result, const char* call) const {
    if (result == CUDA_SUCCESS) return;
    throw DeviceError(fmt::format("{} failed: {}", call, describe(result)), call, static_cast<int>(result));
}

int CudaDriver::version() const {
    int version = 0;
    check(functions_.cuDriverGetVersion(&version), "cuDriverGetVersion");
    return version;
}

int CudaDriver::device_count() const {
    int count = 0;
    check(functions_.cuDeviceGetCount(&count), "cuDeviceGetCount");
    return count;
}

CUdevice CudaDriver::handle_of(int ordinal) const {
    const int count = device_count();
    if (ordinal < 0 || ordinal >= count) {
        throw EnvironmentError(count == 0 ? std::string("no CUDA device: the driver sees none")
                                          : fmt::format("no CUDA device {}: allowed are 0 to {}", ordinal, count - 1));
    }
    CUdevice device = 0;
    check(functions_.cuDeviceGet(&device, ordinal), "cuDeviceGet");
    return device;
}

std::shared_ptr<const CudaContext> CudaDriver::context(int ordinal) const {
    const CUdevice device = handle_of(ordinal);
    const std::scoped_lock lock(mutex_);
    std::shared_ptr<const CudaContext> context = contexts_[ordinal].lock();
    if (context == nullptr) {
        context = std::make_shared<CudaContext>(shared_from_this(), device, ordinal);
        contexts_[ordinal] = context;
    }
    return context;
}

CudaContext::CudaContext(std::shared_ptr<const CudaDriver> driver, CUdevice device, int ordinal)
    : driver_(std::move(driver)), device_(device), ordinal_(ordinal) {
    driver_->check(functions().cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

CudaContext::~CudaContext() { functions().cuDevicePrimaryCtxRelease(device_); }

ContextScope::ContextScope(const CudaContext& context) : context_(context) {
    CUcontext current = nullptr;
    context.driver().check(context.functions().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == context.handle()) return;
    context.driver().check(context.functions().cuCtxPushCurrent(context.handle()), "cuCtxPushCurrent");
    pushed_ = true;
}

ContextScope::~ContextScope() {
    CUcontext popped = nullptr;
    if (pushed_) context_.functions().cuCtxPopCurrent(&popped);
}

CudaModule::CudaModule(std::shared_ptr<const CudaContext> context, std::span<const std::byte> cubin) : context_(std::move(context)) {
    const ContextScope scope(*context_);
    context_->driver().check(context_->functions().cuModuleLoadData(&module_, cubin.data()), "cuModuleLoadData");
}

CudaModule::~CudaModule() {
    try {
        const ContextScope scope(*context_);
        context_->functions().cuModuleUnload(module_);
    } catch (const DeviceError&) {  // NOLINT(bugprone-empty-catch): the driver shuts down with the process, and unloads it then
    }
}

CUfunction CudaModule::function(const std::string& name, std::uint32_t dynamic_smem_bytes) const {
    const CudaDriver& driver = context_->driver();
    const CudaFunctions& f = driver.functions();
    const ContextScope scope(*context_);
    CUfunction function = nullptr;
    driver.check(f.cuModuleGetFunction(&function, module_, name.c_str()), ("cuModuleGetFunction of " + name).c_str());
    // With lazy loading the code is fetched at the first use; cuFuncLoad (CUDA 12.4) does it here, older drivers do at the attribute calls.
    using FuncLoad = CUresult (*)(CUfunction);
    if (const auto load = reinterpret_cast<FuncLoad>(driver.find("cuFuncLoad", 12040))) {
        driver.check(load(function), ("cuFuncLoad of " + name).c_str());
    }
    driver.check(f.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(dynamic_smem_bytes)),
                 fmt::format("cuFuncSetAttribute ({} bytes of dynamic shared memory) of {}", dynamic_smem_bytes, name).c_str());
    return function;
}

FunctionUse CudaModule::use(CUfunction function, std::uint32_t block_threads, std::uint32_t dynamic_smem_bytes) const {
    const CudaDriver& driver = context_->driver();
    const CudaFunctions& f = driver.functions();
    const ContextScope scope(*context_);
    FunctionUse use;
    const auto read = [&](int& value, CUfunction_attribute attribute) {
        driver.check(f.cuFuncGetAttribute(&value, attribute, function), "cuFuncGetAttribute");
    };
    read(use.registers, CU_FUNC_ATTRIBUTE_NUM_REGS);
    read(use.static_smem_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
    read(use.local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
    driver.check(
        f.cuOccupancyMaxActiveBlocksPerMultiprocessor(&use.blocks_per_sm, function, static_cast<int>(block_threads), dynamic_smem_bytes),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    return use;
}

void launch(const CudaContext& context, CUfunction function, const LaunchConfig& config, std::span<const std::byte> params,
            CUstream stream) {
    CUlaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (config.cluster_x > 1) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim.x = config.cluster_x;
        attributes[count].value.clusterDim.y = 1;
        attributes[count].value.clusterDim.z = 1;
        ++count;
    }
    if (config.overlap_previous) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    CUlaunchConfig cuda{};
    cuda.gridDimX = config.grid[0];
    cuda.gridDimY = config.grid[1];
    cuda.gridDimZ = config.grid[2];
    cuda.blockDimX = config.block_threads;
    cuda.blockDimY = 1;
    cuda.blockDimZ = 1;
    cuda.sharedMemBytes = config.dynamic_smem_bytes;
    cuda.hStream = stream;
    cuda.attrs = attributes;
    cuda.numAttrs = count;
    std::size_t bytes = params.size();
    void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, const_cast<std::byte*>(params.data()), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                     CU_LAUNCH_PARAM_END};
    const ContextScope scope(context);
    context.driver().check(context.functions().cuLaunchKernelEx(&cuda, function, nullptr, extra), "cuLaunchKernelEx");
}

}  // namespace flce

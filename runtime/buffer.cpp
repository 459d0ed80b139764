#include "flce/buffer.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#include "flce/error.hpp"
#include "runtime/cuda/driver.hpp"

namespace flce {
namespace {

// Alignment that kernels ask of a workspace, so that a Buffer can be one.
constexpr std::align_val_t kHostAlignment{256};

std::shared_ptr<const CudaContext> context_of(DeviceRef device) { return CudaDriver::load()->context(device.index); }

CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

/// The copies below return when their bytes have arrived, also for streams that do not wait for the default stream.
void wait_for_default_stream(const CudaContext& context) {
    context.driver().check(context.functions().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
}

}  // namespace

struct Buffer::State {
    DeviceRef device;
    std::size_t bytes = 0;
    void* data = nullptr;
    std::shared_ptr<const CudaContext> context;  // null for the CPU

    State(DeviceRef ref, std::size_t size) : device(ref), bytes(size) {
        if (device.kind == DeviceKind::cpu) {
            if (bytes > 0) data = ::operator new(bytes, kHostAlignment);
            return;
        }
        context = context_of(device);
        if (bytes == 0) return;
        const ContextScope scope(*context);
        CUdeviceptr pointer = 0;
        context->driver().check(context->functions().cuMemAlloc(&pointer, bytes), fmt::format("cuMemAlloc of {} bytes", bytes).c_str());
        data = reinterpret_cast<void*>(pointer);
    }
    ~State() {
        if (context == nullptr) {
            ::operator delete(data, kHostAlignment);
        } else if (data != nullptr) {
            try {
                const ContextScope scope(*context);
                context->functions().cuMemFree(address(data));
            } catch (const DeviceError&) {  // NOLINT(bugprone-empty-catch): the driver shuts down with the process, and frees it then
            }
        }
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    [[nodiscard]] std::byte* at(std::size_t offset) const noexcept { return static_cast<std::byte*>(data) + offset; }
};

namespace {

void check_range(const char* what, std::size_t size, std::size_t bytes, std::size_t offset) {
    if (offset <= size && bytes <= size - offset) return;
    throw ArgumentError(fmt::format("{}: {} bytes at offset {} do not lie in a buffer of {} bytes", what, bytes, offset, size));
}

}  // namespace

Buffer::Buffer(DeviceRef device, std::size_t bytes) : state_(std::make_shared<State>(device, bytes)) {}

void* Buffer::data() const noexcept { return state_ == nullptr ? nullptr : state_->data; }
std::size_t Buffer::bytes() const noexcept { return state_ == nullptr ? 0 : state_->bytes; }
DeviceRef Buffer::device() const noexcept { return state_ == nullptr ? DeviceRef{} : state_->device; }

void Buffer::upload(const void* host, std::size_t bytes, std::size_t offset) {
    check_range("upload", this->bytes(), bytes, offset);
    if (bytes == 0) return;
    if (state_->context == nullptr) {
        std::memcpy(state_->at(offset), host, bytes);
        return;
    }
    const CudaContext& context = *state_->context;
    const ContextScope scope(context);
    context.driver().check(context.functions().cuMemcpyHtoD(address(state_->at(offset)), host, bytes), "cuMemcpyHtoD");
    wait_for_default_stream(context);
}

void Buffer::download(void* host, std::size_t bytes, std::size_t offset) const {
    check_range("download", this->bytes(), bytes, offset);
    if (bytes == 0) return;
    if (state_->context == nullptr) {
        std::memcpy(host, state_->at(offset), bytes);
        return;
    }
    const CudaContext& context = *state_->context;
    const ContextScope scope(context);
    context.driver().check(context.functions().cuMemcpyDtoH(host, address(state_->at(offset)), bytes), "cuMemcpyDtoH");
}

void Buffer::fill(std::byte value) {
    if (bytes() == 0) return;
    if (state_->context == nullptr) {
        std::memset(state_->data, std::to_integer<int>(value), state_->bytes);
        return;
    }
    const CudaContext& context = *state_->context;
    const ContextScope scope(context);
    context.driver().check(context.functions().cuMemsetD8(address(state_->data), std::to_integer<unsigned char>(value), state_->bytes),
                           "cuMemsetD8");
    wait_for_default_stream(context);
}

void synchronize(DeviceRef device) {
    if (device.kind == DeviceKind::cpu) return;
    const auto context = context_of(device);
    const ContextScope scope(*context);
    context->driver().check(context->functions().cuCtxSynchronize(), "cuCtxSynchronize");
}

struct Timer::State {
    std::chrono::steady_clock::time_point started;
    std::shared_ptr<const CudaContext> context;  // null for the CPU
    CUevent start = nullptr;
    CUevent stop = nullptr;

    explicit State(DeviceRef device) {
        if (device.kind == DeviceKind::cpu) return;
        context = context_of(device);
        const ContextScope scope(*context);
        create(start);
        create(stop);
    }
    ~State() {
        for (CUevent event : {start, stop}) {
            if (event != nullptr) context->functions().cuEventDestroy(event);
        }
    }
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    void create(CUevent& event) const {
        context->driver().check(context->functions().cuEventCreate(&event, CU_EVENT_DEFAULT), "cuEventCreate");
    }
    void record(CUevent event, Stream stream) const {
        const ContextScope scope(*context);
        context->driver().check(context->functions().cuEventRecord(event, static_cast<CUstream>(stream.handle)), "cuEventRecord");
    }
};

Timer::Timer(DeviceRef device) : state_(std::make_shared<State>(device)) {}

void Timer::start(Stream stream) {
    if (state_->context != nullptr) state_->record(state_->start, stream);
    state_->started = std::chrono::steady_clock::now();
}

double Timer::stop_ms(Stream stream) {
    if (state_->context == nullptr) {
        return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - state_->started).count();
    }
    state_->record(state_->stop, stream);
    const CudaContext& context = *state_->context;
    context.driver().check(context.functions().cuEventSynchronize(state_->stop), "cuEventSynchronize");
    float milliseconds = 0;
    context.driver().check(context.functions().cuEventElapsedTime(&milliseconds, state_->start, state_->stop), "cuEventElapsedTime");
    return milliseconds;
}

MemoryInfo memory_info(DeviceRef device) {
    if (device.kind == DeviceKind::cpu) throw EnvironmentError("memory_info: allowed are CUDA devices, not the CPU");
    const auto context = context_of(device);
    const ContextScope scope(*context);
    MemoryInfo info;
    context->driver().check(context->functions().cuMemGetInfo(&info.free_bytes, &info.total_bytes), "cuMemGetInfo");
    return info;
}

}  // namespace flce

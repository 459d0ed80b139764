// Stand-in for a reduction over ranks on one GPU: a copy by the copy engine, or by blocks of a kernel, as NCCL's are. And a pause that a
// stream makes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/cuda/driver.hpp"
#include "runtime/cuda/nvrtc.hpp"

namespace flce::bench {

class Stream {
public:
    Stream(std::shared_ptr<const CudaContext> context, int priority = 0) : context_(std::move(context)) {
        const ContextScope scope(*context_);
        using Create = CUresult (*)(CUstream*, unsigned, int);
        const auto create = reinterpret_cast<Create>(context_->driver().find("cuStreamCreateWithPriority"));
        context_->driver().check(create(&stream_, CU_STREAM_NON_BLOCKING, priority), "cuStreamCreateWithPriority");
    }
    ~Stream() { context_->functions().cuStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    [[nodiscard]] CUstream get() const { return stream_; }

private:
    std::shared_ptr<const CudaContext> context_;
    CUstream stream_ = nullptr;
};

/// A moment on a stream.
class Moment {
public:
    explicit Moment(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
        const ContextScope scope(*context_);
        context_->driver().check(context_->functions().cuEventCreate(&event_, CU_EVENT_DEFAULT), "cuEventCreate");
    }
    ~Moment() { context_->functions().cuEventDestroy(event_); }
    Moment(const Moment&) = delete;
    Moment& operator=(const Moment&) = delete;

    void record(CUstream stream) const {
        const ContextScope scope(*context_);
        context_->driver().check(context_->functions().cuEventRecord(event_, stream), "cuEventRecord");
    }
    [[nodiscard]] double ms_since(const Moment& begin) const {
        float ms = 0;
        context_->driver().check(context_->functions().cuEventElapsedTime(&ms, begin.event_, event_), "cuEventElapsedTime");
        return ms;
    }

private:
    std::shared_ptr<const CudaContext> context_;
    CUevent event_ = nullptr;
};

class ReductionStandIn {
public:
    explicit ReductionStandIn(std::shared_ptr<const CudaContext> context)
        : context_(std::move(context)), module_(context_, compiled(*context_)) {
        copy_async_ = reinterpret_cast<CopyAsync>(context_->driver().find("cuMemcpyDtoDAsync"));
    }

    void copy(void* to, const void* from, std::size_t bytes, CUstream stream) const {
        const ContextScope scope(*context_);
        context_->driver().check(copy_async_(address(to), address(from), bytes, stream), "cuMemcpyDtoDAsync");
    }
    /// By `blocks` blocks, none of which fits on an SM beside a block of a GEMM.
    void copy_by_blocks(void* to, const void* from, std::size_t bytes, unsigned blocks, CUstream stream) const {
        const CopyParams params{to, from, bytes / 16};
        launch(*context_, module_.function("copy", kBlockBytes), {{blocks, 1, 1}, kBlockThreads, kBlockBytes},
               std::as_bytes(std::span(&params, 1)), stream);
    }
    /// One block that waits.
    void pause(std::uint64_t ns, CUstream stream) const {
        launch(*context_, module_.function("pause", 0), {{1, 1, 1}, 32, 0}, std::as_bytes(std::span(&ns, 1)), stream);
    }

private:
    static constexpr unsigned kBlockThreads = 512;
    static constexpr unsigned kBlockBytes = 96 << 10;
    using CopyAsync = CUresult (*)(CUdeviceptr, CUdeviceptr, std::size_t, CUstream);

    struct CopyParams {
        void* to;
        const void* from;
        std::uint64_t count;
    };
    static constexpr const char* kSource = R"(
struct CopyParams { uint4* to; const uint4* from; unsigned long long count; };
extern "C" __global__ void __launch_bounds__(512) copy(const __grid_constant__ CopyParams p) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < p.count; i += 8 * step) {
        uint4 values[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) values[k] = p.from[i + k * step];
#pragma unroll
        for (int k = 0; k < 8; ++k) p.to[i + k * step] = values[k];
    }
    for (; i < p.count; i += step) p.to[i] = p.from[i];
}
__device__ unsigned long long now() { unsigned long long ns; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)); return ns; }
extern "C" __global__ void pause(const __grid_constant__ unsigned long long ns) {
    const unsigned long long begin = now();
    while (now() - begin < ns) { }
}
)";
    static std::vector<std::byte> compiled(const CudaContext& context) {
        const std::vector<KernelEntry> kernels = {{"copy", kBlockThreads, kBlockBytes}, {"pause", 32, 0}};
        const std::string arch = context.driver().device(context.ordinal()).gpu.arch;
        return Nvrtc::load()->compile(kSource, {}, {"--gpu-architecture=" + arch, "--std=c++17"}, kernels).cubin;
    }
    static CUdeviceptr address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

    std::shared_ptr<const CudaContext> context_;
    CudaModule module_;
    CopyAsync copy_async_ = nullptr;
};

}  // namespace flce::bench

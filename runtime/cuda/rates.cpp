#include "runtime/cuda/rates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "flce/error.hpp"
#include "runtime/cuda/cublaslt.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

constexpr unsigned kMmaThreads = 256;
constexpr unsigned kMmaSmemBytes = 98304;
constexpr double kMmaOperations = 2.0 * 128 * 256 * 64;  // operations of a block in a round
constexpr unsigned kReadThreads = 512;

constexpr const char* kSource = R"(#include "flce/common/rates.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) mma_rate(const __grid_constant__ flce::MmaRateParams p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    flce::MmaRate::fill(smem);
    flce::MmaRate(smem).run(p);
}
extern "C" __global__ void __launch_bounds__(512) read_rate(const __grid_constant__ flce::ReadRateParams p) { flce::ReadRate::run(p); }
extern "C" __global__ void nothing(const __grid_constant__ int) {}
static_assert(flce::MmaRate::kSmemBytes == 98304 && flce::MmaRate::kThreads == 256, "as the host has it");
static_assert(flce::ReadRate::kThreads == 512, "as the host has it");
)";

struct MmaParams {  // flce::MmaRateParams
    CUdeviceptr sums;
    int rounds;
    int unused;
};
struct ReadParams {  // flce::ReadRateParams
    CUdeviceptr data;
    CUdeviceptr sums;
    long long count;
    int rounds;
    int unused;
};

std::vector<std::byte> compiled(const std::string& arch) {
    const std::vector<KernelEntry> kernels = {{"mma_rate", kMmaThreads, kMmaSmemBytes}, {"read_rate", kReadThreads, 0}, {"nothing", 32, 0}};
    return Nvrtc::load()->compile(kSource, embedded_templates(), {"--gpu-architecture=" + arch, "--std=c++17"}, kernels).cubin;
}

class Memory {
public:
    Memory(const CudaContext& context, std::size_t bytes) : context_(context) {
        const ContextScope scope(context_);
        context_.driver().check(context_.functions().cuMemAlloc(&address_, bytes), "cuMemAlloc");
    }
    ~Memory() {
        const ContextScope scope(context_);
        context_.functions().cuMemFree(address_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    [[nodiscard]] CUdeviceptr address() const { return address_; }

private:
    const CudaContext& context_;
    CUdeviceptr address_ = 0;
};

/// Times work on a stream of its own.
class Timer {
public:
    explicit Timer(const CudaContext& context) : context_(context), scope_(context) {
        check(context_.functions().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
        check(context_.functions().cuEventCreate(&begin_, CU_EVENT_DEFAULT), "cuEventCreate");
        check(context_.functions().cuEventCreate(&end_, CU_EVENT_DEFAULT), "cuEventCreate");
    }
    ~Timer() {
        context_.functions().cuEventDestroy(begin_);
        context_.functions().cuEventDestroy(end_);
        context_.functions().cuStreamDestroy(stream_);
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

    template <class Work>
    [[nodiscard]] double seconds(const Work& work) const {
        const CudaFunctions& f = context_.functions();
        check(f.cuEventRecord(begin_, stream_), "cuEventRecord");
        work(stream_);
        check(f.cuEventRecord(end_, stream_), "cuEventRecord");
        check(f.cuEventSynchronize(end_), "cuEventSynchronize");
        float ms = 0;
        check(f.cuEventElapsedTime(&ms, begin_, end_), "cuEventElapsedTime");
        return ms * 1e-3;
    }

private:
    void check(CUresult result, const char* call) const { context_.driver().check(result, call); }

    const CudaContext& context_;
    ContextScope scope_;
    CUstream stream_ = nullptr;
    CUevent begin_ = nullptr;
    CUevent end_ = nullptr;
};

class Rates {
public:
    explicit Rates(const std::shared_ptr<const CudaContext>& context)
        : context_(context),
          gpu_(context->driver().device(context->ordinal()).gpu),
          module_(context, compiled(gpu_.arch)),
          timer_(*context),
          sums_(*context, std::size_t{16} * gpu_.sm_count * kReadThreads * sizeof(float)) {}

    /// Operations a second over about `seconds`.
    [[nodiscard]] double mma(double seconds) const {
        const CUfunction kernel = module_.function("mma_rate", kMmaSmemBytes);
        const auto run = [&](int rounds) {
            const MmaParams params{sums_.address(), rounds, 0};
            const LaunchConfig config{{blocks(), 1, 1}, kMmaThreads, kMmaSmemBytes};
            return timer_.seconds(
                [&](CUstream stream) { launch(*context_, kernel, config, std::as_bytes(std::span(&params, 1)), stream); });
        };
        constexpr int kRounds = 4000;
        double once = std::min(run(kRounds), run(kRounds));
        double operations = 0;
        double taken = 0;
        for (; taken < seconds; taken += once) {
            once = run(kRounds);
            operations += kMmaOperations * blocks() * kRounds;
        }
        return operations / taken;
    }

    /// Operations a second of cuBLASLt over about `seconds`; 0 where there is none.
    [[nodiscard]] double library(double seconds) const {
        try {
            static_cast<void>(CublasLt::load());
        } catch (const EnvironmentError&) {
            return 0;
        }
        constexpr std::int64_t kRows = 4096;
        constexpr std::int64_t kColumns = 8192;
        constexpr std::int64_t kDepth = 4096;
        constexpr std::int64_t kWorkspace = std::int64_t{4} << 20;
        const Memory operands(*context_, 2 * (kRows + kColumns) * kDepth);
        const Memory result(*context_, 4 * kRows * kColumns + kWorkspace);
        fill_random(operands.address(), 2 * (kRows + kColumns) * kDepth);
        const auto a = static_cast<std::int64_t>(operands.address());
        const auto c = static_cast<std::int64_t>(result.address());
        const GemmCall call{.transpose_b = 1,
                            .operands = static_cast<std::int64_t>(DType::bf16),
                            .result_type = static_cast<std::int64_t>(DType::fp32),
                            .m = kRows,
                            .n = kColumns,
                            .k = kDepth,
                            .a = a,
                            .lda = kDepth,
                            .b = a + 2 * kRows * kDepth,
                            .ldb = kDepth,
                            .result = c,
                            .ld = kColumns,
                            .workspace = c + 4 * kRows * kColumns};
        const LibraryGemms& gemms = LibraryGemms::of(context_);
        const auto run = [&](int times) {
            return timer_.seconds([&](CUstream stream) {
                for (int i = 0; i < times; ++i) {
                    if (const int status = gemms.run(call, stream); status != 0) {
                        throw DeviceError("cublasLtMatmul failed: " + gemms.library().describe(status), "cublasLtMatmul", status);
                    }
                }
            });
        };
        const double once = std::max(std::min(run(1), run(1)), 1e-6);
        const int times = std::max(4, static_cast<int>(seconds / once));
        return 2.0 * kRows * kColumns * kDepth * times / run(times);
    }

    [[nodiscard]] double l2(double seconds) const {
        const std::int64_t bytes = std::clamp<std::int64_t>(gpu_.l2_bytes / 4, 1 << 20, 32 << 20);
        const Memory data(*context_, static_cast<std::size_t>(bytes));
        const CUfunction kernel = module_.function("read_rate", 0);
        const auto run = [&](int rounds) {
            const ReadParams params{data.address(), sums_.address(), bytes / 16, rounds, 0};
            const LaunchConfig config{{4 * blocks(), 1, 1}, kReadThreads, 0};
            return timer_.seconds(
                [&](CUstream stream) { launch(*context_, kernel, config, std::as_bytes(std::span(&params, 1)), stream); });
        };
        constexpr int kRounds = 20;
        const double once = std::max(std::min(run(kRounds), run(kRounds)), 1e-6);
        const int rounds = std::max(kRounds, static_cast<int>(kRounds * seconds / once));
        return static_cast<double>(bytes) * rounds / run(rounds);
    }

    [[nodiscard]] double copy(double seconds) const {
        using Copy = CUresult (*)(CUdeviceptr, CUdeviceptr, std::size_t, CUstream);
        const auto copy = reinterpret_cast<Copy>(context_->driver().find("cuMemcpyDtoDAsync"));
        const std::size_t bytes = std::size_t{256} << 20;
        const Memory from(*context_, bytes);
        const Memory to(*context_, bytes);
        const auto run = [&](int times) {
            return timer_.seconds([&](CUstream stream) {
                for (int i = 0; i < times; ++i)
                    context_->driver().check(copy(to.address(), from.address(), bytes, stream), "cuMemcpyDtoDAsync");
            });
        };
        const double once = std::max(std::min(run(1), run(1)), 1e-6);
        const int times = std::max(4, static_cast<int>(seconds / once));
        return 2.0 * static_cast<double>(bytes) * times / run(times);
    }

    [[nodiscard]] double launch_seconds(double seconds) const {
        const CUfunction kernel = module_.function("nothing", 0);
        const int parameter = 0;
        const auto run = [&](int times) {
            return timer_.seconds([&](CUstream stream) {
                for (int i = 0; i < times; ++i)
                    launch(*context_, kernel, {{1, 1, 1}, 32, 0}, std::as_bytes(std::span(&parameter, 1)), stream);
            });
        };
        constexpr int kTimes = 200;
        const double once = std::max(run(kTimes), 1e-6);
        const int times = std::clamp(static_cast<int>(kTimes * seconds / once), kTimes, 100 * kTimes);
        return run(times) / times;
    }

private:
    /// Nearly random numbers of bf16 between -2 and 2: what a product draws depends on its operands.
    void fill_random(CUdeviceptr to, std::size_t bytes) const {
        constexpr std::size_t kBlock = std::size_t{4} << 20;
        std::vector<std::uint16_t> numbers(kBlock / 2);
        std::uint32_t state = 1;
        for (std::uint16_t& number : numbers) {
            state = state * 1664525U + 1013904223U;
            number = static_cast<std::uint16_t>((state >> 16 & 0x80ffU) | 0x3f00U);
        }
        for (std::size_t at = 0; at < bytes; at += kBlock) {
            context_->driver().check(context_->functions().cuMemcpyHtoD(to + at, numbers.data(), std::min(kBlock, bytes - at)),
                                     "cuMemcpyHtoD");
        }
    }

    [[nodiscard]] unsigned blocks() const { return static_cast<unsigned>(gpu_.sm_count); }

    std::shared_ptr<const CudaContext> context_;
    GpuProperties gpu_;
    CudaModule module_;
    Timer timer_;
    Memory sums_;
};

}  // namespace

MeasuredRates measure_rates(const std::shared_ptr<const CudaContext>& context, double seconds) {
    const Rates rates(context);
    return {.mma_flops = rates.mma(seconds * 0.3),
            .library_flops = rates.library(seconds * 0.3),
            .copy_bytes_per_s = rates.copy(seconds * 0.15),
            .l2_bytes_per_s = rates.l2(seconds * 0.15),
            .launch_seconds = rates.launch_seconds(seconds * 0.1)};
}

MeasuredRates measure_rates_of(int ordinal, double seconds) { return measure_rates(CudaDriver::load()->context(ordinal), seconds); }

double measure_mma_rate(const std::shared_ptr<const CudaContext>& context, double seconds) { return Rates(context).mma(seconds); }

}  // namespace flce

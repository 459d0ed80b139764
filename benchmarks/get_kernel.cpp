// Time of get_kernel: for a kernel that is known (target: under 1 µs), one that is on disk (under 5 ms), one that must be compiled; and
// time of the checks before a launch. On the CPU, so that it runs anywhere; FLCE_DEVICE=cuda asks for a GPU's kernels
// (--benchmark_filter='GetKernel').
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

#include "benchmarks/temporary_folder.hpp"
#include "flce/flce.h"
#include "flce/flce.hpp"

namespace {

namespace fs = std::filesystem;

constexpr char kSpecText[] = "D=2048,V=151936,dtype=bf16,tied";

using CacheDirectory = flce::bench::TemporaryFolder;

const char* device() {
    const char* asked = std::getenv("FLCE_DEVICE");
    return asked != nullptr && *asked != '\0' ? asked : "cpu";
}

flce::SessionOptions options_in(const CacheDirectory& directory) {
    return {.device = device(), .cache_dir = directory.path(), .threads = 1};
}

/// One session with the kernel known, shared by the threads of a benchmark.
struct WarmSession {
    CacheDirectory directory;
    flce::Session session{options_in(directory)};
    flce::Spec spec = flce::parse_spec(kSpecText);
    std::shared_ptr<const flce::Kernel> kernel = session.get_kernel(spec);
};

WarmSession& warm_session() {
    static WarmSession warm;
    return warm;
}

void GetKernel_Hot(benchmark::State& state) {
    WarmSession& warm = warm_session();
    for (auto _ : state) benchmark::DoNotOptimize(warm.session.get_kernel(warm.spec));
}
BENCHMARK(GetKernel_Hot)->ThreadRange(1, 8)->UseRealTime();

void GetKernel_HotAmongManySpecs(benchmark::State& state) {
    WarmSession& warm = warm_session();
    for (int d = 8; d <= 8 * 64; d += 8) {
        flce::Spec other = warm.spec;
        other.hidden_size = d;
        (void)warm.session.get_kernel(other);
    }
    for (auto _ : state) benchmark::DoNotOptimize(warm.session.get_kernel(warm.spec));
}
BENCHMARK(GetKernel_HotAmongManySpecs);

void GetKernel_HotFromTextThroughC(benchmark::State& state) {
    CacheDirectory directory;
    const std::string path = directory.path().string();
    flce_session_options options = FLCE_SESSION_OPTIONS_INIT;
    options.device = device();
    options.cache_dir = path.c_str();
    flce_session* session = nullptr;
    if (flce_session_create(&options, &session) != FLCE_OK) return state.SkipWithError(flce_last_error());
    for (auto _ : state) {
        flce_kernel* kernel = nullptr;
        if (flce_get_kernel(session, kSpecText, nullptr, &kernel) != FLCE_OK) return state.SkipWithError(flce_last_error());
        flce_kernel_release(kernel);
    }
    flce_session_release(session);
}
BENCHMARK(GetKernel_HotFromTextThroughC);

/// A new session over a warm directory, from nothing to the kernel. Nobody waits for the session's end. Another session keeps the device in
/// use, as PyTorch would: a CUDA context takes a hundred milliseconds.
void GetKernel_Disk(benchmark::State& state) {
    CacheDirectory directory;
    const flce::Spec spec = flce::parse_spec(kSpecText);
    flce::Session before(options_in(directory));
    const auto kept = before.get_kernel(spec);
    std::int64_t compiled = 0;
    using Clock = std::chrono::steady_clock;
    std::chrono::duration<double, std::milli> making{};  // the session
    for (auto _ : state) {
        const auto begin = Clock::now();
        flce::Session session(options_in(directory));
        making += Clock::now() - begin;
        const auto kernel = session.get_kernel(spec);
        state.SetIterationTime(std::chrono::duration<double>(Clock::now() - begin).count());
        compiled += session.statistics().compiled;
    }
    state.counters["session_ms"] = benchmark::Counter(making.count(), benchmark::Counter::kAvgIterations);
    if (compiled != 0) state.SkipWithError("something was compiled");
}
BENCHMARK(GetKernel_Disk)->Unit(benchmark::kMillisecond)->UseManualTime();

void GetKernel_Cold(benchmark::State& state) {
    const flce::Spec spec = flce::parse_spec(kSpecText);
    for (auto _ : state) {
        CacheDirectory directory;
        flce::Session session(options_in(directory));
        benchmark::DoNotOptimize(session.get_kernel(spec));
    }
}
BENCHMARK(GetKernel_Cold)->Unit(benchmark::kMillisecond);

/// No tokens: nothing to compute, so that checks, slots and the call itself are left.
void Forward_NoTokens(benchmark::State& state) {
    const auto kernel = warm_session().session.get_kernel(flce::parse_spec("D=8,V=16,dtype=fp32"));
    alignas(256) static float memory[4096];
    using flce::ScalarType;
    using flce::TensorView;
    const flce::ForwardArgs args{.hidden = TensorView::matrix(memory, ScalarType::fp32, 0, 8),
                                 .weight = TensorView::matrix(memory + 64, ScalarType::fp32, 16, 8),
                                 .target = TensorView::vector(memory + 256, ScalarType::int64, 0),
                                 .loss = TensorView::scalar(memory + 320, ScalarType::fp32),
                                 .lse = TensorView::vector(memory + 384, ScalarType::fp32, 0)};
    std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(256, (kernel->workspace_bytes(0) / 256 + 1) * 256),
                                                          &std::free);
    for (auto _ : state) kernel->forward(args, {workspace.get(), kernel->workspace_bytes(0)});
}
BENCHMARK(Forward_NoTokens);

}  // namespace

BENCHMARK_MAIN();

// One core: its multiply-add peak, and the parts of the peak that the CPU backend's micro-kernel reaches from the first-level cache and
// that whole tiles reach with packing included. Minima of interleaved repetitions; JSON on stdout.
//   bench_cpu_gemm [--device x86-64-v3] [--plan PLAN] [--repeats 20]
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <vector>

#include "flce/flce.hpp"
#include "generator/cpu/code.hpp"
#include "generator/cpu/layout.hpp"
#include "runtime/cpu/gemm.hpp"
#include "runtime/host/host_code.hpp"

namespace {

using namespace flce;

constexpr int kPeakSums = 12;  // more than latency times throughput of any x86-64 core, fewer than the registers
using PeakLoop = void (*)(std::int64_t iterations, float* sums);

/// sums[i] = sums[i] · 0.5 + 1, `iterations` times, kPeakSums vectors at once and nothing else.
void emit_peak_loop(llvm::Module& module, const VectorTarget& target) {
    FunctionBuilder f(module, target, "peak", {FunctionBuilder::Arg::i64, FunctionBuilder::Arg::pointer});
    const int lanes = target.lanes();
    FunctionBuilder::Values sums;
    for (int i = 0; i < kPeakSums; ++i) sums.push_back(f.load_float(f.at(f.arg(1), i * lanes, 4), DType::fp32, lanes));
    llvm::Value* half = f.splat(f.load_float(f.arg(1), DType::fp32, 0), lanes);
    sums = f.loop(f.i64(0), f.arg(0), 1, sums, [&](llvm::Value*, const FunctionBuilder::Values& carried) {
        FunctionBuilder::Values next;
        for (llvm::Value* sum : carried) next.push_back(f.multiply_add(sum, half, half));
        return next;
    });
    for (int i = 0; i < kPeakSums; ++i) f.store_float(sums[static_cast<std::size_t>(i)], f.at(f.arg(1), i * lanes, 4), DType::fp32, lanes);
    f.finish();
}

struct AlignedBytes {
    explicit AlignedBytes(std::int64_t bytes) : data(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096))) {
        if (data == nullptr) throw std::bad_alloc();
        std::fill_n(data.get(), bytes, std::byte{0});
    }
    struct Free {
        void operator()(std::byte* p) const { std::free(p); }
    };
    std::unique_ptr<std::byte, Free> data;
};

struct Measurement {
    std::string name;
    double operations;  ///< operations of one run
    std::function<void()> run;
    double best_s = 1e30;
};

void measure(std::vector<Measurement>& measurements, int repeats) {
    for (int r = 0; r < repeats; ++r) {
        for (Measurement& m : measurements) {
            const auto start = std::chrono::steady_clock::now();
            m.run();
            m.best_s = std::min(m.best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
    }
}

struct Options {
    std::string device = "cpu";
    std::string plan;
    int repeats = 20;
};

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string_view key = argv[i];
        if (key == "--device") options.device = argv[i + 1];
        if (key == "--plan") options.plan = argv[i + 1];
        if (key == "--repeats") options.repeats = std::atoi(argv[i + 1]);
    }
    return options;
}

nlohmann::ordered_json run(const Options& options) {
    const Device device = resolve_device(options.device);
    const Spec spec = parse_spec("D=2048,V=50257,dtype=fp32");
    const Plan plan = options.plan.empty() ? choose_plan(spec, device) : parse_plan(options.plan);
    const CpuPlan& p = plan.cpu;
    const VectorTarget target = vector_target(device.cpu, p);
    const auto peak_code =
        HostCode::load(compile_host_object(device.cpu, "peak", [&](llvm::Module& m) { emit_peak_loop(m, target); }), "peak");
    const auto peak = reinterpret_cast<PeakLoop>(peak_code->symbol("peak"));
    const auto code =
        HostCode::load(compile_host_object(device.cpu, "gemm", [&](llvm::Module& m) { emit_cpu_code(m, spec, device.cpu, p); }), "gemm");
    const CpuFunctions f = CpuFunctions::find(*code);

    const std::int64_t rows = p.block_m;
    const std::int64_t columns = p.block_n;
    const std::int64_t depth = spec.hidden_size;
    const AlignedBytes a(4 * rows * depth);
    const AlignedBytes weight(4 * columns * depth);
    const AlignedBytes b_block(4 * p.block_k * columns);
    const AlignedBytes tile(4 * rows * columns);
    const AlignedBytes sums(4 * 64 * kPeakSums);
    std::fill_n(reinterpret_cast<float*>(sums.data.get()), 16 * kPeakSums, 0.5F);
    auto* c = reinterpret_cast<float*>(tile.data.get());
    const PackedA packed{a.data.get(), depth};
    const UnpackedB along{weight.data.get(), depth, 4, true, f.pack_weight_logits};
    const UnpackedB across{weight.data.get(), columns, 4, false, f.pack_weight_grad};
    const TileRange range{0, rows, 0, columns};

    constexpr std::int64_t kPeakIterations = 1'000'000;
    constexpr int kMicroRuns = 200;
    const double tile_operations = 2.0 * static_cast<double>(rows * columns * depth);
    std::vector<Measurement> measurements{
        {"fma_peak", 2.0 * kPeakIterations * kPeakSums * target.lanes(),
         [&] { peak(kPeakIterations, reinterpret_cast<float*>(sums.data.get())); }},
        {"micro_kernel", 2.0 * kMicroRuns * p.micro_m * p.micro_n * p.block_k,
         [&] {
             for (int i = 0; i < kMicroRuns; ++i) f.micro_kernel(p.block_k, a.data.get(), b_block.data.get(), c, columns, 1, a.data.get());
         }},
        {"tile_packing_along_depth", tile_operations, [&] { multiply_tile(f, p, packed, along, range, depth, b_block.data.get(), c); }},
        {"tile_packing_across", tile_operations, [&] { multiply_tile(f, p, packed, across, range, depth, b_block.data.get(), c); }},
    };
    measure(measurements, options.repeats);

    nlohmann::ordered_json result{{"device", device.cpu.cpu}, {"vector_bits", p.vector_bits}, {"plan", plan.text()}};
    const double peak_rate = measurements[0].operations / measurements[0].best_s;
    for (const Measurement& m : measurements) {
        result[m.name + "_gflops"] = m.operations / m.best_s * 1e-9;
        if (m.name != "fma_peak") result[m.name + "_share_of_peak"] = m.operations / m.best_s / peak_rate;
    }
    return result;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        std::cout << run(parse(argc, argv)).dump(2) << "\n";
    } catch (const std::exception& e) {
        fmt::print(stderr, "{}\n", e.what());
        return 1;
    }
}

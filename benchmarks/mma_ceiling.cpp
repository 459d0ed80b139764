// The ceiling of the generic path on this GPU: mma.sync on random data that ldmatrix reads from shared memory, seconds in a row, with the
// power and the SM clock while it ran, and the other rates that a cost model knows.
//     bench_mma_ceiling [--seconds 3]
// Prints a JSON object: TFLOP/s, W, MHz, GB/s, µs.
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "runtime/cuda/rates.hpp"

namespace {

/// Power and clock at this moment, as nvidia-smi says them: "690.12 W, 1410 MHz"; empty where there is no nvidia-smi.
std::string power_and_clock(std::chrono::duration<double> later) {
    std::this_thread::sleep_for(later);
    FILE* const pipe = ::popen("nvidia-smi --query-gpu=power.draw,clocks.sm --format=csv,noheader 2>/dev/null", "r");
    if (pipe == nullptr) return {};
    std::array<char, 128> line{};
    const bool read = std::fgets(line.data(), line.size(), pipe) != nullptr;
    ::pclose(pipe);
    std::string text = read ? line.data() : "";
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const bool given = argc == 3 && std::string(argv[1]) == "--seconds";
        if (argc != 1 && !given) throw std::runtime_error("usage: bench_mma_ceiling [--seconds 3]");
        const double seconds = given ? std::stod(argv[2]) : 3.0;
        const auto context = flce::CudaDriver::load()->context(0);
        const flce::MeasuredRates rates = flce::measure_rates(context, 1.0);
        auto seen = std::async(std::launch::async, power_and_clock, std::chrono::duration<double>(seconds * 0.7));
        const double flops = flce::measure_mma_rate(context, seconds);
        const nlohmann::json report{{"gpu", context->driver().device(0).name},
                                    {"mma_tflops", flops * 1e-12},
                                    {"seconds", seconds},
                                    {"power_and_clock", seen.get()},
                                    {"mma_tflops_of_a_moment", rates.mma_flops * 1e-12},
                                    {"library_tflops_of_a_moment", rates.library_flops * 1e-12},
                                    {"copy_gb_per_s", rates.copy_bytes_per_s * 1e-9},
                                    {"l2_gb_per_s", rates.l2_bytes_per_s * 1e-9},
                                    {"launch_us", rates.launch_seconds * 1e6}};
        std::puts(report.dump(1).c_str());
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_mma_ceiling: %s\n", error.what());
        return 1;
    }
}

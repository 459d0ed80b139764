// Cost of many ranks of a machine that start at once on a warm cache: processes that make a session and get a kernel each, from the moment
// on which all of them may start, until each has its kernel.
//     bench_start_up [--processes 64] [--device cpu] [--spec SPEC]
// Prints one JSON object. `ratio` is the median of many over the median of one, `per_core` the same with the processes that share a core
// divided out: the goal is 1.5 for the latter.
#include <fcntl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/temporary_folder.hpp"
#include "flce/flce.hpp"

namespace {

constexpr int kRepetitions = 15;

struct Options {
    int processes = 64;
    std::string device = "cpu";
    std::string spec = "D=2048,V=151936,dtype=bf16,tied";
    std::filesystem::path cache;
    int report = -1;  // pipe on which a child reports when it was done
};

std::int64_t now_ns() {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);  // one clock for all processes
    return std::int64_t{1'000'000'000} * time.tv_sec + time.tv_nsec;
}

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        const std::string value = argv[i + 1];
        if (name == "--processes") options.processes = std::stoi(value);
        if (name == "--device") options.device = value;
        if (name == "--spec") options.spec = value;
        if (name == "--cache") options.cache = value;
        if (name == "--report") options.report = std::stoi(value);
    }
    return options;
}

int run_child(const Options& options) {
    flce::Session session({.device = options.device, .cache_dir = options.cache, .strict = true});
    const auto kernel = session.get_kernel(flce::parse_spec(options.spec));
    const std::int64_t done = kernel ? now_ns() : 0;
    return ::write(options.report, &done, sizeof done) == sizeof done ? 0 : 1;
}

/// Milliseconds from the start to each process's kernel.
std::vector<double> start(const Options& options, int processes) {
    std::array<int, 2> gate{};
    std::array<int, 2> report{};
    if (::pipe2(gate.data(), O_CLOEXEC) != 0 || ::pipe(report.data()) != 0) throw std::runtime_error("pipe failed");
    std::vector<pid_t> children;
    for (int i = 0; i < processes; ++i) {
        const pid_t child = ::fork();
        if (child == 0) {
            char byte = 0;
            ::close(gate[1]);
            (void)!::read(gate[0], &byte, 1);  // ends for all of them when the gate is closed
            const std::string out = std::to_string(report[1]);
            ::execl("/proc/self/exe", "bench_start_up", "--report", out.c_str(), "--device", options.device.c_str(), "--spec",
                    options.spec.c_str(), "--cache", options.cache.c_str(), nullptr);
            ::_exit(127);
        }
        children.push_back(child);
    }
    ::usleep(100'000);  // all of them wait
    const std::int64_t begin = now_ns();
    ::close(gate[1]);
    ::close(gate[0]);
    ::close(report[1]);
    std::vector<double> times;
    std::int64_t done = 0;
    while (::read(report[0], &done, sizeof done) == sizeof done) times.push_back(1e-6 * static_cast<double>(done - begin));
    ::close(report[0]);
    for (const pid_t child : children) ::waitpid(child, nullptr, 0);
    if (times.size() != static_cast<std::size_t>(processes)) throw std::runtime_error("a process got no kernel");
    return times;
}

double median(std::vector<double> values) {
    std::ranges::sort(values);
    return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) try {
    Options options = parse(argc, argv);
    if (options.report >= 0) return run_child(options);
    const flce::bench::TemporaryFolder folder;
    options.cache = folder.path();
    flce::Session builder({.device = options.device, .cache_dir = options.cache, .strict = false});
    (void)builder.get_kernel(flce::parse_spec(options.spec));
    std::vector<double> one;
    for (int i = 0; i < kRepetitions; ++i) one.push_back(start(options, 1)[0]);
    std::vector<double> many;
    for (int i = 0; i < 3; ++i) many.push_back(median(start(options, options.processes)));
    const int cores = flce::resolve_device("cpu").cpu.cores;
    const double ratio = median(many) / median(one);
    const double sharing = std::max(1.0, static_cast<double>(options.processes) / cores);
    const nlohmann::ordered_json result{{"device", builder.device().name},
                                        {"spec", options.spec},
                                        {"processes", options.processes},
                                        {"cores", cores},
                                        {"one_ms", median(one)},
                                        {"many_ms", median(many)},
                                        {"ratio", ratio},
                                        {"per_core", ratio / sharing}};
    std::printf("%s\n", result.dump(2).c_str());
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "bench_start_up: %s\n", error.what());
    return 1;
}

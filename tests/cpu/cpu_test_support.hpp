// The instruction sets that this machine can run, plans for them, and kernels made straight from a plan.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "generator/cpu/code.hpp"
#include "runtime/host/host_code.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce::test {

/// An instruction set level with its register block.
struct IsaLevel {
    std::string name;
    CpuProperties cpu;
    int micro_m = 0;
    int micro_n = 0;
    friend std::ostream& operator<<(std::ostream& out, const IsaLevel& level) { return out << level.name; }

    [[nodiscard]] VectorTarget target() const { return {.vector_bits = cpu.vector_bits, .fma = cpu.fma, .bf16_dot = cpu.bf16_dot}; }
};

/// The levels up to this machine's own, of its architecture.
[[nodiscard]] inline std::vector<IsaLevel> isa_levels() {
    const CpuProperties native = native_cpu().cpu;
    const auto level = [&](const char* name, int bits, int micro_m, int micro_n) {
        CpuProperties cpu{.triple = native.triple, .cpu = name, .vector_bits = bits, .fma = bits > 128, .cores = 2};
        return IsaLevel{name, cpu, micro_m, micro_n};
    };
    if (native.triple.starts_with("aarch64")) {
        std::vector<IsaLevel> levels{level("generic", 128, 8, 12)};
        levels.back().cpu.fma = true;
        return levels;
    }
    std::vector<IsaLevel> levels{level("x86-64", 128, 4, 8)};
    if (native.vector_bits >= 256) levels.push_back(level("x86-64-v3", 256, 6, 16));
    if (native.vector_bits >= 512) levels.push_back(level("x86-64-v4", 512, 12, 32));
    if (native.bf16_dot) {
        // The oldest CPU that has the feature: newer ones of one maker have more, which other makers' have not.
        levels.push_back(level("cooperlake", 512, 12, 32));
        levels.back().cpu.bf16_dot = true;
    }
    return levels;
}

[[nodiscard]] inline std::string isa_name(const testing::TestParamInfo<IsaLevel>& info) {
    std::string name = info.param.name;
    for (char& c : name) c = c == '-' ? '_' : c;
    return name;
}

/// Blocks so small that even tiny problems have several of each.
[[nodiscard]] inline Plan tiny_plan(const IsaLevel& level, bool bf16_pairs = false) {
    Plan plan{.path = PlanPath::cpu, .vocab_chunk = 1 << 20, .scratch_bytes = kDefaultScratchBytes};
    plan.cpu = {.vector_bits = level.cpu.vector_bits,
                .bf16_dot = bf16_pairs,
                .micro_m = level.micro_m,
                .micro_n = level.micro_n,
                .block_m = 2 * level.micro_m,
                .block_n = std::lcm(level.micro_m, level.micro_n),
                .block_k = 32};
    return plan;
}

[[nodiscard]] inline BuildRequest build_request(const IsaLevel& level, const Spec& spec, const Plan& plan, int threads = 2) {
    return {.spec = spec.normalized(),
            .device = {.kind = DeviceKind::cpu, .name = level.name, .cpu = level.cpu},
            .plan = plan,
            .threads = threads};
}

/// Compiled objects are shared between the tests of this process.
[[nodiscard]] inline ArtifactCache& shared_cache() {
    static ArtifactCache cache({});
    return cache;
}

[[nodiscard]] inline std::shared_ptr<const Kernel> kernel_of(const IsaLevel& level, const Spec& spec, const Plan& plan, int threads = 2) {
    return make_cpu_kernel(build_request(level, spec, plan, threads), shared_cache());
}

/// One function emitted by `emit`, loaded.
template <class Function, class Emit>
struct EmittedFunction {
    EmittedFunction(const IsaLevel& level, const char* symbol, const Emit& emit)
        : code(HostCode::load(compile_host_object(level.cpu, symbol, emit), symbol)),
          call(reinterpret_cast<Function>(code->symbol(symbol))) {}
    std::shared_ptr<const HostCode> code;
    Function call;
};
template <class Function, class Emit>
[[nodiscard]] EmittedFunction<Function, Emit> emitted(const IsaLevel& level, const char* symbol, const Emit& emit) {
    return {level, symbol, emit};
}

}  // namespace flce::test

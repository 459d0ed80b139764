#include "generator/cpu/cost.hpp"

#include <algorithm>

#include "generator/chunk_cost.hpp"
#include "generator/cpu/blocks.hpp"
#include "generator/cpu/layout.hpp"

namespace flce {
namespace {

/// Share of the vector units' peak: measured where the table has the blocks, else what the register block's reuse suggests.
double cpu_efficiency(CpuPlan blocks) {
    const double vectors = blocks.micro_n * 32.0 / blocks.vector_bits;
    const double loads = (vectors + blocks.micro_m / 2.0) / (blocks.micro_m * vectors);
    blocks.bf16_dot = false;
    for (const CpuBlockCandidate& candidate : block_candidates_cpu()) {
        if (candidate.blocks == blocks) return candidate.efficiency;
    }
    return 0.9 / (1.0 + 0.25 * loads) * blocks.block_k / (blocks.block_k + 8.0);
}

/// Operations a second of all workers in the GEMM.
double cpu_rate(const Spec& spec, const Device& device, const Plan& plan) {
    const CpuPlan& p = plan.cpu;
    const double lanes = p.vector_bits / 32.0;
    const double per_cycle = 2.0 * lanes * (device.cpu.fma ? 2.0 : 1.0) * (p.bf16_dot ? 2.0 : 1.0);  // two units; multiply and add
    constexpr double kCyclesPerSecond = 2.5e9;
    // A tile of C and a block of B that overflow the second-level cache are streamed from the next cache.
    const double crowded = 4.0 * p.block_n * (p.block_m + p.block_k) > 0.75 * static_cast<double>(device.cpu.l2_bytes) ? 0.9 : 1.0;
    const auto workers = static_cast<double>(cpu_worker_count(spec, plan, device.cpu.cores));
    return per_cycle * kCyclesPerSecond * workers * cpu_efficiency(p) * crowded;
}

double cpu_seconds(const Spec& spec, const Device& device, const Plan& plan, const Cost& cost) {
    const double bandwidth = std::min(10e9 * device.cpu.cores, 200e9);
    return std::max(cost.flops / cpu_rate(spec, device, plan), cost.bytes / bandwidth);
}

}  // namespace

Cost cpu_forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const double n = num_tokens;
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.support ? spec.teacher_top_k : spec.vocab_size);
    const double element = static_cast<double>(element_bytes(spec.dtype));
    const double weight_passes = spec.support ? n : up_div(n, plan.cpu.block_m);  // each tile of rows packs the weight for itself
    const double weight_row = static_cast<double>(weight_row_bytes(spec));
    Cost cost{.flops = 2.0 * n * v * d, .bytes = n * d * element + weight_passes * v * weight_row + 4.0 * retained * n * v};
    cost.seconds = cpu_seconds(spec, device, plan, cost);
    return cost;
}

Cost cpu_backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    Cost cost = cpu_forward_cost(spec, device, plan, num_tokens, 0);
    cost.flops *= (is_quantized(spec) ? 2.0 : 3.0) - retained;
    if (spec.support) {
        cost.seconds = cpu_seconds(spec, device, plan, cost);
        return cost;
    }
    cost.bytes *= 1.0 - retained;
    cost.bytes += 4.0 * retained * num_tokens * static_cast<double>(spec.vocab_size);
    const double chunk = chunk_rows_that_fit(spec, plan, plan.cpu.block_n, num_tokens);
    cost.bytes += chunked_backward_bytes(spec, num_tokens, up_div(static_cast<double>(spec.vocab_size), chunk));
    cost.seconds = cpu_seconds(spec, device, plan, cost);
    return cost;
}

}  // namespace flce

// Expected time of a pass: the larger of its arithmetic and its memory traffic. Good enough to order candidates and to say roughly how long
// a pass takes; measured times are the tuner's.
#include <algorithm>

#include "flce/plan.hpp"
#include "generator/blocks_cpu.hpp"
#include "generator/chunk_cost.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/host/cpu_layout.hpp"

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
    // A tile of C and a block of B that overflow the second-level cache are streamed from the next one.
    const double crowded = 4.0 * p.block_n * (p.block_m + p.block_k) > 0.75 * static_cast<double>(device.cpu.l2_bytes) ? 0.9 : 1.0;
    const auto workers = static_cast<double>(cpu_worker_count(spec, plan, device.cpu.cores));
    return per_cycle * kCyclesPerSecond * workers * cpu_efficiency(p) * crowded;
}

double cpu_seconds(const Spec& spec, const Device& device, const Plan& plan, const Cost& cost) {
    const double bandwidth = std::min(10e9 * device.cpu.cores, 200e9);
    return std::max(cost.flops / cpu_rate(spec, device, plan), cost.bytes / bandwidth);
}

/// `retained`: the part of the fp32 logits that forward writes and backward reads instead of computing it again.
Cost cpu_forward(const Spec& spec, const Device& device, const Plan& plan, double n, double retained) {
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const double element = static_cast<double>(element_bytes(spec.dtype));
    const double weight_passes = up_div(n, plan.cpu.block_m);  // each tile of rows packs the weight for itself
    const double weight_element = static_cast<double>(element_bytes(weight_dtype(spec)));
    Cost cost{.flops = 2.0 * n * v * d, .bytes = n * d * element + weight_passes * v * d * weight_element + 4.0 * retained * n * v};
    cost.seconds = cpu_seconds(spec, device, plan, cost);
    return cost;
}

Cost cpu_backward(const Spec& spec, const Device& device, const Plan& plan, double n, double retained) {
    Cost cost = cpu_forward(spec, device, plan, n, 0);
    cost.flops *= 3.0 - retained;
    cost.bytes *= 1.0 - retained;
    cost.bytes += 4.0 * retained * n * static_cast<double>(spec.vocab_size);
    const double chunk = chunk_rows_that_fit(spec, plan, plan.cpu.block_n, n);
    cost.bytes += chunked_backward_bytes(spec, n, up_div(static_cast<double>(spec.vocab_size), chunk));
    cost.seconds = cpu_seconds(spec, device, plan, cost);
    return cost;
}

double retained_part(const Plan& plan, std::optional<double> asked) {
    if (plan.path == PlanPath::cpu) return asked.value_or(0.0);
    return plan.strategy == Strategy::retain ? asked.value_or(1.0) : 0.0;
}

}  // namespace

Cost estimate_forward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens, std::optional<double> retained) {
    if (num_tokens <= 0) return {};
    const auto n = static_cast<double>(num_tokens);
    const double part = retained_part(plan, retained);
    return plan.path == PlanPath::cpu ? cpu_forward(spec, device, plan, n, part) : gpu_forward_cost(spec, device, plan, n, part);
}

Cost estimate_backward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens, std::optional<double> retained) {
    if (num_tokens <= 0) return {};
    const auto n = static_cast<double>(num_tokens);
    const double part = retained_part(plan, retained);
    if (plan.path == PlanPath::cpu) return cpu_backward(spec, device, plan, n, part);
    return cuda_path(plan.path).backward_cost(spec, device, plan, n, part);
}

}  // namespace flce

// Expected time of cuda_sm90a's backward.
#include <algorithm>
#include <numeric>

#include "generator/chunk_cost.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/cuda/sm90/chunk_time.hpp"
#include "generator/cuda/sm90/rules.hpp"

namespace flce::sm90 {
namespace {

/// Chunks are taken that make whole waves, and the waves are what takes the time.
Cost chunks_cost(const Spec& spec, const Device& device, const Plan& plan, double n) {
    const GemmCost gemm(spec, device, plan);
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const ChunkTime time(spec, device, plan);
    const auto quantum = static_cast<std::int64_t>(std::lcm(plan.cuda.dlogits.block_n, std::lcm(plan.cuda.grad_weight.block_m, 128)));
    const auto tokens = static_cast<std::int64_t>(n);
    const std::int64_t widest = std::max(static_cast<std::int64_t>(gpu_chunk_rows(spec, plan, n)) / quantum * quantum, quantum);
    const std::int64_t chunk = time.quickest(tokens, widest, quantum);
    const double moved = chunked_backward_bytes(spec, n, up_div(v, static_cast<double>(chunk)));
    Cost cost{.flops = 6.0 * n * v * d, .bytes = gemm.logits_bytes(plan.cuda.dlogits, n, v) + moved};
    // A unit is a column of 64 multiply-adds in every SM.
    const double arithmetic =
        static_cast<double>(time.all(tokens, chunk)) * 128.0 * device.gpu.sm_count / (device.gpu.bf16_flops * wgmma_share());
    cost.seconds = std::max(arithmetic, cost.bytes / device.gpu.bandwidth_bytes_per_s);
    add_rounding(spec, device, cost);
    return cost;
}

/// grad_weight of a shard, beside the reduction of grad_hidden, whose blocks hold SMs for a part of the time: waves are not whole then,
/// whatever the number of tiles. With 4096 tokens of an eighth of 151936 classes 128x192 and 192x128 have whole waves by themselves, and on
/// eight H200s 128x256 is ahead by 0.5 and 1.5 % of a step.
double seconds_beside_reduction(const Spec& spec, const Device& device, const Plan& plan, double flops, double bytes) {
    const double efficiency = tile_rate(spec, device, GemmRole::grad_weight, plan.cuda.grad_weight).efficiency;
    const double arithmetic = flops / (device.gpu.bf16_flops * wgmma_share() * efficiency);
    return std::max(arithmetic, bytes / device.gpu.bandwidth_bytes_per_s) + launch_seconds(device);
}

}  // namespace

Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const Cost again = chunks_cost(spec, device, plan, num_tokens);
    if (retained == 0) return again;
    RetainedGemms kept(spec, device, plan, num_tokens, retained);
    // A tile with which grad_weight's kernel has no room to add up grad_bias leaves that to a pass of its own.
    kept.adds_up_bias = sums_bias(spec, plan.cuda.grad_weight);
    if (is_shard(spec)) {
        kept.grad_weight_seconds = seconds_beside_reduction(spec, device, plan, kept.gemm_flops, kept.exponentials + kept.gradient);
    }
    return mixed(again, kept.cost(), retained);
}

}  // namespace flce::sm90

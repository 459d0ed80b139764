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
    return std::max(arithmetic, bytes / device.gpu.bandwidth_bytes_per_s) + GemmCost::kLaunchSeconds;
}

/// Two plain GEMMs over the retained part of the vocabulary.
Cost retained_cost(const Spec& spec, const Device& device, const Plan& plan, double n, double retained) {
    const GemmCost gemm(spec, device, plan);
    const double d = static_cast<double>(spec.hidden_size);
    const double v = retained * static_cast<double>(spec.vocab_size);
    const double element = static_cast<double>(element_bytes(spec.dtype));
    const double exponentials = n * v * element;
    const double weight = v * d * element;
    const double gradient =
        v * d * static_cast<double>(element_bytes(spec.grad_weight_dtype)) * (spec.grad_weight_mode == GradMode::accumulate ? 2 : 1);
    // A tile with which grad_weight's kernel has no room to add up grad_bias leaves that to a pass of its own.
    const double for_bias = spec.bias && !sums_bias(spec, plan.cuda.grad_weight) ? exponentials : 0;
    const double grad_weight = is_shard(spec)
                                   ? seconds_beside_reduction(spec, device, plan, 2.0 * n * v * d, exponentials + gradient)
                                   : gemm.seconds(GemmRole::grad_weight, plan.cuda.grad_weight, {v, d, n}, exponentials + gradient);
    return {.flops = 4.0 * n * v * d,
            .bytes = 2 * exponentials + weight + gradient + for_bias,
            .seconds = gemm.seconds(GemmRole::grad_hidden, plan.cuda.grad_hidden, {n, d, v}, exponentials + weight) + grad_weight +
                       for_bias / device.gpu.bandwidth_bytes_per_s};
}

}  // namespace

Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const Cost again = chunks_cost(spec, device, plan, num_tokens);
    if (retained == 0) return again;
    const Cost kept = retained_cost(spec, device, plan, num_tokens, retained);
    const double rest = 1 - retained;
    return {again.flops * rest + kept.flops, again.bytes * rest + kept.bytes, again.seconds * rest + kept.seconds};
}

}  // namespace flce::sm90

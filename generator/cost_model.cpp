// Expected time of a pass: for every GEMM the larger of its arithmetic, in whole waves of tiles, and its memory traffic. Good enough to order
// candidates and to say roughly how long a pass takes; measured times are the tuner's.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "flce/plan.hpp"
#include "generator/blocks_cpu.hpp"
#include "generator/cuda/chunk_time.hpp"
#include "generator/cuda/tile_rules.hpp"
#include "generator/host/cpu_layout.hpp"
#include "generator/tiles_sm90.hpp"

namespace flce {
namespace {

double ceil_div(double a, double b) { return std::ceil(a / b); }

struct GemmSize {
    double m, n, k;
};

/// Share of the tensor cores' rate that a tile reaches: measured where the table has the tile, else what its warps' operand reuse suggests.
double tile_efficiency(const Spec& spec, PlanPath path, GemmRole role, const GemmTile& tile) {
    for (const TileCandidate& candidate : path == PlanPath::cuda_sm90a ? tile_candidates_sm90() : tile_candidates_sm80(spec.dtype)) {
        if (candidate.tile != tile) continue;
        return role == GemmRole::grad_weight && candidate.grad_weight > 0 ? candidate.grad_weight : candidate.efficiency;
    }
    const double warp_m = static_cast<double>(tile.block_m) / tile.warps_m;
    const double warp_n = static_cast<double>(tile.block_n) / tile.warps_n;
    const double reuse = warp_m * warp_n / (warp_m + warp_n);  // 32 for 64 × 64
    return 0.9 * reuse / (reuse + 8.0);
}

class GpuCost {
public:
    GpuCost(const Spec& spec, const Device& device, const Plan& plan) : spec_(spec), device_(device), plan_(plan) {
        const double share = plan.path == PlanPath::cuda_sm90a ? kWgmmaShare : mma_sync_share(device.gpu.compute_capability);
        // fp32: TF32 has half of bf16's rate, and three products make one.
        rate_ = device.gpu.bf16_flops * share / (spec.dtype == DType::fp32 ? 6.0 : 1.0);
    }

    [[nodiscard]] double gemm_seconds(GemmRole role, const GemmTile& tile, const GemmSize& size, double bytes) const {
        const double blocks_per_sm = tile_blocks_per_sm(spec_, device_, plan_.path, role, tile);
        const double slots = device_.gpu.sm_count * blocks_per_sm;
        const double tiles = ceil_div(size.m, tile.block_m) * ceil_div(size.n, tile.block_n);
        // Filling the pipeline and the epilogue as extra depth; another block on the SM, or the other warpgroup's turn, hides most of it.
        const bool turns = plan_.path == PlanPath::cuda_sm90a && takes_turns(tile);
        const double hidden_by_others = turns ? 0.1 : blocks_per_sm > 1 ? 0.4 : 1.0;
        const double depth = ceil_div(size.k, tile.block_k) * tile.block_k + epilogue_depth(role) * hidden_by_others;
        const double tile_seconds =
            2.0 * tile.block_m * tile.block_n * depth * slots / (rate_ * tile_efficiency(spec_, plan_.path, role, tile));
        return std::max(ceil_div(tiles, slots) * tile_seconds, bytes / device_.gpu.bandwidth_bytes_per_s) + kLaunchSeconds;
    }

    /// Operand bytes of the pass over all logits: the hidden rows of a raster group stay in L2 while the weight streams past them.
    [[nodiscard]] double logits_bytes(const GemmTile& tile, double n, double v) const {
        const double d = static_cast<double>(spec_.hidden_size);
        const double element = static_cast<double>(element_bytes(spec_.dtype));
        return (n * d + ceil_div(n, double{1} * tile.block_m * plan_.cuda.raster) * v * d) * element;
    }

    static constexpr double kLaunchSeconds = 4e-6;

private:
    /// How much deeper a tile's sum would be if it took as long as filling the pipeline and the epilogue.
    [[nodiscard]] double epilogue_depth(GemmRole role) const {
        if (role == GemmRole::grad_weight && plan_.path == PlanPath::cuda_sm90a) return 64.0 * grad_weight_epilogue_slices(spec_);
        return role == GemmRole::grad_hidden || role == GemmRole::grad_weight ? 120.0 : 300.0;
    }

    const Spec& spec_;
    const Device& device_;
    const Plan& plan_;
    double rate_;
};

/// Vocabulary rows of a chunk with this many tokens, as scratch allows.
double chunk_rows(const Spec& spec, const Plan& plan, double n) {
    const double unit = plan.path == PlanPath::cpu ? plan.cpu.block_n : std::lcm(plan.cuda.dlogits.block_n, 128);
    // Gradients of a column's logits, and on a GPU its rounded weights.
    const double rows = n + (rounds_weight(spec) && plan.path != PlanPath::cpu ? static_cast<double>(spec.hidden_size) : 0);
    const double fits =
        std::floor(static_cast<double>(plan.scratch_bytes) / (rows * static_cast<double>(element_bytes(spec.dtype))) / unit) * unit;
    return std::min({std::max(fits, unit), static_cast<double>(plan.vocab_chunk), static_cast<double>(spec.vocab_size)});
}

/// What backward moves to and from memory beyond the operands of the recomputed logits.
double backward_bytes(const Spec& spec, double n, double chunks) {
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const double element = static_cast<double>(element_bytes(spec.dtype));
    const double grad_element = static_cast<double>(element_bytes(spec.grad_weight_dtype));
    const double grad_passes = spec.grad_weight_mode == GradMode::accumulate ? 2.0 : 1.0;
    return 3.0 * n * v * element               // dlogits: written once, read by two GEMMs
           + v * d * element                   // weight, again, for grad_hidden
           + n * d * (element + 8.0) * chunks  // hidden again; grad_hidden's accumulator read and written
           + v * d * grad_element * grad_passes;
}

/// Rounds the weight, chunk by chunk, before what else a pass on a GPU does.
void add_rounding(const Spec& spec, const Device& device, Cost& cost) {
    if (!rounds_weight(spec)) return;
    const double elements = static_cast<double>(spec.vocab_size) * static_cast<double>(spec.hidden_size);
    const double bytes = elements * static_cast<double>(element_bytes(weight_dtype(spec)) + element_bytes(spec.dtype));
    cost.bytes += bytes;
    cost.seconds += bytes / device.gpu.bandwidth_bytes_per_s;
}

Cost gpu_forward(const Spec& spec, const Device& device, const Plan& plan, double n, double retained) {
    const GpuCost gpu(spec, device, plan);
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    Cost cost{.flops = 2.0 * n * v * d,
              .bytes = gpu.logits_bytes(plan.cuda.forward, n, v) + retained * n * v * static_cast<double>(element_bytes(spec.dtype))};
    cost.seconds = gpu.gemm_seconds(forward_role(plan), plan.cuda.forward, {n, v, d}, cost.bytes) + GpuCost::kLaunchSeconds;
    add_rounding(spec, device, cost);
    return cost;
}

/// cuda_sm90a takes chunks that make whole waves, and the waves are what takes the time.
Cost sm90_backward(const Spec& spec, const Device& device, const Plan& plan, double n) {
    const GpuCost gpu(spec, device, plan);
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const ChunkTime time(spec, device, plan);
    const auto quantum = static_cast<std::int64_t>(std::lcm(plan.cuda.dlogits.block_n, std::lcm(plan.cuda.grad_weight.block_m, 128)));
    const auto tokens = static_cast<std::int64_t>(n);
    const std::int64_t widest = std::max(static_cast<std::int64_t>(chunk_rows(spec, plan, n)) / quantum * quantum, quantum);
    std::int64_t chunk = widest;
    for (int narrower = 1; narrower < kChunkCandidates; ++narrower) {
        const std::int64_t candidate = std::max(widest - narrower * quantum, quantum);
        if (time.all(tokens, candidate) < time.all(tokens, chunk)) chunk = candidate;
    }
    Cost cost{.flops = 6.0 * n * v * d,
              .bytes = gpu.logits_bytes(plan.cuda.dlogits, n, v) + backward_bytes(spec, n, ceil_div(v, static_cast<double>(chunk)))};
    // A unit is a column of 64 multiply-adds in every SM.
    const double arithmetic =
        static_cast<double>(time.all(tokens, chunk)) * 128.0 * device.gpu.sm_count / (device.gpu.bf16_flops * kWgmmaShare);
    cost.seconds = std::max(arithmetic, cost.bytes / device.gpu.bandwidth_bytes_per_s);
    add_rounding(spec, device, cost);
    return cost;
}

/// Two plain GEMMs over the retained part of the vocabulary.
Cost retained_backward(const Spec& spec, const Device& device, const Plan& plan, double n, double retained) {
    const GpuCost gpu(spec, device, plan);
    const double d = static_cast<double>(spec.hidden_size);
    const double v = retained * static_cast<double>(spec.vocab_size);
    const double element = static_cast<double>(element_bytes(spec.dtype));
    const double exponentials = n * v * element;
    const double weight = v * d * element;
    const double gradient =
        v * d * static_cast<double>(element_bytes(spec.grad_weight_dtype)) * (spec.grad_weight_mode == GradMode::accumulate ? 2 : 1);
    return {.flops = 4.0 * n * v * d,
            .bytes = 2 * exponentials + weight + gradient,
            .seconds = gpu.gemm_seconds(GemmRole::grad_hidden, plan.cuda.grad_hidden, {n, d, v}, exponentials + weight) +
                       gpu.gemm_seconds(GemmRole::grad_weight, plan.cuda.grad_weight, {v, d, n}, exponentials + gradient)};
}

Cost gpu_backward(const Spec& spec, const Device& device, const Plan& plan, double n, double retained) {
    if (plan.path == PlanPath::cuda_sm90a) {
        const Cost again = sm90_backward(spec, device, plan, n);
        if (retained == 0) return again;
        const Cost kept = retained_backward(spec, device, plan, n, retained);
        const double rest = 1 - retained;
        return {again.flops * rest + kept.flops, again.bytes * rest + kept.bytes, again.seconds * rest + kept.seconds};
    }
    const GpuCost gpu(spec, device, plan);
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const double chunk = chunk_rows(spec, plan, n);
    const double chunks = ceil_div(v, chunk);
    const double logits = gpu.logits_bytes(plan.cuda.dlogits, n, v);
    const double rest = backward_bytes(spec, n, chunks);
    Cost cost{.flops = 6.0 * n * v * d, .bytes = logits + rest};
    cost.seconds = chunks * (gpu.gemm_seconds(GemmRole::dlogits, plan.cuda.dlogits, {n, chunk, d}, logits / chunks) +
                             gpu.gemm_seconds(GemmRole::grad_hidden, plan.cuda.grad_hidden, {n, d, chunk}, rest / 2 / chunks) +
                             gpu.gemm_seconds(GemmRole::grad_weight, plan.cuda.grad_weight, {chunk, d, n}, rest / 2 / chunks));
    add_rounding(spec, device, cost);
    return cost;
}

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
    const double weight_passes = ceil_div(n, plan.cpu.block_m);  // each tile of rows packs the weight for itself
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
    cost.bytes += backward_bytes(spec, n, ceil_div(static_cast<double>(spec.vocab_size), chunk_rows(spec, plan, n)));
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
    return plan.path == PlanPath::cpu ? cpu_forward(spec, device, plan, n, part) : gpu_forward(spec, device, plan, n, part);
}

Cost estimate_backward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens, std::optional<double> retained) {
    if (num_tokens <= 0) return {};
    const auto n = static_cast<double>(num_tokens);
    const double part = retained_part(plan, retained);
    return plan.path == PlanPath::cpu ? cpu_backward(spec, device, plan, n, part) : gpu_backward(spec, device, plan, n, part);
}

}  // namespace flce

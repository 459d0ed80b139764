#include "generator/cuda/common/gemm_cost.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "generator/chunk_cost.hpp"

namespace flce {

double launch_seconds(const Device& device) {
    constexpr double kHopper = 4e-6;
    return device.gpu.measured.launch_seconds > 0 ? device.gpu.measured.launch_seconds : kHopper;
}

GemmCost::GemmCost(const Spec& spec, const Device& device, const Plan& plan)
    : path_(cuda_path(plan.path)), spec_(spec), device_(device), plan_(plan) {
    // fp32: TF32 has half of bf16's rate, and three products make one.
    rate_ = device.gpu.bf16_flops * path_.rate_share(device) / (spec.dtype == DType::fp32 ? 6.0 : 1.0);
}

double GemmCost::seconds(GemmRole role, const GemmTile& tile, const GemmSize& size, double bytes) const {
    const TileRate rate = path_.tile_rate(spec_, device_, role, tile);
    const double slots = device_.gpu.sm_count * static_cast<double>(rate.blocks_per_sm);
    const double tiles = up_div(size.m, tile.block_m) * up_div(size.n, tile.block_n);
    const double depth = up_div(size.k, tile.block_k) * tile.block_k + rate.epilogue_depth;
    const double tile_seconds = 2.0 * tile.block_m * tile.block_n * depth * slots / (rate_ * rate.efficiency);
    return std::max(up_div(tiles, slots) * tile_seconds, bytes / device_.gpu.bandwidth_bytes_per_s) + launch_seconds(device_);
}

double GemmCost::logits_bytes(const GemmTile& tile, double num_tokens, double vocab_size) const {
    const double d = static_cast<double>(spec_.hidden_size);
    const double element = static_cast<double>(element_bytes(spec_.dtype));
    return (num_tokens * d + up_div(num_tokens, double{1} * tile.block_m * plan_.cuda.raster) * vocab_size * d) * element;
}

Cost gpu_forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const GemmCost gemm(spec, device, plan);
    const double n = num_tokens;
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    Cost cost{.flops = 2.0 * n * v * d,
              .bytes = gemm.logits_bytes(plan.cuda.forward, n, v) + retained * n * v * static_cast<double>(element_bytes(spec.dtype))};
    cost.seconds = gemm.seconds(forward_role(plan), plan.cuda.forward, {n, v, d}, cost.bytes) + launch_seconds(device);
    add_rounding(spec, device, cost);
    return cost;
}

Cost chunked_backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens) {
    const GemmCost gemm(spec, device, plan);
    const double n = num_tokens;
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const double chunk = gpu_chunk_rows(spec, plan, n);
    const double chunks = up_div(v, chunk);
    const double logits = gemm.logits_bytes(plan.cuda.dlogits, n, v);
    const double rest = chunked_backward_bytes(spec, n, chunks);
    const bool frozen = is_quantized(spec);
    const double grad_weight = frozen ? 0 : gemm.seconds(GemmRole::grad_weight, plan.cuda.grad_weight, {chunk, d, n}, rest / 2 / chunks);
    Cost cost{.flops = (frozen ? 4.0 : 6.0) * n * v * d, .bytes = logits + rest};
    cost.seconds = chunks * (gemm.seconds(GemmRole::dlogits, plan.cuda.dlogits, {n, chunk, d}, logits / chunks) +
                             gemm.seconds(GemmRole::grad_hidden, plan.cuda.grad_hidden, {n, d, chunk}, rest / 2 / chunks) + grad_weight);
    add_rounding(spec, device, cost);
    return cost;
}

RetainedGemms::RetainedGemms(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained)
    : spec_(spec), device_(device), plan_(plan), tokens_(num_tokens), columns_(retained * static_cast<double>(spec.vocab_size)) {
    const double d = static_cast<double>(spec.hidden_size);
    const double moves = spec.grad_weight_mode == GradMode::accumulate ? 2 : 1;
    gemm_flops = 2.0 * tokens_ * columns_ * d;
    exponentials = tokens_ * columns_ * static_cast<double>(element_bytes(spec.dtype));
    gradient = columns_ * d * static_cast<double>(element_bytes(spec.grad_weight_dtype)) * moves;
}

Cost RetainedGemms::cost() const {
    const GemmCost gemm(spec_, device_, plan_);
    const double d = static_cast<double>(spec_.hidden_size);
    const double weight = columns_ * d * static_cast<double>(element_bytes(spec_.dtype));
    const double for_bias = spec_.bias && !adds_up_bias ? exponentials : 0;
    Cost cost{.flops = gemm_flops,
              .bytes = exponentials + weight + for_bias,
              .seconds = gemm.seconds(GemmRole::grad_hidden, plan_.cuda.grad_hidden, {tokens_, d, columns_}, exponentials + weight) +
                         for_bias / device_.gpu.bandwidth_bytes_per_s};
    if (is_quantized(spec_)) return cost;  // it has no gradient of the weight
    cost.flops += gemm_flops;
    cost.bytes += exponentials + gradient;
    cost.seconds += grad_weight_seconds
                        ? *grad_weight_seconds
                        : gemm.seconds(GemmRole::grad_weight, plan_.cuda.grad_weight, {columns_, d, tokens_}, exponentials + gradient);
    return cost;
}

Cost mixed(const Cost& again, const Cost& kept, double retained) {
    const double rest = 1 - retained;
    return {again.flops * rest + kept.flops, again.bytes * rest + kept.bytes, again.seconds * rest + kept.seconds};
}

double gpu_chunk_rows(const Spec& spec, const Plan& plan, double num_tokens) {
    const double column = num_tokens + (rounds_weight(spec) ? static_cast<double>(spec.hidden_size) : 0);
    return chunk_rows_that_fit(spec, plan, std::lcm(plan.cuda.dlogits.block_n, 128), column);
}

void add_rounding(const Spec& spec, const Device& device, Cost& cost) {
    if (!rounds_weight(spec)) return;
    const double row = static_cast<double>(weight_row_bytes(spec)) +
                       static_cast<double>(spec.hidden_size) * static_cast<double>(element_bytes(spec.dtype));
    const double bytes = static_cast<double>(spec.vocab_size) * row;
    cost.bytes += bytes;
    cost.seconds += bytes / device.gpu.bandwidth_bytes_per_s;
}

}  // namespace flce

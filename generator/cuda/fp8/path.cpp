#include "generator/cuda/fp8/path.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "generator/chunk_cost.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "templates/fp8/params.cuh"

namespace flce {
namespace fp8 {
namespace {

constexpr std::string_view kName = "cuda_fp8";
constexpr std::array kCapabilities = {90};
constexpr std::array kStrategies = {Strategy::retain, Strategy::recompute};
constexpr std::array kSchedules = {ScheduleWarps{TileSchedule::by_turns, {4, 1}}, ScheduleWarps{TileSchedule::together, {8, 1}}};
constexpr GemmTile kWide{.block_m = 128, .block_n = 192, .block_k = 128, .stages = 4, .schedule = TileSchedule::by_turns};
constexpr GemmTile kNarrow{.block_m = 128, .block_n = 128, .block_k = 128, .stages = 6, .schedule = TileSchedule::by_turns};
static_assert(kFp8Quantum % kWide.block_n == 0 && kFp8Quantum % kNarrow.block_n == 0);
constexpr std::array kTiles = {TileCandidate{kWide, 1.0}, TileCandidate{kNarrow, 0.9}, TileCandidate{kGradientTile, 1.0}};

bool is_logits(GemmRole role) { return role != GemmRole::grad_hidden && role != GemmRole::grad_weight; }
const GemmTile& tile_of(const Spec& spec, GemmRole role) { return is_logits(role) ? logits_tile(spec) : kGradientTile; }

/// The ring of stages, panels of exponentials or results, and barriers.
KernelBlock block(const Spec& spec, GemmRole role) {
    const GemmTile& tile = tile_of(spec, role);
    const std::int64_t ring = std::int64_t{128} * (tile.block_m + tile.block_n) * tile.stages;
    const bool updates =
        role == GemmRole::grad_weight && spec.grad_weight_mode == GradMode::accumulate && element_bytes(spec.grad_weight_dtype) == 2;
    const std::int64_t panels =
        is_logits(role) ? 2 * tile.block_n * std::int64_t{kFp8TokenGroup} : 4 * 64 * 128 + (updates ? 8 * 2 * 2 : 0);
    return {.threads = 384, .per_sm = 1, .smem_bytes = ring + panels + 8 * (2 * tile.stages + 2), .cluster = kClusterBlocks};
}

Reason problem(const Spec& spec, const Device& device, Strategy strategy) {
    const auto refused = [](std::string_view what, std::string_view why) {
        return fmt::format("{}: {} {}; leave fp8 out", what, kName, why);
    };
    if (!is_fp8(spec)) return fmt::format("{} has products of 8-bit numbers, for specs with fp8", kName);
    if (auto reason = oldest_gpu_problem(device)) return reason;
    if (device.gpu.arch != "sm_90a") return fmt::format("fp8: {} needs sm_90a (wgmma), not {}; leave fp8 out", kName, device.gpu.arch);
    if (device.gpu.sm_count < kClusterBlocks)
        return fmt::format("{} SMs: {} needs a cluster of {}", device.gpu.sm_count, kName, kClusterBlocks);
    if (spec.dtype != DType::bf16) return refused(fmt::format("dtype={}", to_string(spec.dtype)), "rounds numbers of bf16");
    if (spec.outputs.log_sum_sq_probs || spec.outputs.top1) return refused("outputs", "adds up nothing but lse");
    if (spec.softcap != 0.0 && spec.class_offset) return refused("class_offset", "tells a softcap's slope by the logit alone");
    if (spec.offset_gradient) return refused("offset_gradient", "differentiates the whole logit");
    if (strategy == Strategy::retain && spec.fp8_dlogits == Fp8Dlogits::e4m3) {
        return std::string("retain: exponentials in e4m3 have no room for a largest one that is not known yet");
    }
    return std::nullopt;
}

Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    const GemmTile& only = tile_of(spec, role);
    if (tile != only) {
        return fmt::format("block {}x{}: {} has tiles of {}x{}x{} with {} stages here", tile.block_m, tile.block_n, kName, only.block_m,
                           only.block_n, only.block_k, only.stages);
    }
    return smem_problem(device, block(spec, role).smem_bytes);
}

std::span<const TileCandidate> tiles(DType /*dtype*/) { return kTiles; }

// Products of int8 keep up 1.5 times bf16's dense rate, those of FP8 1.3 times, at the chip's power limit.
double rate_share(const Device& /*device*/) { return 1.35; }

TileRate tile_rate(const Spec& /*spec*/, const Device& /*device*/, GemmRole role, const GemmTile& /*tile*/) {
    return {.blocks_per_sm = 1, .efficiency = is_logits(role) ? 1.1 : 1.0, .epilogue_depth = is_logits(role) ? 60.0 : 240.0};
}

/// Reading the weight and writing its codes.
Cost codes_cost(const Spec& spec, const Device& device) {
    const double bytes = 3.0 * static_cast<double>(spec.vocab_size) * static_cast<double>(spec.hidden_size);
    return {.bytes = bytes, .seconds = bytes / device.gpu.bandwidth_bytes_per_s};
}

Cost forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    Cost cost = gpu_forward_cost(spec, device, plan, num_tokens, retained);
    const Cost codes = codes_cost(spec, device);
    cost.bytes += codes.bytes;
    cost.seconds += codes.seconds;
    return cost;
}

Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const Cost again = chunked_backward_cost(spec, device, plan, num_tokens);
    Cost cost = retained == 0 ? again : mixed(again, RetainedGemms(spec, device, plan, num_tokens, retained).cost(), retained);
    cost.seconds += codes_cost(spec, device).seconds;
    return cost;
}

CudaProgram generate(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaSource kernels = source(spec, device, plan);
    const ForwardLayoutFp8 forward = forward_layout(spec, plan);
    const BackwardLayoutFp8 backward = backward_layout(spec, device, plan);
    CudaProgram program = program_of(spec, kernels);
    program.forward = forward_program(spec, device, plan, kernels, forward);
    program.forward_workspace_bytes = forward.total;
    program.backward = backward_program(spec, device, plan, kernels, backward);
    program.backward_workspace_bytes = backward.total;
    program.retained_bytes = forward.retained.most;
    program.lendable_bytes = forward.retained.lendable;
    return program;
}

void write_gemms(KernelWriter& writer, const Spec& spec) {
    const auto gemm = [&](KernelRole kernel, GemmRole role, const char* params, const char* function, const char* stated) {
        const GemmTile& tile = tile_of(spec, role);
        const bool turns = tile.schedule == TileSchedule::by_turns;
        writer.gemm({.role = kernel,
                     .params = params,
                     .function = function,
                     .stated = stated,
                     .tile = fmt::format("TileSm90<{}, {}, {}, {}, {}>", tile.block_m, tile.block_n, tile.stages, kClusterBlocks, turns),
                     .block = block(spec, role)});
    };
    gemm(KernelRole::forward, GemmRole::forward, "Fp8LogitsParams", "logits_fp8", "LogitsFp8");
    gemm(KernelRole::grad_hidden, GemmRole::grad_hidden, "Fp8GradientParams", "grad_hidden_fp8", "GradHiddenFp8");
    const char* grad_weight = spec.label_smoothing > 0 ? "SmoothedFp8GradientParams" : "Fp8GradientParams";
    gemm(KernelRole::grad_weight, GemmRole::grad_weight, grad_weight, "grad_weight_fp8", "GradWeightFp8");
}

}  // namespace

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    KernelWriter writer(spec, device, plan, {.header = "fp8/kernels.cuh", .overlaps = true, .tells_falls = false});
    write_gemms(writer, spec);
    writer.row_kernels();
    writer.rows(KernelRole::fp8_codes, "Fp8CodesParams");
    writer.rows(KernelRole::fp8_scales, "Fp8CodesParams");
    writer.rows(KernelRole::fp8_both_codes, "Fp8TurnParams");
    writer.rows(KernelRole::fp8_turn_weight, "Fp8TurnParams");
    writer.rows(KernelRole::fp8_turn_hidden, "Fp8TurnParams");
    writer.rows(KernelRole::fp8_targets, "Fp8TargetsParams");
    writer.rows(KernelRole::fp8_powers, "Fp8PowersParams");
    writer.rows(KernelRole::fp8_merge, "Fp8MergeParams");
    writer.rows(KernelRole::fp8_stale, "Fp8StaleParams");
    writer.rows(KernelRole::fp8_rows, "Fp8RowsParams");
    writer.rows(KernelRole::fp8_target_dz, "Fp8TargetDzParams");
    writer.rows(KernelRole::fp8_finish, "Fp8FinishParams");
    writer.rows(KernelRole::fp8_order, "Fp8OrderParams");
    writer.rows(KernelRole::fp8_target_rows, "Fp8TargetRowsParams");
    if (spec.bias) writer.rows(KernelRole::fp8_bias, "Fp8BiasParams");
    if (spec.label_smoothing > 0) {
        writer.rows(KernelRole::smoothing_sums, "SmoothingSumsParams");
        writer.rows(KernelRole::smoothing_totals, "SmoothingTotalsParams");
    }
    return std::move(writer).finish();
}

const GemmTile& logits_tile(const Spec& spec) {
    const bool crowded = spec.softcap != 0.0 || spec.temperature || spec.class_offset || spec.label_smoothing > 0;
    return crowded ? kNarrow : kWide;
}

Expr clusters_of(const Device& device, const GemmTile& tile, const Expr& m, const Expr& n) {
    const Expr tiles = ceil_div(m, std::int64_t{tile.block_m} * kClusterBlocks) * ceil_div(n, tile.block_n);
    return min(tiles, device.gpu.sm_count / kClusterBlocks);
}

}  // namespace fp8

constinit const CudaPath kPathFp8{
    .id = PlanPath::cuda_fp8,
    .name = fp8::kName,
    .instruction = "8-bit wgmma",
    .own_capabilities = fp8::kCapabilities,
    .least_hidden_size = 0,
    .strategies = fp8::kStrategies,
    .schedules = fp8::kSchedules,
    .grad_weight_cluster = fp8::kClusterBlocks,
    .retained_columns = kRetainedColumns,
    .gathers = false,
    .eight_bits = true,
    .calls_library = false,
    .problem = fp8::problem,
    .tile_problem = fp8::tile_problem,
    .lent_tile_problem = no_lent_tile_problem,
    .least_scratch_bytes = fp8::least_scratch_bytes,
    .tiles = fp8::tiles,
    .lent_tiles = no_lent_tiles,
    .rate_share = fp8::rate_share,
    .tile_rate = fp8::tile_rate,
    .forward_cost = fp8::forward_cost,
    .backward_cost = fp8::backward_cost,
    .generate = fp8::generate,
};

}  // namespace flce

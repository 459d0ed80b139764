#include "generator/cuda/fp8/path.hpp"

#include <fmt/format.h>

#include <array>

#include "generator/chunk_cost.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/gemm_cost.hpp"

namespace flce {
namespace fp8 {
namespace {

constexpr int kLeastForFp8Mma = 89;  // compute capability of the first mma.sync on FP8
constexpr std::array kHopperCapabilities = {90};
constexpr std::array kMmaCapabilities = {89, 120, 121};
constexpr std::array kStrategies = {Strategy::retain, Strategy::recompute};
constexpr std::array kHopperSchedules = {ScheduleWarps{TileSchedule::by_turns, {4, 1}}, ScheduleWarps{TileSchedule::together, {8, 1}}};

/// Why the path's GEMMs do not run on the device.
Reason device_problem(const Gemms& gemms, const Device& device) {
    const GpuProperties& gpu = device.gpu;
    if (!gemms.maps) {
        if (gpu.compute_capability >= kLeastForFp8Mma) return std::nullopt;
        return fmt::format("fp8: {} needs compute capability 8.9 or newer (mma.sync on FP8), not {}; leave fp8 out", gemms.path, gpu.arch);
    }
    if (gpu.arch != "sm_90a") return fmt::format("fp8: {} needs sm_90a (wgmma), not {}; leave fp8 out", gemms.path, gpu.arch);
    if (gpu.sm_count < gemms.cluster_blocks) return fmt::format("{} SMs: {} needs a cluster of {}", gpu.sm_count, gemms.path, 2);
    return std::nullopt;
}

template <PlanPath kPath>
Reason problem(const Spec& spec, const Device& device, Strategy strategy) {
    const Gemms& gemms = gemms_of(kPath);
    const auto refused = [&](std::string_view what, std::string_view why) {
        return fmt::format("{}: {} {}; leave fp8 out", what, gemms.path, why);
    };
    if (!is_fp8(spec)) return fmt::format("{} has products of 8-bit numbers, for specs with fp8", gemms.path);
    if (auto reason = oldest_gpu_problem(device)) return reason;
    if (auto reason = device_problem(gemms, device)) return reason;
    if (spec.dtype != DType::bf16) return refused(fmt::format("dtype={}", to_string(spec.dtype)), "rounds numbers of bf16");
    if (spec.outputs.log_sum_sq_probs || spec.outputs.top1) return refused("outputs", "adds up nothing but lse and the entropy");
    if (spec.softcap != 0.0 && spec.class_offset) return refused("class_offset", "tells a softcap's slope by the logit alone");
    if (spec.offset_gradient) return refused("offset_gradient", "differentiates the whole logit");
    if (is_hidden_major(spec) && spec.padded_vocab_size % 8 != 0) {  // rows have to start on 16 bytes
        return refused(fmt::format("layout=hidden_major with rows of {}", spec.padded_vocab_size),
                       "needs rows of a multiple of 8: pad them, or give the weight as [V, D]");
    }
    if (strategy == Strategy::retain && spec.fp8_dlogits == Fp8Dlogits::e4m3) {
        return std::string("retain: exponentials in e4m3 have no room for a largest one that is not known yet");
    }
    return std::nullopt;
}

template <PlanPath kPath>
Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    const Gemms& gemms = gemms_of(kPath);
    const GemmTile& only = tile_of(gemms, spec, role);
    if (tile != only) {
        return fmt::format("block {}x{}: {} has tiles of {}x{}x{} with {} stages here", tile.block_m, tile.block_n, gemms.path,
                           only.block_m, only.block_n, only.block_k, only.stages);
    }
    return smem_problem(device, block(gemms, spec, role).smem_bytes);
}

std::span<const TileCandidate> hopper_tiles(DType /*dtype*/) {
    static const Gemms& gemms = gemms_of(PlanPath::cuda_fp8);
    static const std::array kTiles = {TileCandidate{gemms.logits, 1.0}, TileCandidate{gemms.crowded_logits, 0.9},
                                      TileCandidate{gemms.gradient, 1.0}};
    return kTiles;
}
std::span<const TileCandidate> mma_tiles(DType /*dtype*/) {
    static const std::array kTiles = {TileCandidate{gemms_of(PlanPath::cuda_fp8_sm89).gradient, 1.0}};
    return kTiles;
}

// Products of int8 keep up 1.5 times bf16's dense rate, those of FP8 1.3 times, at the chip's power limit.
double hopper_rate_share(const Device& /*device*/) { return 1.35; }

/// Published rates of FP8, accumulated in fp32, and of int8 are twice bf16's, or more, on sm_89, sm_120 and sm_121 (docs/hardware.md). It
/// is assumed that these kernels keep up as much of it as mma.sync's do of bf16's. On Hopper and on GPUs of data centres after it mma.sync
/// takes FP8 apart to fp16.
double mma_rate_share(const Device& device) {
    constexpr double kOfBf16 = 2.0;
    const double bf16 = cuda_path(PlanPath::cuda_sm80).rate_share(device);
    return device.gpu.compute_capability / 10 >= 9 && device.gpu.compute_capability / 10 < 12 ? bf16 : kOfBf16 * bf16;
}

TileRate hopper_tile_rate(const Spec& /*spec*/, const Device& /*device*/, GemmRole role, const GemmTile& /*tile*/) {
    return {.blocks_per_sm = 1, .efficiency = is_logits(role) ? 1.1 : 1.0, .epilogue_depth = is_logits(role) ? 60.0 : 240.0};
}
TileRate mma_tile_rate(const Spec& /*spec*/, const Device& /*device*/, GemmRole role, const GemmTile& /*tile*/) {
    return {.blocks_per_sm = 1, .efficiency = 1.0, .epilogue_depth = is_logits(role) ? 240.0 : 120.0};
}

/// Reading the weight, `times` times, and writing its codes. One that is codes is read for its largest number, and copied for grad_hidden.
Cost codes_cost(const Spec& spec, const Device& device, int times) {
    const double bytes =
        (is_quantized(spec) ? 2.0 : 1.0 + 2.0 * times) * static_cast<double>(spec.vocab_size) * static_cast<double>(spec.hidden_size);
    return {.bytes = bytes, .seconds = bytes / device.gpu.bandwidth_bytes_per_s};
}

Cost forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    Cost cost = gpu_forward_cost(spec, device, plan, num_tokens, retained);
    if (is_quantized(spec)) return cost;
    const Cost codes = codes_cost(spec, device, is_hidden_major(spec) ? 2 : 1);
    cost.bytes += codes.bytes;
    cost.seconds += codes.seconds;
    return cost;
}

Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const Cost again = chunked_backward_cost(spec, device, plan, num_tokens);
    Cost cost = retained == 0 ? again : mixed(again, RetainedGemms(spec, device, plan, num_tokens, retained).cost(), retained);
    cost.seconds += codes_cost(spec, device, 1).seconds;
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

}  // namespace
}  // namespace fp8

constinit const CudaPath kPathFp8{
    .id = PlanPath::cuda_fp8,
    .name = "cuda_fp8",
    .instruction = "8-bit wgmma",
    .own_capabilities = fp8::kHopperCapabilities,
    .least_hidden_size = 0,
    .strategies = fp8::kStrategies,
    .schedules = fp8::kHopperSchedules,
    .grad_weight_cluster = 2,
    .retained_columns = kRetainedColumns,
    .gathers = false,
    .eight_bits = true,
    .calls_library = false,
    .problem = fp8::problem<PlanPath::cuda_fp8>,
    .tile_problem = fp8::tile_problem<PlanPath::cuda_fp8>,
    .lent_tile_problem = no_lent_tile_problem,
    .least_scratch_bytes = fp8::least_scratch_bytes,
    .tiles = fp8::hopper_tiles,
    .lent_tiles = no_lent_tiles,
    .rate_share = fp8::hopper_rate_share,
    .tile_rate = fp8::hopper_tile_rate,
    .forward_cost = fp8::forward_cost,
    .backward_cost = fp8::backward_cost,
    .generate = fp8::generate,
};

constinit const CudaPath kPathFp8Sm89{
    .id = PlanPath::cuda_fp8_sm89,
    .name = "cuda_fp8_sm89",
    .instruction = "8-bit mma.sync",
    .runs_on = "GPUs of compute capability 8.9 and newer",
    .own_capabilities = fp8::kMmaCapabilities,
    .least_hidden_size = 0,
    .strategies = fp8::kStrategies,
    .schedules = {},
    .grad_weight_cluster = 1,
    .retained_columns = kRetainedColumns,
    .gathers = false,
    .eight_bits = true,
    .calls_library = false,
    .problem = fp8::problem<PlanPath::cuda_fp8_sm89>,
    .tile_problem = fp8::tile_problem<PlanPath::cuda_fp8_sm89>,
    .lent_tile_problem = no_lent_tile_problem,
    .least_scratch_bytes = fp8::least_scratch_bytes,
    .tiles = fp8::mma_tiles,
    .lent_tiles = no_lent_tiles,
    .rate_share = fp8::mma_rate_share,
    .tile_rate = fp8::mma_tile_rate,
    .forward_cost = fp8::forward_cost,
    .backward_cost = fp8::backward_cost,
    .generate = fp8::generate,
};

}  // namespace flce

#include "generator/cuda/tile_rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "generator/cuda/workspace.hpp"
#include "templates/params.cuh"

namespace flce {
namespace {

constexpr int kFragmentBytes = 32;  // one k step of an mma operand: 16 half-precision elements or 8 of fp32

bool power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

/// Accumulator registers a thread may hold: fp32 keeps a second set for the slice in flight.
int accumulator_limit(DType dtype) { return dtype == DType::fp32 ? 64 : 128; }

std::int64_t sm80_smem_bytes(const Spec& spec, GemmRole role, const GemmTile& tile) {
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const std::int64_t operands = (tile.block_m + tile.block_n) * tile.block_k * element * tile.stages;
    // 16-bit results pass through shared memory (over the operands, which are spent by then) in rows padded by one access.
    const std::int64_t staged = tile.block_m * (tile.block_n * std::int64_t{2} + 16);
    std::int64_t beside = 0;
    if (role == GemmRole::forward) {
        beside = std::int64_t{4} * tile.block_m * (partial_fields(spec) * tile.warps_n + 1);
    } else if (role == GemmRole::dlogits && spec.bias) {
        beside = std::int64_t{4} * tile.block_n * tile.warps_m;
    }
    return (role == GemmRole::forward ? operands : std::max(operands, staged)) + beside;
}

/// The ring of stages, what an epilogue keeps or hands over, the barriers, and numbers of tiles.
std::int64_t sm90_smem_bytes(const Spec& spec, GemmRole role, const GemmTile& tile) {
    constexpr std::int64_t kPanelBytes = 64 * 128;
    const std::int64_t ring = std::int64_t{128} * (tile.block_m + tile.block_n) * tile.stages;
    const int consumer_rows = takes_turns(tile) ? tile.block_m : tile.block_m / 2;
    std::int64_t beside = 0;
    if (role == GemmRole::forward || role == GemmRole::forward_retain) {
        // Two parts' sums of every thread, words for the consumers, and where the first thread stands.
        beside = std::int64_t{2} * 256 * (consumer_rows / 64 * 2) * partial_fields(spec) * 4 + 32 * (8 + 8) + 128;
        // Panels that leave together: ForwardSm90::kPanelWidth.
        if (role == GemmRole::forward_retain) beside += 2 * kPanelBytes * (tile.block_n % 192 == 0 ? 3 : tile.block_n % 128 == 0 ? 2 : 1);
    } else if (role == GemmRole::chunks) {
        beside = 2 * kPanelBytes * (tile.block_n / 64) + 8 * 2 * 2 + 8;  // panels, an update's barriers, rows and parts
    } else if (role == GemmRole::dlogits) {
        beside = 2 * kPanelBytes * (tile.block_n / 64) + (spec.bias ? 4 * 4 * 2 * tile.block_n : 0);
    } else if (role == GemmRole::grad_hidden) {
        beside = 2 * kPanelBytes * 2;
    } else if (role == GemmRole::grad_weight) {
        const bool updates = element_bytes(spec.grad_weight_dtype) == 2 && spec.grad_weight_mode == GradMode::accumulate;
        beside = 2 * kPanelBytes * 2 + (updates ? 8 * 2 * 2 : 0);
    }
    constexpr std::int64_t kNumberBytes = 16 * (8 + 4);
    return ring + beside + std::int64_t{8} * (2 * tile.stages + 2) + kNumberBytes;
}

/// Of a thread's 232 registers. A gradient's terms are alive beside the accumulators: the capped logit and its derivative, what multiplies the logit,
/// the columns' weights and where they are.
int sm90_accumulator_limit(const Spec& spec, GemmRole role) {
    const bool smoothed_bias = spec.bias && spec.label_smoothing > 0;
    if (role == GemmRole::grad_hidden || role == GemmRole::grad_weight) return 192;
    if (role != GemmRole::dlogits) return smoothed_bias ? 64 : spec.class_weight && spec.label_smoothing > 0 ? 128 : 192;
    const bool capped = spec.softcap != 0.0;
    const int smoothed = spec.label_smoothing <= 0 ? 0 : spec.class_weight ? 3 : capped || smoothed_bias ? 1 : 0;
    const int terms = smoothed + (smoothed_bias ? 1 : 0) + (capped ? 1 : 0) + (spec.outputs.entropy ? 1 : 0);
    return terms <= 1 ? 192 : terms == 2 ? 128 : 64;
}

std::optional<std::string> sm90_tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    if (tile.warps_n != 1 || (tile.warps_m != 4 && tile.warps_m != 8)) {
        return fmt::format("warps {}x{}: 4x1, warpgroups take turns, or 8x1, they share a tile", tile.warps_m, tile.warps_n);
    }
    const int consumer_rows = takes_turns(tile) ? tile.block_m : tile.block_m / 2;
    if (consumer_rows < 64 || tile.block_m % (takes_turns(tile) ? 64 : 128) != 0 || tile.block_m > 256) {
        return fmt::format("block_m {}: a multiple of 64 a warpgroup, at most 256", tile.block_m);
    }
    if (tile.block_n != 64 && tile.block_n != 128 && tile.block_n != 192 && tile.block_n != 256) {
        return fmt::format("block_n {}: 64, 128, 192 or 256", tile.block_n);
    }
    const int accumulators = consumer_rows * tile.block_n / 128;
    if (const int most = sm90_accumulator_limit(spec, role); accumulators > most) {
        return fmt::format("block {}x{}: needs {} accumulator registers a thread, {} fit", tile.block_m, tile.block_n, accumulators, most);
    }
    if ((role == GemmRole::forward || role == GemmRole::forward_retain) && tile.block_m % 128 != 0)
        return fmt::format("block_m {}: forward needs 128 or 256", tile.block_m);
    if (tile.block_k != 64) return fmt::format("block_k {}: 64, a row of the 128-byte swizzle", tile.block_k);
    if (tile.stages < 2 || tile.stages > 8) return fmt::format("stages {}: 2 to 8", tile.stages);
    const std::int64_t smem = sm90_smem_bytes(spec, role, tile);
    if (smem > device.gpu.smem_per_block_bytes) {
        return fmt::format("needs {} bytes of shared memory a block, {} offers {}", smem, device.gpu.arch, device.gpu.smem_per_block_bytes);
    }
    return std::nullopt;
}

std::optional<std::string> sm80_tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    const int element = static_cast<int>(element_bytes(spec.dtype));
    if (!power_of_two(tile.warps_m) || !power_of_two(tile.warps_n) || tile.warps_m * tile.warps_n > 16) {
        return fmt::format("warps {}x{}: powers of two, at most 16 warps in all", tile.warps_m, tile.warps_n);
    }
    if (!power_of_two(tile.block_m) || !power_of_two(tile.block_n) || tile.block_m < 64 || tile.block_n < 64) {
        return fmt::format("block {}x{}: powers of two, at least 64", tile.block_m, tile.block_n);
    }
    const int warp_m = tile.block_m / tile.warps_m;
    const int warp_n = tile.block_n / tile.warps_n;
    if (warp_m < 16 || warp_n < 16) return fmt::format("warp tile {}x{}: at least 16x16", warp_m, warp_n);
    if (warp_m * warp_n / 32 > accumulator_limit(spec.dtype)) {
        return fmt::format("warp tile {}x{}: needs {} accumulator registers a thread, {} allows {}", warp_m, warp_n, warp_m * warp_n / 32,
                           to_string(spec.dtype), accumulator_limit(spec.dtype));
    }
    const int slice_bytes = tile.block_k * element;
    if (slice_bytes != 2 * kFragmentBytes && slice_bytes != 4 * kFragmentBytes) {
        return fmt::format("block_k {}: {} needs {} or {}", tile.block_k, to_string(spec.dtype), 2 * kFragmentBytes / element,
                           4 * kFragmentBytes / element);
    }
    if (tile.stages < 2 || tile.stages > 8) return fmt::format("stages {}: 2 to 8", tile.stages);
    const int threads = 32 * tile.warps_m * tile.warps_n;
    for (const int block : {tile.block_m, tile.block_n}) {
        if (block * slice_bytes / 16 % threads != 0) {
            return fmt::format("block side {} with block_k {}: does not divide into 16-byte copies of {} threads", block, tile.block_k,
                               threads);
        }
    }
    const std::int64_t smem = sm80_smem_bytes(spec, role, tile);
    if (smem > device.gpu.smem_per_block_bytes) {
        return fmt::format("needs {} bytes of shared memory a block, {} offers {}", smem, device.gpu.arch, device.gpu.smem_per_block_bytes);
    }
    return std::nullopt;
}

std::string capability(const Device& device) {
    return fmt::format("compute capability {}.{}", device.gpu.compute_capability / 10, device.gpu.compute_capability % 10);
}

/// The copy engine reads rows that start on 16 bytes.
std::optional<std::string> sm90_problem(const Spec& spec, const Device& device) {
    if (device.gpu.arch != "sm_90a") return fmt::format("{}: cuda_sm90a needs sm_90a (wgmma)", device.gpu.arch);
    if (device.gpu.sm_count < kClusterBlocks)
        return fmt::format("{} SMs: cuda_sm90a needs a cluster of {}", device.gpu.sm_count, kClusterBlocks);
    if (spec.dtype == DType::fp32) return std::string("dtype=fp32: cuda_sm90a multiplies 16-bit operands; fp32 runs on cuda_sm80");
    if (spec.layout == WeightLayout::hidden_major && spec.padded_vocab_size % 8 != 0) {
        return fmt::format("layout=hidden_major with rows of {}: cuda_sm90a needs rows of a multiple of 8; others run on cuda_sm80",
                           spec.padded_vocab_size);
    }
    return std::nullopt;
}

}  // namespace

int partial_fields(const Spec& spec) { return 2 + (spec.outputs.entropy ? 1 : 0) + (spec.label_smoothing > 0 ? 1 : 0); }

std::int64_t tile_smem_bytes(const Spec& spec, PlanPath path, GemmRole role, const GemmTile& tile) {
    return path == PlanPath::cuda_sm90a ? sm90_smem_bytes(spec, role, tile) : sm80_smem_bytes(spec, role, tile);
}

int tile_threads(PlanPath path, const GemmTile& tile) { return path == PlanPath::cuda_sm90a ? 384 : 32 * tile.warps_m * tile.warps_n; }

std::optional<std::string> path_problem(const Spec& spec, const Device& device, PlanPath path) {
    if (device.gpu.compute_capability < 80) {
        return fmt::format("{}: cuda_sm80 needs 8.0 or newer (mma.sync on bf16, cp.async)", capability(device));
    }
    return path == PlanPath::cuda_sm90a ? sm90_problem(spec, device) : std::nullopt;
}

std::optional<std::string> tile_problem(const Spec& spec, const Device& device, PlanPath path, GemmRole role, const GemmTile& tile) {
    return path == PlanPath::cuda_sm90a ? sm90_tile_problem(spec, device, role, tile) : sm80_tile_problem(spec, device, role, tile);
}

std::optional<std::string> retain_problem(const Spec& spec, PlanPath path) {
    if (path != PlanPath::cuda_sm90a) return fmt::format("retain: {} keeps nothing", to_string(path));
    if (rounds_weight(spec)) return std::string("retain: references are single rows of the weight, which is rounded a stretch at a time");
    if (spec.dtype != DType::bf16) return fmt::format("retain: exponentials have bf16's range, not {}'s", to_string(spec.dtype));
    if (spec.softcap != 0.0) return std::string("retain: softcap's derivative needs the logits again");
    if (spec.outputs.entropy) return std::string("retain: entropy's gradient needs the logits again");
    if (spec.bias) return std::string("retain: a bias's gradient is a sum over tokens of the exponentials, in a pass of its own");
    if (spec.label_smoothing > 0) return std::string("retain: label smoothing's gradient is not a multiple of the exponentials");
    return std::nullopt;
}

bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight) {
    return may_lend_grad_weight(spec) && kRetainedColumns % (kClusterBlocks * grad_weight.block_m) == 0;
}

GemmTile few_tokens_tile(const Spec& spec) {
    const bool narrow = sm90_accumulator_limit(spec, GemmRole::forward) < 128;
    return {.block_m = kFewTokens, .block_n = narrow ? 64 : 128, .block_k = 64, .stages = narrow ? 7 : 5, .warps_m = 4, .warps_n = 1};
}

bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan) {
    const GemmTile& tile = plan.cuda.dlogits;
    return plan.path == PlanPath::cuda_sm90a && spec.layout == WeightLayout::vocab_major && !spec.bias && !rounds_weight(spec) &&
           takes_turns(tile) && tile.block_m == 128 && tile.block_n >= 128 &&
           sm90_smem_bytes(spec, GemmRole::chunks, tile) <= device.gpu.smem_per_block_bytes;
}

std::int64_t joined_quantum(const Plan& plan) {
    return std::lcm(std::int64_t{plan.cuda.dlogits.block_n}, std::int64_t{kClusterBlocks} * plan.cuda.dlogits.block_m);
}

int rows_of_bias_partial(const Plan& plan) { return plan.path == PlanPath::cuda_sm90a ? 64 : plan.cuda.dlogits.block_m; }

std::int64_t smallest_scratch_bytes(const Spec& spec, const Plan& plan) { return workspace_minimum(spec, plan); }

int tile_blocks_per_sm(const Spec& spec, const Device& device, PlanPath path, GemmRole role, const GemmTile& tile) {
    if (path == PlanPath::cuda_sm90a) return 1;  // persistent, with most of the shared memory
    const std::int64_t reserved = 1024;          // of each block, by the driver
    const std::int64_t by_smem = device.gpu.smem_per_sm_bytes / (sm80_smem_bytes(spec, role, tile) + reserved);
    const int threads = 32 * tile.warps_m * tile.warps_n;
    const int accumulators = tile.block_m * tile.block_n / threads;
    const int registers = accumulators > 64 || spec.dtype == DType::fp32 ? 255 : 168;
    const std::int64_t by_registers = 65536 / (std::int64_t{threads} * ((registers + 7) / 8 * 8));
    return static_cast<int>(std::clamp<std::int64_t>(std::min(by_smem, by_registers), 1, 4));
}

}  // namespace flce

#include "generator/cuda/sm90/rules.hpp"

#include <fmt/format.h>

#include <numeric>

#include "generator/cuda/common/workspace.hpp"

namespace flce::sm90 {
namespace {

bool is_forward(GemmRole role) { return role == GemmRole::forward || role == GemmRole::forward_retain; }

/// Rows of a tile that one consumer warpgroup has.
int consumer_rows(const GemmTile& tile) { return takes_turns(tile) ? tile.block_m : tile.block_m / 2; }

/// A 16-bit grad_weight that is added to comes through shared memory, two panels of a consumer at a time.
std::int64_t update_barrier_bytes(const Spec& spec) {
    return element_bytes(spec.grad_weight_dtype) == 2 && spec.grad_weight_mode == GradMode::accumulate ? 8 * 2 * 2 : 0;
}

constexpr std::int64_t kMostSmem = 227 << 10;  ///< bytes of a block
constexpr std::int64_t kBiasOperandBytes = 8 * 128;
constexpr int kPartsOfFew = 1;  ///< clusters of rows of a kernel whose tile has all tokens

/// The ring of stages, what an epilogue keeps or hands over, the barriers, and numbers of tiles. `parts`: clusters of rows that a share of
/// forward may have.
std::int64_t bytes_without_factors(const Spec& spec, GemmRole role, const GemmTile& tile, int parts) {
    constexpr std::int64_t kPanelBytes = std::int64_t{64} * 128;
    const std::int64_t ring = std::int64_t{128} * (tile.block_m + tile.block_n) * tile.stages;
    std::int64_t beside = 0;
    if (is_forward(role)) {
        const std::int64_t fields = partial_fields(spec) + (spec.top_k > 0 ? 2 : 0);  // and of the states of lists of classes
        // Bytes of all parts' sums of every thread, of words for the consumers, and of the first thread's state.
        beside = std::int64_t{parts} * 256 * 2 * (consumer_rows(tile) / 64) * fields * 4 + std::int64_t{32} * (8 + 8) + 128;
        // Panels that leave together: ForwardSm90::kPanelWidth.
        const int width = tile.block_n % 192 == 0 ? (partial_fields(spec) > 2 ? 1 : 3) : tile.block_n % 128 == 0 ? 2 : 1;
        if (role == GemmRole::forward_retain) beside += 2 * kPanelBytes * width;
        if (picks_named(spec) && parts > kPartsOfFew) beside += 256 * 8;  // a record of every thread
    } else if (role == GemmRole::backward_chunks) {
        beside = 2 * kPanelBytes * (tile.block_n / 64) + update_barrier_bytes(spec) + 8;  // panels, barriers, rows and parts
        if (spec.bias) beside += kBiasOperandBytes;
    } else if (role == GemmRole::dlogits) {
        beside = 2 * kPanelBytes * (tile.block_n / 64) + (spec.bias ? 4 * 4 * 2 * tile.block_n : 0);
    } else if (role == GemmRole::grad_hidden) {
        beside = 2 * kPanelBytes * 2;
    } else if (role == GemmRole::grad_weight) {
        beside = 2 * kPanelBytes * 2 + update_barrier_bytes(spec);
    }
    constexpr std::int64_t kNumberBytes = std::int64_t{16} * (8 + 4);
    return ring + beside + std::int64_t{8} * (2 * tile.stages + 2) + kNumberBytes;
}

/// The factors of each stage by which grad_bias is added up.
std::int64_t factor_bytes(const GemmTile& tile) { return kBiasOperandBytes * tile.stages; }

std::int64_t smem_bytes(const Spec& spec, GemmRole role, const GemmTile& tile, int parts = 2) {
    const bool factors = role == GemmRole::grad_weight && sums_bias(spec, tile);
    return bytes_without_factors(spec, role, tile, parts) + (factors ? factor_bytes(tile) : 0);
}

/// Most accumulators, of a thread's 232 registers. A gradient's terms are alive beside the accumulators: the capped logit and its
/// derivative, the logit's factor, smoothing's columns. A class' weight or offset is read where it is used; both are too many.
int accumulator_limit(const Spec& spec, GemmRole role) {
    const bool smoothed_bias = spec.bias && spec.label_smoothing > 0;
    if (role == GemmRole::grad_hidden || role == GemmRole::grad_weight) return 192;
    const bool capped = spec.softcap != 0.0;
    // A row that is retained has more sums beside its exponentials, and an exponential more that it is made of.
    const Outputs& outputs = spec.outputs;
    const bool crowded =
        role == GemmRole::forward_retain && ((outputs.entropy && outputs.top1 && outputs.log_sum_sq_probs) ||
                                             (capped && spec.temperature && (outputs.entropy || outputs.log_sum_sq_probs)));
    const bool two_of_class = spec.label_smoothing > 0 && spec.class_weight && spec.class_offset;
    if (role != GemmRole::dlogits) return smoothed_bias ? 64 : crowded || two_of_class ? 128 : 192;
    const int smoothed = spec.label_smoothing > 0 && (capped || smoothed_bias) ? 1 : two_of_class ? 2 : 0;
    const bool capped_offset = capped && spec.class_offset && (spec.bias || spec.temperature);
    const int terms = smoothed + (smoothed_bias ? 1 : 0) + (capped ? 1 : 0) + (spec.outputs.entropy ? 1 : 0) + (capped_offset ? 1 : 0);
    return terms <= 1 ? 192 : terms == 2 ? 128 : 64;
}

int accumulators(const GemmTile& tile) { return consumer_rows(tile) * tile.block_n / 128; }

/// A row's sums take room that stages would have.
GemmTile with_stages(const Spec& spec, GemmRole role, GemmTile tile) {
    while (smem_bytes(spec, role, tile, kPartsOfFew) > kMostSmem) --tile.stages;
    return tile;
}

}  // namespace

Reason problem(const Spec& spec, const Device& device, Strategy strategy) {
    if (auto reason = oldest_gpu_problem(device)) return reason;
    if (device.gpu.arch != "sm_90a") return fmt::format("{}: cuda_sm90a needs sm_90a (wgmma)", device.gpu.arch);
    if (device.gpu.sm_count < kClusterBlocks)
        return fmt::format("{} SMs: cuda_sm90a needs a cluster of {}", device.gpu.sm_count, kClusterBlocks);
    if (spec.dtype == DType::fp32) return std::string("dtype=fp32: cuda_sm90a multiplies 16-bit operands; fp32 runs on cuda_sm80");
    if (spec.batch_invariant && spec.dtype == DType::fp16) {
        return std::string(
            "batch_invariant with dtype=fp16: gradients of the logits are scaled by a power of two that depends on all tokens; use bf16");
    }
    if (spec.layout == WeightLayout::hidden_major &&
        spec.padded_vocab_size % 8 != 0) {  // the copy engine reads rows that start on 16 bytes
        return fmt::format("layout=hidden_major with rows of {}: cuda_sm90a needs rows of a multiple of 8; others run on cuda_sm80",
                           spec.padded_vocab_size);
    }
    constexpr int kMostTopK = 64;
    if (spec.top_k > kMostTopK) {
        return fmt::format("top_k={}: cuda_sm90a has lists of at most {} classes; more run on cuda_lt and on CPUs", spec.top_k, kMostTopK);
    }
    if (auto reason = teacher_head_problem(spec, "cuda_sm90a")) return reason;
    if (auto reason = quantized_problem(spec, "cuda_sm90a")) return reason;
    if (auto reason = support_problem(spec, "cuda_sm90a")) return reason;
    if (auto reason = fp8_problem(spec, "cuda_sm90a")) return reason;
    return strategy == Strategy::retain ? retain_problem(spec) : std::nullopt;
}

Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    if (tile.schedule == TileSchedule::warp_grid) {
        return fmt::format("warps {}x{}: 4x1, warpgroups take turns, or 8x1, they share a tile", tile.warps_m, tile.warps_n);
    }
    if (consumer_rows(tile) < 64 || tile.block_m % (takes_turns(tile) ? 64 : 128) != 0 || tile.block_m > 256) {
        return fmt::format("block_m {}: a multiple of 64 a warpgroup, at most 256", tile.block_m);
    }
    if (tile.block_n != 64 && tile.block_n != 128 && tile.block_n != 192 && tile.block_n != 256) {
        return fmt::format("block_n {}: 64, 128, 192 or 256", tile.block_n);
    }
    if (const int most = accumulator_limit(spec, role); accumulators(tile) > most) {
        return fmt::format("block {}x{}: needs {} accumulator registers a thread, {} fit", tile.block_m, tile.block_n, accumulators(tile),
                           most);
    }
    if (spec.batch_invariant && role == GemmRole::forward) {
        // One for a spec: which columns are summed up first follows from it.
        if (const int wide = accumulator_limit(spec, role); !takes_turns(tile) || tile.block_m != 128 || tile.block_n != wide) {
            return fmt::format("block {}x{}: batch_invariant has a tile of 128x{} for this spec, by turns", tile.block_m, tile.block_n,
                               wide);
        }
    }
    if (spec.top_k > 0 && is_forward(role) && !takes_turns(tile)) {  // two lists a row have room for the logits that come before lists
        return fmt::format("block {}x{}: a top_k has forward's tiles by turns (4x1)", tile.block_m, tile.block_n);
    }
    if (is_forward(role) && tile.block_m % 128 != 0) return fmt::format("block_m {}: forward needs 128 or 256", tile.block_m);
    if (tile.block_k != 64) return fmt::format("block_k {}: 64, a row of the 128-byte swizzle", tile.block_k);
    if (tile.stages < 2 || tile.stages > 8) return fmt::format("stages {}: 2 to 8", tile.stages);
    return smem_problem(device, smem_bytes(spec, role, tile));
}

KernelBlock block(const Spec& spec, GemmRole role, const GemmTile& tile) {
    // Blocks are persistent, with most of the shared memory.
    return {.threads = 384, .per_sm = 1, .smem_bytes = smem_bytes(spec, role, tile), .cluster = kClusterBlocks};
}

bool defers_hidden(const Spec& spec, const Plan& plan) {
    return is_shard(spec) && plan.strategy == Strategy::retain && spec.label_smoothing <= 0;
}

ForwardShape few_tokens_shape(const Spec& spec, const Plan& plan) {
    const int limit = accumulator_limit(spec, GemmRole::forward);
    // With batch_invariant a thread has the columns that it has where tokens are many.
    const int wide = spec.batch_invariant ? limit : std::min(limit, 128);
    const GemmTile tile{
        .block_m = kFewTokens, .block_n = wide, .block_k = 64, .stages = wide < 128 ? 7 : 5, .schedule = TileSchedule::by_turns};
    return {.role = forward_role(plan), .tile = with_stages(spec, GemmRole::forward_retain, tile)};
}

KernelBlock forward_block(const Spec& spec, const ForwardShape& shape) {
    KernelBlock of = block(spec, shape.role, shape.tile);
    if (shape.cluster == 1) of.smem_bytes = smem_bytes(spec, shape.role, shape.tile, kPartsOfFew);
    of.cluster = shape.cluster;
    return of;
}

bool picks_named(const Spec& spec) {
    constexpr int kFewestNames = 256;
    constexpr std::int64_t kMostClasses = std::int64_t{4608} * 64;  // each tile has counters in shared memory
    return spec.teacher_top_k >= kFewestNames && spec.vocab_size <= kMostClasses && spec.top_k == 0 && !spec.support &&
           !spec.batch_invariant && !rounds_weight(spec);
}

int segment_tiles(const Spec& spec, const GemmTile& forward) {
    if (!spec.batch_invariant) return 0;
    constexpr std::int64_t kMostSegments = 512;
    const std::int64_t tiles = multiple_above(spec.vocab_size, forward.block_n) / forward.block_n;
    return static_cast<int>(2 * ((tiles + 2 * kMostSegments - 1) / (2 * kMostSegments)));  // each consumer has as many
}

bool sums_bias(const Spec& spec, const GemmTile& grad_weight) {
    // Label smoothing's terms leave registers beside few tiles, and beside none where old values are added.
    const bool crowded = consumer_rows(grad_weight) != 128 || !takes_turns(grad_weight) || spec.grad_weight_mode == GradMode::accumulate;
    if (spec.label_smoothing > 0 && crowded) return false;
    return spec.bias && spec.layout == WeightLayout::vocab_major &&
           bytes_without_factors(spec, GemmRole::grad_weight, grad_weight, 0) + factor_bytes(grad_weight) <= kMostSmem;
}

bool sums_retained_bias(const Spec& spec, const Plan& plan) {
    return plan.strategy == Strategy::retain && sums_bias(spec, plan.cuda.grad_weight);
}

bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan) {
    const GemmTile& tile = plan.cuda.dlogits;
    // A teacher's classes are written into a chunk's dlogits between its launches.
    return spec.layout == WeightLayout::vocab_major && !spec.batch_invariant && spec.teacher_top_k == 0 && takes_turns(tile) &&
           tile.block_m == 128 && tile.block_n >= 128 &&
           smem_bytes(spec, GemmRole::backward_chunks, tile) <= device.gpu.smem_per_block_bytes;
}

std::int64_t joined_quantum(const Plan& plan) {
    return std::lcm(std::int64_t{plan.cuda.dlogits.block_n}, std::int64_t{kClusterBlocks} * plan.cuda.dlogits.block_m);
}

}  // namespace flce::sm90

// The calls of the library that the planner considers for cuda_lt, and how long they take.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "generator/chunk_cost.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/cuda/lt/path.hpp"
#include "generator/planner.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/lt/params.cuh"

namespace flce::lt {
namespace {

// Tokens and columns of the vocabulary. The first is three whole waves of the library's tiles of 128 × 256 on an H200, and a third fewer
// calls than the second; the others are for less scratch.
constexpr std::array kTiles = {
    TileCandidate{{4096, 3072, 1, 1, 1, 1}, 1.0},  TileCandidate{{4096, 2048, 1, 1, 1, 1}, 0.99},
    TileCandidate{{2048, 2048, 1, 1, 1, 1}, 0.96}, TileCandidate{{4096, 1024, 1, 1, 1, 1}, 0.94},
    TileCandidate{{2048, 1024, 1, 1, 1, 1}, 0.88}, TileCandidate{{1024, 1024, 1, 1, 1, 1}, 0.78},
    TileCandidate{{512, 512, 1, 1, 1, 1}, 0.60},   TileCandidate{{1, 1, 1, 1, 1, 1}, 1.0},  // products of backward, which are made at once
};

// Sums in grad_weight's memory, of both heads, and those for a gradient of less than twice as many bytes as the first take. Wider ones
// leave less of a mixture's memory to retained logits.
constexpr std::array kLentTiles = {GemmTile{4096, 4096, 1, 1, 1, 1}, GemmTile{4096, 2048, 1, 1, 1, 1}, GemmTile{4096, 8192, 1, 1, 1, 1}};
constexpr std::array kSmallLentTiles = {GemmTile{4096, 2048, 1, 1, 1, 1}, GemmTile{4096, 4096, 1, 1, 1, 1}};
constexpr std::int64_t kSmallGradient = std::int64_t{2} * 2 * 4 * 4096 * 4096;

bool may_lend_to_heads(const Spec& spec) { return has_teacher_head(spec) && may_lend_grad_weight(spec) && !rounds_weight(spec); }

bool of_logits(GemmRole role) { return role == GemmRole::forward || role == GemmRole::forward_retain || role == GemmRole::dlogits; }

constexpr GemmTile kOne{1, 1, 1, 1, 1, 1};

/// Seconds of products by the library, `calls` of them, and of the bytes that kernels between them move, most of them in L2.
double seconds_of(const Device& device, double flops, double efficiency, double calls, double bytes_between) {
    const double l2 = device.gpu.measured.l2_bytes_per_s;
    return flops / (device.gpu.bf16_flops * rate_share(device) * efficiency) +
           bytes_between / (l2 > 0 ? l2 : device.gpu.bandwidth_bytes_per_s) + calls * launch_seconds(device);
}

double efficiency_of(const GemmTile& tile) {
    for (const TileCandidate& candidate : kTiles) {
        if (candidate.tile == tile) return candidate.efficiency;
    }
    return 0.5;
}

double calls_of(const GemmTile& tile, double rows, double columns) { return up_div(rows, tile.block_m) * up_div(columns, tile.block_n); }

}  // namespace

Reason tile_problem(const Spec& /*spec*/, const Device& /*device*/, GemmRole role, const GemmTile& tile) {
    if (tile.schedule != TileSchedule::warp_grid) return std::string("schedule: only tiles of cuda_sm90a have one");
    const GemmTile rest{1, 1, tile.block_k, tile.stages, tile.warps_m, tile.warps_n};
    if (rest != kOne) return std::string("the library chooses its own tiles: only tokens and columns are given");
    if (!of_logits(role)) {
        if (tile.block_m != 1 || tile.block_n != 1) return std::string("the library makes these products at once");
        return std::nullopt;
    }
    if (tile.block_m % kLtBlockRows != 0) return fmt::format("{} tokens: must be a multiple of {}", tile.block_m, +kLtBlockRows);
    if (tile.block_n % kLtTileColumns != 0) return fmt::format("{} columns: must be a multiple of {}", tile.block_n, +kLtTileColumns);
    return std::nullopt;
}

Reason lent_tile_problem(const Spec& spec, const GemmTile& tile) {
    constexpr int kMost = 16384;
    if (tile == GemmTile{}) return std::nullopt;
    if (!may_lend_to_heads(spec)) {
        return std::string("only a divergence's logits lie in grad_weight's memory, where that is vocab_major and not accumulated into");
    }
    if (tile.block_m < kLtBlockRows || tile.block_m > kMost || tile.block_m % kLtBlockRows != 0) {
        return fmt::format("{} tokens: must be a multiple of {} and at most {}", tile.block_m, +kLtBlockRows, kMost);
    }
    if (tile.block_n < kLtTileColumns || tile.block_n > kMost || tile.block_n % kLtTileColumns != 0) {
        return fmt::format("{} columns: must be a multiple of {} and at most {}", tile.block_n, +kLtTileColumns, kMost);
    }
    return std::nullopt;
}

std::span<const GemmTile> lent_tiles(const Spec& spec) {
    if (!may_lend_to_heads(spec)) return {};
    const std::int64_t gradient = spec.vocab_size * spec.hidden_size * static_cast<std::int64_t>(element_bytes(spec.grad_weight_dtype));
    if (gradient < kSmallGradient) return kSmallLentTiles;
    return kLentTiles;
}

std::span<const TileCandidate> tile_candidates(DType /*dtype*/) { return kTiles; }

/// Measured on an H200, where the power limit decides; elsewhere it is assumed that the library loses as much of the dense rate.
double rate_share(const Device& device) {
    return device.gpu.measured.library_flops > 0 ? device.gpu.measured.library_flops / device.gpu.bf16_flops : 0.72;
}

TileRate tile_rate(const Spec& /*spec*/, const Device& /*device*/, GemmRole /*role*/, const GemmTile& tile) {
    return {.blocks_per_sm = 1, .efficiency = efficiency_of(tile), .epilogue_depth = 0};
}

Cost forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const double n = num_tokens;
    const double d = static_cast<double>(spec.hidden_size);
    const double v = static_cast<double>(spec.vocab_size);
    const double both = d + static_cast<double>(spec.teacher_hidden_size);
    const double heads = has_teacher_head(spec) ? 2 : 1;
    const double walks = has_teacher_head(spec) && divergence_form(spec.divergence_beta) == kMixture ? 2 : 1;
    const double between = walks * n * v * (4 * heads + 2 * retained);
    Cost cost{.flops = walks * 2 * n * v * both,
              .bytes = between + walks * (heads * n * v * 4 + v * both * 2 * up_div(n, plan.cuda.forward.block_m))};
    cost.seconds =
        seconds_of(device, cost.flops, efficiency_of(plan.cuda.forward), walks * (heads + 1) * calls_of(plan.cuda.forward, n, v), between);
    add_rounding(spec, device, cost);
    return cost;
}

/// Part of the vocabulary whose logits backward computes with sums of the plan's lent tile: what is not retained, but for the classes whose
/// gradient lies where those sums would.
double lent_part(const Spec& spec, const Plan& plan, double num_tokens, double retained) {
    if (!has_lent_tile(plan)) return 0;
    const GemmTile& tile = plan.cuda.lent;
    const double gradient_row = static_cast<double>(spec.hidden_size) * static_cast<double>(element_bytes(spec.grad_weight_dtype));
    const double sums = 8 * std::min(num_tokens, static_cast<double>(tile.block_m)) * tile.block_n;
    return std::max(0.0, 1 - retained - sums / gradient_row / static_cast<double>(spec.vocab_size));
}

Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const double n = num_tokens;
    const double d = static_cast<double>(spec.hidden_size);
    const double kept = static_cast<double>(spec.vocab_size) * retained;
    const double again = static_cast<double>(spec.vocab_size) - kept;
    Plan beside_sums = plan;
    const double of_teacher = static_cast<double>(spec.teacher_hidden_size);
    const std::int64_t heads = has_teacher_head(spec) ? 2 : 1;
    beside_sums.scratch_bytes -= heads * 4 * plan.cuda.dlogits.block_m * plan.cuda.dlogits.block_n + kGemmWorkspaceBytes;
    const double chunks = again > 0 ? up_div(again, gpu_chunk_rows(spec, beside_sums, n)) : 0;
    const double blocks = up_div(kept, kLtRetainedColumns);
    const double moves = spec.grad_weight_mode == GradMode::accumulate ? 2 : 1;
    const double gradient = static_cast<double>(spec.vocab_size) * d * static_cast<double>(element_bytes(spec.grad_weight_dtype)) * moves;
    const double sums = 8 * n * d * (chunks + blocks);
    const double between = n * again * (2 + 4 * static_cast<double>(heads));
    Cost cost{.flops = 4 * n * kept * d + n * again * (6 * d + 2 * of_teacher),
              .bytes = between + n * again * 8 + n * kept * 4 + gradient + sums};
    const double wide = std::min(lent_part(spec, plan, n, retained) * static_cast<double>(spec.vocab_size), again);
    const double pieces = calls_of(plan.cuda.dlogits, n, again - wide) + (wide > 0 ? calls_of(plan.cuda.lent, n, wide) : 0);
    const double calls = (1 + static_cast<double>(heads)) * pieces + 2 * (chunks + blocks) + 4;
    cost.seconds = seconds_of(device, 4 * n * (kept + again) * d, 1.0, calls, between + sums) +
                   seconds_of(device, 2 * n * (again - wide) * (d + of_teacher), efficiency_of(plan.cuda.dlogits), 0, 0) +
                   seconds_of(device, 2 * n * wide * (d + of_teacher), 1.0, 0, 0);
    add_rounding(spec, device, cost);
    return cost;
}

}  // namespace flce::lt

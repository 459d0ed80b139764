#include "generator/cuda/fp8/gemms.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "flce/error.hpp"
#include "generator/cuda/fp8/layout.hpp"

namespace flce::fp8 {
namespace {

constexpr Gemms kHopper{
    .path = "cuda_fp8",
    .header = "fp8/kernels.cuh",
    .maps = true,
    .cluster_blocks = 2,
    .groups = 1,
    .logits = {.block_m = 128, .block_n = 192, .block_k = 128, .stages = 4, .schedule = TileSchedule::by_turns},
    .crowded_logits = {.block_m = 128, .block_n = 128, .block_k = 128, .stages = 6, .schedule = TileSchedule::by_turns},
    .gradient = {.block_m = 128, .block_n = 256, .block_k = 128, .stages = 4, .schedule = TileSchedule::together},
};

// Tile that 99 KiB of shared memory have room for, and registers beside the accumulators.
constexpr GemmTile kMmaTile{.block_m = 128, .block_n = 256, .block_k = 128, .stages = 2, .warps_m = 4, .warps_n = 2};
constexpr Gemms kMma{
    .path = "cuda_fp8_sm89",
    .header = "fp8/mma_kernels.cuh",
    .maps = false,
    .cluster_blocks = 1,
    .groups = 2,
    .logits = kMmaTile,
    .crowded_logits = kMmaTile,
    .gradient = kMmaTile,
};

constexpr int sums_of(const Gemms& gemms, const GemmTile& tile) { return tile.block_n / gemms.groups; }
static_assert(kFp8Quantum % sums_of(kHopper, kHopper.logits) == 0 && kFp8Quantum % sums_of(kHopper, kHopper.crowded_logits) == 0);
static_assert(kFp8Quantum % sums_of(kMma, kMmaTile) == 0 && kFp8FirstClasses % sums_of(kMma, kMmaTile) == 0);

/// Names of a GEMM in the path's templates.
struct GemmNames {
    KernelRole kernel;
    GemmRole role;
    const char* params;
    const char* function;
    const char* stated;
};
constexpr std::array kHopperNames = {
    GemmNames{KernelRole::forward, GemmRole::forward, "Fp8LogitsParams", "logits_fp8", "LogitsFp8"},
    GemmNames{KernelRole::grad_hidden, GemmRole::grad_hidden, "Fp8GradientParams", "grad_hidden_fp8", "GradHiddenFp8"},
    GemmNames{KernelRole::grad_weight, GemmRole::grad_weight, "Fp8GradientParams", "grad_weight_fp8", "GradWeightFp8"},
};
constexpr std::array kMmaNames = {
    GemmNames{KernelRole::forward, GemmRole::forward, "Fp8LogitsMmaParams", "logits_fp8_mma", "LogitsMma8"},
    GemmNames{KernelRole::grad_hidden, GemmRole::grad_hidden, "Fp8GradientMmaParams", "grad_hidden_fp8_mma", "GradHiddenMma8"},
    GemmNames{KernelRole::grad_weight, GemmRole::grad_weight, "Fp8GradientMmaParams", "grad_weight_fp8_mma", "GradWeightMma8"},
};

std::string tile_type(const Gemms& gemms, const GemmTile& t) {
    if (!gemms.maps) return fmt::format("TileMma8<{}, {}, {}, {}>", t.block_m, t.block_n, t.stages, gemms.groups);
    return fmt::format("TileSm90<{}, {}, {}, {}, {}>", t.block_m, t.block_n, t.stages, gemms.cluster_blocks,
                       t.schedule == TileSchedule::by_turns);
}

/// Type of a GEMM's parameters.
std::string params_of(const Gemms& gemms, const Spec& spec, const GemmNames& names) {
    if (names.kernel != KernelRole::grad_weight) return names.params;
    const std::string params = std::string(spec.label_smoothing > 0 ? "Smoothed" : "") + names.params;
    return adds_by_threads(gemms, spec) ? fmt::format("WithResult<flce::{}>", params) : params;
}

}  // namespace

bool adds_by_threads(const Gemms& gemms, const Spec& spec) {
    return gemms.maps && is_hidden_major(spec) && spec.grad_weight_mode == GradMode::accumulate;
}

const Gemms& gemms_of(PlanPath path) {
    if (path != PlanPath::cuda_fp8 && path != PlanPath::cuda_fp8_sm89) throw InternalError("gemms_of: a path without products in 8 bits");
    return path == PlanPath::cuda_fp8 ? kHopper : kMma;
}

const GemmTile& logits_tile(const Gemms& gemms, const Spec& spec) {
    const bool crowded = spec.softcap != 0.0 || spec.temperature || spec.class_offset || spec.label_smoothing > 0 || spec.outputs.entropy;
    return crowded ? gemms.crowded_logits : gemms.logits;
}

bool is_logits(GemmRole role) { return role != GemmRole::grad_hidden && role != GemmRole::grad_weight; }

const GemmTile& tile_of(const Gemms& gemms, const Spec& spec, GemmRole role) {
    return is_logits(role) ? logits_tile(gemms, spec) : gemms.gradient;
}

int sum_columns(const Gemms& gemms, const Spec& spec) { return sums_of(gemms, logits_tile(gemms, spec)); }

/// The ring of stages; on Hopper also panels of exponentials or results, and barriers.
KernelBlock block(const Gemms& gemms, const Spec& spec, GemmRole role) {
    const GemmTile& tile = tile_of(gemms, spec, role);
    const std::int64_t ring = std::int64_t{128} * (tile.block_m + tile.block_n) * tile.stages;
    if (!gemms.maps) return {.threads = 32 * tile.warps_m * tile.warps_n, .per_sm = 1, .smem_bytes = ring};
    const bool updates =
        role == GemmRole::grad_weight && spec.grad_weight_mode == GradMode::accumulate && element_bytes(spec.grad_weight_dtype) == 2;
    const std::int64_t panels =
        is_logits(role) ? 2 * tile.block_n * std::int64_t{kFp8TokenGroup} : 4 * 64 * 128 + (updates ? 8 * 2 * 2 : 0);
    return {.threads = 384, .per_sm = 1, .smem_bytes = ring + panels + 8 * (2 * tile.stages + 2), .cluster = gemms.cluster_blocks};
}

Expr grid_of(const Gemms& gemms, const Device& device, const GemmTile& tile, const Expr& m, const Expr& n) {
    const Expr tiles = ceil_div(m, std::int64_t{tile.block_m} * gemms.cluster_blocks) * ceil_div(n, tile.block_n);
    return min(tiles, device.gpu.sm_count / gemms.cluster_blocks) * gemms.cluster_blocks;
}

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    const Gemms& gemms = gemms_of(plan.path);
    // Launches overlap on sm_90 and newer: the other path has one text for all of its architectures.
    KernelWriter writer(spec, device, plan, {.header = gemms.header, .overlaps = gemms.maps, .tells_falls = false});
    for (const GemmNames& names : gemms.maps ? kHopperNames : kMmaNames) {
        writer.gemm({.role = names.kernel,
                     .params = params_of(gemms, spec, names),
                     .function = names.function,
                     .stated = names.stated,
                     .tile = tile_type(gemms, tile_of(gemms, spec, names.role)),
                     .block = block(gemms, spec, names.role)});
    }
    writer.row_kernels();
    writer.rows(KernelRole::fp8_codes, "Fp8CodesParams");
    const bool given_codes = is_quantized(spec);
    writer.rows(KernelRole::fp8_scales, given_codes ? "Fp8GivenScalesParams" : "Fp8CodesParams");
    if (!given_codes) writer.rows(KernelRole::fp8_both_codes, "Fp8TurnParams");
    writer.rows(KernelRole::fp8_turn_weight, "Fp8TurnParams");
    writer.rows(KernelRole::fp8_turn_hidden, "Fp8TurnParams");
    writer.rows(KernelRole::fp8_targets, given_codes ? "Fp8TargetsOfCodesParams" : "Fp8TargetsParams");
    writer.rows(KernelRole::fp8_powers, "Fp8PowersParams");
    writer.rows(KernelRole::fp8_merge, "Fp8MergeParams");
    writer.rows(KernelRole::fp8_stale, "Fp8StaleParams");
    writer.rows(KernelRole::fp8_rows, "Fp8RowsParams");
    writer.rows(KernelRole::fp8_target_dz, "Fp8TargetDzParams");
    writer.rows(KernelRole::fp8_finish, given_codes ? "Fp8FinishOfCodesParams" : "Fp8FinishParams");
    writer.rows(KernelRole::fp8_order, "Fp8OrderParams");
    writer.rows(KernelRole::fp8_target_rows, "Fp8TargetRowsParams");
    if (zeroes_columns(spec)) writer.rows(KernelRole::zero_columns, "ZeroColumnsParams");
    if (spec.bias) writer.rows(KernelRole::fp8_bias, "Fp8BiasParams");
    if (spec.label_smoothing > 0) {
        writer.rows(KernelRole::smoothing_sums, given_codes ? "SmoothingSumsOfCodesParams" : "SmoothingSumsParams");
        writer.rows(KernelRole::smoothing_totals, "SmoothingTotalsParams");
    }
    return std::move(writer).finish();
}

}  // namespace flce::fp8

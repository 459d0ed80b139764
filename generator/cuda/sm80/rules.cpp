#include <fmt/format.h>

#include <algorithm>

#include "generator/cuda/sm80/path.hpp"
#include "templates/common/params.cuh"

namespace flce::sm80 {
namespace {

constexpr int kMostSide = kRetainedColumns;  // tiles over exponentials lie in one of their blocks
constexpr int kLeastRetainedColumns = 32;    // four lanes exchange a row's columns, eight of each
constexpr int kFragmentBytes = 32;           // one k step of an mma operand: 16 half-precision elements or 8 of fp32

bool power_of_two(int value) { return value > 0 && (value & (value - 1)) == 0; }

bool is_forward(GemmRole role) { return role == GemmRole::forward || role == GemmRole::forward_retain; }

/// Accumulator registers a thread may hold: fp32 keeps a second set for the slice in flight.
int accumulator_limit(DType dtype) { return dtype == DType::fp32 ? 64 : 128; }

std::int64_t smem_bytes(const Spec& spec, GemmRole role, const GemmTile& tile) {
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const std::int64_t operands = std::int64_t{tile.block_m + tile.block_n} * tile.block_k * element * tile.stages;
    // 16-bit results pass through shared memory (over the operands, which are spent by then) in rows padded by one access.
    const std::int64_t staged = tile.block_m * (tile.block_n * std::int64_t{2} + 16);
    std::int64_t beside = 0;
    if (is_forward(role)) {
        // Sums of each row, its label, its temperature and its reference.
        const int words = 1 + (spec.temperature ? 1 : 0) + (role == GemmRole::forward_retain ? 1 : 0);
        beside = std::int64_t{4} * tile.block_m * (partial_fields(spec) * tile.warps_n + words);
    } else if (role == GemmRole::dlogits && spec.bias) {
        beside = std::int64_t{4} * tile.block_n * tile.warps_m;
    }
    return (is_forward(role) ? operands : std::max(operands, staged)) + beside;
}

int threads(const GemmTile& tile) { return 32 * tile.warps_m * tile.warps_n; }

int blocks_per_sm(const Spec& spec, const Device& device, const GemmTile& tile, std::int64_t smem) {
    const std::int64_t reserved = 1024;  // shared memory that the driver takes of each block
    const std::int64_t by_smem = device.gpu.smem_per_sm_bytes / (smem + reserved);
    const int accumulators = tile.block_m * tile.block_n / threads(tile);
    const int registers = accumulators > 64 || spec.dtype == DType::fp32 ? 255 : 168;
    const std::int64_t by_registers = 65536 / (std::int64_t{threads(tile)} * 8 * ((registers + 7) / 8));
    return static_cast<int>(std::clamp<std::int64_t>(std::min(by_smem, by_registers), 1, 4));
}

/// Checks the block's extents and the warps' parts of it.
Reason shape_problem(const Spec& spec, const GemmTile& tile) {
    if (!power_of_two(tile.warps_m) || !power_of_two(tile.warps_n) || tile.warps_m * tile.warps_n > 16) {
        return fmt::format("warps {}x{}: powers of two, at most 16 warps in all", tile.warps_m, tile.warps_n);
    }
    if (!power_of_two(tile.block_m) || !power_of_two(tile.block_n) || std::min(tile.block_m, tile.block_n) < 64 ||
        std::max(tile.block_m, tile.block_n) > kMostSide) {
        return fmt::format("block {}x{}: powers of two, 64 to {}", tile.block_m, tile.block_n, kMostSide);
    }
    const int warp_m = tile.block_m / tile.warps_m;
    const int warp_n = tile.block_n / tile.warps_n;
    if (warp_m < 16 || warp_n < 16) return fmt::format("warp tile {}x{}: at least 16x16", warp_m, warp_n);
    if (warp_m * warp_n / 32 > accumulator_limit(spec.dtype)) {
        return fmt::format("warp tile {}x{}: needs {} accumulator registers a thread, {} allows {}", warp_m, warp_n, warp_m * warp_n / 32,
                           to_string(spec.dtype), accumulator_limit(spec.dtype));
    }
    return std::nullopt;
}

}  // namespace

Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    if (tile.schedule != TileSchedule::warp_grid) return std::string("schedule: only tiles of cuda_sm90a have one");
    if (auto reason = shape_problem(spec, tile)) return reason;
    const int element = static_cast<int>(element_bytes(spec.dtype));
    const int slice_bytes = tile.block_k * element;
    if (slice_bytes != 2 * kFragmentBytes && slice_bytes != 4 * kFragmentBytes) {
        return fmt::format("block_k {}: {} needs {} or {}", tile.block_k, to_string(spec.dtype), 2 * kFragmentBytes / element,
                           4 * kFragmentBytes / element);
    }
    if (tile.stages < 2 || tile.stages > 8) return fmt::format("stages {}: 2 to 8", tile.stages);
    for (const int side : {tile.block_m, tile.block_n}) {
        if (side * slice_bytes / 16 % threads(tile) != 0) {
            return fmt::format("block side {} with block_k {}: does not divide into 16-byte copies of {} threads", side, tile.block_k,
                               threads(tile));
        }
    }
    if (role == GemmRole::forward_retain && tile.block_n / tile.warps_n < kLeastRetainedColumns) {
        return fmt::format("warp tile of {} columns: retained exponentials need {}", tile.block_n / tile.warps_n, kLeastRetainedColumns);
    }
    return smem_problem(device, smem_bytes(spec, role, tile));
}

KernelBlock block(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    const std::int64_t smem = smem_bytes(spec, role, tile);
    return {threads(tile), blocks_per_sm(spec, device, tile, smem), smem, 1};
}

}  // namespace flce::sm80

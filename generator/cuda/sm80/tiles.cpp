// The tiles that the planner considers for cuda_sm80, and how quick they are: the one place to edit when a measurement says otherwise.
#include <array>

#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/cuda/sm80/path.hpp"

namespace flce::sm80 {
namespace {

// block_m, block_n, block_k, stages, warps_m, warps_n
constexpr std::array kHalfTiles = {
    TileCandidate{{128, 256, 64, 3, 2, 4}, 0.93}, TileCandidate{{128, 256, 32, 4, 2, 4}, 0.92},
    TileCandidate{{128, 256, 32, 3, 2, 4}, 0.91}, TileCandidate{{256, 128, 64, 3, 4, 2}, 0.92},
    TileCandidate{{256, 128, 32, 3, 4, 2}, 0.90}, TileCandidate{{128, 128, 64, 3, 2, 2}, 0.90},
    TileCandidate{{128, 128, 32, 4, 2, 2}, 0.88}, TileCandidate{{128, 128, 32, 3, 2, 2}, 0.86},
    TileCandidate{{128, 128, 32, 4, 2, 4}, 0.80}, TileCandidate{{64, 128, 64, 3, 2, 2}, 0.76},
    TileCandidate{{128, 64, 64, 3, 2, 2}, 0.76},  TileCandidate{{64, 64, 64, 3, 2, 2}, 0.60},
    TileCandidate{{64, 64, 32, 3, 2, 2}, 0.55},
};

// Three products of TF32 halves; the accumulator of the slice in flight leaves room for 64 registers of sums.
constexpr std::array kFloatTiles = {
    TileCandidate{{128, 128, 32, 3, 2, 4}, 0.80}, TileCandidate{{128, 128, 16, 4, 2, 4}, 0.78},
    TileCandidate{{128, 128, 16, 3, 2, 4}, 0.77}, TileCandidate{{64, 128, 32, 3, 2, 2}, 0.76},
    TileCandidate{{64, 128, 16, 4, 2, 2}, 0.74},  TileCandidate{{128, 64, 16, 4, 2, 2}, 0.74},
    TileCandidate{{64, 64, 32, 3, 2, 2}, 0.60},   TileCandidate{{64, 64, 16, 3, 2, 2}, 0.55},
};

}  // namespace

std::span<const TileCandidate> tile_candidates(DType dtype) {
    if (dtype == DType::fp32) return kFloatTiles;
    return kHalfTiles;
}

/// Measured on Hopper, which keeps its full rate for instructions of its own. Elsewhere it is assumed that mma.sync has the dense rate from
/// registers (0.3 of it on sm_100, sm_103 and sm_110), and that kernels lose as much of it as on Hopper.
double rate_share(const Device& device) {
    // On an H100: 650 of 989 TFLOP/s with operands that stay in registers. Kernels that read them from shared memory keep up 0.72 of that
    // where tiles' efficiencies are as above: of 14 steps in bf16, fp16 and fp32 13 are within 7 % of the time modelled, one within 15.
    constexpr double kFromSharedMemory = 0.72;
    // On an H200: the rate that is modelled there, to what mma.sync and ldmatrix reach without copies (583 TFLOP/s).
    constexpr double kBesideCopies = 0.81;
    if (device.gpu.measured.mma_flops > 0) return kBesideCopies * device.gpu.measured.mma_flops / device.gpu.bf16_flops;
    switch (device.gpu.compute_capability / 10) {
        case 9: return 0.66 * kFromSharedMemory;
        case 10:
        case 11: return 0.30 * kFromSharedMemory;
        default: return kFromSharedMemory;
    }
}

TileRate tile_rate(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) {
    const int blocks_per_sm = block(spec, device, role, tile).per_sm;
    const double depth = role == GemmRole::grad_hidden || role == GemmRole::grad_weight ? 120.0 : 300.0;
    return {.blocks_per_sm = blocks_per_sm,
            .efficiency = tile_efficiency(tile_candidates(spec.dtype), role, tile, {tile.warps_m, tile.warps_n}),
            .epilogue_depth = depth * (blocks_per_sm > 1 ? 0.4 : 1.0)};  // another block on the SM hides most of it
}

Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) {
    const Cost again = chunked_backward_cost(spec, device, plan, num_tokens);
    return retained == 0 ? again : mixed(again, RetainedGemms(spec, device, plan, num_tokens, retained).cost(), retained);
}

}  // namespace flce::sm80

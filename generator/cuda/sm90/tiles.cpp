// The tiles that the planner considers for cuda_sm90a, and how quick they are: the one place to edit when a measurement says otherwise.
#include <array>

#include "generator/cuda/sm90/path.hpp"

namespace flce::sm90 {
namespace {

constexpr TileSchedule kByTurns = TileSchedule::by_turns;
constexpr TileSchedule kTogether = TileSchedule::together;

constexpr GemmTile tile(int block_m, int block_n, int stages, TileSchedule schedule) {
    return {.block_m = block_m, .block_n = block_n, .block_k = 64, .stages = stages, .schedule = schedule};
}

// The second number, of grad_weight from retained exponentials, is from steps in a row on an H100 at its power limit
// (benchmarks/in_a_row.py), where time follows energy: whole steps with 128x256 take 0.97 and 0.96 of those with 192x128 (4096x2048x151936
// and 8192x4096x64128), with 128x192 0.98 and 0.99. 128x256 brings a fifth less from L2 than 192x128, and half as much from memory.
constexpr std::array kTiles = {
    TileCandidate{tile(128, 192, 5, kByTurns), 0.99},
    TileCandidate{tile(128, 192, 4, kByTurns), 0.98, 0.90},
    TileCandidate{tile(128, 256, 4, kTogether), 0.97},
    TileCandidate{tile(192, 128, 4, kByTurns), 0.95, 0.88},
    TileCandidate{tile(256, 128, 4, kTogether), 0.95, 0.88},
    TileCandidate{tile(128, 256, 3, kTogether), 0.90},
    TileCandidate{tile(128, 128, 6, kByTurns), 0.75},
    TileCandidate{tile(128, 128, 4, kTogether), 0.74},
    TileCandidate{tile(128, 64, 6, kTogether), 0.50},
    TileCandidate{tile(128, 64, 6, kByTurns), 0.30},  // batch_invariant takes turns
};

}  // namespace

std::span<const TileCandidate> tile_candidates() { return kTiles; }

double wgmma_share() { return 0.76; }

TileRate tile_rate(const Spec& spec, const Device& /*device*/, GemmRole role, const GemmTile& tile) {
    // grad_weight's depth is that of retained exponentials, also where the gradient is added to: the first old values come while the tile
    // is multiplied.
    const double depth = role == GemmRole::grad_weight ? 256.0 : role == GemmRole::grad_hidden ? 120.0 : 300.0;
    return {.blocks_per_sm = block(spec, role, tile).per_sm,
            .efficiency = tile_efficiency(kTiles, role, tile, kPathSm90.warps(tile)),
            .epilogue_depth = depth * (takes_turns(tile) ? 0.1 : 1.0)};  // the other warpgroup's turn hides most of it
}

}  // namespace flce::sm90

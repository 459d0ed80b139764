#include "generator/cuda/sm90/tiles.hpp"

#include <array>

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

std::span<const TileCandidate> tile_candidates() noexcept { return kTiles; }

}  // namespace flce::sm90

#include "generator/tiles_sm90.hpp"

#include <array>

namespace flce {
namespace {

// block_m, block_n, block_k, stages, warps_m (4: warpgroups take turns, 8: they share the tile), warps_n
constexpr std::array kTiles = {
    TileCandidate{{128, 192, 64, 5, 4, 1}, 0.99}, TileCandidate{{128, 192, 64, 4, 4, 1}, 0.98},
    TileCandidate{{128, 256, 64, 4, 8, 1}, 0.97}, TileCandidate{{192, 128, 64, 4, 4, 1}, 0.95, 0.98},
    TileCandidate{{256, 128, 64, 4, 8, 1}, 0.95}, TileCandidate{{128, 256, 64, 3, 8, 1}, 0.90},
    TileCandidate{{128, 128, 64, 6, 4, 1}, 0.75}, TileCandidate{{128, 128, 64, 4, 8, 1}, 0.74},
    TileCandidate{{128, 64, 64, 6, 8, 1}, 0.50},
};

}  // namespace

std::span<const TileCandidate> tile_candidates_sm90() { return kTiles; }

}  // namespace flce

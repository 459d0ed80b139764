// Tiles of sm_90a's persistent GEMMs: their size and schedule, where a thread stands in one, and in which order they come.
#pragma once

#include "flce/common/problem.cuh"
#include "flce/common/tile_order.cuh"

namespace flce {

/// kTurns: consumers take turns with whole tiles, else each has half of a tile's rows.
template <int kBlockM_, int kBlockN_, int kStages_, int kCluster_, bool kTurns_>
struct TileSm90 {
    enum : int { kBlockM = kBlockM_ };
    enum : int { kBlockN = kBlockN_ };
    enum : int { kBlockK = 64 };  // 128 bytes: one row of the 128-byte swizzle
    enum : int { kStages = kStages_ };
    enum : int { kCluster = kCluster_ };  ///< blocks along M, each with a part of B to bring for all of them
    enum : bool { kTurns = kTurns_ };
    enum : bool { kStreamsB = kCluster == 1 };  ///< no other block reads this one's part of B
    enum : int { kConsumers = 2 };
    enum : int { kThreads = 128 * (1 + kConsumers) };
    enum : int { kConsumerM = kTurns ? kBlockM : kBlockM / kConsumers };  ///< rows of a tile that one consumer has
    static_assert(kConsumerM % 64 == 0 && kBlockN % 64 == 0, "wgmma multiplies 64 rows; panels are 64 wide");
    enum : int { kStageBytes = (kBlockM + kBlockN) * 128 };  ///< a slice of each operand
};

/// Place of a thread: its warpgroup, and in a consumer its accumulators. Accumulator [i][j][2·h + e] is row(i, h), column(j, e) of the
/// tile.
template <class TileT>
struct PlaceSm90 {
    using Columns = MmaColumns;
    int lane;
    int warp;      // in the warpgroup
    int consumer;  // −1: producer
    __device__ __forceinline__ PlaceSm90() {
        lane = static_cast<int>(threadIdx.x) % 32;
        // Equal in all lanes of a warp, which the compiler is to know.
        const int warp_of_block = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
        warp = warp_of_block % 4;
        consumer = warp_of_block / 4 - 1;
    }
    /// First row of the consumer, in the tile.
    __device__ __forceinline__ int first_row() const { return TileT::kTurns ? 0 : consumer * TileT::kConsumerM; }
    __device__ __forceinline__ int row(int i, int h) const { return first_row() + i * 64 + warp * 16 + h * 8 + lane / 4; }
    __device__ __forceinline__ int column(int j, int e) const { return j * 8 + lane % 4 * 2 + e; }
};

/// Tiles of a persistent GEMM by number, in the order of tile_of_block over clusters of tiles; `in_blocks`: with kBlockRows rows after each
/// other instead of kRaster clusters of tiles.
template <class TileT, int kRaster, int kBlockRows = 0>
struct TileWalk {
    enum : int { kClusterRows = TileT::kBlockM * TileT::kCluster };
    enum : int { kBlockClusters = kBlockRows < kClusterRows ? 1 : kBlockRows / kClusterRows };

    int clusters_m;  // clusters of tiles along M
    int tiles_n;
    unsigned count;  // tiles of what has room in memory: far below 2^32
    bool in_blocks = false;
    unsigned number = 0;  // number of the tile at hand
    int m = 0;            // first row of this block's tile
    int n = 0;

    __device__ __forceinline__ TileWalk(int extent_m, int extent_n)
        : clusters_m(ceil_div(extent_m, TileT::kBlockM * TileT::kCluster)),
          tiles_n(ceil_div(extent_n, TileT::kBlockN)),
          count(static_cast<unsigned>(clusters_m) * static_cast<unsigned>(tiles_n)) {}

    /// False where there is no such tile.
    __device__ __forceinline__ bool go_to(unsigned tile, unsigned rank) {
        if (tile >= count) return false;
        number = tile;
        int tile_m;
        int tile_n;
        if (in_blocks) {
            tile_of_block<kBlockClusters>(tile, clusters_m, tiles_n, tile_m, tile_n);
        } else {
            tile_of_block<kRaster>(tile, clusters_m, tiles_n, tile_m, tile_n);
        }
        m = (tile_m * TileT::kCluster + static_cast<int>(rank)) * TileT::kBlockM;
        n = tile_n * TileT::kBlockN;
        return true;
    }
};

}  // namespace flce

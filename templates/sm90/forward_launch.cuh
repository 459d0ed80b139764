// Launch of cuda_sm90a's forward: its rows, which tokens they are, and how rows × the vocabulary are cut into work.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/sm90/forward_share.cuh"
#include "flce/sm90/tile.cuh"

namespace flce {

template <class Problem_, class TileT_>
struct ForwardLaunch {
    using Problem = Problem_;
    using TileT = TileT_;
    using GemmParams = Select<kStretches<Problem>, ForwardStretchSm90Params, ForwardSm90Params>;
    using Params = TemperedOf<Problem, Select<Problem::picks_named, WithNamed<GemmParams>, GemmParams>>;
    enum : bool { kFew = TileT::kCluster == 1 };  ///< few tokens: one tile holds every token, so no list of valid rows is needed
    enum : bool { kLists = Problem::lists_rows && !kFew };
    enum : int { kSegment = Problem::segment_tiles };  ///< tiles of a segment, which has sums of its own; 0: a share's tiles are added up
    static_assert(kSegment == 0 || (TileT::kTurns && kSegment % 2 == 0), "a tile of a segment always has the same consumer");
    enum : int { kClusterRows = TileT::kBlockM * TileT::kCluster };
    enum : int { kWriters = ForwardShare::writers_of(TileT::kTurns) };
    /// Clusters of rows that a share may have. Every thread has its sums of all of them.
    enum : int { kParts = kFew ? 1 : 2 };

    const Params& p;
    const unsigned rank;  ///< this block's, in its cluster
    const ForwardShare share;
    const bool compact;  ///< listed rows have been brought together

    __device__ __forceinline__ ForwardLaunch(const Params& params, unsigned rank_)
        : p(params),
          rank(rank_),
          share(listed_rows<Problem>(params.list, params.rows, params.list.first == 0 ? 1 : 0), dealt(params), kClusterRows, kWriters,
                params.clusters, kSegment > 0),
          compact(kLists && params.compact_rows != 0 && *params.list.valid < params.compact_rows) {}

    /// Tiles of the vocabulary.
    static __device__ __forceinline__ int tiles(const Params& params) { return ceil_div(forward_columns<Problem>(params), TileT::kBlockN); }
    /// Number of things that are dealt to clusters: tiles, or segments.
    static __device__ __forceinline__ int dealt(const Params& params) {
        return kSegment > 0 ? ForwardShare::segments_of(tiles(params), kSegment) : tiles(params);
    }
    static __device__ __forceinline__ int cluster() { return static_cast<int>(blockIdx.x) / TileT::kCluster; }
    __device__ __forceinline__ bool has_work() const { return share.rows != 0 && cluster() < share.clusters; }

    __device__ __forceinline__ int first_row(int row_cluster) const {
        return row_cluster * kClusterRows + (TileT::kCluster > 1 ? static_cast<int>(rank) * TileT::kBlockM : 0);
    }
    /// Label of a row: a class, or below 0.
    __device__ __forceinline__ int target_of(int row) const {
        return row < share.rows ? listed_row<Problem>(p.list, p.targets, row).target : kIgnored;
    }
    __device__ __forceinline__ float temperature_of(int row) const {
        if constexpr (Problem::temperature) {
            if (row >= share.rows) return 1.f;
            if constexpr (Problem::lists_rows) {
                if (p.list.rows != nullptr) row = p.list.rows[p.list.first + row].row;
            }
            return p.temperatures[row];
        }
        return 1.f;
    }
    __device__ __forceinline__ int group_of(int row) const {
        if (row >= share.rows) return kNoGroup;
        if constexpr (Problem::lists_rows) {
            if (p.list.rows != nullptr) row = p.list.rows[p.list.first + row].row;
        }
        return p.row_groups[row];
    }

    /// This block's rows of a cluster of rows, as they lie in hidden, or in the compact rows.
    struct TileRows {
        const ListedRow* listed;  ///< null: rows from `first` on
        int first;
        int last;  ///< last listed row of the tile, counted from `first`; −1: none is listed

        __device__ __forceinline__ bool neighbours() const {
            return listed == nullptr || last < 0 || listed[last].row - listed[0].row == last;
        }
        __device__ __forceinline__ int begin() const { return listed == nullptr || last < 0 ? first : listed[0].row; }
    };
    __device__ __forceinline__ TileRows tile_rows(int row_cluster) const {
        const int first = first_row(row_cluster);
        const int last = min(TileT::kBlockM, share.rows - first) - 1;
        if constexpr (!kLists) return {nullptr, first, last};
        if (compact) return {nullptr, p.list.first + first, last};
        return {p.list.rows != nullptr ? p.list.rows + p.list.first + first : nullptr, first, last};
    }

    /// Whether the launch goes through stale rows again: rows whose reference turned out to be far below their logits. Only their
    /// exponentials are written.
    __device__ __forceinline__ bool goes_again() const {
        if constexpr (Problem::retain) return p.again != 0;
        return false;
    }
    /// Whether any row is stale; asked by the whole block.
    __device__ __forceinline__ bool any_stale() const {
        bool found = false;
        for (int row = static_cast<int>(threadIdx.x) * kOutputRows; row < share.rows; row += TileT::kThreads * kOutputRows) {
            found = found || p.stale[row / kOutputRows] != 0u;
        }
        return __syncthreads_or(found) != 0;
    }
    /// Whether any row of a cluster of rows is stale, or any other row of the same blocks of kOutputRows.
    __device__ __forceinline__ bool any_stale_of(int row_cluster) const {
        const int begin = row_cluster * kClusterRows;
        const int end = min(begin + kClusterRows, share.rows);
        bool found = false;
#pragma unroll 1
        for (int row = begin; row < end; row += kOutputRows) found = found || p.stale[row / kOutputRows] != 0u;
        return found;
    }
};

}  // namespace flce

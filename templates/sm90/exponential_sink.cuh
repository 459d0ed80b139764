// Where a tile's exponentials go, in cuda_sm90a's forward: nowhere, or to memory for backward.
#pragma once

#include "flce/sm90/forward_launch.cuh"
#include "flce/sm90/store.cuh"

namespace flce {

template <class Launch>
struct NoSink {
    enum : int { kBytes = 0 };

    __device__ __forceinline__ NoSink(const typename Launch::Params& /*p*/, unsigned /*smem*/,
                                      const PlaceSm90<typename Launch::TileT>& /*place*/) {}
    /// Whether exponentials of the launch are relative to their rows' references.
    __device__ __forceinline__ bool active() const { return false; }
    /// Whether the exponentials of a tile are stored.
    __device__ __forceinline__ bool stores(int /*first_column*/) const { return false; }
    /// Reference of a row among the launch's `rows`.
    __device__ __forceinline__ float reference_of(int /*row*/, int /*rows*/) const { return 0.f; }
    /// Stores a piece of 64 rows of a tile.
    template <int kColumnPieces>
    __device__ __forceinline__ void store(const float (& /*c*/)[kColumnPieces][4], int /*first_column*/, int /*first_row*/) {}
    /// Waits until everything has left.
    __device__ __forceinline__ void finish() const {}
};

/// Exponentials of the first columns of the vocabulary leave through panels of shared memory.
template <class Launch>
struct RetainedSink {
    using TileT = typename Launch::TileT;
    // Panels that leave together. Three of them have no room beside more sums of rows than every Problem has.
    enum : bool { kMoreSums = PartialFields<typename Launch::Problem>::kCount > 2 };
    enum : int { kPanelWidth = TileT::kBlockN % 192 == 0 ? (kMoreSums ? 1 : 3) : TileT::kBlockN % 128 == 0 ? 2 : 1 };
    using PanelsT = PanelStore<typename Launch::Problem::Element, TileT, kPanelWidth, 1>;
    enum : int { kBytes = PanelsT::kBytes };

    const typename Launch::Params& p;
    PanelsT panels;

    __device__ __forceinline__ RetainedSink(const typename Launch::Params& params, unsigned smem, const PlaceSm90<TileT>& place)
        : p(params), panels(smem, place) {}
    __device__ __forceinline__ bool active() const { return p.retained_columns > 0; }
    __device__ __forceinline__ bool stores(int first_column) const { return first_column < p.retained_columns; }
    __device__ __forceinline__ float reference_of(int row, int rows) const { return row < rows ? p.references[row] : 0.f; }
    template <int kColumnPieces>
    __device__ __forceinline__ void store(const float (&c)[kColumnPieces][4], int first_column, int first_row) {
        constexpr int kGroup = kPanelWidth * 8;  // column pieces
#pragma unroll
        for (int first = 0; first < kColumnPieces; first += kGroup) {
            panels.open();
#pragma unroll
            for (int h = 0; h < 2; ++h) panels.put(c, h, first, 1.f);
            panels.close(BlockedMap{p.retained_map, kRetainedShift}, first_column + first * 8, first_row);
        }
    }
    __device__ __forceinline__ void finish() const { panels.finish(); }
};

template <class Launch>
using ExponentialSink = Select<Launch::Problem::retain, RetainedSink<Launch>, NoSink<Launch>>;

}  // namespace flce

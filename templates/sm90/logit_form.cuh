// Forms of logits in cuda_sm90a's forward: what a logit is in the accumulators, and how a thread adds up a row's and makes the exponentials
// that are retained. A form has
//
//     enum : int { kPieces, kColumnPieces };                     of the accumulators
//     static RowSums nothing();                                  sums of no logit
//     void make(place, tile, c, weighted);                       products become logits; weighted += Σ c_j·z_j, with label smoothing
//     float logit(float c);                                      logit that an accumulator tells
//     void reduce(c, place, tile, sums, sink);                   a tile to the sums; its exponentials to the sink
//     RowSums whole(sums, sink, row);                            a row's sums, relative to its largest logit
#pragma once

#include "flce/common/row_exponentials.cuh"
#include "flce/sm90/exponential_sink.cuh"
#include "flce/sm90/forward_sums.cuh"

namespace flce {

/// Place of a tile of logits.
struct LogitTile {
    int first_column;  ///< class of its first column
    int first_row;     ///< among the launch's rows
    int part;          ///< part of the share
};

/// Accumulators are logits. A thread has kColumnPieces pairs of a row's columns, in c[·][2·h] and c[·][2·h + 1].
template <class Launch, class MainloopT>
struct LogitForm {
    using Problem = typename Launch::Problem;
    using Place = PlaceSm90<typename Launch::TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    using Rows = LogitRows<Problem, kColumnPieces, OneThread>;

    const Launch& launch;

    static __device__ __forceinline__ RowSums nothing() { return sums_of_nothing(lowest_logit(), -infinity()); }
    __device__ __forceinline__ void make(const Place& place, const LogitTile& tile, Accumulators& c, float (&weighted)[kPieces][2]) const {
        to_logits<Problem>(
            launch.p, place, tile.first_column, Launch::TileT::kBlockN,
            [&](int row) { return launch.temperature_of(tile.first_row + row); }, c, weighted);
        if constexpr (Problem::class_groups) {
            rule_out_groups<Problem>(
                launch.p, place, tile.first_column, [&](int row) { return launch.group_of(tile.first_row + row); },
                [&](int row) { return launch.target_of(tile.first_row + row); }, c);
        }
    }
    __device__ __forceinline__ float logit(float c) const { return c; }

    template <class Sums, class Sink>
    __device__ __forceinline__ void reduce(Accumulators& c, const Place& place, const LogitTile& tile, const Sums& sums, Sink& sink) const {
        if (sink.active()) return retain(c, place, tile, sums, sink);
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                RowSums row = sums.load(tile.part, 2 * i + h);
                Rows::reduce_row(c[i], h, tile.first_column + place.column(0, 0), row);
                sums.store(tile.part, 2 * i + h, row);
            }
    }
    template <class Sink>
    __device__ __forceinline__ RowSums whole(RowSums sums, const Sink& sink, int row) const {
        if (sink.active()) Rows::to_largest(sums, sink.reference_of(row, launch.share.rows));
        return sums;
    }

private:
    /// Turns logits into exponentials above the row's reference and adds those up.
    template <class Sums, class Sink>
    __device__ __forceinline__ void retain(Accumulators& c, const Place& place, const LogitTile& tile, const Sums& sums, Sink& sink) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = tile.first_row + place.row(i, h);
                RowSums of_row = sums.load(tile.part, 2 * i + h);
                const int first_class = tile.first_column + place.column(0, 0);
                if (Problem::stores_derivative && !sink.stores(tile.first_column)) {
                    Rows::exponentials_of_row(c[i], h, sink.reference_of(row, launch.share.rows), NothingStored{}, first_class, of_row);
                } else {
                    Rows::exponentials_of_row(c[i], h, sink.reference_of(row, launch.share.rows), stored_factor(row), first_class, of_row);
                }
                sums.store(tile.part, 2 * i + h, of_row);
            }
            if (sink.stores(tile.first_column)) sink.store(c[i], tile.first_column, tile.first_row + place.first_row() + i * 64);
        }
    }
    __device__ __forceinline__ StoredFactor<Problem> stored_factor(int row) const {
        return {LogitDerivative<Problem>(launch.p.transform, Problem::stores_derivative ? launch.temperature_of(row) : 1.f)};
    }
};

/// Accumulators are falls of softcapped logits (Falls). No logit is further than kMostAboveReference from the row's reference, nor from 0.
/// So a row's sum is relative to its reference (to 0 without one), and no maximum has to be known first. RowSums::max is the least fall
/// here, which the largest logit has; infinite while there is none.
template <class Launch, class MainloopT>
struct FallForm {
    using Problem = typename Launch::Problem;
    using Place = PlaceSm90<typename Launch::TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    using Rows = FallRows<Problem, kColumnPieces>;

    const Launch& launch;

    static __device__ __forceinline__ RowSums nothing() { return sums_of_nothing(infinity(), -infinity()); }
    __device__ __forceinline__ void make(const Place& place, const LogitTile& tile, Accumulators& c,
                                         float (& /*weighted*/)[kPieces][2]) const {
        to_falls<Problem>(launch.p, place, tile.first_column, Launch::TileT::kBlockN, c);
    }
    __device__ __forceinline__ float logit(float c) const { return Problem::falls(launch.p.transform).logit(c); }

    template <class Sums, class Sink>
    __device__ __forceinline__ void reduce(Accumulators& c, const Place& place, const LogitTile& tile, const Sums& sums, Sink& sink) const {
        const bool stored = sink.stores(tile.first_column);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const FallPowersAbove of_row = above(sink, tile.first_row + place.row(i, h));
                RowSums row = sums.load(tile.part, 2 * i + h);
                if (stored) {
                    Rows::template add<true>(c[i], h, of_row, row);
                } else {
                    Rows::template add<false>(c[i], h, of_row, row);
                }
                sums.store(tile.part, 2 * i + h, row);
            }
            if (stored) sink.store(c[i], tile.first_column, tile.first_row + place.first_row() + i * 64);
        }
    }
    template <class Sink>
    __device__ __forceinline__ RowSums whole(RowSums sums, const Sink& sink, int row) const {
        return Rows::whole(sums, above(sink, row));
    }

private:
    template <class Sink>
    __device__ __forceinline__ FallPowersAbove above(const Sink& sink, int row) const {
        return Rows::above(launch.p.transform, sink.active() ? sink.reference_of(row, launch.share.rows) : 0.f);
    }
};

template <class Launch, class MainloopT>
using FormOf = Select<Launch::Problem::has_falls, FallForm<Launch, MainloopT>, LogitForm<Launch, MainloopT>>;

}  // namespace flce

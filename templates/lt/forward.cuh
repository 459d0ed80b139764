// Forward, after each product of a stretch of the vocabulary: logits are reduced to RowSums, and exponentials are stored where they are
// retained. A warp owns two rows and a part (split) of the stretch, and goes on with the rows' sums of the stretches before.
#pragma once

#include "flce/lt/top_lists.cuh"

namespace flce {

/// The one tile that a warp has.
struct LtTile {};

template <class Problem, class TileT>
struct ForwardBlock {
    using Element = typename Problem::Element;
    using Fields = PartialFields<Problem>;
    using Params = TemperedOf<Problem, LtForwardParams>;
    using Rows = LogitRows<Problem, LtPlace::kColumnPieces, OneThread, LtColumns>;
    enum : int { kSmemBytes = 0 };
    enum : int { kThreads = kLtThreads };

    const Params& p;
    LtPlace place;
    int targets[LtPlace::kRows];
    float references[LtPlace::kRows];
    RowSums sums[LtPlace::kRows];
    TopListOf<Problem> top[LtPlace::kRows];

    __device__ __forceinline__ explicit ForwardBlock(const Params& params) : p(params) {
        place.first_row = (static_cast<int>(blockIdx.x) * (kLtThreads / 32) + LtPlace::warp()) * LtPlace::kRows;
    }

    __device__ __forceinline__ void run() {
        wait_for_product();
        if (place.first_row >= p.rows) return;
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            const int row = place.row(0, h);
            targets[h] = row < p.rows ? load_target<Problem>(p.targets, row) : kIgnored;
            references[h] = Problem::retain && p.retained_columns > 0 && row < p.rows ? p.references[row] : 0.f;
            sums[h] = sums_of_nothing(lowest_logit(), -infinity());
            top[h].load(p, min(row, p.rows - 1));
        }
        const int split = static_cast<int>(blockIdx.y);
        const int tiles = ceil_div(p.columns, kLtTileColumns);
        const int first = static_cast<int>(static_cast<long long>(tiles) * split / p.splits);
        const int end = static_cast<int>(static_cast<long long>(tiles) * (split + 1) / p.splits);
        LtSums next;
        if (first < end) load(first, next);
#pragma unroll 1
        for (int tile = first; tile < end; ++tile) {
            LtSums c;
            take(next, c);
            if (tile + 1 < end) load(tile + 1, next);  // they arrive while this tile is added up
            add_tile(c, p.first_column + tile * kLtTileColumns);
        }
        finish(split);
    }

    struct RowTemperatures {
        const Params& p;
        __device__ __forceinline__ float operator()(int row) const {
            if constexpr (Problem::temperature) return row < p.rows ? p.temperatures[row] : 1.f;
            return 1.f;
        }
    };

    __device__ __forceinline__ void load(int tile, LtSums& c) const {
        load_sums(p.sums, p.ld, place, p.rows, tile * kLtTileColumns, p.columns, c);
    }
    static __device__ __forceinline__ void take(const LtSums& from, LtSums& c) {
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[0][j][e] = from[0][j][e];
    }

    __device__ __forceinline__ void add_tile(LtSums& c, int first_column) {
        float weighted[1][2] = {};
        to_logits<Problem>(p, place, first_column, kLtTileColumns, RowTemperatures{p}, c, weighted);
        if constexpr (Problem::class_groups) {
            const auto group_of = [&](int row) { return row < p.rows ? p.row_groups[row] : +kNoGroup; };
            rule_out_groups<Problem>(p, place, first_column, group_of, [&](int row) { return targets[row - place.first_row]; }, c);
        }
        const bool stored = Problem::retain && first_column < p.retained_columns;
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            pick_target(c[0], h, first_column);
            if constexpr (Problem::top_k > 0) {
                if (place.row(0, h) < p.rows) top[h].add(c[0], h, first_column + place.column(0, 0), end_of_classes());
            }
            add_row(c[0], h, stored, first_column + place.column(0, 0));
            if constexpr (Problem::label_smoothing) sums[h].weighted_sum += weighted[0][h];
            if constexpr (Problem::retain) {
                if (stored && place.row(0, h) < p.rows) store_row(c[0], h, first_column);
            }
        }
    }

    __device__ __forceinline__ int end_of_classes() const { return Problem::shard ? p.targets.columns : Problem::vocab_size; }

    /// Exactly one thread of all blocks holds a row's target logit.
    __device__ __forceinline__ void pick_target(const float (&c)[LtPlace::kColumnPieces][4], int h, int first_column) {
        const int within = targets[h] - first_column - place.column(0, 0);
        if (!has_column<LtPlace::kColumnPieces, LtColumns>(within)) return;
        p.target_logits[place.row(0, h)] = pick_column<LtColumns>(c, h, within);
    }

    /// Logits become exponentials where they are stored.
    __device__ __forceinline__ void add_row(float (&c)[LtPlace::kColumnPieces][4], int h, bool stored, int first_class) {
        if constexpr (Problem::retain) {
            if (p.retained_columns > 0) {
                if (Problem::stores_derivative && !stored) {
                    return Rows::exponentials_of_row(c, h, references[h], NothingStored{}, first_class, sums[h]);
                }
                const float temperature = Problem::stores_derivative ? RowTemperatures{p}(place.row(0, h)) : 1.f;
                const StoredFactor<Problem> factor{LogitDerivative<Problem>(p.transform, temperature)};
                return Rows::exponentials_of_row(c, h, references[h], factor, first_class, sums[h]);
            }
        }
        Rows::reduce_row(c, h, first_class, sums[h]);
    }

    __device__ __forceinline__ void store_row(const float (&c)[LtPlace::kColumnPieces][4], int h, int first_column) const {
        Element* const to = exponentials_from<Element>(p.exponentials, p.block_bytes, place.row(0, h), first_column);
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; j += 2) {
            const uint2 words = make_uint2(Numeric<Element>::pack(c[j][2 * h], c[j][2 * h + 1]),
                                           Numeric<Element>::pack(c[j + 1][2 * h], c[j + 1][2 * h + 1]));
            __stcs(reinterpret_cast<uint2*>(to + place.column(j, 0)), words);  // the next product's operands shall stay in L2, not these
        }
    }

    __device__ __forceinline__ void finish(int split) {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            const int row = place.row(0, h);
            if constexpr (Problem::retain) {
                if (p.retained_columns > 0) Rows::to_largest(sums[h], references[h]);
            }
            const RowSums all = merge_lanes<Problem>(sums[h]);
            if (row < p.rows) top[h].store(p, row);
            if (LtPlace::lane() != 0 || row >= p.rows) continue;
            float* const at = p.partials + split * Fields::kCount * p.partial_rows + row;
            Fields::store(at, p.partial_rows, p.first != 0 ? all : merge(Fields::load(at, p.partial_rows), all));
        }
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void forward(const typename ForwardBlock<Problem, TileT>::Params& p) {
    ForwardBlock<Problem, TileT>(p).run();
}

}  // namespace flce

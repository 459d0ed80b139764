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

#include "flce/sm90/exponential_sink.cuh"
#include "flce/sm90/forward_sums.cuh"

namespace flce {

/// Place of a tile of logits.
struct LogitTile {
    int first_column;  ///< class of its first column
    int first_row;     ///< among the launch's rows
    int part;          ///< part of the share
};

/// Factor of a retained exponential: the derivative of its logit, where derivatives differ from class to class.
template <class Problem>
struct StoredFactor {
    LogitDerivative<Problem> derivative;

    __device__ __forceinline__ float times(float exponential, float logit) const {
        if constexpr (Problem::stores_derivative) {
            return exponential * derivative(logit);
        } else {
            return exponential;
        }
    }
};

/// StoredFactor where nothing is stored, so that no derivative is worked out.
struct NothingStored {
    __device__ __forceinline__ float times(float exponential, float /*logit*/) const { return exponential; }
};

/// x / divisor without a subroutine for subnormal numbers, which would cost registers: both are within 2^±118.
__device__ __forceinline__ float divided_in_range(float x, float divisor) {
    const float reciprocal = ptx::rcp_approx_ftz(divisor);
    const float rough = x * reciprocal;
    return __fmaf_rn(__fmaf_rn(-rough, divisor, x), reciprocal, rough);
}

/// Accumulators are logits. A thread has kColumnPieces pairs of a row's columns, in c[·][2·h] and c[·][2·h + 1].
template <class Launch, class MainloopT>
struct LogitForm {
    using Problem = typename Launch::Problem;
    using Place = PlaceSm90<typename Launch::TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };

    const Launch& launch;

    static __device__ __forceinline__ RowSums nothing() { return sums_of_nothing(lowest_logit(), -infinity()); }
    __device__ __forceinline__ void make(const Place& place, const LogitTile& tile, Accumulators& c, float (&weighted)[kPieces][2]) const {
        to_logits<Problem>(
            launch.p, place, tile.first_column, Launch::TileT::kBlockN,
            [&](int row) { return launch.temperature_of(tile.first_row + row); }, c, weighted);
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
                reduce_row(c[i], h, tile.first_column + place.column(0, 0), row);
                sums.store(tile.part, 2 * i + h, row);
            }
    }
    template <class Sink>
    __device__ __forceinline__ RowSums whole(RowSums sums, const Sink& sink, int row) const {
        if (sink.active()) {
            const float reference = sink.reference_of(row, launch.share.rows);
            if (shares(sums.max, reference)) to_own_max(sums, reference);
        }
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
                    exponentials_of_row(c[i], h, sink.reference_of(row, launch.share.rows), NothingStored{}, first_class, of_row);
                } else {
                    exponentials_of_row(c[i], h, sink.reference_of(row, launch.share.rows), stored_factor(row), first_class, of_row);
                }
                sums.store(tile.part, 2 * i + h, of_row);
            }
            if (sink.stores(tile.first_column)) sink.store(c[i], tile.first_column, tile.first_row + place.first_row() + i * 64);
        }
    }
    __device__ __forceinline__ StoredFactor<Problem> stored_factor(int row) const {
        return {LogitDerivative<Problem>(launch.p.transform, Problem::stores_derivative ? launch.temperature_of(row) : 1.f)};
    }

    /// Whether a row's sums add up the retained exponentials, relative to its reference, and need no exponentials of their own: where the
    /// largest logit so far is near it. Others are relative to that logit.
    static __device__ __forceinline__ bool shares(float max, float reference) {
        return kPowers<Problem> && !Problem::entropy && PowersAbove::takes(reference) && fabsf(max - reference) <= kMostShared;
    }
    /// Squares are to stay within a float's range as well.
    enum : int { kMostShared = Problem::square_sum ? kMostAboveReference / 2 : kMostAboveReference };

    /// Makes exponentials, and cuts them off where they are far from the reference: a row that is ignored, whatever it holds, has to
    /// multiply a finite number by 0. `first_class`: class of the thread's first column. `Factor`: StoredFactor, or NothingStored.
    template <class Factor>
    static __device__ __forceinline__ void exponentials_of_row(float (&c)[kColumnPieces][4], int h, float reference, const Factor& factor,
                                                               int first_class, RowSums& sums) {
        constexpr float kMostPower = 100.f;
        const PowersAbove above(reference);
        const float old_max = sums.max;
        const float tile_max = row_max(c, h);
        const float now_max = fmaxf(old_max, tile_max);
        const bool shared = shares(old_max, reference);
        if (shares(now_max, reference)) {
            if (!shared) {
                const float grown = above.exp(old_max);
                sums.exp_sum *= grown;
                if constexpr (Problem::square_sum) sums.exp_sq_sum *= grown * grown;
            }
            if constexpr (Problem::top1) find_top1(c, h, tile_max, first_class, sums);
            sums.max = now_max;
            float exp_sum[2] = {0.f, 0.f};
            float squares = 0.f;
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float exponential = above.exp(c[j][2 * h + e]);
                    exp_sum[e] += exponential;
                    if constexpr (Problem::square_sum) squares = __fmaf_rn(exponential, exponential, squares);
                    c[j][2 * h + e] = factor.times(exponential, c[j][2 * h + e]);
                }
            }
            sums.exp_sum += exp_sum[0] + exp_sum[1];
            if constexpr (Problem::square_sum) sums.exp_sq_sum += squares;
            return;
        }
        if (shared) to_own_max(sums, reference);
        const float taken = reduce_row(c, h, first_class, sums);
        reference -= taken;
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float exponential = ptx::ex2_approx_ftz(fminf((c[j][2 * h + e] - reference) * log2_e(), kMostPower));
                c[j][2 * h + e] = factor.times(exponential, c[j][2 * h + e] + taken);
            }
        }
    }
    /// The largest logit's own exponential becomes exactly 1, so that confident tokens keep their small losses.
    static __device__ __forceinline__ void to_own_max(RowSums& sums, float reference) {
        const float largest = PowersAbove(reference).exp(sums.max);
        sums.exp_sum = divided_in_range(sums.exp_sum, largest);
        if constexpr (Problem::square_sum) sums.exp_sq_sum = divided_in_range(divided_in_range(sums.exp_sq_sum, largest), largest);
    }

    static __device__ __forceinline__ float row_max(const float (&c)[kColumnPieces][4], int h) {
        float max = fmaxf(c[0][2 * h], c[0][2 * h + 1]);
#pragma unroll
        for (int j = 1; j < kColumnPieces; ++j) max = fmaxf(max, fmaxf(c[j][2 * h], c[j][2 * h + 1]));
        return max;
    }

    /// Before sums.max is that of the tile, too. The tile's columns are only looked through where it has a logit as large as any before, of
    /// which there are fewer and fewer.
    static __device__ __forceinline__ void find_top1(const float (&c)[kColumnPieces][4], int h, float tile_max, int first_class,
                                                     RowSums& sums) {
        if (tile_max >= sums.max) {
            sums.top1 = first_of_largest(sums.max, sums.top1, tile_max, class_of(c, h, tile_max, first_class));
        }
    }

    /// Adds a row of logits to its sums, and returns the number that it has subtracted from each logit: nothing, or their maximum where
    /// that is huge.
    static __device__ __forceinline__ float reduce_row(float (&c)[kColumnPieces][4], int h, int first_class, RowSums& sums) {
        const float old_max = sums.max;
        const float tile_max = row_max(c, h);
        const float now_max = fmaxf(old_max, tile_max);
        if constexpr (Problem::top1) find_top1(c, h, tile_max, first_class, sums);
        float shift = sums.exp_sum > 0.f ? old_max - now_max : 0.f;
        if constexpr (Problem::entropy) shift = fmaxf(shift, farthest_below());
        const float shrunk = Problem::Math::exp(shift);
        if constexpr (Problem::entropy) sums.exp_z_sum = shrunk * (sums.exp_z_sum + shift * sums.exp_sum);
        sums.exp_sum *= shrunk;
        if constexpr (Problem::square_sum) sums.exp_sq_sum *= shrunk * shrunk;
        sums.max = now_max;
        float taken = 0.f;
        if (!SummedAbove<Problem>::takes(now_max)) {  // a column's that does not exist, too
            taken = now_max;
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) c[j][2 * h + e] -= now_max;
        }
        const float reference = now_max - taken;
        const SummedAbove<Problem> above(reference);
        float exp_sum[2] = {0.f, 0.f};
        float exp_z_sum = 0.f;
        float squares = 0.f;
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float exponential = above.exp(c[j][2 * h + e]);
                exp_sum[e] += exponential;
                if constexpr (Problem::entropy) exp_z_sum += exponential * fmaxf(c[j][2 * h + e] - reference, farthest_below());
                if constexpr (Problem::square_sum) squares = __fmaf_rn(exponential, exponential, squares);
            }
        }
        const float factor = above.factor(reference);
        sums.exp_sum = __fmaf_rn(factor, exp_sum[0] + exp_sum[1], sums.exp_sum);
        if constexpr (Problem::entropy) sums.exp_z_sum = __fmaf_rn(factor, exp_z_sum, sums.exp_z_sum);
        if constexpr (Problem::square_sum) sums.exp_sq_sum = __fmaf_rn(factor * factor, squares, sums.exp_sq_sum);
        return taken;
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
    /// Rows that are written again have their lse as reference. A row that is ignored has no lse, and its exponentials must not become NaN.
    enum : int { kMostReference = 128 };

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
                    add<true>(c[i], h, of_row, row);
                } else {
                    add<false>(c[i], h, of_row, row);
                }
                sums.store(tile.part, 2 * i + h, row);
            }
            if (stored) sink.store(c[i], tile.first_column, tile.first_row + place.first_row() + i * 64);
        }
    }
    template <class Sink>
    __device__ __forceinline__ RowSums whole(RowSums sums, const Sink& sink, int row) const {
        const FallPowersAbove of_row = above(sink, row);
        if (!(sums.max <= 1.f)) {
            sums.max = lowest_logit();
            return sums;
        }
        sums.exp_sum = divided_in_range(sums.exp_sum, of_row.exp(sums.max));
        sums.max = of_row.falls.logit(sums.max);
        return sums;
    }

private:
    template <class Sink>
    __device__ __forceinline__ FallPowersAbove above(const Sink& sink, int row) const {
        const float reference = sink.active() ? sink.reference_of(row, launch.share.rows) : 0.f;
        return {Problem::falls(launch.p.transform), fabsf(reference) <= kMostReference ? reference : 0.f};
    }

    /// Adds a row. kStored: falls become exponentials times a quarter of their logits' slopes; nothing where there is a NaN, for an ignored
    /// row has to multiply finite numbers by 0.
    template <bool kStored>
    static __device__ __forceinline__ void add(float (&c)[kColumnPieces][4], int h, const FallPowersAbove& above, RowSums& sums) {
        // Not below 0, so that they are compared as integers, two at a time. NaN is above all others.
        int least = __float_as_int(sums.max);
        float exp_sum[2] = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
            least = __vimin3_s32(least, __float_as_int(c[j][2 * h]), __float_as_int(c[j][2 * h + 1]));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& fall = c[j][2 * h + e];
                const float exponential = above.exp(fall);
                exp_sum[e] += exponential;
                if constexpr (kStored) fall = exponential * Falls::quarter_slope(fall);
            }
        }
        const float exp_sum_of_all = exp_sum[0] + exp_sum[1];
        sums.max = __int_as_float(least);
        sums.exp_sum += exp_sum_of_all;
        if constexpr (kStored) {
            if (exp_sum_of_all != exp_sum_of_all) {
#pragma unroll
                for (int j = 0; j < kColumnPieces; ++j) c[j][2 * h] = c[j][2 * h + 1] = 0.f;
            }
        }
    }
};

template <class Launch, class MainloopT>
using FormOf = Select<Launch::Problem::has_falls, FallForm<Launch, MainloopT>, LogitForm<Launch, MainloopT>>;

}  // namespace flce

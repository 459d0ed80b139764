// Rows of a tile of logits in forward: a thread adds up a row's columns that it has and, where exponentials are retained, puts them in the
// place of the logits. The accumulators of a row are c[·][2·h] and c[·][2·h + 1].
#pragma once

#include "flce/common/logit_epilogue.cuh"

namespace flce {

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

/// Threads among which a row's columns are divided, where each of them has sums and a maximum of its own.
struct OneThread {
    static __device__ __forceinline__ float largest(float of_thread) { return of_thread; }
};

/// Rows of logits. `Columns`: the Place's. `Lanes`: largest() is the largest of a number among the threads that have the same maximum in
/// their sums.
template <class Problem, int kColumnPieces, class Lanes, class Columns = MmaColumns>
struct LogitRows {
    /// Makes sums relative to the row's largest logit, where they are relative to the reference. In place: kernels that retain nothing
    /// would lose a register to a copy of the sums, although they never come here.
    static __device__ __forceinline__ void to_largest(RowSums& sums, float reference) {
        if (shares(sums.max, reference)) to_own_max(sums, reference);
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
        const float tile_max = Lanes::largest(row_max(c, h));
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
        const float taken = reduce_row(c, h, tile_max, first_class, sums);
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
            sums.top1 = first_of_largest(sums.max, sums.top1, tile_max, class_of<Columns>(c, h, tile_max, first_class));
        }
    }

    static __device__ __forceinline__ float reduce_row(float (&c)[kColumnPieces][4], int h, int first_class, RowSums& sums) {
        return reduce_row(c, h, Lanes::largest(row_max(c, h)), first_class, sums);
    }
    /// Adds a row of logits, the largest of them `tile_max`, to its sums, and returns the number that it has subtracted from each logit:
    /// nothing, or their maximum where that is huge.
    static __device__ __forceinline__ float reduce_row(float (&c)[kColumnPieces][4], int h, float tile_max, int first_class,
                                                       RowSums& sums) {
        const float old_max = sums.max;
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

/// Rows of falls. RowSums::max is the least fall, which the largest logit has; infinite while there is none.
template <class Problem, int kColumnPieces>
struct FallRows {
    /// Rows that are written again have their lse as reference. A row that is ignored has no lse, and its exponentials must not become NaN.
    enum : int { kMostReference = 128 };

    static __device__ __forceinline__ FallPowersAbove above(const float* transform, float reference) {
        return {Problem::falls(transform), fabsf(reference) <= kMostReference ? reference : 0.f};
    }
    /// Sums relative to the row's largest logit, which is then their maximum.
    static __device__ __forceinline__ RowSums whole(RowSums sums, const FallPowersAbove& above) {
        if (!(sums.max <= 1.f)) {
            sums.max = lowest_logit();
            return sums;
        }
        sums.exp_sum = divided_in_range(sums.exp_sum, above.exp(sums.max));
        sums.max = above.falls.logit(sums.max);
        return sums;
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

}  // namespace flce

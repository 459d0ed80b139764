// Exponentials of rows whose reference was poor, once their logits are known. The library cannot be called for these rows alone, since only
// the device knows whether there are any, so that they are multiplied here, without tensor cores. There are hardly ever any. Sums of
// products in another order are other logits: where logits are huge, by more than a whole number. So such a row's exponentials are relative
// to the lse of logits that were multiplied here, all of them: stale_sums finds it, and stale_rows writes what is retained.
#pragma once

#include "flce/common/retain_kernels.cuh"
#include "flce/lt/sums.cuh"

namespace flce {

/// A thread's columns: four beside each other.
struct StaleColumns {
    static __device__ __forceinline__ constexpr int of(int j) { return 2 * j; }
    template <int kColumnPieces>
    static __device__ __forceinline__ bool have(int within) {
        return within >= 0 && within < 2 * kColumnPieces;
    }
};

/// A block multiplies tiles of kSide × kSide, a thread 4 × 4 of each.
struct StalePlace {
    using Columns = StaleColumns;
    enum : int { kSide = 64 };
    enum : int { kDepth = 16 };  ///< depth of a slice
    __device__ __forceinline__ static int across() { return static_cast<int>(threadIdx.x) % 16; }
    __device__ __forceinline__ static int down() { return static_cast<int>(threadIdx.x) / 16; }
    __device__ __forceinline__ static int row(int i, int h) { return down() * 4 + i * 2 + h; }
    __device__ __forceinline__ static int column(int j, int e) { return across() * 4 + Columns::of(j) + e; }
};

template <class Problem, class TileT>
struct StaleRowsBlock {
    using Element = typename Problem::Element;
    using Params = TemperedOf<Problem, LtStaleParams>;
    using Sums = float[2][2][4];
    enum : int { kSmemBytes = 0 };
    enum : int { kThreads = kLtThreads };

    struct RowTemperatures {
        const Params& p;
        long long first_row;
        __device__ __forceinline__ float operator()(int row) const {
            if constexpr (Problem::temperature) return first_row + row < p.rows ? p.temperatures[first_row + row] : 1.f;
            return 1.f;
        }
    };

    const Params& p;
    const long long first_row;

    __device__ __forceinline__ explicit StaleRowsBlock(const Params& params)
        : p(params), first_row(static_cast<long long>(blockIdx.x) * StalePlace::kSide) {
        static_assert(StalePlace::kSide == kOutputRows, "a flag is a block's");
    }

    /// The largest logit of each row, and the sum of exponentials relative to it, in this block's part of all columns.
    __device__ __forceinline__ void sum() const {
        float max[4];
        float exp_sum[4] = {};
#pragma unroll
        for (float& of_row : max) of_row = lowest_logit();
        const int tiles = ceil_div(vocab_columns<Problem>(p), StalePlace::kSide);
        for (int tile = static_cast<int>(blockIdx.y); tile < tiles; tile += p.splits) {
            Sums c = {};
            logits_of(tile * StalePlace::kSide, c);
#pragma unroll
            for (int row = 0; row < 4; ++row) {
                const float(&pair)[2][4] = c[row / 2];
                const int h = row % 2 * 2;
                const float largest = fmaxf(fmaxf(pair[0][h], pair[0][h + 1]), fmaxf(pair[1][h], pair[1][h + 1]));
                add(max[row], exp_sum[row], largest, 0.f);
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) exp_sum[row] += ::expf(pair[j][h + e] - max[row]);
            }
        }
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            for (int lanes = 1; lanes < 16; lanes *= 2) {
                const float other = __shfl_xor_sync(0xffffffffu, max[row], lanes);
                add(max[row], exp_sum[row], other, __shfl_xor_sync(0xffffffffu, exp_sum[row], lanes));
            }
            const long long at = first_row + StalePlace::row(row / 2, row % 2);
            if (StalePlace::across() != 0 || at >= p.rows) continue;
            float* const to = p.own_sums + 2ll * static_cast<int>(blockIdx.y) * p.partial_rows + at;
            to[0] = max[row];
            to[p.partial_rows] = exp_sum[row];
        }
    }

    /// Adds sums relative to another largest logit.
    static __device__ __forceinline__ void add(float& max, float& exp_sum, float other_max, float other_sum) {
        const float largest = fmaxf(max, other_max);
        exp_sum =
            (exp_sum > 0.f ? exp_sum * ::expf(max - largest) : 0.f) + (other_sum > 0.f ? other_sum * ::expf(other_max - largest) : 0.f);
        max = largest;
    }

    /// lse of a row from sums of all parts, `fields` numbers each.
    __device__ __forceinline__ float lse_of(const float* sums, int fields, long long row) const {
        float max = lowest_logit();
        float exp_sum = 0.f;
        for (int part = 0; part < p.splits; ++part) {
            const float* const at = sums + static_cast<long long>(part) * fields * p.partial_rows + row;
            add(max, exp_sum, at[0], at[p.partial_rows]);
        }
        return max + ::logf(exp_sum);
    }

    /// Whether the row's reference has been corrected: it is then lse as forward's partial sums have it, but for a last place or two.
    __device__ __forceinline__ bool is_corrected(long long row) const {
        const float lse = lse_of(p.partials, PartialFields<Problem>::kCount, row);
        return !(fabsf(p.references[row] - lse) > 0x1p-21f * fmaxf(fabsf(lse), 1.f));
    }

    __device__ __forceinline__ void write() const {
        float lse[4];
        bool corrected[4];
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            const long long at = first_row + StalePlace::row(row / 2, row % 2);
            corrected[row] = at < p.rows && is_corrected(at);
            lse[row] = corrected[row] ? lse_of(p.own_sums, 2, at) : 0.f;
        }
        const int tiles = ceil_div(p.retained_columns, StalePlace::kSide);
        for (int tile = static_cast<int>(blockIdx.y); tile < tiles; tile += static_cast<int>(gridDim.y))
            write_tile(tile * StalePlace::kSide, lse, corrected);
    }

    __device__ __forceinline__ void logits_of(int first_column, Sums& c) const {
        multiply(p, first_row, first_column, c);
        float weighted[2][2] = {};
        to_logits<Problem>(p, StalePlace{}, first_column, StalePlace::kSide, RowTemperatures{p, first_row}, c, weighted);
    }

    static __device__ __forceinline__ void multiply(const Params& p, long long first_row, int first_column, Sums& c) {
        __shared__ float hidden[StalePlace::kDepth][StalePlace::kSide + 1];
        __shared__ float weight[StalePlace::kDepth][StalePlace::kSide + 1];
        const int end = vocab_columns<Problem>(p);
        for (int k0 = 0; k0 < Problem::hidden_size; k0 += StalePlace::kDepth) {
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < StalePlace::kDepth * StalePlace::kSide; i += kLtThreads) {
                const int k = i % StalePlace::kDepth;
                const int side = i / StalePlace::kDepth;
                const bool inside = k0 + k < Problem::hidden_size;
                const Element* const h = static_cast<const Element*>(p.hidden) + (first_row + side) * Problem::hidden_size + k0 + k;
                hidden[k][side] = inside && first_row + side < p.rows ? to_float(*h) : 0.f;
                const Element* const w = weight_at<Problem>(static_cast<const Element*>(p.weight), first_column + side, k0 + k);
                weight[k][side] = inside && first_column + side < end ? to_float(*w) : 0.f;
            }
            __syncthreads();
            for (int k = 0; k < StalePlace::kDepth; ++k) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int j = 0; j < 2; ++j)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                float& sum = c[i][j][2 * h + e];
                                sum = __fmaf_rn(hidden[k][StalePlace::row(i, h)], weight[k][StalePlace::column(j, e)], sum);
                            }
            }
        }
    }

    __device__ __forceinline__ void write_tile(int first_column, const float (&lse)[4], const bool (&corrected)[4]) const {
        constexpr float kMostPower = 100.f;
        Sums c = {};
        logits_of(first_column, c);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const long long row = first_row + StalePlace::row(i, h);
                if (!corrected[2 * i + h]) continue;
                const float temperature = Problem::stores_derivative ? RowTemperatures{p, first_row}(StalePlace::row(i, h)) : 1.f;
                const StoredFactor<Problem> factor{LogitDerivative<Problem>(p.transform, temperature)};
                Element* const to = exponentials_from<Element>(p.exponentials, p.block_bytes, row, first_column);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float pair[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float logit = c[i][j][2 * h + e];
                        // Finite whatever the row holds, as in forward.
                        pair[e] = factor.times(ptx::ex2_approx_ftz(fminf((logit - lse[2 * i + h]) * log2_e(), kMostPower)), logit);
                    }
                    *reinterpret_cast<unsigned*>(to + StalePlace::column(j, 0)) = Numeric<Element>::pack(pair[0], pair[1]);
                }
            }
        }
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void stale_sums(const typename StaleRowsBlock<Problem, TileT>::Params& p) {
    wait_for_product();
    if (p.stale[blockIdx.x] != 0u) StaleRowsBlock<Problem, TileT>(p).sum();
}

template <class Problem, class TileT>
__device__ __forceinline__ void stale_rows(const typename StaleRowsBlock<Problem, TileT>::Params& p) {
    wait_for_product();
    if (p.stale[blockIdx.x] != 0u) StaleRowsBlock<Problem, TileT>(p).write();
}

}  // namespace flce

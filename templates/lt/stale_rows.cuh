// Exponentials of rows whose reference was poor, once their logits are known. The library cannot be called for these rows alone, since only
// the device knows whether there are any, so that they are multiplied here, without tensor cores. There are hardly ever any.
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

    static __device__ __forceinline__ void run(const Params& p) {
        static_assert(StalePlace::kSide == kOutputRows, "a flag is a block's");
        wait_for_product();
        if (p.stale[blockIdx.x] == 0u) return;
        const long long first_row = static_cast<long long>(blockIdx.x) * StalePlace::kSide;
        for (int tile = static_cast<int>(blockIdx.y); tile * StalePlace::kSide < p.retained_columns; tile += static_cast<int>(gridDim.y)) {
            write_tile(p, first_row, tile * StalePlace::kSide);
        }
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

    static __device__ __forceinline__ void write_tile(const Params& p, long long first_row, int first_column) {
        using Rows = LogitRows<Problem, 2, OneThread, StaleColumns>;
        Sums c = {};
        multiply(p, first_row, first_column, c);
        float weighted[2][2] = {};
        const RowTemperatures temperatures{p, first_row};
        to_logits<Problem>(p, StalePlace{}, first_column, StalePlace::kSide, temperatures, c, weighted);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const long long row = first_row + StalePlace::row(i, h);
                if (row >= p.rows) continue;
                const float temperature = Problem::stores_derivative ? temperatures(StalePlace::row(i, h)) : 1.f;
                RowSums unused = sums_of_nothing(lowest_logit(), -infinity());
                Rows::exponentials_of_row(c[i], h, p.references[row],
                                          StoredFactor<Problem>{LogitDerivative<Problem>(p.transform, temperature)}, 0, unused);
                Element* const to = exponentials_from<Element>(p.exponentials, p.block_bytes, row, first_column);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    *reinterpret_cast<unsigned*>(to + StalePlace::column(j, 0)) =
                        Numeric<Element>::pack(c[i][j][2 * h], c[i][j][2 * h + 1]);
                }
            }
        }
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void stale_rows(const typename StaleRowsBlock<Problem, TileT>::Params& p) {
    StaleRowsBlock<Problem, TileT>::run(p);
}

}  // namespace flce

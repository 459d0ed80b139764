// Backward, after each product of some rows and columns: logits become their gradient, in the Problem's dtype.
#pragma once

#include "flce/common/gradient_epilogue.cuh"
#include "flce/lt/sums.cuh"

namespace flce {

/// The gradients of a warp's rows of sums, for a cross entropy.
template <class Problem>
struct CrossEntropyRows {
    using Params = TemperedOf<Problem, LtDlogitsParams>;

    static __device__ __forceinline__ void load(const Params& p, const LtPlace& place, int column0, LtSums& c) {
        load_sums(p.sums, p.sums_ld, place, p.rows, column0, p.columns, c);
    }
    static __device__ __forceinline__ void replace(const Params& p, const LtPlace& place, int column0, float scale, LtSums& c) {
        if constexpr (Problem::bias) add_bias<Problem>(p, place, column0, c);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) row_gradient<Problem>(p, place, column0, place.row(0, h), scale, c[0], h);
    }
};

/// `Rows` loads sums, or what stands for them, and replaces them by gradients.
template <class Problem, class Rows>
struct DlogitsBlock {
    using Element = typename Problem::Element;
    using Params = typename Rows::Params;
    enum : int { kSmemBytes = 0 };
    enum : int { kThreads = kLtThreads };
    enum : int { kWarps = kLtThreads / 32 };
    enum : int { kWarpRows = kLtBlockRows / kWarps };

    const Params& p;
    LtPlace place;
    int column0;
    float column_sums[LtPlace::kColumnPieces][2];

    __device__ __forceinline__ explicit DlogitsBlock(const Params& params)
        : p(params), column0(static_cast<int>(blockIdx.y) * kLtTileColumns), column_sums{} {}

    __device__ __forceinline__ void run() {
        wait_for_product();
        write_factors<Problem>(p.factors, p.scalars);
        const float scale = dlogits_scale<Problem>(p.scalars, false);
        const int first = static_cast<int>(blockIdx.x) * kLtBlockRows + LtPlace::warp() * kWarpRows;
#pragma unroll 1
        for (int row = first; row < min(first + kWarpRows, p.rows); row += LtPlace::kRows) {
            place.first_row = row;
            LtSums c;
            Rows::load(p, place, column0, c);
            Rows::replace(p, place, column0, scale, c);
#pragma unroll
            for (int h = 0; h < LtPlace::kRows; ++h) {
                if (row + h < p.rows) write(c[0], h, row + h);
            }
        }
        if constexpr (Problem::bias) {
            if (p.bias_partials != nullptr) sum_columns();
        }
    }

    __device__ __forceinline__ void write(float (&c)[LtPlace::kColumnPieces][4], int h, int row) {
        Element* const to = static_cast<Element*>(p.dlogits) + row * p.ld + column0;
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; j += 2) {
            const int column = place.column(j, 0);
            float four[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                four[e] = column0 + column + e < p.columns ? c[j + e / 2][2 * h + e % 2] : 0.f;
                if constexpr (Problem::bias) column_sums[j + e / 2][e % 2] += four[e];
                if constexpr (kSame<Element, Fp16>) four[e] = ptx::clamp_nan(four[e], 65504.f);
            }
            // A chunk's leading dimension has room for whole groups.
            if (column0 + column >= p.columns) continue;
            if constexpr (Numeric<Element>::kHalf) {
                *reinterpret_cast<uint2*>(to + column) =
                    make_uint2(Numeric<Element>::pack(four[0], four[1]), Numeric<Element>::pack(four[2], four[3]));
            } else {
                *reinterpret_cast<float4*>(to + column) = make_float4(four[0], four[1], four[2], four[3]);
            }
        }
    }

    /// Sums of the block's columns, still scaled, for the bias gradient: over a warp's rows, then the warps, in fixed order.
    __device__ __forceinline__ void sum_columns() {
        __shared__ float of_warps[kWarps][kLtTileColumns];
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) of_warps[LtPlace::warp()][place.column(j, e)] = column_sums[j][e];
        __syncthreads();
        for (int column = static_cast<int>(threadIdx.x); column < kLtTileColumns; column += kLtThreads) {
            float sum = of_warps[0][column];
            for (int warp = 1; warp < kWarps; ++warp) sum += of_warps[warp][column];
            if (column0 + column < p.columns) p.bias_partials[blockIdx.x * p.ld + column0 + column] = sum;
        }
    }
};

template <class Problem, class TileT>
struct LtDlogits : DlogitsBlock<Problem, CrossEntropyRows<Problem>> {
    using DlogitsBlock<Problem, CrossEntropyRows<Problem>>::DlogitsBlock;
};
template <class Problem, class TileT>
__device__ __forceinline__ void dlogits(const typename LtDlogits<Problem, TileT>::Params& p) {
    LtDlogits<Problem, TileT>(p).run();
}

}  // namespace flce

// Epilogues of the GEMMs over retained exponentials, for any mainloop: c[i][j][2·h + e] is at place.row(i, h), place.column(j, e).
#pragma once

#include "flce/common/problem.cuh"

namespace flce {

/// Multiplies each row, the first of which is `first_row` of `rows`, by its scale. A scale of 0 is an ignored row's, whatever its products
/// are.
template <class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void scale_tile_rows(const Place& place, const float* scales, int first_row, int rows,
                                                float (&c)[kPieces][kColumnPieces][4]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + place.row(i, h);
            const float scale = row < rows ? scales[row] : 0.f;
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) c[i][j][2 * h + e] = scale == 0.f ? 0.f : c[i][j][2 * h + e] * scale;
            }
        }
    }
}

/// Subtracts label smoothing's term from a tile of grad_hidden: the row's share of the sum of the weight. `first_column`: the tile's.
template <int kHidden, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void take_weight_smoothing(const Place& place, const float* row_smoothing, const float* weight_sum,
                                                      int first_row, int rows, int first_column, float (&c)[kPieces][kColumnPieces][4]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + place.row(i, h);
            const float smoothing = row < rows ? row_smoothing[row] : 0.f;
            if (smoothing == 0.f) continue;
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) {
                const int k = first_column + place.column(j, 0);
                if (k >= kHidden) break;
                const float2 sum = *reinterpret_cast<const float2*>(weight_sum + k);
                c[i][j][2 * h] = __fmaf_rn(-smoothing, sum.x, c[i][j][2 * h]);
                c[i][j][2 * h + 1] = __fmaf_rn(-smoothing, sum.y, c[i][j][2 * h + 1]);
            }
        }
    }
}

/// Subtracts label smoothing's term from a tile of grad_weight, as it lies in memory from (m0, n0) on: the class' share of the sum of the
/// hidden states. `columns`: classes of the launch.
template <class Problem, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void take_hidden_smoothing(const Place& place, const float* class_weight, const float* hidden_sum, int m0,
                                                      int n0, int columns, float (&c)[kPieces][kColumnPieces][4]) {
    const auto smoothing_of = [&](int column) { return Problem::class_weight ? class_weight[min(column, columns - 1)] : 1.f; };
    const auto sum_of = [&](int k) { return k < Problem::hidden_size ? hidden_sum[k] : 0.f; };
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int m = m0 + place.row(i, h);
            const float of_row = Problem::hidden_major ? sum_of(m) : smoothing_of(m);
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int n = n0 + place.column(j, e);
                    const float of_column = Problem::hidden_major ? smoothing_of(n) : sum_of(n);
                    c[i][j][2 * h + e] = __fmaf_rn(-of_row, of_column, c[i][j][2 * h + e]);
                }
            }
        }
    }
}

}  // namespace flce

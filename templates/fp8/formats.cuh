// Formats of products' operands, and what a gradient's sums are multiplied with.
#pragma once

#include "flce/fp8/codes.cuh"

namespace flce {

/// Formats of A and B.
enum class CodesFp8 { s8_s8, e4m3_e4m3, e5m2_e4m3 };

template <class Problem>
__device__ __forceinline__ constexpr CodesFp8 logits_codes() {
    return Problem::int8_logits ? CodesFp8::s8_s8 : CodesFp8::e4m3_e4m3;
}
template <class Problem>
__device__ __forceinline__ constexpr CodesFp8 gradient_codes() {
    return Problem::e5m2_dlogits ? CodesFp8::e5m2_e4m3 : CodesFp8::e4m3_e4m3;
}

/// Multiplies the sums of a tile, whose first row is `first_row`, with `factor` and with their rows' factors. A row's factor of 0 is an
/// ignored one's, whose sum does not count.
template <class Params, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void scale_gradient(const Params& p, const Place& place, int first_row, float factor,
                                               float (&c)[kPieces][kColumnPieces][4]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float f = factor;
            if (p.row_factors != nullptr) {
                const int row = first_row + place.row(i, h);
                const float of_row = row < p.m ? p.row_factors[row] : 0.f;
                f = of_row * factor;
            }
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) c[i][j][2 * h + e] = f == 0.f ? 0.f : c[i][j][2 * h + e] * f;
        }
}

/// Takes each class's weight times the tokens' sum off a tile of grad_weight whose first row and column are these, where its parameters
/// have label smoothing's.
template <class Problem, class Params, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void take_smoothing(const Params& p, const Place& place, int first_row, int first_column,
                                               float (&c)[kPieces][kColumnPieces][4]) {
    if constexpr (Params::kSmoothed) {
        float of_class[kPieces][2];
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = min(first_row + place.row(i, h), p.m - 1);
                of_class[i][h] = Problem::class_weight ? p.class_weight[row] : 1.f;
            }
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
            const int k = first_column + place.column(j, 0);
            if (k >= Problem::hidden_size) continue;
            const float2 sum = *reinterpret_cast<const float2*>(p.hidden_sum + k);
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    c[i][j][2 * h] = __fmaf_rn(-of_class[i][h], sum.x, c[i][j][2 * h]);
                    c[i][j][2 * h + 1] = __fmaf_rn(-of_class[i][h], sum.y, c[i][j][2 * h + 1]);
                }
        }
    }
}

}  // namespace flce

// Formats of products' operands, and what a gradient's sums are multiplied with.
#pragma once

#include "flce/fp8/codes.cuh"

namespace flce {

/// Formats of A and B.
enum class CodesFp8 { s8_s8, e4m3_e4m3, e5m2_e4m3, e4m3_e5m2 };

template <class Problem>
__device__ __forceinline__ constexpr CodesFp8 logits_codes() {
    return Problem::int8_logits ? CodesFp8::s8_s8 : CodesFp8::e4m3_e4m3;
}
/// kTurned: B is the exponentials, as in a hidden_major grad_weight, and not A.
template <class Problem, bool kTurned = false>
__device__ __forceinline__ constexpr CodesFp8 gradient_codes() {
    if (!Problem::e5m2_dlogits) return CodesFp8::e4m3_e4m3;
    return kTurned ? CodesFp8::e4m3_e5m2 : CodesFp8::e5m2_e4m3;
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

/// Takes each class's weight times the tokens' sum off a tile of grad_weight [D, classes] whose first row and column are these. Where it is
/// written, whole 16 bytes are: columns behind the last class stay 0.
template <class Problem, class Params, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void take_turned_smoothing(const Params& p, const Place& place, int first_row, int first_column,
                                                      float (&c)[kPieces][kColumnPieces][4]) {
    float sum[kPieces][2];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) sum[i][h] = p.hidden_sum[min(first_row + place.row(i, h), p.m - 1)];
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = first_column + place.column(j, e);
            float of_class = Problem::class_weight ? p.class_weight[min(column, p.n - 1)] : 1.f;
            if (!Problem::accumulate && column >= p.n) of_class = 0.f;
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) c[i][j][2 * h + e] = __fmaf_rn(-of_class, sum[i][h], c[i][j][2 * h + e]);
        }
}

/// Takes each class's weight times the tokens' sum off a tile of grad_weight whose first row and column are these, where its parameters
/// have label smoothing's.
template <class Problem, bool kTurned, class Params, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void take_smoothing(const Params& p, const Place& place, int first_row, int first_column,
                                               float (&c)[kPieces][kColumnPieces][4]) {
    if constexpr (Params::kSmoothed && kTurned) {
        take_turned_smoothing<Problem>(p, place, first_row, first_column, c);
    } else if constexpr (Params::kSmoothed) {
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

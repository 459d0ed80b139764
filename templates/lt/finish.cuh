// Small kernels around the products of backward: fp32 sums become gradients, and hidden states meet their rows' scales.
#pragma once

#include "flce/common/retain_kernels.cuh"
#include "flce/lt/dlogits.cuh"
#include "flce/lt/pairs.cuh"

namespace flce {

/// A warp has a row.
template <class Problem>
__device__ __forceinline__ void finish_hidden(const LtFinishHiddenParams& p) {
    using Out = GradHiddenOf<Problem>;
    const long long row = (static_cast<long long>(blockIdx.x) * kRowThreads + threadIdx.x) / 32;
    if (row >= p.rows) return;
    const bool last = p.grad_hidden != nullptr;
    const float scale = p.row_scales != nullptr ? p.row_scales[row] : 1.f;
    const float factor = last ? dlogits_scale<Problem>(p.scalars, true) : 1.f;
    float* const sums = p.sums + row * Problem::hidden_size;
    Out* const out = static_cast<Out*>(p.grad_hidden) + row * Problem::hidden_size;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 4; k < Problem::hidden_size; k += 32 * 4) {
        float4 sum = *reinterpret_cast<const float4*>(sums + k);
        float* const of_four = &sum.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) of_four[i] = scale == 0.f ? 0.f : of_four[i] * scale * factor;
        if (!last) {
            *reinterpret_cast<float4*>(sums + k) = sum;
        } else if constexpr (sizeof(Out) == 4) {
            *reinterpret_cast<float4*>(out + k) = sum;
        } else {
            *reinterpret_cast<uint2*>(out + k) = make_uint2(Numeric<Out>::pack(sum.x, sum.y), Numeric<Out>::pack(sum.z, sum.w));
        }
    }
}

/// A block has kRowThreads elements of a row of grad_weight, as it lies in memory.
template <class Problem>
__device__ __forceinline__ void finish_weight(const LtFinishWeightParams& p) {
    using Out = typename Problem::GradWeight;
    const int column = static_cast<int>(blockIdx.y) * kRowThreads + static_cast<int>(threadIdx.x);
    if (column >= (Problem::hidden_major ? p.columns : static_cast<int>(Problem::hidden_size))) return;
    const long long row = blockIdx.x;
    Out* const out = static_cast<Out*>(p.grad_weight) + row * kWeightLd<Problem> + column;
    float sum = p.sums[row * p.ld + column] * dlogits_scale<Problem>(p.scalars, true);
    if constexpr (Problem::accumulate) sum += to_float(*out);
    *out = Numeric<Out>::from_float(sum);
}

/// A warp has a row.
template <class Problem>
__device__ __forceinline__ void scaled_hidden(const LtScaledHiddenParams& p) {
    write_factors<Problem>(p.factors, p.scalars);
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / 32;
    if (row >= p.rows) return;
    scale_hidden<Problem>(p.hidden, RowList{}, row, p.row_scales[row], p.scaled);
}

/// Scales of the rows of gradients in the place of pairs, and hidden states times them. A warp has a row.
template <class Problem>
__device__ __forceinline__ void divergence_scales(const DivergenceScalesParams& p) {
    write_factors<Problem>(p.factors, p.scalars);
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / 32;
    if (row >= p.rows) return;
    float scale = 0.f;
    if (static_cast<const RowTarget*>(p.row_targets)[row].target >= 0) {
        scale = static_cast<const float4*>(p.coefficients)[row].x * (dlogits_scale<Problem>(p.scalars, false) * p.derivative) *
                pair_gradient_scale<Problem>(p.student_divergence[row], true);
    }
    if (threadIdx.x % 32 == 0) p.row_scales[row] = scale;
    if (p.scaled != nullptr) scale_hidden<Problem>(p.hidden, RowList{}, row, scale, p.scaled);
}

}  // namespace flce

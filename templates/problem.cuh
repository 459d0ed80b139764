// What a generated configuration looks like to the kernels, and small helpers that every kernel shares.
//
//     struct Problem {
//         using Element = flce::Bf16;                 hidden, weight, bias, grad_hidden
//         using GradWeight = flce::Bf16;              grad_weight, grad_bias
//         using Math = flce::FastMath;
//         static constexpr int hidden_size, vocab_size; static constexpr long long padded_vocab_size;
//         static constexpr bool hidden_major, bias, class_weight, label_smoothing, entropy, accumulate;
//         static constexpr int raster;
//         static flce::Logit transform(float x, const float* p);
//     };
#pragma once

#include "flce/numeric.cuh"
#include "flce/params.cuh"
#include "flce/row_math.cuh"
#include "flce/tile_store.cuh"

namespace flce {

/// A logit and its derivative with respect to hidden · weightᵀ + bias.
struct Logit {
    float value;
    float derivative;
};

extern __shared__ __align__(128) unsigned char dynamic_smem[];

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Rows of this many elements start on 16-byte boundaries.
template <class T>
__host__ __device__ constexpr bool rows_aligned(long long elements) {
    return elements * static_cast<long long>(sizeof(T)) % 16 == 0;
}

/// First element of the weight's rows (or columns, hidden_major) from `vocab` on and columns of hidden from `hidden` on; likewise its gradient.
template <class Problem, class T>
__device__ __forceinline__ T* weight_at(T* weight, long long vocab, long long hidden) {
    return Problem::hidden_major ? weight + hidden * Problem::padded_vocab_size + vocab : weight + vocab * Problem::hidden_size + hidden;
}
template <class Problem>
constexpr long long kWeightLd = Problem::hidden_major ? Problem::padded_vocab_size : Problem::hidden_size;

/// A row's label: its index, kIgnored, or kOutOfRange, which counts as ignored.
constexpr int kIgnored = -1;
constexpr int kOutOfRange = -2;
template <class Problem>
__device__ __forceinline__ int load_target(const TargetParams& p, long long row) {
    const long long label = p.bits == 64 ? static_cast<const long long*>(p.target)[row] : static_cast<const int*>(p.target)[row];
    if (label == p.ignore_index) return kIgnored;
    return label >= 0 && label < Problem::vocab_size ? static_cast<int>(label) : kOutOfRange;
}

/// The power of two that dz is stored with in fp16: brings the largest bound of any row just under 2^15.
template <class Problem>
__device__ __forceinline__ float dlogits_scale(const PassScalars* scalars, bool inverse) {
    if constexpr (kSame<typename Problem::Element, Fp16>) {
        const unsigned exponent = min(max(scalars->dlogits_bound_bits >> 23, 15u), 254u);
        return __uint_as_float((inverse ? exponent - 14u : 268u - exponent) << 23);
    } else {
        return 1.f;
    }
}

}  // namespace flce

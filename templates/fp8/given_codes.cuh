// A frozen weight that is e4m3 with a scale a row: the logits are products of its codes as they are, and nothing is rounded again but for
// grad_hidden, which reads e4m3 of code · scale.
#pragma once

#include "flce/common/retain_kernels.cuh"
#include "flce/fp8/codes.cuh"

namespace flce {

/// Whether the weight is codes.
template <class Problem>
__device__ constexpr bool has_given_codes() {
    return +Problem::weight_format != +kWeightNumbers;
}

/// Numbers of four codes.
__device__ __forceinline__ void numbers_of(unsigned codes, float scale, float (&x)[4]) {
    const float2 first = unpack_fp8<false>(codes & 0xffffu);
    const float2 second = unpack_fp8<false>(codes >> 16);
    x[0] = first.x * scale;
    x[1] = first.y * scale;
    x[2] = second.x * scale;
    x[3] = second.y * scale;
}

/// Bits of the largest |number| of a row of codes without those of NaN, for all lanes of a warp.
template <class Problem>
__device__ __forceinline__ unsigned largest_of_codes(const unsigned char* row, float scale) {
    unsigned largest = 0u;  // the largest of each byte
#pragma unroll 2
    for (int k = static_cast<int>(threadIdx.x) % 32 * 16; k < Problem::hidden_size; k += 512) {
        unsigned words[4];
        ptx::ld_global_v4(words, row + k);
#pragma unroll
        for (const unsigned word : words) {
            const unsigned magnitudes = word & 0x7f7f7f7fu;  // ordered as their numbers are
            largest = __vmaxu4(largest, magnitudes & ~__vcmpeq4(magnitudes, 0x7f7f7f7fu));
        }
    }
    const unsigned pairs = __vmaxu2(largest & 0xff00ffu, largest >> 8 & 0xff00ffu);
    const unsigned code = __reduce_max_sync(0xffffffffu, max(pairs >> 16, pairs & 0xffffu));
    return __float_as_uint(unpack_fp8<false>(code).x * fabsf(scale));
}

/// Scales of rows where tiles read them, to their ends. A thread has a row, or a warp where the largest finite number is asked for.
template <class Problem>
__device__ __forceinline__ void fp8_scales(const Fp8GivenScalesParams& p) {
    const int lanes = p.largest != nullptr ? 32 : 1;
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / lanes;
    if (row >= p.rows) return;
    const float scale = p.given[row];
    const bool writes = static_cast<int>(threadIdx.x) % lanes == 0;
    if (writes) p.scales[row] = scale;
    if (p.largest == nullptr) return;
    const unsigned largest =
        largest_of_codes<Problem>(static_cast<const unsigned char*>(p.from) + static_cast<long long>(row) * Problem::hidden_size, scale);
    if (writes && largest < 0x7f800000u && largest > *static_cast<volatile unsigned*>(p.largest)) atomicMax(p.largest, largest);
}

/// Σ_j c_j·weight[j] of a stretch of the classes. A thread has eight columns. Blocks of the other sum, which nobody reads, end at once.
template <class Problem>
__device__ __forceinline__ void smoothing_sums(const SmoothingSumsOfCodesParams& p) {
    const int part = static_cast<int>(blockIdx.x);
    if (part >= kSmoothingParts) return;
    const int first = static_cast<int>(static_cast<long long>(p.columns) * part / kSmoothingParts);
    const int end = static_cast<int>(static_cast<long long>(p.columns) * (part + 1) / kSmoothingParts);
    for (int k = static_cast<int>(threadIdx.x) * 8; k < Problem::hidden_size; k += kRowThreads * 8) {
        float sum[8] = {};
#pragma unroll 8
        for (int j = first; j < end; ++j) {
            const float times = Problem::class_weight ? p.class_weight[j] : 1.f;
            const unsigned char* const row = static_cast<const unsigned char*>(p.weight) + static_cast<long long>(j) * Problem::hidden_size;
            const uint2 words = __ldg(reinterpret_cast<const uint2*>(row + k));
            float x[2][4];
            numbers_of(words.x, p.class_scales[j], x[0]);
            numbers_of(words.y, p.class_scales[j], x[1]);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = times != 0.f ? __fmaf_rn(times, x[i / 4][i % 4], sum[i]) : sum[i];
        }
        float* const to = p.weight_sums + part * Problem::hidden_size + k;
        *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        *reinterpret_cast<float4*>(to + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
}

/// TurnedRows of codes: a lane has four of each row.
template <class Problem>
struct TurnedCodes {
    enum : int { kRows = kFp8Square / (kRowThreads / 32) };
    static_assert(kRows <= 32 && kRows % 4 == 0);

    float factor;
    float scale;  // the one of the lane's row; 0 where there is none
    unsigned in[kRows];

    /// `first`: position of the warp's first row behind row0.
    __device__ __forceinline__ TurnedCodes(const Fp8TurnParams& p, int row0, int first, int column)
        : factor(fp8_factor(*p.largest)), scale(0.f) {
        const int own = row0 + class_at(first + static_cast<int>(threadIdx.x) % kRows);
        const bool exists = own < p.rows;
        if (exists) scale = p.factors[own];
        const bool there = column < Problem::hidden_size;
        const unsigned char* const from = static_cast<const unsigned char*>(p.from) + (there ? column : 0);
        // There is always something to read; what does not exist is codes of 0.
        const int read = exists ? own : -1;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int of = __shfl_sync(0xffffffffu, read, i);
            in[i] = __ldg(reinterpret_cast<const unsigned*>(from + static_cast<long long>(max(of, 0)) * Problem::hidden_size));
            if (of < 0 || !there) in[i] = 0u;
        }
    }
    /// e4m3 of four rows from `first` on.
    __device__ __forceinline__ void make(int first, unsigned (&w)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float x[4];
            numbers_of(in[first + r], __shfl_sync(0xffffffffu, scale, first + r), x);
            w[r] = pack_fp8<false>(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
        }
    }
};

}  // namespace flce

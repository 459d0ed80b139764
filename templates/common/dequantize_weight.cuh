// The kernel that dequantises a weight of codes and scales into the workspace, a stretch of the vocabulary at a time. A number is its code
// times its scale in fp32, rounded to the Problem's dtype once.
#pragma once

#include "flce/common/row_kernels.cuh"

namespace flce {

enum : int { kNvfp4Group = 16 };  ///< numbers of a row that have a scale

/// Two e4m3 codes in the upper halves' bytes of a pair of 16 bits, as fp16. A NaN code becomes 480, which is no other code's number.
__device__ __forceinline__ unsigned f16x2_of_e4m3(unsigned codes) {
    // fp16 has another bias: the number is 2^8 times what its exponent and mantissa say in place.
    return ptx::mul_f16x2((codes & 0x80008000u) | (codes & 0x7f007f00u) >> 1, 0x5c005c00u);
}

/// The numbers of four e4m3 codes in a word.
__device__ __forceinline__ void numbers_of_e4m3(float (&numbers)[4], unsigned codes) {
    const float no_number = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned pair = f16x2_of_e4m3(__byte_perm(codes, 0u, i == 0 ? 0x1404 : 0x3424));
        numbers[2 * i] = Numeric<Fp16>::first(pair);
        numbers[2 * i + 1] = Numeric<Fp16>::second(pair);
    }
#pragma unroll
    for (float& number : numbers) number = fabsf(number) > 448.f ? no_number : number;
}

/// The numbers of two e2m1 codes in the lowest byte.
__device__ __forceinline__ void numbers_of_e2m1(float& first, float& second, unsigned codes) {
    const unsigned low = (codes & 0x8u) << 12 | (codes & 0x7u) << 9;
    const unsigned high = (codes & 0x80u) << 24 | (codes & 0x70u) << 21;
    const unsigned pair = ptx::mul_f16x2(low | high, 0x74007400u);  // 2^14, for fp16's bias
    first = Numeric<Fp16>::first(pair);
    second = Numeric<Fp16>::second(pair);
}

/// Eight numbers of a row from `column` on, not rounded yet.
template <class Problem>
__device__ __forceinline__ void dequantize_eight(float (&numbers)[8], const WeightToRound& p, long long row, int column) {
    const long long at = row * Problem::hidden_size + column;
    float scale;
    if constexpr (Problem::weight_format == kWeightNvfp4) {
        const unsigned codes = *reinterpret_cast<const unsigned*>(static_cast<const unsigned char*>(p.weight) + at / 2);
        float scales[4];
        numbers_of_e4m3(scales, static_cast<const unsigned char*>(p.scale)[at / kNvfp4Group]);
        scale = scales[0] * *p.tensor_scale;
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers_of_e2m1(numbers[2 * i], numbers[2 * i + 1], codes >> (8 * i) & 0xffu);
    } else {
        const uint2 codes = *reinterpret_cast<const uint2*>(static_cast<const unsigned char*>(p.weight) + at);
        const float* const scales = static_cast<const float*>(p.scale);
        if constexpr (Problem::weight_block == 0) {
            scale = scales[row];
        } else {
            scale = scales[row / Problem::weight_block * ceil_div(Problem::hidden_size, Problem::weight_block) +
                           column / Problem::weight_block];
        }
        float halves[2][4];
        numbers_of_e4m3(halves[0], codes.x);
        numbers_of_e4m3(halves[1], codes.y);
#pragma unroll
        for (int i = 0; i < 8; ++i) numbers[i] = halves[i / 4][i % 4];
    }
#pragma unroll
    for (float& number : numbers) number *= scale;
}

/// Eight numbers of a row from `column` on, rounded to the Problem's dtype.
template <class Problem>
__device__ __forceinline__ void round_eight(unsigned (&words)[4], const WeightToRound& p, long long row, int column) {
    using N = Numeric<typename Problem::Element>;
    float numbers[8];
    if constexpr (Problem::weight_format == kWeightNumbers) {
        const float4* const from =
            reinterpret_cast<const float4*>(static_cast<const float*>(p.weight) + row * Problem::hidden_size + column);
        const float4 halves[2] = {from[0], from[1]};
#pragma unroll
        for (int i = 0; i < 8; ++i) numbers[i] = (&halves[i / 4].x)[i % 4];
    } else {
        dequantize_eight<Problem>(numbers, p, row, column);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = N::pack(numbers[2 * i], numbers[2 * i + 1]);
}

/// Writes weight rows in the Problem's dtype. A thread has 8 elements of a row.
template <class Problem>
__device__ __forceinline__ void dequantize_weight(const DequantizeWeightParams& p) {
    using Element = typename Problem::Element;
    constexpr int kEights = Problem::hidden_size / 8;
    const long long eight = static_cast<long long>(blockIdx.x) * kRowThreads + threadIdx.x;
    const long long row = eight / kEights;
    if (row >= p.rows) return;
    unsigned words[4];
    round_eight<Problem>(words, p, p.first_row + row, static_cast<int>(eight - row * kEights) * 8);
    ptx::st_global_v4(static_cast<Element*>(p.dequantized) + eight * 8, words);
}

}  // namespace flce

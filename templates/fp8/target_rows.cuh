// The targets' elements of grad_weight and grad_bias, and grad_bias of the others. Sums in a fixed order.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/common/row_kernels.cuh"
#include "flce/fp8/codes.cuh"

namespace flce {

/// A row's key: rows of equal targets follow each other, and ignored ones come last.
__device__ __forceinline__ unsigned order_key(const Fp8OrderParams& p, int row) {
    const int target = static_cast<const RowTarget*>(p.row_targets)[row].target;
    return target < 0 ? 0xffffffffu : static_cast<unsigned>(target);
}

/// Each row counts the rows before it. A warp counts for a row, with kRowThreads keys of others in shared memory.
template <class Problem>
__device__ __forceinline__ void fp8_order(const Fp8OrderParams& p) {
    constexpr int kWarps = kRowThreads / 32;
    constexpr int kOfWarp = 4;
    __shared__ unsigned keys[kRowThreads];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row0 = (static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32) * kOfWarp;
    unsigned mine[kOfWarp];
    int before[kOfWarp] = {};
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) mine[i] = row0 + i < p.rows ? order_key(p, row0 + i) : 0u;
    for (int first = 0; first < p.rows; first += kRowThreads) {
        const int other = first + static_cast<int>(threadIdx.x);
        __syncthreads();  // every warp has read the keys before
        if (other < p.rows) keys[threadIdx.x] = order_key(p, other);
        __syncthreads();
        const int count = min(p.rows - first, +kRowThreads);
        for (int k = lane; k < count; k += 32) {
            const unsigned key = keys[k];
#pragma unroll
            for (int i = 0; i < kOfWarp; ++i) {
                if (key < mine[i] || (key == mine[i] && first + k < row0 + i)) ++before[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
        const int place = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(before[i])));
        if (lane == 0 && row0 + i < p.rows) p.order[place] = row0 + i;
    }
}

enum : int { kTargetRows = 4 };  // rows of a target that are read together

/// Rows of a target in their order, from place `first` on, for a whole warp: `add(rows, dz, count)` of kTargetRows at most.
template <class Add>
__device__ __forceinline__ void for_rows_of_target(const Fp8TargetRowsParams& p, int first, int target, const Add& add) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int begin = first; begin < p.rows; begin += 32) {
        const bool there = begin + lane < p.rows;
        const int row = there ? p.order[begin + lane] : 0;
        const bool same = there && static_cast<const RowTarget*>(p.row_targets)[row].target == target;
        const float dz = same ? p.target_dz[row] : 0.f;
        const int count = __popc(__ballot_sync(0xffffffffu, same));  // they come first
        for (int i = 0; i < count; i += kTargetRows) {
            int rows[kTargetRows];
            float factors[kTargetRows];
#pragma unroll
            for (int r = 0; r < kTargetRows; ++r) {
                rows[r] = __shfl_sync(0xffffffffu, row, min(i + r, count - 1));
                factors[r] = __shfl_sync(0xffffffffu, dz, (i + r) % 32);
                if (i + r >= count) factors[r] = 0.f;
            }
            add(rows, factors);
        }
        if (count < 32) return;
    }
}

/// A warp has a place in the order and 256 hidden dimensions; the first place of a target adds up all of them.
template <class Problem>
__device__ __forceinline__ void fp8_target_rows(const Fp8TargetRowsParams& p) {
    using Out = typename Problem::GradWeight;
    using N = Numeric<Bf16>;
    const int place = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (place >= p.rows) return;
    const auto target_at = [&](int at) { return static_cast<const RowTarget*>(p.row_targets)[p.order[at]].target; };
    const int target = target_at(place);
    if (!has_class<Problem>(target) || (place > 0 && target_at(place - 1) == target)) return;
    if (Problem::bias && p.grad_bias != nullptr && blockIdx.y == 0) {
        Out* const out = static_cast<Out*>(p.grad_bias) + target;
        float sum = to_float(*out);
        for_rows_of_target(p, place, target, [&](const int(&)[kTargetRows], const float(&dz)[kTargetRows]) {
            for (const float part : dz) sum += part;
        });
        if (threadIdx.x % 32 == 0) *out = Numeric<Out>::from_float(sum);
    }
    const int k = static_cast<int>(blockIdx.y) * 256 + static_cast<int>(threadIdx.x) % 32 * 8;
    if (p.grad_weight == nullptr) return;
    const bool there = k < Problem::hidden_size;
    const Bf16* const hidden = static_cast<const Bf16*>(p.hidden) + (there ? k : 0);
    float sums[8] = {};
    for_rows_of_target(p, place, target, [&](const int(&rows)[kTargetRows], const float(&dz)[kTargetRows]) {
        unsigned words[kTargetRows][4];
#pragma unroll
        for (int r = 0; r < kTargetRows; ++r) ptx::ld_global_v4(words[r], hidden + static_cast<long long>(rows[r]) * Problem::hidden_size);
#pragma unroll
        for (int r = 0; r < kTargetRows; ++r) {
            if (dz[r] == 0.f) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[2 * i] = __fmaf_rn(dz[r], N::first(words[r][i]), sums[2 * i]);
                sums[2 * i + 1] = __fmaf_rn(dz[r], N::second(words[r][i]), sums[2 * i + 1]);
            }
        }
    });
    if (!there) return;
    Out* const out = weight_at<Problem>(static_cast<Out*>(p.grad_weight), target, k);
    constexpr long long kStep = Problem::hidden_major ? +Problem::padded_vocab_size : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i * kStep] = Numeric<Out>::from_float(to_float(out[i * kStep]) + sums[i]);
}

/// A warp has a class.
template <class Problem>
__device__ __forceinline__ void fp8_bias(const Fp8BiasParams& p) {
    using Out = typename Problem::GradWeight;
    const int column = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (column >= p.columns) return;
    const unsigned* const codes = reinterpret_cast<const unsigned*>(p.turned + column * p.positions);
    float sum = 0.f;
    for (int word = static_cast<int>(threadIdx.x) % 32; word < static_cast<int>(p.positions / 4); word += 32) {
        const unsigned w = codes[word];
        const float2 pairs[2] = {unpack_fp8<Problem::e5m2_dlogits>(w & 0xffffu), unpack_fp8<Problem::e5m2_dlogits>(w >> 16)};
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const int row = token_at(word * 4 + byte);
            const float factor = row < p.rows ? p.factors[row] : 0.f;
            const float e = byte % 2 == 0 ? pairs[byte / 2].x : pairs[byte / 2].y;
            if (factor != 0.f) sum = __fmaf_rn(factor, e, sum);
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Problem::label_smoothing) sum -= *p.smoothing_total * (Problem::class_weight ? p.class_weight[column] : 1.f);
    Out* const out = static_cast<Out*>(p.grad_bias) + column;
    if constexpr (Problem::accumulate) sum += to_float(*out);
    *out = Numeric<Out>::from_float(sum);
}

}  // namespace flce

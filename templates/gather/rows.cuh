// A row's ids against the row: their logits and sums going forward, their dz and grad_hidden going backward. A block has a row; its rows of
// the weight are read once in each pass.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/gather/params.cuh"

namespace flce {

/// Sums of a row's logits over the block.
template <class Problem>
__device__ __forceinline__ RowSums sums_of_logits(const float* logits, int count) {
    __shared__ float scratch[kRowThreads / 32];
    float largest = -infinity();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) largest = fmaxf(largest, logits[i]);
    largest = block_reduce<kRowThreads>(largest, scratch, MaxOp{});
    const float reference = fmaxf(largest, lowest_logit());
    RowSums sums = sums_of_nothing(count > 0 ? reference : -infinity(), -infinity());
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) {
        const float below = logits[i] - reference;
        const float e = ::expf(below);
        sums.exp_sum += e;
        if constexpr (Problem::entropy) sums.exp_z_sum += e * (below < farthest_below() ? farthest_below() : below);
    }
    sums.exp_sum = block_reduce<kRowThreads>(sums.exp_sum, scratch, SumOp{});
    if constexpr (Problem::entropy) sums.exp_z_sum = block_reduce<kRowThreads>(sums.exp_z_sum, scratch, SumOp{});
    return Problem::shard ? sums : of_support(sums);
}

/// Logits of a row's ids where their log-probabilities will be, as teacher_logits leaves them, and the sums of those that are named here.
template <class Problem>
__device__ __forceinline__ void gather_forward(const GatherForwardParams& p) {
    __shared__ NamedPlaces named;
    __shared__ float logits[NamedPlaces::kMost];
    __shared__ float target_logit;
    const int row = static_cast<int>(blockIdx.x);
    const ListedRow listed{row, load_target<Problem>(p.targets, p.temperature, row)};
    if (threadIdx.x == 0) target_logit = -infinity();
    load_named<Problem>(p, named, listed);
    named_logits<Problem>(p, named, row, [&](int i, float logit) {
        teacher_logit<Problem>(p.teacher, row, named.places[i]) = logits[i] = logit;
        if (named.ids[i] == listed.target) target_logit = logit;
    });
    __syncthreads();  // all logits are there
    const RowSums sums = sums_of_logits<Problem>(logits, named.count);
    if (threadIdx.x != 0) return;
    PartialFields<Problem>::store(p.partials + row, p.partial_rows, sums);
    p.target_logits[row] = target_logit;
}

/// dz of a place: a row's coefficients, and what its own probability takes off. The product is rounded before it is taken off, so that the
/// only class of a row has a dz of exactly 0.
template <class Problem>
__device__ __forceinline__ float dz_of_place(const GatherHiddenParams& p, int row, long long place, int id, const RowTarget& target) {
    const float4 c = static_cast<const float4*>(p.coefficients)[row];
    const float logprob = p.teacher.logprobs[place];
    const float p_k = ::expf(logprob);
    const float dz = p_k * (Problem::entropy ? c.x + c.y * logit_of_share(p_k, logprob + target.lse) : c.x);
    return (dz - __fmul_rn(p.row_weights[row], p.teacher.probs[place])) *
           slope_in_row<Problem>(p, row, logprob, target.lse, offset_of<Problem>(p.class_offset, id));
}

/// Groups of a block's threads, each of which adds up eight columns a thread of some of a row's ids.
template <class Problem>
struct HiddenGroups {
    enum : int { kColumns = (Problem::hidden_size + 7) / 8 < kRowThreads ? (Problem::hidden_size + 7) / 8 : kRowThreads };
    enum : int { kCount = kRowThreads / kColumns };
};

/// Adds dz times the rows of the weight of every kCount-th named id, for eight columns from `d` on.
template <class Problem>
__device__ __forceinline__ void add_weight_rows(const NamedPlaces& named, const float* dz, const void* weight, int group, int d,
                                                float (&sums)[8]) {
    constexpr int kCount = HiddenGroups<Problem>::kCount;
    constexpr int kAtOnce = 4;
    for (int i = group; i < named.count; i += kCount * kAtOnce) {
        WeightEight<Problem> of_weight[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) of_weight[j].load(weight, named.ids[min(i + j * kCount, named.count - 1)], d);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (i + j * kCount >= named.count) continue;
            const float factor = dz[i + j * kCount];
#pragma unroll
            for (int k = 0; k < 8; ++k) sums[k] = __fmaf_rn(factor, of_weight[j].number(k), sums[k]);
        }
    }
}

/// dz of a row's places, and the row of grad_hidden. An ignored row's are 0.
template <class Problem>
__device__ __forceinline__ void gather_hidden(const GatherHiddenParams& p) {
    using Out = GradHiddenOf<Problem>;
    using Groups = HiddenGroups<Problem>;
    __shared__ NamedPlaces named;
    __shared__ float dz[NamedPlaces::kMost];
    __shared__ float others[Groups::kCount > 1 ? kRowThreads * 8 : 1];
    const int row = static_cast<int>(blockIdx.x);
    const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
    const long long first = static_cast<long long>(row) * p.teacher.top_k;
    named.load<Problem>(p.teacher, first, target.target < 0, [&](int k, int) {
        if (p.dlogits != nullptr) p.dlogits[first + k] = 0.f;
    });
    for (int i = static_cast<int>(threadIdx.x); i < named.count; i += kRowThreads) {
        const long long place = first + named.places[i];
        dz[i] = dz_of_place<Problem>(p, row, place, named.ids[i], target);
        if (p.dlogits != nullptr) p.dlogits[place] = dz[i];
    }
    if (p.grad_hidden == nullptr) return;
    __syncthreads();  // every dz is there
    const int group = static_cast<int>(threadIdx.x) / Groups::kColumns;
    const int column = static_cast<int>(threadIdx.x) % Groups::kColumns;
    Out* const to = static_cast<Out*>(p.grad_hidden) + static_cast<long long>(row) * Problem::hidden_size;
    for (int begin = 0; begin < Problem::hidden_size; begin += 8 * Groups::kColumns) {
        const int d = begin + 8 * column;
        const bool there = group < Groups::kCount && d < Problem::hidden_size;
        float sums[8] = {};
        if (there) add_weight_rows<Problem>(named, dz, p.weight, group, d, sums);
        if constexpr (Groups::kCount > 1) {
            float* const mine = others + 8 * threadIdx.x;
#pragma unroll
            for (int k = 0; k < 8; ++k) mine[k] = sums[k];
            __syncthreads();  // every group's sums are there
            if (group == 0) {
                for (int other = 1; other < Groups::kCount; ++other) {
#pragma unroll
                    for (int k = 0; k < 8; ++k) sums[k] += mine[8 * other * Groups::kColumns + k];
                }
            }
        }
        if (!there || group != 0) continue;
        EightOf<Out> result;
        result.set(sums);
        result.store(to + d);
    }
}

}  // namespace flce

// Places sorted by class, so that grad_weight adds up a class's terms in the order of rows: a radix sort, each round of which keeps the
// order of places with equal bits.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/gather/params.cuh"

namespace flce {

/// Place number i of a round.
template <class Problem>
__device__ __forceinline__ ClassPlace class_place(const GatherSortParams& p, unsigned i) {
    if (p.from != nullptr) return p.from[i];
    const int row = static_cast<int>(i / static_cast<unsigned>(p.teacher.top_k));
    if (static_cast<const RowTarget*>(p.row_targets)[row].target < 0) return {p.nowhere, i};
    const int id = teacher_id<Problem>(p.teacher, i);
    return {id < 0 || (Problem::shard && id == kElsewhere) ? p.nowhere : static_cast<unsigned>(id), i};
}
__device__ __forceinline__ unsigned sort_bin(const GatherSortParams& p, ClassPlace place) { return place.id >> p.shift & (kSortBins - 1u); }

/// Numbers of a block's places in each bin.
template <class Problem>
__device__ __forceinline__ void sort_counts(const GatherSortParams& p) {
    __shared__ unsigned counts[kSortBins];
    for (int bin = static_cast<int>(threadIdx.x); bin < kSortBins; bin += kRowThreads) counts[bin] = 0u;
    __syncthreads();
    const unsigned begin = blockIdx.x * kSortPlaces;
    const unsigned end = min(begin + kSortPlaces, p.places);
    for (unsigned i = begin + threadIdx.x; i < end; i += kRowThreads) atomicAdd(&counts[sort_bin(p, class_place<Problem>(p, i))], 1u);
    __syncthreads();
    for (int bin = static_cast<int>(threadIdx.x); bin < kSortBins; bin += kRowThreads) {
        p.counts[static_cast<long long>(bin) * p.blocks + blockIdx.x] = counts[bin];
    }
}

/// Sum of the block's numbers up to a thread's own; `all`: of all of them. `of_warps` may be used again afterwards.
__device__ __forceinline__ unsigned sum_upto(unsigned mine, unsigned* of_warps, int lane, int warp, unsigned& all) {
    unsigned upto = mine;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, upto, lanes);
        if (lane >= lanes) upto += other;
    }
    if (lane == 31) of_warps[warp] = upto;
    __syncthreads();  // every warp's sum is there
    const unsigned of_other = lane < kRowThreads / 32 ? of_warps[lane] : 0u;
    all = __reduce_add_sync(0xffffffffu, of_other);
    upto += __reduce_add_sync(0xffffffffu, lane < warp ? of_other : 0u);
    __syncthreads();  // every warp has read them
    return upto;
}

/// Replaces a bin's counts by their sums over the blocks before, and leaves the bin's total. A block has a bin.
template <class Problem>
__device__ __forceinline__ void sort_sums(const GatherSortParams& p) {
    __shared__ unsigned of_warps[kRowThreads / 32];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    unsigned* const counts = p.counts + static_cast<long long>(blockIdx.x) * p.blocks;
    unsigned before = 0u;
    for (int begin = 0; begin < p.blocks; begin += kRowThreads) {
        const int at = begin + static_cast<int>(threadIdx.x);
        const unsigned mine = at < p.blocks ? counts[at] : 0u;
        unsigned all;
        const unsigned upto = sum_upto(mine, of_warps, lane, warp, all);
        if (at < p.blocks) counts[at] = before + upto - mine;
        before += all;
    }
    if (threadIdx.x == 0) p.counts[static_cast<long long>(kSortBins) * p.blocks + blockIdx.x] = before;
}

/// Puts a block's places where they go. Each warp has a stretch of them, which it takes in order.
template <class Problem>
__device__ __forceinline__ void sort_places(const GatherSortParams& p) {
    constexpr int kWarps = kRowThreads / 32;
    constexpr unsigned kOfWarp = kSortPlaces / kWarps;
    __shared__ unsigned of_warps[kWarps];
    __shared__ unsigned next[kWarps][kSortBins];  // numbers of places, then where the next one goes
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int bin = lane; bin < kSortBins; bin += 32) next[warp][bin] = 0u;
    __syncwarp();
    const unsigned begin = blockIdx.x * kSortPlaces + warp * kOfWarp;
    ClassPlace places[kOfWarp / 32];
#pragma unroll
    for (int i = 0; i < static_cast<int>(kOfWarp / 32); ++i) {
        const unsigned at = begin + 32 * i + lane;
        if (at >= p.places) continue;
        places[i] = class_place<Problem>(p, at);
        atomicAdd(&next[warp][sort_bin(p, places[i])], 1u);
    }
    __syncthreads();       // every warp's counts are there
    unsigned before = 0u;  // places of the bins before
    for (int begin = 0; begin < kSortBins; begin += kRowThreads) {
        const int bin = begin + static_cast<int>(threadIdx.x);
        const unsigned mine = p.counts[static_cast<long long>(kSortBins) * p.blocks + bin];
        unsigned all;
        unsigned at =
            before + sum_upto(mine, of_warps, lane, warp, all) - mine + p.counts[static_cast<long long>(bin) * p.blocks + blockIdx.x];
        before += all;
#pragma unroll
        for (int of = 0; of < kWarps; ++of) {
            const unsigned count = next[of][bin];
            next[of][bin] = at;
            at += count;
        }
    }
    __syncthreads();  // every warp knows where its places go
#pragma unroll
    for (int i = 0; i < static_cast<int>(kOfWarp / 32); ++i) {
        const bool there = begin + 32 * i + lane < p.places;
        const unsigned bin = there ? sort_bin(p, places[i]) : kSortBins + lane;
        const unsigned same = __match_any_sync(0xffffffffu, bin);
        if (there) {
            const unsigned rank = __popc(same & ((1u << lane) - 1u));
            p.to[next[warp][bin] + rank] = places[i];
        }
        __syncwarp();
        if (there && lane == __ffs(same) - 1) next[warp][bin] += __popc(same);
        __syncwarp();
    }
}

}  // namespace flce

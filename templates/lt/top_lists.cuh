// The lists of a warp's rows, to which forward's logits go tile by tile.
#pragma once

#include "flce/common/top_lists.cuh"
#include "flce/lt/sums.cuh"

namespace flce {

/// A row's list, or that of a part of the vocabulary. `end`: columns from there on are no classes.
template <class Problem>
struct LtTopList {
    TopList<Problem, 32> list;

    static __device__ __forceinline__ long long number(const LtForwardParams& p, int row) { return blockIdx.y * p.partial_rows + row; }
    __device__ __forceinline__ void load(const LtForwardParams& p, int row) {
        const long long of_row = number(p, row);
        const TopState before = p.first != 0 ? TopState{list.unknown(), 0} : p.top_states[of_row];
        list = {static_cast<TopEntry*>(p.top_keys), before.least, list.place_of(of_row) + static_cast<unsigned>(before.count)};
    }
    __device__ __forceinline__ void store(const LtForwardParams& p, int row) const {
        if (threadIdx.x % 32 == 0) p.top_states[number(p, row)] = list.state();
        __syncwarp();  // the next call reads it
    }
    __device__ __forceinline__ void add(const float (&c)[LtPlace::kColumnPieces][4], int h, int first_class, int end) {
        list.add(LaneLogits<LtColumns, LtPlace::kColumnPieces>{c, h, first_class, end});
    }
};

/// The list of a Problem without a top_k.
struct NoTopList {
    __device__ __forceinline__ void load(const LtForwardParams& /*p*/, int /*row*/) {}
    __device__ __forceinline__ void store(const LtForwardParams& /*p*/, int /*row*/) const {}
};
template <class Problem>
using TopListOf = Select<(Problem::top_k > 0), LtTopList<Problem>, NoTopList>;

}  // namespace flce

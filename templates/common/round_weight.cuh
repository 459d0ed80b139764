// Kernels beside forward and backward where the weight is fp32 under a 16-bit dtype: it is rounded into the workspace, a stretch of the
// vocabulary at a time.
#pragma once

#include "flce/common/row_kernels.cuh"

namespace flce {

/// Writes weight rows in the Problem's dtype, vocab_major whatever the weight's layout is. A thread has 8 elements of a row.
template <class Problem>
__device__ __forceinline__ void round_rows(const RoundWeightParams& p) {
    using Element = typename Problem::Element;
    const long long at = (static_cast<long long>(blockIdx.x) * kRowThreads + threadIdx.x) * 8;
    if (at >= static_cast<long long>(p.rows) * Problem::hidden_size) return;
    unsigned first[4];
    unsigned second[4];
    ptx::ld_global_v4(first, p.weight + at);
    ptx::ld_global_v4(second, p.weight + at + 4);
    const unsigned words[4] = {Numeric<Element>::pack(__uint_as_float(first[0]), __uint_as_float(first[1])),
                               Numeric<Element>::pack(__uint_as_float(first[2]), __uint_as_float(first[3])),
                               Numeric<Element>::pack(__uint_as_float(second[0]), __uint_as_float(second[1])),
                               Numeric<Element>::pack(__uint_as_float(second[2]), __uint_as_float(second[3]))};
    ptx::st_global_v4(static_cast<Element*>(p.rounded) + at, words);
}

/// Rounds a hidden_major weight: a block transposes a square.
template <class Problem>
__device__ __forceinline__ void round_columns(const RoundWeightParams& p) {
    using Element = typename Problem::Element;
    constexpr int kWarps = kRowThreads / 32;
    __shared__ float square[kRoundedTile][kRoundedTile + 1];  // [hidden][vocabulary]
    const int across = ceil_div(p.rows, kRoundedTile);
    const int row0 = static_cast<int>(blockIdx.x) % across * kRoundedTile;
    const int hidden0 = static_cast<int>(blockIdx.x) / across * kRoundedTile;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int i = warp; i < kRoundedTile; i += kWarps) {
        if (row0 + lane < p.rows && hidden0 + i < Problem::hidden_size) {
            square[i][lane] = p.weight[(hidden0 + i) * static_cast<long long>(Problem::padded_vocab_size) + row0 + lane];
        }
    }
    __syncthreads();  // the square is complete
    Element* const rounded = static_cast<Element*>(p.rounded);
    for (int i = warp; i < kRoundedTile; i += kWarps) {
        if (row0 + i < p.rows && hidden0 + lane < Problem::hidden_size) {
            rounded[static_cast<long long>(row0 + i) * Problem::hidden_size + hidden0 + lane] =
                Numeric<Element>::from_float(square[lane][i]);
        }
    }
}

template <class Problem>
__device__ __forceinline__ void round_weight(const RoundWeightParams& p) {
    if constexpr (Problem::hidden_major) {
        round_columns<Problem>(p);
    } else {
        round_rows<Problem>(p);
    }
}

/// A thread has a row: its parts of this stretch, in their order, behind those of the stretches before.
template <class Problem>
__device__ __forceinline__ void merge_stretch(const MergeStretchParams& p) {
    using Fields = PartialFields<Problem>;
    const int row = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    if (row >= rows) return;
    const int splits = Problem::lists_rows ? p.scalars->splits : p.splits;
    const long long partial_rows = Problem::lists_rows ? partial_rows_of(rows) : p.partial_rows;
    float* const running = p.running + row;
    const long long stride = Fields::kCount * partial_rows;
    RowSums sums;
    if constexpr (is_batch_invariant<Problem>()) {  // one after the other, wherever a stretch ends
        sums = Fields::load(p.first != 0 ? p.partials + row : running, p.first != 0 ? partial_rows : p.running_rows);
        for (int split = p.first != 0 ? 1 : 0; split < splits; ++split) {
            sums = merge(sums, Fields::load(p.partials + row + split * stride, partial_rows));
        }
    } else {
        sums = merge_splits<Problem, 1>(p.partials + row, stride, partial_rows, 0, splits);
        if (p.first == 0) sums = merge(Fields::load(running, p.running_rows), sums);
    }
    Fields::store(running, p.running_rows, sums);
}

}  // namespace flce

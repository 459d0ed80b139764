// Rows whose exponentials forward writes again: the reference that they are relative to turned out to be far below the row's logits.
#pragma once

#include "flce/common/row_outputs.cuh"

namespace flce {

struct StaleRows {
    const unsigned* stale;  ///< for each block of kOutputRows, whether it has stale rows (SplitSumsParams)
    int rows;               ///< rows of the launch

    /// Whether there are any among `count` rows from `begin` on, or among other rows of the same blocks of kOutputRows.
    __device__ __forceinline__ bool any(int begin, int count) const {
        const int end = min(begin + count, rows);
        bool found = false;
#pragma unroll 1
        for (int row = begin; row < end; row += kOutputRows) found = found || stale[row / kOutputRows] != 0u;
        return found;
    }
    /// Whether any row is stale; asked by the whole block.
    template <int kThreads>
    __device__ __forceinline__ bool any_at_all() const {
        bool found = false;
        for (int row = static_cast<int>(threadIdx.x) * kOutputRows; row < rows; row += kThreads * kOutputRows) {
            found = found || stale[row / kOutputRows] != 0u;
        }
        return __syncthreads_or(found) != 0;
    }
};

}  // namespace flce

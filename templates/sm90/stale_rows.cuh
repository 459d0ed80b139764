// Rows whose exponentials forward writes again: the reference that they are relative to turned out to be far below the row's logits.
#pragma once

#include "flce/common/row_outputs.cuh"

namespace flce {

struct StaleRows {
    unsigned* states;  ///< RetainedState, of each block of kOutputRows
    int rows;          ///< of the launch

    /// Whether there are any among `count` rows from `begin` on, or among other rows of the same blocks of kOutputRows.
    __device__ __forceinline__ bool any(int begin, int count) const {
        const int end = min(begin + count, rows);
        bool found = false;
#pragma unroll 1
        for (int row = begin; row < end; row += kOutputRows) found = found || states[row / kOutputRows] != kInRange;
        return found;
    }
    /// Of all rows, for the whole block.
    template <int kThreads>
    __device__ __forceinline__ bool any_at_all() const {
        bool found = false;
        for (int row = static_cast<int>(threadIdx.x) * kOutputRows; row < rows; row += kThreads * kOutputRows) {
            found = found || states[row / kOutputRows] != kInRange;
        }
        return __syncthreads_or(found) != 0;
    }
    /// For one block. Others may read the state before or after: `any` is true of both.
    template <int kThreads>
    __device__ __forceinline__ void tell_written_again() const {
        for (int row = static_cast<int>(threadIdx.x) * kOutputRows; row < rows; row += kThreads * kOutputRows) {
            if (states[row / kOutputRows] == kStale) states[row / kOutputRows] = kWrittenAgain;
        }
    }
};

}  // namespace flce

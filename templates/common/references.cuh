// Finds a number near each row's logits before forward retains exponentials.
#pragma once

#include "flce/common/reference_rows.cuh"

namespace flce {

/// A warp has a row of the launch.
template <class Problem>
__device__ __forceinline__ void references(const ReferencesParams& p) {
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / 32;
    if (row >= p.rows) return;
    const float reference = reference_of<Problem>(p, listed_row<Problem>(p.list, p.targets, row));
    if (threadIdx.x % 32 == 0) p.references[row] = reference;
}

}  // namespace flce

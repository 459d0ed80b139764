// Rows of hidden · weightᵀ as the library has left them in memory: a warp has two rows and kLtTileColumns columns of them at a time.
#pragma once

#include "flce/common/row_exponentials.cuh"
#include "flce/lt/params.cuh"

namespace flce {

/// A thread's columns: four beside each other, 128 columns apart.
struct LtColumns {
    static __device__ __forceinline__ constexpr int of(int j) { return j / 2 * 128 + j % 2 * 2; }
    template <int kColumnPieces>
    static __device__ __forceinline__ bool have(int within) {
        return within >= 0 && within < 64 * kColumnPieces && (within & 127) < 4;
    }
};

/// This thread's place in its warp's rows. Sums [0][j][2·h + e] are row(0, h), column(j, e).
struct LtPlace {
    using Columns = LtColumns;
    enum : int { kRows = 2 };
    enum : int { kColumnPieces = kLtTileColumns / 64 };
    int first_row;  ///< the warp's

    __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ int row(int /*i*/, int h) const { return first_row + h; }
    __device__ __forceinline__ int column(int j, int e) const { return lane() * 4 + Columns::of(j) + e; }
};
using LtSums = float[1][LtPlace::kColumnPieces][4];

/// Waits for the product before, whose end a launch need not have waited for.
__device__ __forceinline__ void wait_for_product() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
}

/// Four neighbours of a row from `column` on; columns that do not exist are 0.
__device__ __forceinline__ float4 load_four(const float* row, int column, int columns) {
    if (column + 3 < columns) return *reinterpret_cast<const float4*>(row + column);
    float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
    if (column < columns) four.x = row[column];
    if (column + 1 < columns) four.y = row[column + 1];
    if (column + 2 < columns) four.z = row[column + 2];
    return four;
}

/// Reads a warp's rows of `sums`, from `column` on; rows and columns that do not exist are 0.
__device__ __forceinline__ void load_sums(const float* sums, long long ld, const LtPlace& place, int rows, int column, int columns,
                                          LtSums& c) {
#pragma unroll
    for (int h = 0; h < LtPlace::kRows; ++h) {
        const float* const row = sums + place.row(0, h) * ld;
        const int end = place.row(0, h) < rows ? columns : 0;
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; j += 2) {
            const float4 four = load_four(row, column + place.column(j, 0), end);
            c[0][j][2 * h] = four.x;
            c[0][j][2 * h + 1] = four.y;
            c[0][j + 1][2 * h] = four.z;
            c[0][j + 1][2 * h + 1] = four.w;
        }
    }
}

__device__ __forceinline__ float warp_total(float of_lane) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) of_lane += __shfl_xor_sync(0xffffffffu, of_lane, lanes);
    return of_lane;
}

/// Merges the sums that the lanes of a warp have of a row. All of them get the result, the same bits each.
template <class Problem>
__device__ __forceinline__ RowSums merge_lanes(const RowSums& mine) {
    float largest = mine.max;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    RowSums all = sums_of_nothing(largest, -infinity());
    const float below = mine.exp_sum > 0.f ? fmaxf(mine.max - largest, farthest_below()) : 0.f;
    const float factor = ::expf(below);
    all.exp_sum = warp_total(factor * mine.exp_sum);
    if constexpr (Problem::entropy) all.exp_z_sum = warp_total(factor * (mine.exp_z_sum + below * mine.exp_sum));
    if constexpr (Problem::label_smoothing) all.weighted_sum = warp_total(mine.weighted_sum);
    if constexpr (Problem::square_sum) all.exp_sq_sum = warp_total(factor * factor * mine.exp_sq_sum);
    if constexpr (Problem::top1) {
        all.top1 = mine.max == largest ? mine.top1 : FLCE_NO_CLASS;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) all.top1 = min(all.top1, __shfl_xor_sync(0xffffffffu, all.top1, lanes));
    }
    return all;
}

/// The place of a row's exponentials from `column` on, a multiple of kLtTileColumns.
template <class Element>
__device__ __forceinline__ Element* exponentials_from(void* exponentials, long long block_bytes, long long row, int column) {
    char* const block = static_cast<char*>(exponentials) + column / kLtRetainedColumns * block_bytes;
    return reinterpret_cast<Element*>(block) + row * kLtRetainedColumns + column % kLtRetainedColumns;
}

}  // namespace flce

// Copies of operand slices from global to shared memory, and where an element lies there.
#pragma once

#include "flce/numeric.cuh"

namespace flce {

/// Which dimension of a GEMM operand is contiguous in memory: the one that is summed over, or the one of the result.
enum class Major { k, mn };

/// Tile of a GEMM: GemmTile of the plan.
template <int kBlockM_, int kBlockN_, int kBlockK_, int kStages_, int kWarpsM_, int kWarpsN_>
struct Tile {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockN = kBlockN_;
    static constexpr int kBlockK = kBlockK_;
    static constexpr int kStages = kStages_;
    static constexpr int kWarpsM = kWarpsM_;
    static constexpr int kWarpsN = kWarpsN_;
    static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
    static constexpr int kWarpM = kBlockM / kWarpsM;
    static constexpr int kWarpN = kBlockN / kWarpsN;
};

/// Shared memory of one slice of an operand: `kRows` rows of `kColumns` contiguous elements. The 16-byte chunks of a row are permuted by an
/// XOR with a function of the row, so that the eight rows (or four rows and two chunks) that one access touches lie in different banks.
template <class T, Major kMajor, int kExtent, int kBlockK>
struct SliceLayout {
    static constexpr int kRows = kMajor == Major::k ? kExtent : kBlockK;
    static constexpr int kColumns = kMajor == Major::k ? kBlockK : kExtent;
    static constexpr int kPitch = kColumns * static_cast<int>(sizeof(T));  // bytes
    static constexpr int kChunksPerRow = kPitch / 16;
    static constexpr int kBytes = kRows * kPitch;
    static_assert(kPitch == 64 || kPitch % 128 == 0, "a row fills half the banks or all of them");

    static __device__ __forceinline__ int swizzle(int row) {
        if constexpr (kPitch == 64) return (row >> 1) & 3;
        if constexpr (kMajor == Major::mn && sizeof(T) == 4) return ((row & 3) << 1) | ((row >> 2) & 1);
        return row & 7;
    }
    static __device__ __forceinline__ unsigned offset(int row, int chunk) {
        return static_cast<unsigned>(row * kPitch + ((chunk ^ swizzle(row)) << 4));
    }
};

/// One operand's way into shared memory. Every thread copies the same chunk column of every kRowStep-th row.
template <class T, Major kMajor, int kExtent, int kBlockK, int kThreads, bool kAligned>
struct OperandLoader {
    using Layout = SliceLayout<T, kMajor, kExtent, kBlockK>;
    static constexpr int kElements = 16 / static_cast<int>(sizeof(T));  // of a chunk
    static constexpr int kRowStep = kThreads / Layout::kChunksPerRow;
    static constexpr int kCopies = Layout::kRows / kRowStep;
    static_assert(kThreads % Layout::kChunksPerRow == 0 && Layout::kRows % kRowStep == 0, "threads divide a slice evenly");

    const T* source;  // this thread's first chunk of the next slice
    long long ld;     // elements
    int row;
    int column;
    int extent;  // valid elements of the result's dimension from the tile's origin
    int depth;   // elements still to be summed over, from the next slice's origin

    /// `origin` is the tile's first element, `valid` how many of its kExtent rows of the result exist, `k` the length of the sum.
    __device__ __forceinline__ void start(const T* origin, long long ld_, int valid, int k) {
        const int thread = static_cast<int>(threadIdx.x);
        row = thread / Layout::kChunksPerRow;
        column = thread % Layout::kChunksPerRow * kElements;
        ld = ld_;
        source = origin + row * ld + column;
        extent = valid;
        depth = k;
    }

    /// Copies the next slice to `destination` (its base in the .shared window) and moves on to the one after.
    __device__ __forceinline__ void load(unsigned destination) {
        const int row_limit = kMajor == Major::k ? extent : depth;
        const int column_limit = kMajor == Major::k ? depth : extent;
        const int bytes = min(max((column_limit - column) * static_cast<int>(sizeof(T)), 0), 16);
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int r = row + i * kRowStep;
            const unsigned to = destination + Layout::offset(r, column / kElements);
            const T* from = source + i * kRowStep * ld;
            const int present = r < row_limit ? bytes : 0;
            if constexpr (kAligned) {
                ptx::cp_async_cg_16(to, from, static_cast<unsigned>(present));
            } else {
                copy_elements(to, from, present / static_cast<int>(sizeof(T)));
            }
        }
        source += kMajor == Major::k ? static_cast<long long>(kBlockK) : kBlockK * ld;
        depth -= kBlockK;
    }

private:
    /// For rows that are not 16-byte aligned.
    static __device__ __forceinline__ void copy_elements(unsigned to, const T* from, int count) {
        unsigned words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if constexpr (sizeof(T) == 4) {
                words[w] = w < count ? __float_as_uint(to_float(from[w])) : 0u;
            } else {
                const unsigned low = 2 * w < count ? from[2 * w].bits : 0u;
                const unsigned high = 2 * w + 1 < count ? from[2 * w + 1].bits : 0u;
                words[w] = low | (high << 16);
            }
        }
        ptx::st_shared_v4(to, words);
    }
};

}  // namespace flce

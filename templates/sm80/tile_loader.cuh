// Copies of operand slices from global to shared memory, and where an element lies there.
#pragma once

#include "flce/common/numeric.cuh"
#include "flce/common/operands.cuh"

namespace flce {

/// Tile of a GEMM: GemmTile of the plan.
template <int kBlockM_, int kBlockN_, int kBlockK_, int kStages_, int kWarpsM_, int kWarpsN_>
struct Tile {
    enum : int { kBlockM = kBlockM_ };
    enum : int { kBlockN = kBlockN_ };
    enum : int { kBlockK = kBlockK_ };
    enum : int { kStages = kStages_ };
    enum : int { kWarpsM = kWarpsM_ };
    enum : int { kWarpsN = kWarpsN_ };
    enum : int { kThreads = 32 * kWarpsM * kWarpsN };
    enum : int { kWarpM = kBlockM / kWarpsM };
    enum : int { kWarpN = kBlockN / kWarpsN };
};

/// Shared memory of one slice of an operand: `kRows` rows of `kColumns` contiguous elements. The 16-byte chunks of a row are permuted by an
/// XOR with a function of the row, so that the eight rows (or four rows and two chunks) that one access touches lie in different banks.
template <class T, Major kMajor, int kExtent, int kBlockK>
struct SliceLayout {
    enum : int { kRows = kMajor == Major::k ? kExtent : kBlockK };
    enum : int { kColumns = kMajor == Major::k ? kBlockK : kExtent };
    enum : int { kPitch = kColumns * static_cast<int>(sizeof(T)) };  // bytes
    enum : int { kChunksPerRow = kPitch / 16 };
    enum : int { kBytes = kRows * kPitch };
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
template <class T, Major kMajor, int kExtent, int kBlockK, int kThreads, Access kAccess>
struct OperandLoader {
    using Layout = SliceLayout<T, kMajor, kExtent, kBlockK>;
    enum : int { kElements = 16 / static_cast<int>(sizeof(T)) };  // elements of a chunk
    enum : int { kRowStep = kThreads / Layout::kChunksPerRow };
    enum : int { kCopies = Layout::kRows / kRowStep };
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

    /// Copies the next slice of an operand whose rows are summed over. Only rows with a bit in `present` are read, counted from the slice's
    /// first.
    template <int kWords>
    __device__ __forceinline__ void load_some(unsigned destination, const unsigned (&present)[kWords]) {
        static_assert(kMajor == Major::mn && kAccess == Access::chunks && kBlockK <= 32 * kWords, "a bit for each row of a slice");
        static_assert(kRowStep <= 32 || kCopies == 1, "the word of a copy is known");
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const unsigned word = kRowStep <= 32 ? present[i * kRowStep / 32] : row < 32 ? present[0] : present[kWords - 1];
            const bool is_present = (word >> ((row + i * kRowStep) & 31) & 1u) != 0u;
            ptx::cp_async_cg_16_if(is_present && column < extent, destination + offset(i), source + i * kRowStep * ld);
        }
        source += kBlockK * ld;
    }

    /// Copies the next slice to `destination` (its base in the .shared window) and moves on to the one after. Elements that do not exist
    /// become 0; past the sum's end nothing exists. There are no branches, so that copies mix with the multiplications around them.
    __device__ __forceinline__ void load(unsigned destination) {
        const int row_limit = kMajor == Major::k ? extent : depth;
        const int column_limit = kMajor == Major::k ? depth : extent;
        if constexpr (kAccess == Access::chunks) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                ptx::cp_async_cg_16_if(row + i * kRowStep < row_limit && column < column_limit, destination + offset(i),
                                       source + i * kRowStep * ld);
            }
        } else {
            const int count = min(max(column_limit - column, 0), kElements);
#pragma unroll 1
            for (int i = 0; i < kCopies; ++i) {
                const int present = row + i * kRowStep < row_limit ? count : 0;
                copy_part(destination + offset(i), source + i * kRowStep * ld, present);
            }
        }
        source += kMajor == Major::k ? static_cast<long long>(kBlockK) : kBlockK * ld;
        depth -= kBlockK;
    }

private:
    __device__ __forceinline__ unsigned offset(int i) const { return Layout::offset(row + i * kRowStep, column / kElements); }

    static __device__ __forceinline__ void copy_part(unsigned to, const T* from, int count) {
        if constexpr (kAccess == Access::partial) {
            ptx::cp_async_cg_16(to, from, count * static_cast<int>(sizeof(T)));
        } else {
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
    }
};

}  // namespace flce

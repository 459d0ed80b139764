// Retained exponentials as operands of the gradients' GEMMs: how the feeds read them, and in which order grad_weight is written over them.
#pragma once

#include "flce/common/tile_order.cuh"
#include "flce/sm80/mainloop.cuh"
#include "flce/sm80/params.cuh"

namespace flce {

/// Feeds a sum over the vocabulary, whose first operand may lie in blocks of kRetainedColumns.
template <class MainloopT, class TileT>
struct BlockedFeed : TileFeed<MainloopT> {
    enum : int { kSlicesOfBlock = kRetainedColumns / TileT::kBlockK };
    static_assert(kRetainedColumns % TileT::kBlockK == 0, "a slice lies in one block");
    long long gap;  ///< block_gap of RetainGradHiddenParams
    int left = kSlicesOfBlock;
    __device__ __forceinline__ void load_a(unsigned to) {
        this->a.load(to);
        if (--left == 0) {
            this->a.source += gap;
            left = kSlicesOfBlock;
        }
    }
};

/// Column `column` of the first row of a matrix as wide as the vocabulary: a chunk of dlogits, or exponentials in blocks of `block_bytes`.
/// The columns of a tile lie in one block.
template <class Element>
__device__ __forceinline__ const Element* vocabulary_at(const void* matrix, long long block_bytes, int column) {
    const int blocks = block_bytes != 0 ? column / kRetainedColumns : 0;
    return reinterpret_cast<const Element*>(static_cast<const char*>(matrix) + blocks * block_bytes) + column - blocks * kRetainedColumns;
}

/// Tile of this block in grad_weight over exponentials that lie in its memory: numbers are taken in order by blocks that run, so that a
/// tile may wait for tiles of smaller numbers, and tiles of a block of exponentials follow one another. For all threads, before the ring is
/// used.
template <class TileT, class Params>
__device__ __forceinline__ void take_tile(const Params& p, int tiles_m, int tiles_n, int& m, int& n) {
    constexpr int kTilesOfBlock = kRetainedColumns > TileT::kBlockM ? kRetainedColumns / TileT::kBlockM : 1;
    unsigned* const shared = reinterpret_cast<unsigned*>(dynamic_smem);
    if (threadIdx.x == 0) *shared = ptx::atom_relaxed_gpu_add(p.taken, 1u);
    __syncthreads();  // the number is there for all
    const unsigned number = *shared;
    __syncthreads();  // all have read it: the ring may begin
    tile_of_block<kTilesOfBlock>(number, tiles_m, tiles_n, m, n);
}

/// Tells that this block has multiplied its tile of grad_weight, whose rows are [m0, end), and waits until the memory of these rows is
/// free. For all threads, when the ring is drained. `row_bytes`: of grad_weight.
template <class TileT, class Params>
__device__ __forceinline__ void wait_for_room(const Params& p, int m0, int end, long long row_bytes) {
    if (threadIdx.x == 0) ptx::red_release_gpu_add(p.readers + m0 / kRetainedColumns, 1u);
    // Block i of exponentials begins i + 1 places behind the beginning. So it ends behind the gradient of its own columns.
    const int taken = static_cast<int>((end * row_bytes - 1) / p.block_bytes);
    for (int block = static_cast<int>(threadIdx.x); block < taken; block += TileT::kThreads) {
        while (ptx::ld_acquire_gpu(p.readers + block) < p.readers_of_block) {
        }
    }
    __syncthreads();  // every block of exponentials has been waited for
}

}  // namespace flce

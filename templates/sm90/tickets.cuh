// Who works on which tile. Clusters take numbers of tiles from a counter in memory, one at a time and in order, as they get to them. So all
// tiles are worked on by the clusters that run, however few the device has room for beside other kernels, and a tile may wait for tiles of
// smaller numbers: a cluster that runs has taken each of them.
#pragma once

#include "flce/common/sum_parts.cuh"
#include "flce/sm90/mainloop.cuh"

namespace flce {

/// One thread of a cluster: the next number.
__device__ __forceinline__ unsigned take_ticket(Tickets* tickets) { return ptx::atom_relaxed_gpu_add(&tickets->taken, 1u); }

/// One thread of each of `clusters` clusters, when it has taken a number that no tile has. The last one makes the counters ready for the
/// launch after this.
__device__ __forceinline__ void leave_tickets(Tickets* tickets, unsigned clusters) {
    if (ptx::atom_relaxed_gpu_add(&tickets->left, 1u) != clusters - 1) return;
    tickets->taken = 0u;
    tickets->left = 0u;
}

/// Numbers that the first block of a cluster takes and hands to all threads of its blocks: each number to a slot in their shared memory.
/// The producer is ahead of the slowest reader by no more than the ring of slices lets it be, which is less than there are slots.
template <class TileT>
struct TileNumbers {
    enum : unsigned { kSlots = 16 };
    enum : unsigned { kBytes = kSlots * (8 + 4) };
    static_assert(kSlots >= TileT::kStages + 4,
                  "a tile is a slice at least: those in the ring, the one at hand, and what each consumer looks at");

    unsigned smem;  ///< barriers, then numbers
    unsigned turn = 0;

    /// All threads, before the cluster is in step.
    __device__ __forceinline__ explicit TileNumbers(unsigned smem_) : smem(smem_) {
        if (threadIdx.x == 0) {
            for (unsigned slot = 0; slot < kSlots; ++slot) ptx::mbarrier_init(smem + 8 * slot, 1);
            ptx::fence_mbarrier_init();
        }
    }
    /// One thread of each block: that the next number is on its way; of the first block also the number itself.
    __device__ __forceinline__ void hand_out(unsigned number, unsigned rank) const {
        const unsigned slot = turn % kSlots;
        if constexpr (TileT::kCluster == 1) {
            ptx::st_shared_b32(smem + 8 * kSlots + 4 * slot, number);
            ptx::mbarrier_arrive(smem + 8 * slot);
            return;
        }
        ptx::mbarrier_arrive_expect_tx(smem + 8 * slot, 4);
        if (rank != 0) return;
        for (unsigned block = 0; block < TileT::kCluster; ++block) {
            ptx::st_async_b32(smem + 8 * kSlots + 4 * slot, number, smem + 8 * slot, block);
        }
    }
    /// Any thread: the next number.
    __device__ __forceinline__ unsigned take() {
        const unsigned slot = turn % kSlots;
        ptx::mbarrier_wait_parity(smem + 8 * slot, turn / kSlots & 1u);
        ++turn;
        return ptx::ld_shared_b32(smem + 8 * kSlots + 4 * slot);
    }
};

/// One thread of each block: calls `bring` for every tile of `walk` that the cluster takes.
template <class TileT, class Walk, class Bring>
__device__ __forceinline__ void bring_tiles(Tickets* tickets, TileNumbers<TileT>& numbers, Walk& walk, unsigned rank, const Bring& bring) {
    unsigned number = rank == 0 ? take_ticket(tickets) : 0u;
    while (true) {
        numbers.hand_out(number, rank);
        if (!walk.go_to(numbers.take(), rank)) break;
        if (rank == 0) number = take_ticket(tickets);  // it comes while this tile is brought
        bring();
    }
    if (rank == 0) leave_tickets(tickets, gridDim.x / TileT::kCluster);
}

/// A TileWalk where the last tiles are made in parts, which have numbers of their own (TailParts).
template <class TileT, int kRaster>
struct TailWalk : TileWalk<TileT, kRaster> {
    using Base = TileWalk<TileT, kRaster>;
    using Base::Base;
    TailParts tail{0, 1, 0, 0};
    unsigned taken = 0;  ///< number of the tile at hand, or of the part of one

    __device__ __forceinline__ void divide(int clusters, int slices, int room) {
        tail = TailParts(static_cast<int>(Base::count), clusters, slices, room);
    }
    __device__ __forceinline__ bool go_to(unsigned number, unsigned rank) {
        taken = number;
        if (!in_parts()) return Base::go_to(number, rank);
        if (number >= static_cast<unsigned>(tail.numbers())) return false;
        return Base::go_to(static_cast<unsigned>(tail.tile_of(static_cast<int>(number))), rank);
    }
    __device__ __forceinline__ bool in_parts() const { return tail.count > 1 && taken >= static_cast<unsigned>(tail.full); }
    /// Part of a tile that is made in parts.
    __device__ __forceinline__ int part() const { return tail.part_of(static_cast<int>(taken)); }
};

}  // namespace flce

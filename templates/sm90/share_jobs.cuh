// Who works on what of forward. Each cluster has a share of the work, which it goes through from beginning to end, with nothing to ask for
// on the way. Shares whose own cluster does not run, because another kernel has its SMs, are worked on by the others when they have
// finished theirs, stretch by stretch.
#pragma once

#include "flce/sm90/tickets.cuh"

namespace flce {

/// Stretches of a share as one number, which a cluster's blocks are handed: all of them, or one of another cluster's share.
struct ShareJob {
    enum : unsigned { kNone = ~0u };
    enum : unsigned { kOthers = 1u << 15 };

    unsigned number;

    static __device__ __forceinline__ unsigned own(int share) { return static_cast<unsigned>(share); }
    static __device__ __forceinline__ unsigned others(int share, int stretch) {
        return static_cast<unsigned>(stretch) << 16 | kOthers | static_cast<unsigned>(share);
    }
    __device__ __forceinline__ int share() const { return static_cast<int>(number & (kOthers - 1u)); }
    /// Several clusters may work on this share.
    __device__ __forceinline__ bool is_others() const { return (number & kOthers) != 0u; }
    /// At hand.
    __device__ __forceinline__ int stretch() const { return static_cast<int>(number >> 16); }
    __device__ __forceinline__ void advance() { number += 1u << 16; }
};

/// One thread of a cluster: its jobs.
struct ShareJobs {
    enum : unsigned { kFree = 0, kOwned = 1, kGivenAway = 2 };  ///< a share's owner

    ShareTickets* tickets;  ///< null: only its own share
    int shares;
    int stretches;

    __device__ __forceinline__ unsigned* owner(int share) const { return reinterpret_cast<unsigned*>(tickets + 1) + share; }

    __device__ __forceinline__ unsigned first(int cluster) const {
        if (tickets == nullptr) return ShareJob::own(cluster);
        if (ptx::atom_relaxed_gpu_cas(owner(cluster), kFree, kOwned) != kFree) return next();
        ptx::red_relaxed_gpu_add(&tickets->owned, 1u);
        return ShareJob::own(cluster);
    }
    /// A stretch of another share, in order, so that what comes before it is being worked on. Blocks run in order as a rule: shares from
    /// the last one on.
    __device__ __forceinline__ unsigned next() const {
        if (tickets == nullptr) return ShareJob::kNone;
        while (ptx::ld_relaxed_gpu(&tickets->owned) < static_cast<unsigned>(shares)) {
            const unsigned taken = take_ticket(&tickets->tickets);
            if (taken >= static_cast<unsigned>(shares * stretches)) break;
            const int share = shares - 1 - static_cast<int>(taken) / stretches;
            if (ptx::atom_relaxed_gpu_cas(owner(share), kFree, kGivenAway) == kOwned) continue;
            return ShareJob::others(share, static_cast<int>(taken) % stretches);
        }
        return ShareJob::kNone;
    }
    /// After the last job. The last cluster makes everything ready for the next launch but `done`, which the writer of a share's last
    /// stretch does.
    __device__ __forceinline__ void leave() const {
        if (tickets == nullptr) return;
        if (ptx::atom_relaxed_gpu_add(&tickets->tickets.left, 1u) != static_cast<unsigned>(shares) - 1) return;
        *tickets = {};
        for (int share = 0; share < shares; ++share) *owner(share) = kFree;
    }
};

/// Order of the stretches of a share that several clusters work on: each is added to the sums of the stretches before, so that the result
/// does not depend on how many clusters worked on the share.
struct StretchOrder {
    unsigned* done;  ///< warps that have written a stretch of the share
    ShareJob job;    ///< the stretch at hand
    unsigned warps;  ///< warps that write a stretch
    int lane;

    __device__ __forceinline__ StretchOrder(ShareTickets* tickets, int shares, ShareJob job_, unsigned warps_, int lane_)
        : done(reinterpret_cast<unsigned*>(tickets + 1) + shares + job_.share()), job(job_), warps(warps_), lane(lane_) {}
    /// Waits until the stretches before are written.
    __device__ __forceinline__ void wait() const {
        if (lane == 0) {
            while (ptx::ld_acquire_gpu(done) < static_cast<unsigned>(job.stretch()) * warps) {
            }
        }
        __syncwarp();
    }
    /// Tells that the warp has written its rows.
    __device__ __forceinline__ void tell(bool is_last) const {
        __syncwarp();
        if (lane != 0) return;
        const unsigned before = ptx::atom_release_gpu_add(done, 1u);
        if (is_last && before + 1 == static_cast<unsigned>(job.stretch() + 1) * warps) *done = 0u;  // for the next launch
    }
};

/// Word from the first thread of a block to the others: a tile to work on, or the end of a stretch of a share.
struct TileWord {
    enum Kind : unsigned { kTile = 0, kEnd = 1, kStop = 2 };

    unsigned number;                                                 ///< kTile: tile of the vocabulary; kEnd: number of the job, or of the
                                                                     ///< segment
    unsigned rest;                                                   ///< from bit 5 on the row cluster of the tile, or of part 0
    enum : unsigned { kPart = 4, kConsumer = 8, kNeighbours = 16 };  ///< bits of a tile; kPart also of a segment's end
    enum : unsigned { kHasSecond = 4, kIsLast = 8 };                 ///< bits of an end: part 1 exists, and the stretch is the share's last

    static __device__ __forceinline__ TileWord tile(int tile, int row_cluster, int part, int consumer, bool neighbours) {
        return {static_cast<unsigned>(tile), static_cast<unsigned>(row_cluster) << 5 | (neighbours ? kNeighbours : 0u) |
                                                 (consumer != 0 ? kConsumer : 0u) | static_cast<unsigned>(part) * kPart | kTile};
    }
    static __device__ __forceinline__ TileWord end(ShareJob job, int row_cluster, bool has_second, bool is_last) {
        return {job.number, static_cast<unsigned>(row_cluster) << 5 | (is_last ? kIsLast : 0u) | (has_second ? kHasSecond : 0u) | kEnd};
    }
    static __device__ __forceinline__ TileWord segment_end(int segment, int row_cluster, int part) {
        return {static_cast<unsigned>(segment), static_cast<unsigned>(row_cluster) << 5 | static_cast<unsigned>(part) * kPart | kEnd};
    }
    static __device__ __forceinline__ TileWord stop() { return {0u, kStop}; }
    __device__ __forceinline__ unsigned kind() const { return rest & 3u; }
    __device__ __forceinline__ int row_cluster() const { return static_cast<int>(rest >> 5); }
    __device__ __forceinline__ int part() const { return (rest & kPart) != 0 ? 1 : 0; }
    __device__ __forceinline__ int consumer() const { return (rest & kConsumer) != 0 ? 1 : 0; }
    __device__ __forceinline__ bool neighbours() const { return (rest & kNeighbours) != 0; }
    __device__ __forceinline__ bool has_second() const { return (rest & kHasSecond) != 0; }
    __device__ __forceinline__ bool is_last() const { return (rest & kIsLast) != 0; }
};

/// Words on their way. A stretch has a tile at least, and the producer tells the word after the tile that it brings. So the producer is
/// ahead of the slowest consumer by two words for each slice in the ring, each tile at hand and the next one at most: there are more slots.
template <class TileT>
struct TileWords {
    enum : unsigned { kSlots = 32 };
    enum : unsigned { kBytes = kSlots * (8 + 8) };
    static_assert(kSlots >= 2 * (TileT::kStages + 5), "a tile is a slice at least");

    unsigned smem;  ///< barriers, then words
    unsigned turn = 0;

    /// All threads, before the block is in step.
    __device__ __forceinline__ explicit TileWords(unsigned smem_) : smem(smem_) {
        if (threadIdx.x == 0) {
            for (unsigned slot = 0; slot < kSlots; ++slot) ptx::mbarrier_init(smem + 8 * slot, 1);
            ptx::fence_mbarrier_init();
        }
    }
    /// The producer's first thread, which then takes the word itself.
    __device__ __forceinline__ void tell(const TileWord& word) const {
        const unsigned slot = turn % kSlots;
        ptx::st_shared_b32(smem + 8 * (kSlots + slot), word.number);
        ptx::st_shared_b32(smem + 8 * (kSlots + slot) + 4, word.rest);
        ptx::mbarrier_arrive(smem + 8 * slot);
    }
    /// Any thread.
    __device__ __forceinline__ TileWord take() {
        ptx::mbarrier_wait_parity(smem + 8 * (turn % kSlots), turn / kSlots & 1u);
        ++turn;
        return again();
    }
    /// Word that was taken last.
    __device__ __forceinline__ TileWord again() const {
        const unsigned slot = (turn - 1) % kSlots;
        return {ptx::ld_shared_b32(smem + 8 * (kSlots + slot)), ptx::ld_shared_b32(smem + 8 * (kSlots + slot) + 4)};
    }
};

}  // namespace flce

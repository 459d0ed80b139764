// The mainloop of sm_90a, C[m, n] = Σ_k A[m, k]·B[n, k]: one producer warp has the tensor copy engine bring slices of both operands
// through a ring of stages, two consumer warpgroups multiply them with wgmma. Blocks are persistent and stand in clusters along M,
// which share B by multicast.
//
// Two schedules. Together: each consumer has half of a tile's rows. By turns (ping-pong): each consumer has whole tiles of its own, and
// one's epilogue runs while the other multiplies.
#pragma once

#include "flce/sm90/params.cuh"
#include "flce/sm90/ptx_wgmma.cuh"
#include "flce/sm90/tile.cuh"

namespace flce {

/// A matrix that lies in memory as blocks of 2^shift columns; its map has the blocks as third dimension.
struct BlockedMap {
    const TensorMap& map;
    int shift;
    __device__ __forceinline__ int column(int x) const { return static_cast<int>(static_cast<unsigned>(x) & ((1u << shift) - 1u)); }
    __device__ __forceinline__ int block(int x) const { return x >> shift; }
};

/// One slice of an operand in shared memory: 64 deep, kExtent of the result's dimension, in rows of 128 bytes swizzled as the copy engine
/// and wgmma agree. Contiguous along k: kExtent rows. Contiguous along mn: blocks of 64 rows, a block for every 64 of mn.
template <Major kMajor, int kExtent>
struct SliceSm90 {
    enum : int { kBytes = kExtent * 128 };
    enum : int { kBlockBytes = 64 * 128 };

    /// wgmma's matrix descriptor of the 16 of k number `step` from row `first` (a multiple of 64) on, the slice being at `base`.
    static __device__ __forceinline__ unsigned long long descriptor(unsigned base, int first, int step) {
        constexpr unsigned long long kSwizzle128 = 1ull << 62;
        constexpr unsigned long long kEightRows = static_cast<unsigned long long>(1024 >> 4) << 32;
        constexpr unsigned long long kNextBlock = static_cast<unsigned long long>((kMajor == Major::k ? 16 : kBlockBytes) >> 4) << 16;
        const unsigned at = base + static_cast<unsigned>(first * 128 + step * (kMajor == Major::k ? 32 : 16 * 128));
        return kSwizzle128 | kEightRows | kNextBlock | ((at & 0x3ffffu) >> 4);
    }

    /// Copies part `part` of kParts of the slice at (mn, k); with several parts, to every block of the cluster. kOnce: nobody reads it
    /// again.
    template <int kParts, bool kOnce = false, class Map>
    static __device__ __forceinline__ void load(unsigned base, const Map& map, int mn, int k, int part, unsigned barrier) {
        if constexpr (kMajor == Major::k) {
            const int first = kParts == 1 ? 0 : part * (kExtent / kParts);
            copy<kParts, kOnce>(base + static_cast<unsigned>(first * 128), map, k, mn + first, barrier);
        } else {
            constexpr int kRows = 64 / kParts;
#pragma unroll
            for (int block = 0; block < kExtent / 64; ++block) {
                copy<kParts, kOnce>(base + static_cast<unsigned>(block * kBlockBytes + part * kRows * 128), map, mn + block * 64,
                                    k + part * kRows, barrier);
            }
        }
    }

private:
    template <int kParts, bool kOnce>
    static __device__ __forceinline__ void copy(unsigned to, const TensorMap& map, int x, int y, unsigned barrier) {
        if constexpr (kParts == 1 && kOnce) {
            ptx::cp_async_bulk_tensor_2d_load(to, &map, x, y, barrier, ptx::createpolicy_evict_first());
        } else if constexpr (kParts == 1) {
            ptx::cp_async_bulk_tensor_2d_load(to, &map, x, y, barrier);
        } else {
            ptx::cp_async_bulk_tensor_2d_load_multicast(to, &map, x, y, barrier, static_cast<unsigned short>((1 << kParts) - 1));
        }
    }
    template <int kParts, bool>
    static __device__ __forceinline__ void copy(unsigned to, const BlockedMap& m, int x, int y, unsigned barrier) {
        if constexpr (kParts == 1) {
            ptx::cp_async_bulk_tensor_3d_load(to, &m.map, m.column(x), y, m.block(x), barrier);
        } else {
            ptx::cp_async_bulk_tensor_3d_load_multicast(to, &m.map, m.column(x), y, m.block(x), barrier,
                                                        static_cast<unsigned short>((1 << kParts) - 1));
        }
    }
};

/// Keeps the clusters of a grid at nearly the same depth of their tiles while they go through sums that are thousands of slices long: what
/// one reads from memory the others then find in L2. A cluster that is ahead of the slowest by two steps waits, and it is the slowest that
/// ends a wave of tiles anyhow. Steps are numbered through all waves, a wave being as many tiles as the grid has clusters; counter i has
/// the steps with number ≡ i, and is never set back.
///
/// The pace is worth a few microseconds. Where a cluster does not run, because another kernel has its SMs, its steps are not made in time:
/// the others give up.
struct Pace {
    enum : int { kSlices = 8 };     ///< slices of a step
    enum : int { kPatience = 32 };  ///< looks at a counter, each as long as an access to L2

    unsigned* counters;  // null: no pace
    int clusters;
    int full_steps;  // steps of waves with a tile for every cluster
    int rest;        // tiles of the wave after those
    int tile_steps;
    int first_step = 0;  // first step of the tile at hand

    __device__ __forceinline__ Pace(unsigned* counters_, int clusters_, int tiles, int slices)
        : counters(counters_), clusters(clusters_), tile_steps(ceil_div(slices, kSlices)) {
        full_steps = tiles / clusters * tile_steps;
        rest = tiles % clusters;
    }
    /// One thread of a cluster, before it brings a tile.
    __device__ __forceinline__ void begin(unsigned number) {
        if (counters != nullptr) first_step = static_cast<int>(number) / clusters * tile_steps;
    }
    /// One thread of a cluster, before it brings a slice of the tile.
    __device__ __forceinline__ void before(int slice) {
        if (slice % kSlices == 0 && counters != nullptr) go_to(first_step + slice / kSlices);
    }

private:
    __device__ __forceinline__ void go_to(int step) {
        ptx::red_relaxed_gpu_add(counters + step % kPaceCounters, 1u);
        const int before = step - 1;
        if (before < 0) return;
        const int slot = before % kPaceCounters;
        const int times = before / kPaceCounters + 1;
        const int full = min(times, (full_steps - slot + kPaceCounters - 1) / kPaceCounters);
        const unsigned all = static_cast<unsigned>(full * clusters + (times - full) * rest);
        for (int patience = kPatience; ptx::ld_relaxed_gpu(counters + slot) < all; --patience) {
            if (patience > 0) continue;
            counters = nullptr;
            return;
        }
    }
};
struct NoPace {
    __device__ __forceinline__ void before(int /*slice*/) {}
};

/// Type for a product that nothing is multiplied beside. BiasSums and BiasFactors are the others.
struct NothingBeside {
    __device__ __forceinline__ unsigned bytes() const { return 0u; }
    __device__ __forceinline__ void bring(int /*stage*/, int /*k*/, unsigned /*barrier*/) const {}
    __device__ __forceinline__ void multiply(int /*piece*/, unsigned long long /*a*/, int /*stage*/, int /*step*/) const {}
};

/// Has the copy engine fetch the descriptions of what it will copy while the kernel before this one still runs.
template <class... Maps>
__device__ __forceinline__ void prefetch_maps(const Maps&... maps) {
    if (threadIdx.x == 0) (ptx::prefetch_tensormap(&maps), ...);
}

/// A position in the ring of stages and how often it has gone round.
template <int kStages>
struct RingPosition {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance(int slices = 1) {
        stage += slices;
        if (slices == 1) {
            if (stage == kStages) {
                stage = 0;
                parity ^= 1u;
            }
        } else {
            parity ^= static_cast<unsigned>(stage / kStages) & 1u;
            stage %= kStages;
        }
    }
};

/// The ring of stages and where this thread stands in it, whatever the operands are: slices of a tile have the same size for all of them.
/// kGathers: threads may bring A's rows in place of the copy engine.
template <class TileT, bool kGathers = false>
struct RingSm90 {
    enum : unsigned { kStageBytes = TileT::kStageBytes };
    enum : unsigned { kRingBytes = kStageBytes * TileT::kStages };
    enum : unsigned { kBarrierBytes = 8 * (2 * TileT::kStages + TileT::kConsumers) };

    PlaceSm90<TileT> place;
    unsigned smem;      // the ring
    unsigned barriers;  // full[kStages], empty[kStages], turn[kConsumers]
    unsigned rank;      // in the cluster
    RingPosition<TileT::kStages> position;
    unsigned turn_parity;

    /// `barriers_at` is where in shared memory kBarrierBytes are free. All threads of the block; ends with the cluster in step and the
    /// kernel before this one done.
    __device__ __forceinline__ RingSm90(const void* ring, unsigned barriers_at)
        : smem(ptx::shared_address(ring)), barriers(smem + barriers_at), rank(TileT::kCluster > 1 ? ptx::cluster_ctarank() : 0u) {
        turn_parity = place.consumer == 0 ? 1u : 0u;  // the first turn needs no one to give it
        if (threadIdx.x == 0) {
            constexpr unsigned kReaders = TileT::kCluster * 4 * (TileT::kTurns ? 1 : TileT::kConsumers);  // warps
            for (int stage = 0; stage < TileT::kStages; ++stage) {
                ptx::mbarrier_init(full(stage), kGathers ? 1 + 128 : 1);
                ptx::mbarrier_init(empty(stage), kReaders);
            }
            for (int consumer = 0; consumer < TileT::kConsumers; ++consumer) ptx::mbarrier_init(turn(consumer), 4);
            ptx::fence_mbarrier_init();
        }
        meet();
        ptx::griddepcontrol_launch_dependents();
        ptx::griddepcontrol_wait();
    }

    /// Nobody leaves before the other blocks are done with its shared memory.
    __device__ __forceinline__ void meet() const {
        if constexpr (TileT::kCluster > 1) {
            __syncwarp();
            ptx::barrier_cluster_arrive();
            ptx::barrier_cluster_wait();
        } else {
            __syncthreads();
        }
    }

    /// By turns: the slices of a tile that the other consumer has.
    __device__ __forceinline__ void skip(int slices) { position.advance(slices); }
    /// By turns: the consumer whose turn it is leaves it to the other one.
    __device__ __forceinline__ void pass_turn() {
        ptx::mbarrier_wait_parity(turn(place.consumer), turn_parity);
        turn_parity ^= 1u;
        if (place.lane == 0) ptx::mbarrier_arrive(turn(place.consumer ^ 1));
    }

protected:
    __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8u * static_cast<unsigned>(stage); }
    __device__ __forceinline__ unsigned empty(int stage) const { return full(TileT::kStages + stage); }
    __device__ __forceinline__ unsigned turn(int consumer) const { return full(2 * TileT::kStages + consumer); }
};

template <class OperandsT, class TileT, bool kGathers = false>
struct MainloopSm90 : RingSm90<TileT, kGathers> {
    using Ring = RingSm90<TileT, kGathers>;
    using T = typename OperandsT::Element;
    using SliceA = SliceSm90<OperandsT::major_a(), TileT::kBlockM>;
    using SliceB = SliceSm90<OperandsT::major_b(), TileT::kBlockN>;
    enum : int { kPiecesA = TileT::kConsumerM / 64 };
    enum : int { kPieceRows = 64 };
    enum : int { kColumnPieces = TileT::kBlockN / 8 };
    using Ring::kStageBytes;
    static_assert(kStageBytes == SliceA::kBytes + SliceB::kBytes, "the ring's stages hold a slice of each operand");
    using Accumulators = float[kPiecesA][kColumnPieces][4];
    using Ring::barriers;
    using Ring::empty;
    using Ring::full;
    using Ring::place;
    using Ring::position;
    using Ring::rank;
    using Ring::smem;
    using Ring::turn;
    using Ring::turn_parity;

    using Ring::Ring;
    /// Goes on where a mainloop over other operands has stopped.
    __device__ __forceinline__ explicit MainloopSm90(const Ring& ring) : Ring(ring) {}

    /// One thread: brings `slices` slices of the tile at (m, n), from depths `depth_a` and `depth_b` of the operands on. `a_rows`: rows
    /// that are copied of A, where they are not the tile's. `beside`: brings operands that are multiplied beside the product.
    template <class MapA, class MapB, class PaceT = NoPace, class Beside = NothingBeside>
    __device__ __forceinline__ void produce(const MapA& a, const MapB& b, int m, int n, int slices, PaceT&& pace = {}, int depth_a = 0,
                                            int depth_b = 0, int a_rows = TileT::kBlockM, const Beside& beside = {}) {
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            pace.before(slice);
            ptx::mbarrier_wait_parity(empty(position.stage), position.parity ^ 1u);
            const unsigned barrier = full(position.stage);
            ptx::mbarrier_arrive_expect_tx(barrier, static_cast<unsigned>(a_rows * 128) + SliceB::kBytes + beside.bytes());
            if constexpr (kGathers) ptx::mbarrier_arrive(barrier, 128);  // for all the threads that copy nothing
            const unsigned stage = smem + static_cast<unsigned>(position.stage) * kStageBytes;
            const int k = slice * TileT::kBlockK;
            SliceA::template load<1>(stage, a, m, depth_a + k, 0, barrier);
            SliceB::template load<TileT::kCluster, TileT::kStreamsB>(stage + SliceA::kBytes, b, n, depth_b + k, part_b(), barrier);
            beside.bring(position.stage, k, barrier);
            position.advance();
        }
    }

    /// Does produce in the producer's warpgroup with A's rows from the places that `row_of` gives: a row of the tile → its row in `a`, or
    /// −1: zeros. Threads copy them, 16 bytes each time. Consumers have to say that they are `gathered`.
    template <class RowOf, class MapB>
    __device__ __forceinline__ void produce_rows(const T* a, int depth, const RowOf& row_of, const MapB& b, int n, int slices) {
        static_assert(kGathers);
        constexpr int kRowsAtOnce = 128 / 8;
        constexpr int kRows = TileT::kBlockM / kRowsAtOnce;
        const int thread = static_cast<int>(threadIdx.x);
        const int chunk = thread % 8;
        const unsigned offset = static_cast<unsigned>(thread / 8 * 128 + (chunk ^ (thread / 8 & 7)) * 16);
        constexpr int kGroup = 4;  // rows whose places are looked up together: all of them would not fit into the producer's registers
        // Threads without work for tiles that the copy engine brings have run ahead.
        __syncwarp();
        ptx::barrier_sync(1 + TileT::kConsumers, 128);
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            ptx::mbarrier_wait_parity(empty(position.stage), position.parity ^ 1u);
            const unsigned barrier = full(position.stage);
            const unsigned stage = smem + static_cast<unsigned>(position.stage) * kStageBytes;
            if (thread == 0) {
                ptx::mbarrier_arrive_expect_tx(barrier, SliceB::kBytes);
                SliceB::template load<TileT::kCluster, TileT::kStreamsB>(stage + SliceA::kBytes, b, n, slice * TileT::kBlockK, part_b(),
                                                                         barrier);
            }
            const int k = slice * TileT::kBlockK + chunk * 8;
#pragma unroll 1
            for (int first = 0; first < kRows; first += kGroup) {
                int rows[kGroup];
#pragma unroll
                for (int i = 0; i < kGroup; ++i) rows[i] = row_of(thread / 8 + (first + i) * kRowsAtOnce);
#pragma unroll
                for (int i = 0; i < kGroup; ++i) {
                    ptx::cp_async_cg_16_if(rows[i] >= 0 && k < depth,
                                           stage + offset + static_cast<unsigned>((first + i) * kRowsAtOnce * 128),
                                           a + static_cast<long long>(rows[i]) * depth + k);
                }
            }
            ptx::cp_async_mbarrier_arrive_noinc(barrier);
            position.advance();
        }
    }

    /// A consumer: c += all slices of its next tile, of which the result has kExtent columns and the tile those from `n` on. Where few are
    /// left of them, fewer are multiplied.
    template <int kExtent, class Beside = NothingBeside>
    __device__ __forceinline__ void consume_at(Accumulators& c, int n, int slices, const Beside& beside = {}) {
        constexpr int kTail = ceil_div(kExtent % TileT::kBlockN, 64) * 64;
        if constexpr (kTail > 0 && kTail < TileT::kBlockN) {
            if (n + TileT::kBlockN > kExtent) {
                consume<kTail>(c, slices, false, beside);
                return;
            }
        }
        consume(c, slices, false, beside);
    }

    /// c += all slices of a consumer's next tile, the first kColumns of it. `gathered`: produce_rows brings them.
    template <int kColumns = TileT::kBlockN, class Beside = NothingBeside>
    __device__ __forceinline__ void consume(Accumulators& c, int slices, bool gathered = false, const Beside& beside = {}) {
        if constexpr (TileT::kTurns) {
            ptx::mbarrier_wait_parity(turn(place.consumer), turn_parity);
            turn_parity ^= 1u;
        }
        int previous = 0;
        int slice = 0;
        // There is a slice. The compiler must see that too, or it keeps wgmma from overlapping.
#pragma unroll 1
        do {
            ptx::mbarrier_wait_parity(full(position.stage), position.parity);
            if (kGathers && gathered) ptx::fence_proxy_async();  // threads wrote it, and wgmma reads as the copy engine does
            ptx::wgmma_fence();
            multiply<kColumns>(c, beside);
            ptx::wgmma_commit_group();
            // Every slice before the other consumer's has arrived now, so the parity that it waits for is that of its own.
            if (TileT::kTurns && slice + 1 == slices && place.lane == 0) ptx::mbarrier_arrive(turn(place.consumer ^ 1));
            ptx::wgmma_wait_group<1>();
            if (slice > 0) release(previous);
            previous = position.stage;
            position.advance();
        } while (++slice < slices);
        ptx::wgmma_wait_group<0>();
        release(previous);
    }

    /// The thread that produces: one more stage after a tile's slices, of which `bring(address, barrier)` has the copy engine fill `bytes`.
    template <class Bring>
    __device__ __forceinline__ void produce_more(unsigned bytes, const Bring& bring) {
        ptx::mbarrier_wait_parity(empty(position.stage), position.parity ^ 1u);
        ptx::mbarrier_arrive_expect_tx(full(position.stage), bytes);
        bring(smem + static_cast<unsigned>(position.stage) * kStageBytes, full(position.stage));
        position.advance();
    }
    /// A consumer: `read(address)` of that stage. Both have to.
    template <class Read>
    __device__ __forceinline__ void consume_more(const Read& read) {
        ptx::mbarrier_wait_parity(full(position.stage), position.parity);
        read(smem + static_cast<unsigned>(position.stage) * kStageBytes);
        __syncwarp();
        release(position.stage);
        position.advance();
    }

private:
    /// Part of the shared operand that this block brings.
    __device__ __forceinline__ int part_b() const { return TileT::kCluster > 1 ? static_cast<int>(rank) : 0; }

    /// This warp has read the stage; every block that writes into it hears of it.
    __device__ __forceinline__ void release(int stage) const {
        if constexpr (TileT::kCluster > 1) {
            if (place.lane < TileT::kCluster) ptx::mbarrier_arrive_cluster(empty(stage), static_cast<unsigned>(place.lane));
        } else {
            if (place.lane == 0) ptx::mbarrier_arrive(empty(stage));
        }
    }

    template <int kColumns, class Beside>
    __device__ __forceinline__ void multiply(Accumulators& c, const Beside& beside) const {
        const unsigned stage = smem + static_cast<unsigned>(position.stage) * kStageBytes;
        const int first_row = place.first_row();
#pragma unroll
        for (int step = 0; step < TileT::kBlockK / 16; ++step) {
            const unsigned long long b = SliceB::descriptor(stage + SliceA::kBytes, 0, step);
#pragma unroll
            for (int i = 0; i < kPiecesA; ++i) {
                const unsigned long long a = SliceA::descriptor(stage, first_row + i * 64, step);
                multiply_piece(reinterpret_cast<float(&)[kColumns / 8][4]>(c[i]), a, b);
                beside.multiply(i, a, position.stage, step);
            }
        }
    }

    template <int kPieces>
    static __device__ __forceinline__ void multiply_piece(float (&d)[kPieces][4], unsigned long long a, unsigned long long b) {
        constexpr int kA = OperandsT::major_a() == Major::mn ? 1 : 0;
        constexpr int kB = OperandsT::major_b() == Major::mn ? 1 : 0;
        if constexpr (kSame<T, Bf16>) {
            if constexpr (kPieces == 8) ptx::wgmma_m64n64k16_bf16<kA, kB>(d, a, b);
            if constexpr (kPieces == 16) ptx::wgmma_m64n128k16_bf16<kA, kB>(d, a, b);
            if constexpr (kPieces == 24) ptx::wgmma_m64n192k16_bf16<kA, kB>(d, a, b);
            if constexpr (kPieces == 32) ptx::wgmma_m64n256k16_bf16<kA, kB>(d, a, b);
        } else {
            if constexpr (kPieces == 8) ptx::wgmma_m64n64k16_f16<kA, kB>(d, a, b);
            if constexpr (kPieces == 16) ptx::wgmma_m64n128k16_f16<kA, kB>(d, a, b);
            if constexpr (kPieces == 24) ptx::wgmma_m64n192k16_f16<kA, kB>(d, a, b);
            if constexpr (kPieces == 32) ptx::wgmma_m64n256k16_f16<kA, kB>(d, a, b);
        }
    }
};

/// Registers of a thread after reallocation: 128 · 40 + 256 · 232 ≤ 65536.
enum : int { kProducerRegisters = 40 };
enum : int { kConsumerRegisters = 232 };

}  // namespace flce

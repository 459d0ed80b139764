// The main loop of 8-bit operands, C[m, n] = Σ_k A[m, k]·B[n, k], both contiguous along k: the ring, clusters and turns of
// sm90/mainloop.cuh. A slice of 128 bytes is 128 deep.
#pragma once

#include "flce/fp8/formats.cuh"
#include "flce/fp8/wgmma.cuh"

namespace flce {

template <class TileT, CodesFp8 kCodes>
struct MainloopFp8 : RingSm90<TileT> {
    using Ring = RingSm90<TileT>;
    using SliceA = SliceSm90<Major::k, TileT::kBlockM>;
    using SliceB = SliceSm90<Major::k, TileT::kBlockN>;
    enum : int { kPiecesA = TileT::kConsumerM / 64 };
    enum : int { kColumnPieces = TileT::kBlockN / 8 };
    enum : int { kDepth = 128 };
    enum : int { kPartSlices = 2 };
    enum : int { kPieceColumns = 128 };
    using Sum = Select<kCodes == CodesFp8::s8_s8, int, float>;
    using Accumulators = Sum[kPiecesA][kColumnPieces][4];
    using Ring::empty;
    using Ring::full;
    using Ring::place;
    using Ring::position;
    using Ring::rank;
    using Ring::Ring;
    using Ring::smem;
    using Ring::turn;
    using Ring::turn_parity;

    /// One thread: brings `slices` slices of the tile at (m, n).
    template <class PaceT = NoPace>
    __device__ __forceinline__ void produce(const TensorMap& a, const TensorMap& b, int m, int n, int slices, PaceT&& pace = {}) {
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            pace.before(slice);
            ptx::mbarrier_wait_parity(empty(position.stage), position.parity ^ 1u);
            const unsigned barrier = full(position.stage);
            ptx::mbarrier_arrive_expect_tx(barrier, TileT::kStageBytes);
            const unsigned stage = smem + static_cast<unsigned>(position.stage) * TileT::kStageBytes;
            SliceA::template load<1>(stage, a, m, slice * kDepth, 0, barrier);
            SliceB::template load<TileT::kCluster>(stage + SliceA::kBytes, b, n, slice * kDepth,
                                                   TileT::kCluster > 1 ? static_cast<int>(rank) : 0, barrier);
            position.advance();
        }
    }

    /// A consumer: c = all slices of its next tile.
    __device__ __forceinline__ void consume(Accumulators& c, int slices) {
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
            ptx::wgmma_fence();
            multiply(c, position.stage, 0, 1);
            ptx::wgmma_commit_group();
            if (TileT::kTurns && slice + 1 == slices && place.lane == 0) ptx::mbarrier_arrive(turn(place.consumer ^ 1));
            ptx::wgmma_wait_group<1>();
            if (slice > 0) release(previous);
            previous = position.stage;
            position.advance();
        } while (++slice < slices);
        ptx::wgmma_wait_group<0>();
        release(previous);
    }

    /// A consumer: c = all slices of its next tile, whose columns from `n` on are those of a result with kExtent columns, 0 where nobody
    /// knows yet; where few are left of them, fewer are multiplied. Parts of kPartSlices slices are added up in fp32, because tensor cores
    /// cut off what lies 13 bits below a sum: of many small products beside a large one nothing would be left. The second consumer's first
    /// part is shorter, so that one consumer multiplies while the other one adds.
    template <int kExtent>
    __device__ __forceinline__ void consume_in_parts(Accumulators& c, int n, int slices) {
        static_assert(kPiecesA == 1 && !TileT::kTurns, "a consumer has 64 rows, and a slice is there for both consumers");
        clear_sums(c);
        constexpr int kTail = ceil_div(kExtent % TileT::kBlockN, 64) * 64;
        if constexpr (kTail > 0 && kTail < TileT::kBlockN) {
            if (n + TileT::kBlockN > kExtent) {
                add_parts<kTail>(c, slices);
                return;
            }
        }
        add_parts<TileT::kBlockN>(c, slices);
    }

private:
    /// This warp has read the stage; every block that writes into it hears of it.
    __device__ __forceinline__ void release(int stage) const {
        if constexpr (TileT::kCluster > 1) {
            if (place.lane < TileT::kCluster) ptx::mbarrier_arrive_cluster(empty(stage), static_cast<unsigned>(place.lane));
        } else {
            if (place.lane == 0) ptx::mbarrier_arrive(empty(stage));
        }
    }

    template <int kColumns>
    __device__ __forceinline__ void add_parts(Accumulators& c, int slices) {
        constexpr int kFirstPiece = kColumns < kPieceColumns ? kColumns : kPieceColumns;
        int slice = 0;
        int end = min(kPartSlices >> place.consumer, slices);
        // There is a slice.
#pragma unroll 1
        for (;;) {
            add_piece<0, kFirstPiece>(c, position, end - slice);
            if constexpr (kColumns > kFirstPiece) add_piece<kFirstPiece, kColumns - kFirstPiece>(c, position, end - slice);
            for (; slice < end; ++slice, position.advance()) release(position.stage);
            if (slice == slices) return;
            end = min(end + kPartSlices, slices);
        }
    }

    /// Adds the products of `count` slices to columns [kFirst, kFirst + kColumns): registers beside c have room for one piece's sums.
    template <int kFirst, int kColumns>
    __device__ __forceinline__ void add_piece(Accumulators& c, RingPosition<TileT::kStages> at, int count) const {
        Sum sums[1][kColumns / 8][4];
        int keep = 0;
#pragma unroll 1
        do {
            if constexpr (kFirst == 0) ptx::mbarrier_wait_parity(full(at.stage), at.parity);
            ptx::wgmma_fence();
            multiply(sums, at.stage, kFirst, keep);
            ptx::wgmma_commit_group();
            keep = 1;
            at.advance();
        } while (--count > 0);
        ptx::wgmma_wait_group<0>();
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[0][kFirst / 8 + j][e] += sums[0][j][e];
    }

    /// The products of the slice at hand with B's columns from `first_column` on, added to sums; `keep` 0: in their place.
    template <int kPieces>
    __device__ __forceinline__ void multiply(Sum (&sums)[kPiecesA][kPieces][4], int number, int first_column, int keep) const {
        const unsigned stage = smem + static_cast<unsigned>(number) * TileT::kStageBytes;
        const int first_row = place.first_row();
#pragma unroll
        for (int step = 0; step < kDepth / 32; ++step) {
            const unsigned long long b = SliceB::descriptor(stage + SliceA::kBytes, first_column, step);
            const int kept = step > 0 ? 1 : keep;
#pragma unroll
            for (int i = 0; i < kPiecesA; ++i) {
                const unsigned long long a = SliceA::descriptor(stage, first_row + i * 64, step);
                if constexpr (kCodes == CodesFp8::s8_s8) ptx::wgmma_s8_s8(sums[i], a, b, kept);
                if constexpr (kCodes == CodesFp8::e4m3_e4m3) ptx::wgmma_e4m3_e4m3(sums[i], a, b, kept);
                if constexpr (kCodes == CodesFp8::e5m2_e4m3) ptx::wgmma_e5m2_e4m3(sums[i], a, b, kept);
                if constexpr (kCodes == CodesFp8::e4m3_e5m2) ptx::wgmma_e4m3_e5m2(sums[i], a, b, kept);
            }
        }
    }
};

}  // namespace flce

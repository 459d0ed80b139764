// The tensor-core mainloop of sm_80 and newer: cp.async brings slices of both operands through a ring of stages in shared memory, every
// warp multiplies its part of the tile with mma.sync.
#pragma once

#include "flce/sm80/tile_loader.cuh"

namespace flce {

/// This thread's place in its warp's part of the tile. Accumulator [i][j][2·h + e] is row(i, h), column(j, e).
template <class TileT>
struct ThreadPlace {
    using Columns = MmaColumns;
    int lane;
    int warp_m;
    int warp_n;
    __device__ __forceinline__ ThreadPlace() {
        lane = static_cast<int>(threadIdx.x) % 32;
        const int warp = static_cast<int>(threadIdx.x) / 32;
        warp_m = warp % TileT::kWarpsM;
        warp_n = warp / TileT::kWarpsM;
    }
    __device__ __forceinline__ int row(int i, int h) const { return warp_m * TileT::kWarpM + i * 16 + h * 8 + lane / 4; }
    __device__ __forceinline__ int column(int j, int e) const { return warp_n * TileT::kWarpN + j * 8 + lane % 4 * 2 + e; }
};

/// Reads one operand's fragments: kPieces pieces of 16 rows of the result (A: one m16 fragment, B: two n8 fragments) by 32 bytes of k.
template <class T, Major kMajor, bool kIsA, int kExtent, int kBlockK, int kPieces>
struct FragmentReader {
    using Layout = SliceLayout<T, kMajor, kExtent, kBlockK>;
    unsigned base;  // offset in a slice of this lane's part of piece 0 at k step 0

    __device__ __forceinline__ FragmentReader(int first, int lane) {
        // Number of this lane's matrix among the four 8×8 ones, and the matrix's place along both dimensions. A's matrices run along the
        // result first, B's along k first: mma.sync wants the registers in this order.
        const int low = lane >> 3 & 1;
        const int high = lane >> 4;
        const int along_mn = kIsA ? low : high;
        const int along_k = kIsA ? high : low;
        if constexpr (kMajor == Major::k) {
            base = Layout::offset(first + along_mn * 8 + (lane & 7), along_k);
        } else if constexpr (sizeof(T) == 2) {
            base = Layout::offset(along_k * 8 + (lane & 7), first / 8 + along_mn);
        } else {
            base = Layout::offset(lane & 3, first / 4 + (lane >> 4)) + static_cast<unsigned>((lane >> 2 & 3) * 4);
        }
    }

    __device__ __forceinline__ void read(unsigned slice, int k_step, unsigned (&fragment)[kPieces][4]) const {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            if constexpr (kMajor == Major::k) {
                ptx::ldmatrix_x4(fragment[piece],
                                 slice + (base ^ static_cast<unsigned>(k_step * 32)) + static_cast<unsigned>(piece * 16 * Layout::kPitch));
            } else if constexpr (sizeof(T) == 2) {
                const unsigned along = static_cast<unsigned>(piece * 32);
                ptx::ldmatrix_x4_trans(fragment[piece], slice + (base ^ (along & 127u)) + (along & ~127u) +
                                                            static_cast<unsigned>(k_step * 16 * Layout::kPitch));
            } else {
                read_words(slice, k_step, piece, fragment[piece]);
            }
        }
    }

private:
    /// fp32 with the result's dimension contiguous: ldmatrix cannot transpose words.
    __device__ __forceinline__ void read_words(unsigned slice, int k_step, int piece, unsigned (&fragment)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int along_mn = kIsA ? r & 1 : r >> 1;  // by 8
            const int along_k = kIsA ? r >> 1 : r & 1;   // by 4
            const unsigned along = static_cast<unsigned>(piece * 64 + along_mn * 32);
            fragment[r] = ptx::ld_shared_b32(slice + (base ^ (along & 127u) ^ static_cast<unsigned>(along_k * 16)) + (along & ~127u) +
                                             static_cast<unsigned>((k_step * 8 + along_k * 4) * Layout::kPitch));
        }
    }
};

template <class OperandsT, class TileT>
struct Mainloop {
    using T = typename OperandsT::Element;
    using LayoutA = SliceLayout<T, OperandsT::major_a(), TileT::kBlockM, TileT::kBlockK>;
    using LayoutB = SliceLayout<T, OperandsT::major_b(), TileT::kBlockN, TileT::kBlockK>;
    using LoaderA = OperandLoader<T, OperandsT::major_a(), TileT::kBlockM, TileT::kBlockK, TileT::kThreads, OperandsT::access_a()>;
    using LoaderB = OperandLoader<T, OperandsT::major_b(), TileT::kBlockN, TileT::kBlockK, TileT::kThreads, OperandsT::access_b()>;
    enum : int { kPiecesA = TileT::kWarpM / 16 };
    enum : int { kPiecesB = TileT::kWarpN / 16 };
    enum : int { kSteps = TileT::kBlockK * static_cast<int>(sizeof(T)) / 32 };
    enum : int { kStageBytes = LayoutA::kBytes + LayoutB::kBytes };
    enum : int { kSmemBytes = kStageBytes * TileT::kStages };
    enum : int { kColumnPieces = 2 * kPiecesB };
    static_assert(TileT::kStages >= 2, "one slice is read while another arrives");

    using Accumulators = float[kPiecesA][kColumnPieces][4];
    using FragmentA = unsigned[kPiecesA][4];
    using FragmentB = unsigned[kPiecesB][4];

    ThreadPlace<TileT> place;
    FragmentReader<T, OperandsT::major_a(), true, TileT::kBlockM, TileT::kBlockK, kPiecesA> reader_a;
    FragmentReader<T, OperandsT::major_b(), false, TileT::kBlockN, TileT::kBlockK, kPiecesB> reader_b;
    unsigned smem;
    unsigned read_stage = 0;  // byte offsets in the ring
    unsigned write_stage = 0;

    __device__ __forceinline__ explicit Mainloop(const void* shared)
        : reader_a(place.warp_m * TileT::kWarpM, place.lane),
          reader_b(place.warp_n * TileT::kWarpN, place.lane),
          smem(ptx::shared_address(shared)) {}

    /// Starts the first kStages − 1 slices. `feed.load_a(to)` and `feed.load_b(to)` copy the next slice's parts, or zeros past the end,
    /// and `feed.next()` moves on.
    template <class Feed>
    __device__ __forceinline__ void prologue(Feed& feed) {
#pragma unroll 1
        for (int stage = 0; stage < TileT::kStages - 1; ++stage) {
            produce(feed);
            feed.next();
        }
        ptx::cp_async_wait_group<TileT::kStages - 2>();
        __syncthreads();  // every thread's part of slice 0 is visible to all
    }

    /// Adds `slices` slices to `c`. On return the next slice has arrived and, whatever its tile, the ring goes on.
    template <class Feed>
    __device__ __forceinline__ void accumulate(Feed& feed, int slices, Accumulators& c) {
        if constexpr (sizeof(T) == 2) {
            accumulate_half(feed, slices, c);
        } else {
            accumulate_split(feed, slices, c);
        }
    }

    /// No copy is on its way any more and every thread is done reading: the ring's memory is free for other uses.
    __device__ __forceinline__ void drain() {
        ptx::cp_async_wait_group<0>();
        __syncthreads();
    }

private:
    static __device__ __forceinline__ void advance(unsigned& stage) {
        stage = stage == kSmemBytes - kStageBytes ? 0u : stage + kStageBytes;
    }

    template <class Feed>
    __device__ __forceinline__ void produce(Feed& feed) {
        feed.load_a(smem + write_stage);
        feed.load_b(smem + write_stage + LayoutA::kBytes);
        ptx::cp_async_commit_group();
        advance(write_stage);
    }

    __device__ __forceinline__ void read(int step, FragmentA& a, FragmentB& b) const {
        reader_a.read(smem + read_stage, step, a);
        reader_b.read(smem + read_stage + LayoutA::kBytes, step, b);
    }

    /// Waits until the next slice has arrived. The barrier also tells everyone that the current slice's last fragments have been read, so
    /// that the copy issued after it may overwrite that stage.
    __device__ __forceinline__ void next_slice() {
        ptx::cp_async_wait_group<TileT::kStages - 2>();
        __syncthreads();
        advance(read_stage);
    }

    /// 16-bit operands: fragments of step s + 1 are read while step s multiplies.
    template <class Feed>
    __device__ __forceinline__ void accumulate_half(Feed& feed, int slices, Accumulators& c) {
        FragmentA a[2];
        FragmentB b[2];
        read(0, a[0], b[0]);
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (step + 1 < kSteps) {
                    read(step + 1, a[(step + 1) & 1], b[(step + 1) & 1]);
                } else {
                    next_slice();
                    read(0, a[0], b[0]);
                }
                if (step == 0) produce(feed);
                multiply(c, a[step & 1], b[step & 1]);
            }
            feed.next();
        }
    }

    /// fp32 operands in three TF32 products. Tensor cores truncate while they accumulate, so every k step is multiplied on its own and
    /// added with round-to-nearest; sums of kSlicesPerSum slices join the total, so that no chain of additions is as long as K.
    template <class Feed>
    __device__ __forceinline__ void accumulate_split(Feed& feed, int slices, Accumulators& c) {
        constexpr int kSlicesPerSum = 256 / TileT::kBlockK;
        Accumulators part;
        Accumulators& sum = OperandsT::kExactProducts ? c : part;  // K is short where products are exact
        clear_sums(part);
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice) {
            produce(feed);
            feed.next();
#pragma unroll 1
            for (int step = 0; step < kSteps; ++step) {
                FragmentA a;
                FragmentB b;
                read(step, a, b);
                multiply_split(sum, a, b);
            }
            next_slice();
            if (!OperandsT::kExactProducts && (slice + 1) % kSlicesPerSum == 0) {
                add(c, part);
                clear_sums(part);
            }
        }
        add(c, part);
    }

    static __device__ __forceinline__ void add(Accumulators& c, const Accumulators& part) {
#pragma unroll
        for (int i = 0; i < kPiecesA; ++i)
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[i][j][e] += part[i][j][e];
    }

    static __device__ __forceinline__ void multiply(Accumulators& c, const FragmentA& a, const FragmentB& b) {
#pragma unroll
        for (int i = 0; i < kPiecesA; ++i) {
#pragma unroll
            for (int n = 0; n < kColumnPieces; ++n) {
                const int j = i & 1 ? kColumnPieces - 1 - n : n;  // back and forth, so that neighbours share an operand
                if constexpr (kSame<T, Bf16>) {
                    ptx::mma_m16n8k16_bf16(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                } else {
                    ptx::mma_m16n8k16_f16(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }

    /// fp32 as a sum of TF32 numbers, the largest first. Two parts of 11 bits each: the product of two low ones is below fp32's own
    /// rounding. Three of 8 bits: products of the high ones have 16 bits, so that little is cut off where tensor cores align them to the
    /// largest of a step.
    enum : int { kParts = OperandsT::kExactProducts ? 3 : 2 };
    using Parts = unsigned[kParts][4];

    static __device__ __forceinline__ void split(const unsigned (&x)[4], Parts& parts) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float rest = __uint_as_float(x[r]);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const bool short_part = kParts == 3 && part < 2;
                parts[part][r] = short_part ? (__float_as_uint(rest) + 0x8000u) & 0xffff0000u : ptx::cvt_rna_tf32_f32(rest);
                rest -= __uint_as_float(parts[part][r]);
            }
        }
    }

    static __device__ __forceinline__ void multiply_split(Accumulators& c, const FragmentA& a, const FragmentB& b) {
        Parts b_parts[kPiecesB];
#pragma unroll
        for (int j = 0; j < kPiecesB; ++j) split(b[j], b_parts[j]);
#pragma unroll
        for (int i = 0; i < kPiecesA; ++i) {
            Parts a_parts;
            split(a[i], a_parts);
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) add_products(c[i][j], a_parts, b_parts[j / 2], j % 2 * 2);
        }
    }

    /// Small products first; with exact ones the large have an accumulator of their own.
    static __device__ __forceinline__ void add_products(float (&c)[4], const Parts& a, const Parts& b, int r) {
        float small[4] = {0.f, 0.f, 0.f, 0.f};
        float large[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int order = kParts - 1; order > 0; --order) {
#pragma unroll
            for (int part = order; part >= 0; --part) ptx::mma_m16n8k8_tf32(small, a[part], b[order - part][r], b[order - part][r + 1]);
        }
        ptx::mma_m16n8k8_tf32(kParts == 3 ? large : small, a[0], b[0][r], b[0][r + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) c[e] += kParts == 3 ? large[e] + small[e] : small[e];
    }
};

/// Feeds the mainloop the slices of one tile.
template <class MainloopT>
struct TileFeed {
    typename MainloopT::LoaderA a;
    typename MainloopT::LoaderB b;
    __device__ __forceinline__ void load_a(unsigned to) { a.load(to); }
    __device__ __forceinline__ void load_b(unsigned to) { b.load(to); }
    __device__ __forceinline__ void next() {}
};

}  // namespace flce

// Logits from codes of hidden and of the weight, by turns: sums of their exponentials, and exponentials in 8 bits, both ways.
#pragma once

#include "flce/fp8/logits_epilogue.cuh"
#include "flce/fp8/mainloop.cuh"

namespace flce {

template <class Problem, class TileT>
using LogitsMainloopFp8 = MainloopFp8<TileT, logits_codes<Problem>()>;

template <class Problem, class TileT>
struct LogitsFp8
    : LogitsEpilogueFp8<LogitsFp8<Problem, TileT>, Problem, LogitsMainloopFp8<Problem, TileT>, TemperedOf<Problem, Fp8LogitsParams>> {
    static_assert(TileT::kBlockM == 128 && TileT::kTurns);
    using Mainloop = LogitsMainloopFp8<Problem, TileT>;
    using Params = TemperedOf<Problem, Fp8LogitsParams>;
    using Epilogue = LogitsEpilogueFp8<LogitsFp8, Problem, Mainloop, Params>;
    enum : int { kPanelBytes = TileT::kBlockN * kFp8TokenGroup };
    enum : int { kPanelsAt = Mainloop::kRingBytes };
    enum : int { kBarriersAt = kPanelsAt + TileT::kConsumers * kPanelBytes };
    enum : int { kSmemBytes = kBarriersAt + Mainloop::kBarrierBytes };
    enum : int { kThreads = TileT::kThreads };
    /// Registers of the producer's threads and of consumers': 128 · 24 + 256 · 240 ≤ 65536.
    enum : int { kFewRegisters = 24 };
    enum : int { kManyRegisters = 240 };
    using Epilogue::loop;
    using Epilogue::p;

    TileWalk<TileT, 2 * Problem::raster> walk;  // operands of half the bytes
    bool issues;

    __device__ __forceinline__ explicit LogitsFp8(const Params& params)
        : Epilogue(params, Mainloop(dynamic_smem, kBarriersAt)), walk(params.rows, params.columns), issues(threadIdx.x % 128 == 0) {}

    __device__ __forceinline__ void run() {
        const unsigned clusters = gridDim.x / TileT::kCluster;
        const unsigned first = blockIdx.x / TileT::kCluster;
        constexpr int kSlices = ceil_div(Problem::hidden_size, Mainloop::kDepth);
        const bool idle = p.unless != nullptr && *p.unless == 0u;
        if (loop.place.consumer < 0) {
            ptx::setmaxnreg_dec<kFewRegisters>();
            if (threadIdx.x == 0 && !idle) {
                for (unsigned t = first; walk.go_to(t, loop.rank); t += clusters) {
                    if (is_wanted()) loop.produce(p.hidden_map, p.weight_map, walk.m, walk.n, kSlices);
                }
            }
        } else {
            ptx::setmaxnreg_inc<kManyRegisters>();
            int holder = 0;
#pragma unroll 1
            for (unsigned t = first; !idle && go_to(t); t += clusters) {
                if (!is_wanted()) continue;
                const bool mine = holder == loop.place.consumer;
                holder ^= 1;
                if (!mine) {
                    loop.skip(kSlices);
                    continue;
                }
                typename Mainloop::Accumulators c;
                clear_sums(c);
                loop.consume(c, kSlices);
                asm volatile("" : "+r"(loop.place.lane), "+r"(loop.place.warp));
                this->epilogue(c);
            }
            if (issues) ptx::cp_async_bulk_wait_group<0>();
        }
        loop.meet();
    }

    // The epilogue's: a consumer has all columns of its tiles.
    __device__ __forceinline__ int first_row() const { return walk.m; }
    __device__ __forceinline__ int first_column() const { return walk.n; }
    __device__ __forceinline__ unsigned open_panel() const {
        if (issues) ptx::cp_async_bulk_wait_group_read<0>();
        ptx::barrier_sync(1 + loop.place.consumer, 128);
        return panel();
    }
    /// Puts a thread's four rows of four columns, in 16 from `first` on, into the panel: bytes of a word become tokens, (i, h) = (0, 0),
    /// (0, 1), (1, 0), (1, 1).
    __device__ __forceinline__ void put_turned(unsigned (&w)[4], int first, unsigned panel) const {
        const int chunk = loop.place.warp * 2 + loop.place.lane / 16;
        const int within = loop.place.lane / 4 % 4 * 4;
        turn_4x4(w);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = first + e / 2 * 8 + loop.place.lane % 4 * 2 + e % 2;
            ptx::st_shared_b32(panel + static_cast<unsigned>(column * kFp8TokenGroup + ((chunk ^ (column & 7)) * 16) + within), w[e]);
        }
    }
    /// The tile's codes by columns leave the panel.
    __device__ __forceinline__ void send() {
        ptx::barrier_sync(1 + loop.place.consumer, 128);
        erase_target();
        if constexpr (!Problem::turns_exponentials) return;
        ptx::fence_proxy_async();
        ptx::barrier_sync(1 + loop.place.consumer, 128);
        if (!issues) return;
        ptx::cp_async_bulk_tensor_2d_store(&p.turned_map, walk.m, walk.n, panel());
        ptx::cp_async_bulk_commit_group();
    }

private:
    /// Goes to a consumer's tile. Sizes of the walk are worked out again for each: beside the accumulators they would not fit.
    __device__ __forceinline__ bool go_to(unsigned tile) {
        int rows = p.rows;
        int columns = p.columns;
        asm volatile("" : "+r"(rows), "+r"(columns));
        const TileWalk<TileT, 2 * Problem::raster> again(rows, columns);
        walk.clusters_m = again.clusters_m;
        walk.tiles_n = again.tiles_n;
        walk.count = again.count;
        return walk.go_to(tile, loop.rank);
    }
    __device__ __forceinline__ bool is_wanted() const { return p.again == nullptr || p.again[walk.m / kFp8ClusterRows] != 0u; }

    __device__ __forceinline__ unsigned panel() const {
        return loop.smem + kPanelsAt + static_cast<unsigned>(loop.place.consumer * kPanelBytes);
    }
    /// A row's target has code 0, in both copies, which are there. A thread has a row.
    __device__ __forceinline__ void erase_target() const {
        int within = loop.place.warp * 32 + loop.place.lane;
        int m = walk.m;
        int n = walk.n;
        // Numbers that follow from these are worked out here: kept beside the accumulators they would not fit.
        asm volatile("" : "+r"(within), "+r"(m), "+r"(n));
        const int of = m + within;
        const int column = of < p.rows ? load_target<Problem>(p.targets, of) - (p.first_column + n) : -1;
        if (column < 0 || column >= TileT::kBlockN || n + column >= p.stored) return;
        p.exponentials[of * p.pitch + n + class_position(column)] = 0u;
        if constexpr (!Problem::turns_exponentials) return;
        const int position = token_position(within);
        ptx::st_shared_b8(panel() + static_cast<unsigned>(column * kFp8TokenGroup + (position / 16 ^ column % 8) * 16 + position % 16), 0u);
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void logits_fp8(const TemperedOf<Problem, Fp8LogitsParams>& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.turned_map);
    LogitsFp8<Problem, TileT>(p).run();
}

}  // namespace flce

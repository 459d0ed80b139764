// Logits from codes of hidden and of the weight by mma.sync: the epilogue is that of every GPU.
#pragma once

#include "flce/fp8/logits_epilogue.cuh"
#include "flce/fp8/mma_mainloop.cuh"

namespace flce {

template <class Problem, class TileT>
using LogitsMainloopMma8 = MainloopMma8<TileT, logits_codes<Problem>(), false>;

/// Blocks are persistent. A group of warps works on its columns of a tile like on a tile of its own, for which it has partial sums.
template <class Problem, class TileT>
struct LogitsMma8
    : LogitsEpilogueFp8<LogitsMma8<Problem, TileT>, Problem, LogitsMainloopMma8<Problem, TileT>, TemperedOf<Problem, Fp8LogitsMmaParams>> {
    using Mainloop = LogitsMainloopMma8<Problem, TileT>;
    using Params = TemperedOf<Problem, Fp8LogitsMmaParams>;
    using Epilogue = LogitsEpilogueFp8<LogitsMma8, Problem, Mainloop, Params>;
    enum : int { kSmemBytes = TileT::kSmemBytes };
    enum : int { kThreads = TileT::kThreads };
    enum : int { kSlices = ceil_div(Problem::hidden_size, SliceMma8::kDepth) };
    using Epilogue::loop;
    using Epilogue::p;

    unsigned tile;  // number of the tile whose slices are brought
    int m = 0;      // the epilogue's first row and column
    int n = 0;

    __device__ __forceinline__ explicit LogitsMma8(const Params& params)
        : Epilogue(params, Mainloop(params.hidden_map, params.weight_map, dynamic_smem)), tile(blockIdx.x) {}

    __device__ __forceinline__ void run() {
        if (p.unless != nullptr && *p.unless == 0u) return;
        bool more = begin_tile();
#pragma unroll 1
        while (more) {
            m = loop.m;
            n = loop.n + loop.place.first_column();
            typename Mainloop::Accumulators c;
            clear_sums(c);
            loop.consume(c, kSlices);
            // The next tile's first slices arrive during this one's epilogue.
            tile += gridDim.x;
            more = begin_tile();
            if (n < p.columns) this->epilogue(c);
        }
    }

    // The epilogue's.
    __device__ __forceinline__ int first_row() const { return m; }
    __device__ __forceinline__ int first_column() const { return n; }
    __device__ __forceinline__ unsigned open_panel() const { return 0u; }
    /// Stores a thread's four rows of four columns, in 16 from `first` on: bytes of a word become tokens, (i, h) = (0, 0), (0, 1), (1, 0),
    /// (1, 1). The eight lanes with a column fill 32 bytes of it.
    __device__ __forceinline__ void put_turned(unsigned (&w)[4], int first, unsigned /*panel*/) const {
        turn_4x4(w);
        const int of_lane = n + first + loop.place.column(0, 0);
        unsigned char* const at = static_cast<unsigned char*>(p.turned_map.at) + m + position_mma8(loop.place.warp, loop.place.lane);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = of_lane + e / 2 * 8 + e % 2;
            if (column < p.stored) *reinterpret_cast<unsigned*>(at + column * p.turned_map.pitch) = w[e];
        }
    }
    /// A row's target has code 0, in both copies, which the group has stored. A thread has a row.
    __device__ __forceinline__ void send() const {
        ptx::bar_sync(1 + loop.place.group, 128);
        const int within = loop.place.warp * 32 + loop.place.lane;
        const int of = m + within;
        const int column = of < p.rows ? load_target<Problem>(p.targets, of) - (p.first_column + n) : -1;
        if (column < 0 || column >= TileT::kGroupN || n + column >= p.stored) return;
        p.exponentials[of * p.pitch + n + class_position(column)] = 0u;
        if constexpr (!Problem::turns_exponentials) return;
        static_cast<unsigned char*>(p.turned_map.at)[(n + column) * p.turned_map.pitch + m + token_position(within)] = 0u;
    }

private:
    /// Begins with the block's first tile from number `tile` on that is wanted, where there is one. Sizes are worked out again for each
    /// tile: beside the accumulators they would not fit.
    __device__ __forceinline__ bool begin_tile() {
        int rows = p.rows;
        int columns = p.columns;
        asm volatile("" : "+r"(rows), "+r"(columns));
        WalkMma8<TileT, 2 * Problem::raster> walk(rows, columns);  // operands of half the bytes
        for (; walk.go_to(tile); tile += gridDim.x) {
            if (p.again != nullptr && p.again[walk.m / kFp8ClusterRows] == 0u) continue;
            loop.begin(walk.m, walk.n);
            return true;
        }
        return false;
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void logits_fp8_mma(const TemperedOf<Problem, Fp8LogitsMmaParams>& p) {
    LogitsMma8<Problem, TileT>(p).run();
}

}  // namespace flce

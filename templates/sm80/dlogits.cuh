// Backward, first step of a vocabulary chunk: the logits again, and from them their gradient
// dz_j = (p_j·(a + b·z_j) − t·[j = y] − s·c_j) · dz_j/d(hidden · weightᵀ)_j, written in the Problem's dtype.
#pragma once

#include "flce/common/gradient_epilogue.cuh"
#include "flce/sm80/tile_store.cuh"

namespace flce {

template <class Problem, class TileT>
struct DlogitsBlock {
    using Element = typename Problem::Element;
    using MainloopT = Mainloop<LogitOperands<Problem>, TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };
    enum : int { kRowPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    enum : int { kStagedBytes = sizeof(Element) == 2 ? StagedTile<Element, TileT, true>::kBytes : 0 };
    enum : int { kColumnSumOffset = MainloopT::kSmemBytes > kStagedBytes ? MainloopT::kSmemBytes : kStagedBytes };
    enum : int { kColumnSumBytes = Problem::bias ? 4 * TileT::kWarpsM * TileT::kBlockN : 0 };
    enum : int { kSmemBytes = RingOrStaging<MainloopT, TileT>::kBytes + kColumnSumBytes };
    enum : int { kThreads = TileT::kThreads };

    using Params = TemperedOf<Problem, DlogitsParams>;

    const Params& p;
    MainloopT mainloop;
    int row_block;
    int row0;
    int column0;  // in the chunk

    __device__ __forceinline__ explicit DlogitsBlock(const Params& params) : p(params), mainloop(dynamic_smem) {
        int column_block;
        tile_of_block<Problem::raster>(blockIdx.x, ceil_div(p.rows, TileT::kBlockM), ceil_div(p.columns, TileT::kBlockN), row_block,
                                       column_block);
        row0 = row_block * TileT::kBlockM;
        column0 = column_block * TileT::kBlockN;
    }

    __device__ __forceinline__ void run() {
        TileFeed<MainloopT> feed;
        feed.a.start(static_cast<const Element*>(p.hidden) + static_cast<long long>(row0) * Problem::hidden_size, Problem::hidden_size,
                     p.rows - row0, Problem::hidden_size);
        using WeightT = WeightOperand<Problem>;
        feed.b.start(weight_at<WeightT>(static_cast<const Element*>(p.weight), column0, 0), kWeightLd<WeightT>, p.columns - column0,
                     Problem::hidden_size);
        mainloop.prologue(feed);
        Accumulators c;
        clear_sums(c);
        mainloop.accumulate(feed, kSlices, c);
        mainloop.drain();
        to_gradient(c);
        if (column0 + TileT::kBlockN > p.columns) zero_absent(c);
        if constexpr (Problem::bias) {
            if (p.bias_partials != nullptr) sum_columns(c);
        }
        write(c);
    }

    __device__ __forceinline__ void to_gradient(Accumulators& c) {
        if constexpr (Problem::bias) add_bias<Problem>(p, mainloop.place, column0, c);
        const float scale = dlogits_scale<Problem>(p.scalars, false);
#pragma unroll
        for (int i = 0; i < kRowPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) row_gradient<Problem>(p, mainloop.place, column0, row0 + mainloop.place.row(i, h), scale, c[i], h);
        }
    }

    /// Columns past the chunk's end, which the GEMMs may read.
    __device__ __forceinline__ void zero_absent(Accumulators& c) {
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (column0 + mainloop.place.column(j, e) < p.columns) continue;
#pragma unroll
                for (int i = 0; i < kRowPieces; ++i) {
                    c[i][j][e] = 0.f;
                    c[i][j][2 + e] = 0.f;
                }
            }
        }
    }

    /// Sums of the tile's columns, still scaled, for the bias gradient: over a thread's rows, the lanes that share columns, then the warps,
    /// in fixed order.
    __device__ __forceinline__ void sum_columns(const Accumulators& c) {
        float* const sums = reinterpret_cast<float*>(dynamic_smem + kColumnSumOffset);  // [warps_m][kBlockN]
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = 0.f;
#pragma unroll
                for (int i = 0; i < kRowPieces; ++i) sum += c[i][j][e] + c[i][j][2 + e];
                for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                if (mainloop.place.lane < 4) sums[mainloop.place.warp_m * TileT::kBlockN + mainloop.place.column(j, e)] = sum;
            }
        }
        __syncthreads();  // every warp's sums are there
        for (int column = static_cast<int>(threadIdx.x); column < TileT::kBlockN; column += TileT::kThreads) {
            float sum = sums[column];
            for (int w = 1; w < TileT::kWarpsM; ++w) sum += sums[w * TileT::kBlockN + column];
            if (column0 + column < p.columns) p.bias_partials[row_block * p.ld + column0 + column] = sum;
        }
    }

    __device__ __forceinline__ void write(Accumulators& c) {
        if constexpr (kSame<Element, Fp16>) {
#pragma unroll
            for (int i = 0; i < kRowPieces; ++i)
#pragma unroll
                for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) c[i][j][e] = ptx::clamp_nan(c[i][j][e], 65504.f);
        }
        // Whole tiles are written: columns past the chunk's end are zeros that the GEMMs may read. The leading dimension has room for them.
        TileTarget<Element> target;
        target.origin = static_cast<Element*>(p.dlogits) + row0 * p.ld + column0;
        target.ld = p.ld;
        target.rows = p.rows - row0;
        target.columns = static_cast<int>(min(static_cast<long long>(TileT::kBlockN), p.ld - column0));
        store_tile<Element, TileT, true, false>(mainloop, c, target);
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void dlogits(const typename DlogitsBlock<Problem, TileT>::Params& p) {
    DlogitsBlock<Problem, TileT>(p).run();
}

}  // namespace flce

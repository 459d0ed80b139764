// grad_hidden and grad_weight from exponentials in 8 bits by mma.sync. A block has whole tiles: every result is written, or added to, once.
#pragma once

#include "flce/fp8/mma_mainloop.cuh"

namespace flce {

/// Two neighbouring elements of a row.
template <class T>
struct PairMma8 {
    /// Without the second one, behind a row's end.
    static __device__ __forceinline__ void store_first(T* at, bool adds, float first) {
        *at = Numeric<T>::from_float(first + (adds ? to_float(*at) : 0.f));
    }
    static __device__ __forceinline__ void store(T* at, bool adds, float first, float second) {
        if constexpr (sizeof(T) == 4) {
            float2* const pair = reinterpret_cast<float2*>(at);
            const float2 old = adds ? *pair : make_float2(0.f, 0.f);
            *pair = make_float2(first + old.x, second + old.y);
        } else {
            unsigned* const pair = reinterpret_cast<unsigned*>(at);
            const unsigned old = adds ? *pair : 0u;
            *pair = Numeric<T>::pack(first + Numeric<T>::first(old), second + Numeric<T>::second(old));
        }
    }
};

/// result[m, n] = factor · row_factors[m] · Σ_k A[m, k]·B[n, k], n being hidden dimensions, kTurned: classes.
template <class Problem, class TileT, class Out, class Params = Fp8GradientMmaParams, bool kTurned = false>
struct GradientMma8 {
    using Mainloop = MainloopMma8<TileT, gradient_codes<Problem, kTurned>(), true>;
    enum : int { kSmemBytes = TileT::kSmemBytes };
    enum : int { kThreads = TileT::kThreads };
    enum : int { kColumns = kTurned ? 0 : +Problem::hidden_size };  ///< 0: p.n

    const Params& p;
    Mainloop loop;
    WalkMma8<TileT, Problem::raster> walk;

    __device__ __forceinline__ explicit GradientMma8(const Params& params)
        : p(params), loop(params.a_map, params.b_map, dynamic_smem), walk(params.m, params.n) {}

    __device__ __forceinline__ void run() {
        const float factor = __frcp_rn(fp8_factor(*p.largest));
        const int slices = ceil_div(p.k, SliceMma8::kDepth);
        unsigned tile = blockIdx.x;
        bool more = walk.go_to(tile);
        if (more) loop.begin(walk.m, walk.n);
#pragma unroll 1
        while (more) {
            const int m = walk.m;
            const int n = walk.n + loop.place.first_column();
            typename Mainloop::Accumulators c;
            clear_sums(c);
            loop.consume(c, slices);
            // The next tile's first slices arrive while this one's results are written.
            tile += gridDim.x;
            more = walk.go_to(tile);
            if (more) loop.begin(walk.m, walk.n);
            scale_gradient(p, loop.place, m, factor, c);
            take_smoothing<Problem, kTurned>(p, loop.place, m, n, c);
            store(c, m, n);
        }
    }

private:
    __device__ __forceinline__ void store(const typename Mainloop::Accumulators& c, int m, int n) const {
        const bool adds = p.adds != 0;
        const int column0 = n + loop.place.column(0, 0);
#pragma unroll
        for (int i = 0; i < Mainloop::kPiecesA; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = m + loop.place.row(i, h);
                if (row >= p.m) continue;
                Out* const at = static_cast<Out*>(p.result_map.at) + row * p.result_map.pitch + column0;
#pragma unroll
                for (int j = 0; j < Mainloop::kColumnPieces; ++j) {
                    const int column = column0 + j * 8;
                    if (column >= columns()) continue;
                    if (kTurned && column + 1 == columns()) {
                        PairMma8<Out>::store_first(at + j * 8, adds, c[i][j][2 * h]);
                    } else {
                        PairMma8<Out>::store(at + j * 8, adds, c[i][j][2 * h], c[i][j][2 * h + 1]);
                    }
                }
            }
    }
    __device__ __forceinline__ int columns() const { return kColumns > 0 ? +kColumns : p.n; }
};

/// grad_weight's parameters.
template <class Problem>
using GradWeightMma8Params = Select<Problem::label_smoothing, SmoothedFp8GradientMmaParams, Fp8GradientMmaParams>;

template <class Problem, class TileT>
using GradHiddenMma8 = GradientMma8<Problem, TileT, float>;
template <class Problem, class TileT>
using GradWeightMma8 = GradientMma8<Problem, TileT, typename Problem::GradWeight, GradWeightMma8Params<Problem>, Problem::hidden_major>;

template <class Problem, class TileT>
__device__ __forceinline__ void grad_hidden_fp8_mma(const Fp8GradientMmaParams& p) {
    GradHiddenMma8<Problem, TileT>(p).run();
}
template <class Problem, class TileT>
__device__ __forceinline__ void grad_weight_fp8_mma(const GradWeightMma8Params<Problem>& p) {
    GradWeightMma8<Problem, TileT>(p).run();
}

}  // namespace flce

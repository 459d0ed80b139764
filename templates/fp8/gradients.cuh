// grad_hidden and grad_weight from exponentials in 8 bits: plain products, of which one result after the other leaves through panels.
#pragma once

#include "flce/fp8/formats.cuh"
#include "flce/fp8/mainloop.cuh"
#include "flce/sm90/store.cuh"

namespace flce {

/// Panels of a result of type Out that is written, or added to in fp32; kUpdates: added to in 16 bits.
template <class Out, class TileT, bool kUpdates>
using PanelsFp8 = Select<kUpdates, PanelUpdate<Out, TileT>, PanelStore<Out, TileT, 1, 2>>;

/// grad_weight's parameters.
template <class Problem>
using MappedGradWeightFp8Params = Select<Problem::label_smoothing, SmoothedFp8GradientParams, Fp8GradientParams>;
template <class Problem>
using GradWeightFp8Params = Select<Problem::hidden_major && Problem::accumulate, WithResult<MappedGradWeightFp8Params<Problem>>,
                                   MappedGradWeightFp8Params<Problem>>;

/// result[m, n] = factor · row_factors[m] · Σ_k A[m, k]·B[n, k], n being hidden dimensions, kTurned: classes; less label smoothing's term
/// where its Params have one.
template <class Problem, class TileT, class Out, bool kUpdates, int kRaster, class Params = Fp8GradientParams, bool kTurned = false>
struct GradientFp8 {
    using Mainloop = MainloopFp8<TileT, gradient_codes<Problem, kTurned>()>;
    using Panels = PanelsFp8<Out, TileT, kUpdates>;
    enum : int { kPanelsAt = Mainloop::kRingBytes };
    enum : int { kBarriersAt = kPanelsAt + Panels::kBytes };
    enum : int { kSmemBytes = kBarriersAt + Mainloop::kBarrierBytes };
    enum : int { kThreads = TileT::kThreads };
    enum : int { kColumns = kTurned ? 0 : +Problem::hidden_size };  ///< 0: nobody knows yet
    // The copy engine writes whole 16 bytes of a row, so where rows of the vocabulary end within them, threads add up to the end.
    enum : bool { kPanelled = !(Problem::accumulate && kTurned) || vocabulary_aligned<Problem, Out>() };
    enum : int { kPanelColumns = Panels::kPanelColumns };
    enum : int { kPanels = TileT::kBlockN / kPanelColumns };

    const Params& p;
    Mainloop loop;
    TileWalk<TileT, kRaster> walk;
    Panels panels;
    int slices;

    __device__ __forceinline__ explicit GradientFp8(const Params& params)
        : p(params),
          loop(dynamic_smem, kBarriersAt),
          walk(params.m, params.n),
          panels(loop.smem + kPanelsAt, loop.place),
          slices(ceil_div(params.k, Mainloop::kDepth)) {}

    __device__ __forceinline__ void run() {
        const unsigned clusters = gridDim.x / TileT::kCluster;
        const unsigned first = blockIdx.x / TileT::kCluster;
        if (loop.place.consumer < 0) {
            ptx::setmaxnreg_dec<kProducerRegisters>();
            if (threadIdx.x == 0) {
                for (unsigned t = first; walk.go_to(t, loop.rank); t += clusters) loop.produce(p.a_map, p.b_map, walk.m, walk.n, slices);
            }
        } else {
            ptx::setmaxnreg_inc<kConsumerRegisters>();
            const float factor = __frcp_rn(fp8_factor(*p.largest));
#pragma unroll 1
            for (unsigned t = first; walk.go_to(t, loop.rank); t += clusters) compute(factor);
            panels.finish();
        }
        loop.meet();
    }

private:
    __device__ __forceinline__ void compute(float factor) {
        const int y = walk.m + loop.place.first_row();
        if constexpr (kUpdates && kPanelled) {
            if (p.adds != 0) {
                for (int panel = 0; panel < 2; ++panel) fetch(panel, y);
            }
        }
        typename Mainloop::Accumulators c;
        loop.template consume_in_parts<kColumns>(c, walk.n, slices);
        scale_gradient(p, loop.place, walk.m, factor, c);
        take_smoothing<Problem, kTurned>(p, loop.place, walk.m, walk.n, c);
        if constexpr (kPanelled) {
            hand_over(c, y);
        } else {
            add_to_rows(c);
        }
    }
    __device__ __forceinline__ void hand_over(typename Mainloop::Accumulators& c, int y) {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const int x = walk.n + panel * kPanelColumns;
            if (x >= (kTurned ? p.n : +Problem::hidden_size)) continue;
            if constexpr (kUpdates) {
                panels.add(c[0], panel, panel * kPanelColumns / 8, 1.f);
                panels.close(p.result_map, x, y);
                if (panel + 2 < kPanels) fetch(panel + 2, y);
            } else {
                panels.open();
#pragma unroll
                for (int h = 0; h < 2; ++h) panels.put(c[0], h, panel * kPanelColumns / 8, 1.f);
                panels.close(p.result_map, x, y, p.adds != 0);
            }
        }
    }
    __device__ __forceinline__ void fetch(int panel, int y) {
        if constexpr (kUpdates) {
            const int x = walk.n + panel * kPanelColumns;
            if (x < (kTurned ? p.n : +Problem::hidden_size)) panels.fetch(p.result_map, panel, x, y);
        }
    }
    /// Adds a tile to rows of the vocabulary: of a pair across its end the second element is not there.
    __device__ __forceinline__ void add_to_rows(typename Mainloop::Accumulators& c) const {
        constexpr long long kPitch = Problem::padded_vocab_size;
        const TileTarget<Out> result{static_cast<Out*>(p.result) + walk.m * kPitch + walk.n, kPitch, p.m - walk.m, p.n - walk.n};
        store_tile_sm90<!Problem::shard && Problem::vocab_size % 2 == 0, true>(loop, c, result, 1.f);
    }
};

template <class Problem, class TileT>
struct GradHiddenFp8 : GradientFp8<Problem, TileT, float, false, Problem::raster> {
    using GradientFp8<Problem, TileT, float, false, Problem::raster>::GradientFp8;
};
template <class Problem, class TileT>
using GradWeightFp8Base =
    GradientFp8<Problem, TileT, typename Problem::GradWeight, Problem::accumulate && sizeof(typename Problem::GradWeight) == 2,
                Problem::raster, GradWeightFp8Params<Problem>, Problem::hidden_major>;
template <class Problem, class TileT>
struct GradWeightFp8 : GradWeightFp8Base<Problem, TileT> {
    using GradWeightFp8Base<Problem, TileT>::GradWeightFp8Base;
};

template <class Problem, class TileT>
__device__ __forceinline__ void grad_hidden_fp8(const Fp8GradientParams& p) {
    prefetch_maps(p.a_map, p.b_map, p.result_map);
    GradHiddenFp8<Problem, TileT>(p).run();
}
template <class Problem, class TileT>
__device__ __forceinline__ void grad_weight_fp8(const GradWeightFp8Params<Problem>& p) {
    prefetch_maps(p.a_map, p.b_map, p.result_map);
    GradWeightFp8<Problem, TileT>(p).run();
}

}  // namespace flce

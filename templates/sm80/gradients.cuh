// Backward, the two GEMMs of a vocabulary chunk: grad_hidden += dz · weight, grad_weight = dzᵀ · hidden. Over retained exponentials E the
// rows' scales are in the first one's epilogue, and in the second one's hidden states.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/common/retained_epilogue.cuh"
#include "flce/sm80/retained_operands.cuh"
#include "flce/sm80/tile_store.cuh"

namespace flce {

/// Feeds a sum over tokens. Hidden states of ignored ones are left out: their dlogits are 0, but 0 times NaN is not. Each lane knows
/// whether one token of the slice that is brought next is valid; the lane looked a slice before. kMayHaveAll: there may be no labels.
template <class MainloopT, class TileT, bool kHiddenIsA, bool kMayHaveAll>
struct TokenFeed : TileFeed<MainloopT> {
    enum : int { kTokens = TileT::kBlockK };
    enum : int { kWords = (kTokens + 31) / 32 };
    const RowTarget* tokens;  // this lane's first of the slice
    int left;                 // tokens from there on
    bool all;                 // no label is asked: hidden states of ignored tokens are 0
    bool valid[kWords];

    __device__ __forceinline__ void start_tokens(const void* row_targets, int rows) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        tokens = static_cast<const RowTarget*>(row_targets) + lane;
        all = kMayHaveAll && row_targets == nullptr;
        left = lane < kTokens ? rows - lane : 0;
        ask();
    }
    __device__ __forceinline__ void ask() {
#pragma unroll
        for (int w = 0; w < kWords; ++w) valid[w] = w * 32 < left && (all || tokens[w * 32].target >= 0);
        tokens += kTokens;
        left -= kTokens;
    }
    template <class Loader>
    __device__ __forceinline__ void load_valid(Loader& hidden, unsigned to) {
        unsigned present[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w) present[w] = __ballot_sync(0xffffffffu, valid[w]);
        ask();
        hidden.load_some(to, present);
    }
    __device__ __forceinline__ void load_a(unsigned to) {
        if constexpr (kHiddenIsA) {
            load_valid(this->a, to);
        } else {
            this->a.load(to);
        }
    }
    __device__ __forceinline__ void load_b(unsigned to) {
        if constexpr (kHiddenIsA) {
            this->b.load(to);
        } else {
            load_valid(this->b, to);
        }
    }
};

/// One tile of a GEMM over `k`, ready to be written: the ring is drained.
template <class MainloopT, class TileT, class Feed>
__device__ __forceinline__ void multiply_tile(MainloopT& mainloop, Feed& feed, int k, typename MainloopT::Accumulators& c) {
    const int slices = ceil_div(k, TileT::kBlockK);
    mainloop.prologue(feed);
    clear_sums(c);
    mainloop.accumulate(feed, slices, c);
    mainloop.drain();
}

template <class Problem, class TileT>
struct GradHiddenBlock {
    using Element = typename Problem::Element;
    using WeightT = WeightOperand<Problem>;
    using OperandsT = Operands<Element, Major::k, Access::chunks, WeightT::hidden_major ? Major::k : Major::mn, weight_access<Problem>()>;
    using MainloopT = Mainloop<OperandsT, TileT>;
    using Params = Select<Problem::retain, RetainGradHiddenParams, GradHiddenParams>;
    using Feed = Select<Problem::retain, BlockedFeed<MainloopT, TileT>, TileFeed<MainloopT>>;
    enum : int { kSmemBytes = RingOrStaging<MainloopT, TileT>::kBytes };
    enum : int { kThreads = TileT::kThreads };
};

/// grad_hidden[m: token, n: hidden] = Σ_k: vocabulary. Every tile is read and written by its own block alone, chunk after chunk.
template <class Problem, class TileT>
__device__ __forceinline__ void grad_hidden(const typename GradHiddenBlock<Problem, TileT>::Params& p) {
    using Block = GradHiddenBlock<Problem, TileT>;
    using Element = typename Block::Element;
    using WeightT = typename Block::WeightT;
    using MainloopT = typename Block::MainloopT;
    constexpr int kHidden = Problem::hidden_size;
    int tile_m;
    int tile_n;
    tile_of_block<Problem::raster>(blockIdx.x, ceil_div(p.rows, TileT::kBlockM), ceil_div(kHidden, TileT::kBlockN), tile_m, tile_n);
    const int row0 = tile_m * TileT::kBlockM;
    const int column0 = tile_n * TileT::kBlockN;

    MainloopT mainloop(dynamic_smem);
    typename Block::Feed feed;
    if constexpr (Problem::retain) feed.gap = p.block_gap;
    feed.a.start(static_cast<const Element*>(p.dlogits) + row0 * p.ld, p.ld, p.rows - row0, p.columns);
    feed.b.start(weight_at<WeightT>(static_cast<const Element*>(p.weight), 0, column0), kWeightLd<WeightT>, kHidden - column0, p.columns);
    typename MainloopT::Accumulators c;
    multiply_tile<MainloopT, TileT>(mainloop, feed, p.columns, c);
    if constexpr (Problem::retain) {
        if (p.row_scales != nullptr) {
            scale_tile_rows(mainloop.place, p.row_scales, row0, p.rows, c);
            if constexpr (Problem::label_smoothing) {
                take_weight_smoothing<kHidden>(mainloop.place, p.row_smoothing, p.weight_sum, row0, p.rows, column0, c);
            }
        }
    }

    const long long origin = static_cast<long long>(row0) * kHidden + column0;
    const TileTarget<float> sum{p.accumulator + origin, kHidden, p.rows - row0, kHidden - column0};
    if (p.first == 0) add_tile<true>(mainloop, c, sum);
    if (p.last == 0) {
        store_tile<float, TileT, true, false>(mainloop, c, sum);
        return;
    }
    if constexpr (sizeof(Element) == 2) scale_tile<MainloopT>(c, dlogits_scale<Problem>(p.scalars, true));
    using Out = GradHiddenOf<Problem>;
    const TileTarget<Out> result{static_cast<Out*>(p.grad_hidden) + origin, kHidden, p.rows - row0, kHidden - column0};
    store_tile<Out, TileT, true, false>(mainloop, c, result);
}

template <class Problem, class TileT>
struct GradWeightBlock {
    using Element = typename Problem::Element;
    using MainloopT = Mainloop<Operands<Element, Major::mn, Access::chunks, Major::mn, Access::chunks>, TileT>;
    using Params = Select<Problem::retain, RetainGradWeightParams, GradWeightParams>;
    enum : int { kSmemBytes = RingOrStaging<MainloopT, TileT>::kBytes };
    enum : int { kThreads = TileT::kThreads };
};

/// Tile of this block, in tiles.
template <class Problem, class TileT, class Params>
__device__ __forceinline__ void find_tile(const Params& p, int extent_m, int extent_n, int& m, int& n) {
    const int tiles_m = ceil_div(extent_m, TileT::kBlockM);
    const int tiles_n = ceil_div(extent_n, TileT::kBlockN);
    if constexpr (Problem::retain && !Problem::hidden_major) {
        if (p.readers != nullptr) return take_tile<TileT>(p, tiles_m, tiles_n, m, n);
    }
    tile_of_block<Problem::raster>(blockIdx.x, tiles_m, tiles_n, m, n);
}

/// grad_weight as it lies in memory: [m: vocabulary, n: hidden] = Σ_k: tokens, or [m: hidden, n: vocabulary] for a hidden_major weight.
template <class Problem, class TileT>
__device__ __forceinline__ void grad_weight(const typename GradWeightBlock<Problem, TileT>::Params& p) {
    using Element = typename Problem::Element;
    using Out = typename Problem::GradWeight;
    using MainloopT = typename GradWeightBlock<Problem, TileT>::MainloopT;
    constexpr int kHidden = Problem::hidden_size;
    const int extent_m = Problem::hidden_major ? kHidden : p.columns;
    const int extent_n = Problem::hidden_major ? p.columns : kHidden;
    int tile_m;
    int tile_n;
    find_tile<Problem, TileT>(p, extent_m, extent_n, tile_m, tile_n);
    const int m0 = tile_m * TileT::kBlockM;
    const int n0 = tile_n * TileT::kBlockN;

    MainloopT mainloop(dynamic_smem);
    TokenFeed<MainloopT, TileT, Problem::hidden_major, Problem::retain> feed;
    feed.start_tokens(p.row_targets, p.rows);
    long long block_bytes = 0;
    if constexpr (Problem::retain) block_bytes = p.block_bytes;
    const Element* const dlogits = vocabulary_at<Element>(p.dlogits, block_bytes, Problem::hidden_major ? n0 : m0);
    const Element* const hidden = static_cast<const Element*>(p.hidden);
    if constexpr (Problem::hidden_major) {
        feed.a.start(hidden + m0, kHidden, kHidden - m0, p.rows);
        feed.b.start(dlogits, p.ld, p.columns - n0, p.rows);
    } else {
        feed.a.start(dlogits, p.ld, p.columns - m0, p.rows);
        feed.b.start(hidden + n0, kHidden, kHidden - n0, p.rows);
    }
    typename MainloopT::Accumulators c;
    multiply_tile<MainloopT, TileT>(mainloop, feed, p.rows, c);
    if constexpr (Problem::retain && !Problem::hidden_major) {
        if (p.readers != nullptr) {
            wait_for_room<TileT>(p, m0, min(m0 + TileT::kBlockM, extent_m), kHidden * static_cast<long long>(sizeof(Out)));
        }
    }
    if constexpr (Problem::retain && Problem::label_smoothing) {
        if (p.hidden_sum != nullptr) take_hidden_smoothing<Problem>(mainloop.place, p.class_weight, p.hidden_sum, m0, n0, p.columns, c);
    }

    if (p.accumulator != nullptr) {
        const TileTarget<float> sum{p.accumulator + m0 * p.accumulator_ld + n0, p.accumulator_ld, extent_m - m0, extent_n - n0};
        if (p.first == 0) add_tile<true>(mainloop, c, sum);
        if (p.last == 0) {
            store_tile<float, TileT, true, false>(mainloop, c, sum);
            return;
        }
    }
    if constexpr (sizeof(Element) == 2) scale_tile<MainloopT>(c, dlogits_scale<Problem>(p.scalars, true));
    // A 16-byte piece across the end of the vocabulary may be written whole, zeros past it, but not added to.
    constexpr bool kWhole = !Problem::hidden_major || !Problem::accumulate || vocabulary_aligned<Problem, Out>();
    constexpr long long kLd = kWeightLd<Problem>;
    const TileTarget<Out> result{static_cast<Out*>(p.grad_weight) + m0 * kLd + n0, kLd, extent_m - m0, extent_n - n0};
    store_tile<Out, TileT, kWhole && rows_aligned<Out>(kLd), Problem::accumulate>(mainloop, c, result);
}

}  // namespace flce

// Backward of a vocabulary chunk on sm_90a: the GEMM that makes grad_weight of the logits' gradients, or of retained exponentials.
#pragma once

#include "flce/sm90/backward.cuh"
#include "flce/sm90/bias_sum.cuh"

namespace flce {

/// How tiles of grad_weight leave: panel by panel through the copy engine. 16-bit gradients that are added to are brought to the SM first;
/// sums in fp32 are the copy engine's.
template <class Problem>
constexpr bool kUpdatesGradWeight = sizeof(typename Problem::GradWeight) == 2 && Problem::accumulate;
template <class Problem, class TileT>
using GradWeightPanels = Select<kUpdatesGradWeight<Problem>, PanelUpdate<typename Problem::GradWeight, TileT>,
                                PanelStore<typename Problem::GradWeight, TileT, 1, 2>>;

/// Places of a tile's panels in the gradient.
template <class Problem, class TileT>
struct GradWeightTile {
    using PanelsT = GradWeightPanels<Problem, TileT>;
    enum : int { kPanelsOfRow = TileT::kBlockN / PanelsT::kPanelColumns };
    enum : int { kPanels = TileT::kConsumerM / 64 * kPanelsOfRow };
    enum : bool { kHasTail = !Problem::hidden_major && Problem::hidden_size % TileT::kBlockN != 0 };
    enum : int { kAhead = 2 };  ///< panels that are brought to where they leave from while the tile is multiplied
    enum : int { kRestBytes = (kPanels - kAhead) * int{PanelsT::kPanelBytes} };  ///< bytes of a consumer
    enum : bool { kFitsInStage = kRestBytes > 0 && int{TileT::kConsumers} * kRestBytes <= int{TileT::kStageBytes} };
    /// Whether the other panels' old values come through the ring, in a stage behind the tile's slices. Where consumers share a tile,
    /// nothing is multiplied while its epilogue waits. Not of a hidden_major gradient: no GPU has run that yet.
    enum : bool { kThroughRing = kUpdatesGradWeight<Problem> && !Problem::hidden_major && !TileT::kTurns && kFitsInStage };

    const TensorMap& map;
    int n;
    int first_row;  ///< first row of the consumer's panels; for the producer, of the tile's

    __device__ __forceinline__ int x(int panel) const { return n + panel % kPanelsOfRow * PanelsT::kPanelColumns; }
    __device__ __forceinline__ int y(int panel) const { return first_row + panel / kPanelsOfRow * 64; }
    /// Whether the gradient goes so far.
    __device__ __forceinline__ bool exists(int panel) const { return !kHasTail || x(panel) < Problem::hidden_size; }

    /// Before the tile is multiplied.
    __device__ __forceinline__ void fetch(PanelsT& panels) const {
        if constexpr (kUpdatesGradWeight<Problem>) {
            fetch(panels, 0);
            if constexpr (kPanels > 1) fetch(panels, 1);
        }
    }
    /// The producer, behind the tile's slices: old values of the panels that are not brought ahead.
    template <class MainloopT>
    __device__ __forceinline__ void bring_rest(MainloopT& mainloop) const {
        if constexpr (kThroughRing) {
            unsigned bytes = 0;
#pragma unroll
            for (int panel = kAhead; panel < kPanels; ++panel) bytes += exists(panel) ? TileT::kConsumers * PanelsT::kPanelBytes : 0;
            if (bytes == 0) return;
            mainloop.produce_more(bytes, [&](unsigned address, unsigned barrier) {
#pragma unroll
                for (int i = 0; i < TileT::kConsumers * (kPanels - kAhead); ++i) {
                    const int panel = kAhead + i % (kPanels - kAhead);
                    const int row = y(panel) + i / (kPanels - kAhead) * TileT::kConsumerM;
                    const unsigned to = address + static_cast<unsigned>(i * PanelsT::kPanelBytes);
                    if (exists(panel)) ptx::cp_async_bulk_tensor_2d_load(to, &map, x(panel), row, barrier);
                }
            });
        }
    }
    /// A consumer, when `mainloop` has gone through the tile's slices.
    template <class MainloopT>
    __device__ __forceinline__ void write(MainloopT& mainloop, PanelsT& panels, typename MainloopT::Accumulators& c, float factor) const {
        constexpr bool kUpdates = kUpdatesGradWeight<Problem>;
        add_rest(mainloop, panels, c, factor);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            const auto& piece = c[panel / kPanelsOfRow];
            const int first = panel % kPanelsOfRow * PanelsT::kPanelColumns / 8;
            if (exists(panel)) {
                // Added panels take the buffers in turn, whatever their numbers are: open waits for the last but one to have left.
                const bool added = kThroughRing && panel >= kAhead;
                if constexpr (kUpdates) {
                    if (!added) panels.add(piece, panel, first, factor);
                }
                if (!kUpdates || added) {
                    panels.open();
#pragma unroll
                    for (int h = 0; h < 2; ++h) panels.put(piece, h, first, added ? 1.f : factor);
                }
                panels.close(map, x(panel), y(panel), Problem::accumulate && !kUpdates);
            }
            if constexpr (kUpdates && !kThroughRing) {
                if (panel + kAhead < kPanels) fetch(panels, panel + kAhead);
            }
        }
    }

private:
    template <class MainloopT>
    __device__ __forceinline__ void add_rest(MainloopT& mainloop, const PanelsT& panels, typename MainloopT::Accumulators& c,
                                             float factor) const {
        if constexpr (kThroughRing) {
            if (!exists(kAhead)) return;
            mainloop.consume_more([&](unsigned address) {
                address += static_cast<unsigned>(mainloop.place.consumer * kRestBytes);
#pragma unroll
                for (int panel = kAhead; panel < kPanels; ++panel) {
                    const unsigned from = address + static_cast<unsigned>((panel - kAhead) * PanelsT::kPanelBytes);
                    const int first = panel % kPanelsOfRow * PanelsT::kPanelColumns / 8;
                    if (exists(panel)) panels.add_old(from, c[panel / kPanelsOfRow], first, factor);
                }
            });
        }
    }

    __device__ __forceinline__ void fetch(PanelsT& panels, int panel) const {
        if (exists(panel)) panels.fetch(map, panel, x(panel), y(panel));
    }
};

/// grad_weight as it lies in memory: [m: vocabulary, n: hidden] = Σ_k: tokens, or [m: hidden, n: vocabulary] for a hidden_major weight.
///
/// Exponentials may lie in grad_weight's own memory, a block one place behind its gradient's or more. Blocks are then gone through in
/// order, and a tile is written when every tile whose operand lies there has been multiplied: tiles of smaller numbers, which clusters that
/// run have taken.
template <class Problem, class TileT>
struct GradWeightSm90 {
    using Element = typename Problem::Element;
    using Out = typename Problem::GradWeight;
    using MainloopT = MainloopSm90<Operands<Element, Major::mn, Access::chunks, Major::mn, Access::chunks>, TileT>;
    enum : int { kHidden = Problem::hidden_size };
    // The copy engine writes whole 16 bytes of a row, so where rows of the vocabulary end within them, threads add up to the end.
    enum : bool { kPanelled = !(Problem::accumulate && Problem::hidden_major) || vocabulary_aligned<Problem, Out>() };
    using PanelsT = GradWeightPanels<Problem, TileT>;
    enum : bool { kLends = Problem::retain && !Problem::accumulate && !Problem::hidden_major };
    // grad_bias of a chunk is dlogits' affair.
    enum : bool { kSumsBias = Problem::retain && Problem::sums_bias };
    static_assert(!Problem::sums_bias || (Problem::bias && !Problem::hidden_major), "the vocabulary is the sums' only dimension");
    enum : int { kFactorsAt = MainloopT::kRingBytes };
    enum : int { kPanelsAt = kFactorsAt + (Problem::sums_bias ? TileT::kStages * BiasOperand::kBytes : 0) };
    enum : int { kBarriersAt = kPanelsAt + PanelsT::kBytes };
    enum : int { kSmemBytes = kBarriersAt + MainloopT::kBarrierBytes + TileNumbers<TileT>::kBytes };
    enum : int { kThreads = TileT::kThreads };
    using UnbiasedParams = SmoothedOf<Problem, GradWeightSm90Params, SmoothedGradWeightSm90Params>;
    using Params = Select<kSumsBias, WithScaledBias<UnbiasedParams>, UnbiasedParams>;

    const Params& p;
    TileNumbers<TileT> numbers;
    MainloopT mainloop;
    TileWalk<TileT, Problem::raster, kRetainedColumns> walk;
    PanelsT panels;
    int slices;
    int free_blocks = 0;  ///< blocks of exponentials in grad_weight's memory that nobody reads any more

    __device__ __forceinline__ explicit GradWeightSm90(const Params& params)
        : p(params),
          numbers(ptx::shared_address(dynamic_smem) + kBarriersAt + MainloopT::kBarrierBytes),
          mainloop(dynamic_smem, kBarriersAt),
          walk(Problem::hidden_major ? kHidden : params.columns, Problem::hidden_major ? params.columns : kHidden),
          panels(mainloop.smem + kPanelsAt, mainloop.place),
          slices(ceil_div(listed_rows<Problem>(params.list, params.rows, 1), TileT::kBlockK)) {
        if constexpr (kLends) walk.in_blocks = p.readers != nullptr;
    }

    __device__ __forceinline__ void run() {
        run_tiles(
            mainloop, p.tickets, numbers, walk, [&] { return slices; }, TileT::kTurns,
            [&] {
                if constexpr (kSumsBias) {
                    const BiasFactors factors{p.scales_map, mainloop.smem + kFactorsAt, sums_bias()};
                    mainloop.produce(vocabulary_operand<Problem>(p), p.hidden_map, walk.m, walk.n, slices, NoPace{}, 0, 0, TileT::kBlockM,
                                     factors);
                } else if constexpr (Problem::hidden_major) {
                    mainloop.produce(p.hidden_map, vocabulary_operand<Problem>(p), walk.m, walk.n, slices);
                } else {
                    mainloop.produce(vocabulary_operand<Problem>(p), p.hidden_map, walk.m, walk.n, slices);
                }
                if (kPanelled && writes()) GradWeightTile<Problem, TileT>{p.grad_weight_map, walk.n, walk.m}.bring_rest(mainloop);
            },
            [&] { compute(); });
        if (mainloop.place.consumer >= 0) panels.finish();
        mainloop.meet();
    }

    __device__ __forceinline__ void compute() {
        const GradWeightTile<Problem, TileT> tile{p.grad_weight_map, walk.n, walk.m + mainloop.place.first_row()};
        if constexpr (kPanelled) {
            if (writes()) tile.fetch(panels);
        }
        const int extent_m = Problem::hidden_major ? kHidden : p.columns;
        const int extent_n = Problem::hidden_major ? p.columns : kHidden;
        const TileTarget<float> sum{p.accumulator + walk.m * p.accumulator_ld + walk.n, p.accumulator_ld, extent_m - walk.m,
                                    extent_n - walk.n};
        typename MainloopT::Accumulators c;
        clear_sums(c);
        if (p.accumulator != nullptr && p.first == 0) load_tile_sm90<true>(mainloop, c, sum);
        if constexpr (Problem::hidden_major) {
            mainloop.consume(c, slices);
        } else if (sums_bias()) {
            if constexpr (kSumsBias) consume_with_bias(c);
        } else {
            mainloop.template consume_at<kHidden>(c, walk.n, slices);
        }
        if constexpr (kLends) {
            if (p.readers != nullptr) make_room(min(walk.m + TileT::kBlockM, extent_m));
        }
        if constexpr (Problem::retain && Problem::label_smoothing) {
            if (p.hidden_sum != nullptr) {
                take_hidden_smoothing<Problem>(mainloop.place, p.class_weight, p.hidden_sum, walk.m, walk.n, p.columns, c);
            }
        }
        if (!writes()) {
            store_tile_sm90<true, false>(mainloop, c, sum, 1.f);
        } else if constexpr (kPanelled) {
            tile.write(mainloop, panels, c, dlogits_scale<Problem>(p.scalars, true));
        } else {
            constexpr long long kLd = kWeightLd<Problem>;
            const TileTarget<Out> result{static_cast<Out*>(p.grad_weight) + walk.m * kLd + walk.n, kLd, extent_m - walk.m,
                                         extent_n - walk.n};
            // Pairs across the end of the vocabulary: the second one is not there.
            store_tile_sm90<!Problem::shard && Problem::vocab_size % 2 == 0, true>(mainloop, c, result,
                                                                                   dlogits_scale<Problem>(p.scalars, true));
        }
    }

    /// Whether this launch writes the gradient, and not a sum that another one goes on with.
    __device__ __forceinline__ bool writes() const { return p.accumulator == nullptr || p.last != 0; }
    /// Whether the tile at hand adds up its part of grad_bias.
    __device__ __forceinline__ bool sums_bias() const {
        if constexpr (kSumsBias) return walk.n == 0 && p.grad_bias != nullptr;
        return false;
    }
    __device__ __forceinline__ void consume_with_bias(typename MainloopT::Accumulators& c) {
        float sums[MainloopT::kPiecesA][1][4] = {};
        const BiasSums<Element, Major::mn, MainloopT::kPiecesA> beside{sums, mainloop.smem + kFactorsAt, BiasOperand::kBytes};
        mainloop.template consume_at<kHidden>(c, walk.n, slices, beside);
        write_bias<Problem>(mainloop.place, sums, static_cast<Out*>(p.grad_bias) + walk.m, p.columns - walk.m,
                            dlogits_scale<Problem>(p.scalars, true), [&](int column) {
                                if constexpr (!Problem::label_smoothing) {
                                    return 0.f;
                                } else if constexpr (Problem::class_weight) {
                                    return *p.smoothing_total * p.class_weight[walk.m + column];
                                } else {
                                    return *p.smoothing_total;
                                }
                            });
    }

    /// Tells that this warp has multiplied its tile, and waits until rows up to `end` of grad_weight are free.
    __device__ __forceinline__ void make_room(int end) {
        __syncwarp();
        if (mainloop.place.lane == 0) ptx::red_release_gpu_add(p.readers + walk.m / kRetainedColumns, 1u);
        const long long bytes = static_cast<long long>(end) * kHidden * static_cast<long long>(sizeof(Out));
        // Block i begins i + 1 places behind the beginning.
        const int taken = static_cast<int>((bytes - 1) / p.block_bytes);
        for (; free_blocks < taken; ++free_blocks) {
            while (ptx::ld_acquire_gpu(p.readers + free_blocks) < p.readers_of_block) {
            }
        }
        ptx::fence_proxy_async_all();
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void grad_weight_sm90(const typename GradWeightSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.dlogits_map, p.hidden_map, p.grad_weight_map);
    if constexpr (GradWeightSm90<Problem, TileT>::kSumsBias) {
        if (p.grad_bias != nullptr) prefetch_maps(p.scales_map);
    }
    GradWeightSm90<Problem, TileT>(p).run();
}

}  // namespace flce

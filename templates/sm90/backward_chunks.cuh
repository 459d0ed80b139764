// Backward of many chunks of the vocabulary in one launch. Clusters take the tiles of all phases (chunk_phases.cuh) from one counter, in
// order: no phase ends with clusters that have nothing to do, and those that are slower have fewer tiles. A tile waits only for earlier
// phases (tickets.cuh).
#pragma once

#include "flce/sm90/chunk_phases.cuh"
#include "flce/sm90/grad_weight.cuh"
#include "flce/sm90/rounding_ahead.cuh"

namespace flce {

/// The phases' shape: what follows from the number of rows is read again and again, from shared memory, where registers are few.
template <bool kHidden>
struct ChunkShape {
    enum : bool { kHiddenOnly = kHidden };
    enum : int { kBytes = 8 };  ///< bytes of shared memory

    const BackwardChunksSm90Params& p;
    unsigned rows_at;
    __device__ __forceinline__ int rows() const { return static_cast<int>(ptx::ld_shared_b32(rows_at)); }
    __device__ __forceinline__ int parts() const { return kHidden ? 1 : static_cast<int>(ptx::ld_shared_b32(rows_at + 4)); }
    __device__ __forceinline__ int half_rows() const { return static_cast<int>(ptx::ld_shared_b32(rows_at + 4)); }
    /// One thread, before the block is in step. A cluster has `cluster_rows` rows of a tile.
    __device__ __forceinline__ void set(int rows, int cluster_rows) const {
        ptx::st_shared_b32(rows_at, static_cast<unsigned>(rows));
        const int second = kHidden ? ceil_div(ceil_div(rows, cluster_rows), 2) * cluster_rows : SumParts(p.share, rows).count;
        ptx::st_shared_b32(rows_at + 4, static_cast<unsigned>(second));
    }
    __device__ __forceinline__ int columns() const { return p.columns; }
    __device__ __forceinline__ int even_width() const { return p.even_width; }
    __device__ __forceinline__ int pair_width() const { return p.pair_width; }
};

/// This block's tiles.
template <class TileT, int kHidden, int kRaster, bool kHiddenOnly>
struct ChunkWalk : ChunkPhases<ChunkShape<kHiddenOnly>, kHidden, TileT::kBlockM * TileT::kCluster, TileT::kBlockN> {
    using Phases = ChunkPhases<ChunkShape<kHiddenOnly>, kHidden, TileT::kBlockM * TileT::kCluster, TileT::kBlockN>;
    using Phases::chunk;
    using Phases::kind;

    TileNumbers<TileT> numbers;
    unsigned before = 0;  ///< tiles of earlier phases
    int m = 0;            ///< first row and column of the tile, counted from the chunk's
    int n = 0;
    int slices = 0;
    int part_row = 0;  ///< first row of the tile's part of a sum in parts, and depth in the pair at which the part begins
    int part_depth = 0;

    __device__ __forceinline__ ChunkWalk(const BackwardChunksSm90Params& p, unsigned rows_at, unsigned numbers_at)
        : Phases(ChunkShape<kHiddenOnly>{p, rows_at}), numbers(numbers_at) {}

    __device__ __forceinline__ bool next(unsigned rank) {
        const unsigned number = numbers.take();
        for (unsigned tiles; number - before >= (tiles = this->tiles_of(kind, chunk)); before += tiles) {
            if (!this->advance()) return false;
        }
        int tile_m;
        int tile_n;
        tile_of_block<kRaster>(number - before, this->clusters_of(kind, chunk), this->columns_of(kind, chunk), tile_m, tile_n);
        m = (tile_m * TileT::kCluster + static_cast<int>(rank)) * TileT::kBlockM + this->first_row_of(chunk);
        n = tile_n * TileT::kBlockN;
        find_slices();
        return true;
    }

    __device__ __forceinline__ bool is_turn_of(int consumer) const { return (numbers.turn - 1) % 2 == static_cast<unsigned>(consumer); }

private:
    __device__ __forceinline__ void find_slices() {
        part_row = part_depth = 0;
        if (kind != ChunkKind::grad_hidden) {
            slices = ceil_div(kind == ChunkKind::dlogits ? kHidden : this->shape.rows(), TileT::kBlockK);
            return;
        }
        slices = this->sum_slices(chunk);
        if (this->shape.parts() == 1) return;
        const PartSlices parts = this->parts_of(chunk);
        const int part = m / this->rows_of_part();
        part_row = part * this->rows_of_part();
        part_depth = part * parts.of_part * kSumSlice;
        slices = min(parts.of_part, slices - part * parts.of_part);
    }
};

/// kHiddenOnly: grad_hidden alone is wanted.
template <class Problem, class TileT, bool kHiddenOnly = false>
struct BackwardChunksSm90 {
    using Element = typename Problem::Element;
    using Out = typename Problem::GradWeight;
    template <class OperandsT>
    using Mainloop = MainloopSm90<OperandsT, TileT>;
    using LogitMainloop = Mainloop<LogitOperands<Problem>>;
    using HiddenMainloop = Mainloop<Operands<Element, Major::k, Access::chunks, Major::mn, Access::chunks>>;
    using WeightMainloop = Mainloop<Operands<Element, Major::mn, Access::chunks, Major::mn, Access::chunks>>;
    using Accumulators = typename LogitMainloop::Accumulators;
    using LogitPanels = PanelStore<Element, TileT, TileT::kBlockN / 64, 1>;
    using HiddenPanels = PanelStore<float, TileT, 1, 2>;
    using WeightPanels = GradWeightPanels<Problem, TileT>;
    enum : int { kConsumerBytes = LogitPanels::kConsumerBytes };
    static_assert(kConsumerBytes >= HiddenPanels::kConsumerBytes, "all kinds of tiles leave through the same shared memory");
    static_assert(TileT::kTurns && !Problem::hidden_major, "the generator has asked for it nowhere else");
    enum : int { kOnesAt = LogitMainloop::kRingBytes };
    enum : int { kStagingAt = kOnesAt + (Problem::bias ? BiasOperand::kBytes : 0) };
    enum : int { kBarriersAt = kStagingAt + kConsumerBytes * TileT::kConsumers + WeightPanels::kBarrierBytes };
    enum : int { kNumbersAt = kBarriersAt + RingSm90<TileT>::kBarrierBytes };
    enum : int { kRowsAt = kNumbersAt + TileNumbers<TileT>::kBytes };
    enum : int { kSmemBytes = kRowsAt + ChunkShape<kHiddenOnly>::kBytes };
    enum : int { kThreads = TileT::kThreads };
    enum : int { kHidden = Problem::hidden_size };

    using Plain = Select<Problem::rounds_weight, RoundedChunksSm90Params, BackwardChunksSm90Params>;
    using Params = TemperedOf<Problem, Select<Problem::bias, WithGradBias<Plain>, Plain>>;

    const Params& p;
    RingSm90<TileT> ring;
    ChunkWalk<TileT, kHidden, Problem::raster, kHiddenOnly> walk;
    WeightPanels weight_panels;

    __device__ __forceinline__ explicit BackwardChunksSm90(const Params& params)
        : p(params),
          ring(dynamic_smem, kBarriersAt),
          walk(params, ring.smem + kRowsAt, ring.smem + kNumbersAt),
          weight_panels(staging(), ring.place, kConsumerBytes) {
        if (threadIdx.x == 0) walk.shape.set(listed_rows<Problem>(p.list, p.rows, 1), TileT::kBlockM * TileT::kCluster);
        if constexpr (Problem::bias && !kHiddenOnly) fill_with_ones<Element>(ring.smem + kOnesAt);
        ring.meet();
    }

    __device__ __forceinline__ unsigned staging() const { return ring.smem + kStagingAt; }

    __device__ __forceinline__ void run() {
        if (ring.place.consumer < 0) {
            ptx::setmaxnreg_dec<kProducerRegisters>();
            if (threadIdx.x == 0) produce_all();
            if constexpr (Problem::rounds_weight) {
                const bool needed = walk.shape.rows() > 0;
                if (threadIdx.x >= 32 && needed) RoundingAhead<Problem>{p}.run([&](int pair) { wait_for_readers(pair); });
            }
        } else {
            ptx::setmaxnreg_inc<kConsumerRegisters>();
            while (walk.next(ring.rank)) {
                if (walk.is_turn_of(ring.place.consumer)) {
                    compute();
                } else {
                    ring.skip(walk.slices);
                }
            }
        }
        ring.meet();
    }

    // ---- the producer

    __device__ __forceinline__ void produce_all() {
        unsigned number = ring.rank == 0 ? take() : 0u;
        int phase = -1;
        while (true) {
            walk.numbers.hand_out(number, ring.rank);
            if (!walk.next(ring.rank)) break;
            // the number comes while this tile is brought
            if (ring.rank == 0) number = take();
            const int now = walk.chunk * kChunkKinds + static_cast<int>(walk.kind);
            if (now != phase) wait_for_phases();
            phase = now;
            bring();
        }
    }

    __device__ __forceinline__ unsigned take() const { return ptx::atom_relaxed_gpu_add(p.taken, 1u); }

    __device__ __forceinline__ void bring() {
        const int slices = walk.slices;
        if (walk.kind == ChunkKind::dlogits) {
            produce<LogitMainloop>(p.hidden_map, p.weight_map, walk.m, weight_row() + walk.n, 0, 0, slices);
        } else if (walk.kind == ChunkKind::grad_hidden) {
            produce<HiddenMainloop>(walk.is_last(walk.chunk) ? p.last_dlogits_sum_map : p.dlogits_sum_map, p.weight_sum_map,
                                    walk.m - walk.part_row, walk.n, walk.place_of(walk.chunk) + walk.part_depth,
                                    weight_row() + walk.part_depth, slices);
        } else if constexpr (!kHiddenOnly) {
            produce<WeightMainloop>(p.dlogits_map, p.hidden_sum_map, walk.place_of(walk.chunk) + walk.m, walk.n, 0, 0, slices);
        }
    }

    /// First row of the chunk in the maps of the weight.
    __device__ __forceinline__ int weight_row() const {
        if constexpr (Problem::rounds_weight) return RoundingAhead<Problem>{p}.place_of(walk.chunk / 2) + walk.place_of(walk.chunk);
        return walk.begin_of(walk.chunk);
    }

    template <class MainloopT, class MapA, class MapB>
    __device__ __forceinline__ void produce(const MapA& a, const MapB& b, int m, int n, int depth_a, int depth_b, int slices) {
        MainloopT mainloop(ring);
        mainloop.produce(a, b, m, n, slices, NoPace{}, depth_a, depth_b);
        ring.position = mainloop.position;
    }

    __device__ __forceinline__ void wait_for_phases() const {
        walk.for_each_needed([&](ChunkKind kind, int chunk) { wait(kind, chunk); });
        if constexpr (Problem::rounds_weight) {
            if (walk.kind == ChunkKind::dlogits) RoundingAhead<Problem>{p}.wait_for(walk.chunk / 2);
        }
        ptx::fence_proxy_async_all();
    }

    /// kPause: nanoseconds from one look to the next.
    template <int kPause = 0>
    __device__ __forceinline__ void wait(ChunkKind kind, int chunk) const {
        const unsigned tiles = walk.tiles_of(kind, chunk) * TileT::kCluster;
        while (ptx::ld_acquire_gpu(p.progress + chunk * kChunkKinds + static_cast<int>(kind)) < tiles) {
            if constexpr (kPause > 0) ptx::nanosleep(kPause);
        }
    }

    /// Until the pair's products have read its weight: the last of them are grad_hidden's.
    __device__ __forceinline__ void wait_for_readers(int pair) const {
        wait<1000>(ChunkKind::grad_hidden, 2 * pair);
        if (kHiddenOnly && !walk.is_alone(2 * pair)) wait<1000>(ChunkKind::grad_hidden, 2 * pair + 1);
    }

    // ---- a consumer

    __device__ __forceinline__ void compute() {
        // Numbers that follow from a thread's place are worked out anew for every tile: those of all kinds of tiles, kept beside the
        // accumulators, would not fit.
        asm volatile("" : "+r"(ring.place.lane), "+r"(ring.place.warp));
        weight_panels.place = ring.place;
        if (walk.kind == ChunkKind::dlogits) {
            dlogits();
        } else if (walk.kind == ChunkKind::grad_hidden) {
            grad_hidden();
        } else if constexpr (!kHiddenOnly) {
            grad_weight();
        }
    }

    template <class MainloopT, int kExtent, class Beside = NothingBeside>
    __device__ __forceinline__ void consume(Accumulators& c, const Beside& beside = {}) {
        MainloopT mainloop(ring);
        mainloop.template consume_at<kExtent>(c, walk.n, walk.slices, beside);
        ring.position = mainloop.position;
        ring.turn_parity = mainloop.turn_parity;
    }

    /// One thread, which has handed over this consumer's tile, when that has arrived.
    template <class Panels>
    __device__ __forceinline__ void done(const Panels& panels) const {
        panels.finish();
        if (panels.issues) ptx::red_release_gpu_add(p.progress + walk.chunk * kChunkKinds + static_cast<int>(walk.kind), 1u);
    }

    __device__ __forceinline__ void dlogits() {
        Accumulators c;
        clear_sums(c);
        consume<LogitMainloop, TileT::kBlockN>(c);
        if constexpr (Problem::bias) add_bias_in_turn<Problem>(p, ring.place, walk.begin_of(walk.chunk) + walk.n, c);
        LogitPanels panels(staging(), ring.place);
        const float scale = dlogits_scale<Problem>(p.scalars, false);
        const int column = walk.begin_of(walk.chunk) + walk.n;
#pragma unroll
        for (int i = 0; i < LogitMainloop::kPiecesA; ++i) {
            panels.open();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                dlogits_of_row<Problem>(p, ring.place, column, walk.m + ring.place.row(i, h), scale, c[i], h);
                panels.put(c[i], h, 0, 1.f);
            }
            panels.close(p.dlogits_map, walk.place_of(walk.chunk) + walk.n, walk.m + i * 64);
        }
        done(panels);
    }

    __device__ __forceinline__ void grad_hidden() {
        const bool writes = p.last != 0 && walk.is_last(walk.chunk) && walk.shape.parts() == 1;
        const bool continues = walk.chunk >= 2;
        const bool adds = p.first == 0 || continues;
        Accumulators c;
        clear_sums(c);
        if (writes && adds) {
            if (continues) wait_in_warp(ChunkKind::grad_hidden, walk.chunk - 2);
            const long long origin = static_cast<long long>(walk.m) * kHidden + walk.n;
            load_tile_sm90<true>(HiddenMainloop(ring), c,
                                 TileTarget<float>{p.accumulator + origin, kHidden, walk.shape.rows() - walk.m, kHidden - walk.n});
        }
        consume<HiddenMainloop, kHidden>(c);
        if (!writes) {
            HiddenPanels panels(staging(), ring.place, kConsumerBytes);
            add_to_sum<kHidden>(panels, p.accumulator_map, c, walk.n, walk.m, adds);
            done(panels);
            return;
        }
        // Listed hidden states lie where this is written.
        walk.for_each_reader_of_hidden([&](ChunkKind kind, int chunk) { wait_in_warp(kind, chunk); });
        write_grad_hidden<Problem>(HiddenMainloop(ring), p, c, walk.shape.rows(), walk.m, walk.n);
    }

    __device__ __forceinline__ void wait_in_warp(ChunkKind kind, int chunk) const {
        if (ring.place.lane == 0) wait(kind, chunk);
        __syncwarp();
    }

    __device__ __forceinline__ void grad_weight() {
        const GradWeightTile<Problem, TileT> tile{p.grad_weight_map, walk.n, walk.begin_of(walk.chunk) + walk.m};
        weight_panels.group = weight_panels.staging;  // all of them have left: nothing to remember from tile to tile
        tile.fetch(weight_panels);
        Accumulators c;
        clear_sums(c);
        if (sums_bias()) {
            if constexpr (Problem::bias) consume_with_bias(c);
        } else {
            consume<WeightMainloop, kHidden>(c);
        }
        WeightMainloop mainloop(ring);  // by turns nothing comes through the ring behind the slices
        tile.write(mainloop, weight_panels, c, dlogits_scale<Problem>(p.scalars, true));
        done(weight_panels);
    }

    /// Whether the tile of grad_weight at hand adds up its part of grad_bias.
    __device__ __forceinline__ bool sums_bias() const {
        if constexpr (Problem::bias) return walk.n == 0 && p.grad_bias != nullptr;
        return false;
    }
    __device__ __forceinline__ void consume_with_bias(Accumulators& c) {
        float sums[WeightMainloop::kPiecesA][1][4] = {};
        consume<WeightMainloop, kHidden>(c, BiasSums<Element, Major::mn, WeightMainloop::kPiecesA>{sums, ring.smem + kOnesAt, 0u});
        const int first = walk.begin_of(walk.chunk) + walk.m;
        write_bias<Problem>(ring.place, sums, static_cast<Out*>(p.grad_bias) + first, p.columns - first,
                            dlogits_scale<Problem>(p.scalars, true), [](int /*column*/) { return 0.f; });
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void backward_chunks_sm90(const typename BackwardChunksSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.dlogits_map, p.hidden_sum_map, p.dlogits_sum_map, p.last_dlogits_sum_map, p.weight_sum_map,
                  p.accumulator_map, p.grad_weight_map);
    BackwardChunksSm90<Problem, TileT>(p).run();
}

template <class Problem, class TileT>
struct HiddenChunksSm90 : BackwardChunksSm90<Problem, TileT, true> {
    using BackwardChunksSm90<Problem, TileT, true>::BackwardChunksSm90;
};

template <class Problem, class TileT>
__device__ __forceinline__ void hidden_chunks_sm90(const typename HiddenChunksSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.dlogits_map, p.dlogits_sum_map, p.last_dlogits_sum_map, p.weight_sum_map,
                  p.accumulator_map);
    HiddenChunksSm90<Problem, TileT>(p).run();
}

}  // namespace flce

// Backward of a vocabulary chunk on sm_90a: gradients of the logits, computed again, and the GEMM that makes grad_hidden of them.
#pragma once

#include "flce/common/gradient_epilogue.cuh"
#include "flce/common/retained_epilogue.cuh"
#include "flce/sm90/store.cuh"
#include "flce/sm90/tickets.cuh"

namespace flce {

/// Runs over every tile that the block's cluster takes, which has slices(): `bring` in the producer, `compute` in the consumers, or in the
/// one whose turn it is.
template <class MainloopT, class TileT, class Walk, class Slices, class Bring, class Compute>
__device__ __forceinline__ void run_tiles(MainloopT& mainloop, Tickets* tickets, TileNumbers<TileT>& numbers, Walk& walk,
                                          const Slices& slices, bool by_turns, const Bring& bring, const Compute& compute) {
    if (mainloop.place.consumer < 0) {
        ptx::setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) bring_tiles(tickets, numbers, walk, mainloop.rank, bring);
    } else {
        ptx::setmaxnreg_inc<kConsumerRegisters>();
        for (int turn = 0; walk.go_to(numbers.take(), mainloop.rank); ++turn) {
            if (by_turns && turn % 2 != mainloop.place.consumer) {
                mainloop.skip(slices());
                continue;
            }
            compute();
        }
    }
}

/// The operand of a gradient's GEMM that is as wide as the vocabulary: a chunk of dlogits, or retained exponentials in their blocks.
template <class Problem, class Params>
__device__ __forceinline__ decltype(auto) vocabulary_operand(const Params& p) {
    if constexpr (Problem::retain) {
        return BlockedMap{p.dlogits_map, p.column_shift};
    } else {
        return (p.dlogits_map);
    }
}

/// The counters of a launch's Pace, for the block that brings what its cluster shares.
template <class Problem, class Params>
__device__ __forceinline__ unsigned* pace_of(const Params& p, unsigned rank) {
    if constexpr (Problem::retain) return rank == 0 ? p.pace : nullptr;
    return nullptr;
}

/// row_gradient within the Problem's dtype.
template <class Problem, class Params, class Place, int kColumnPieces>
__device__ __forceinline__ void dlogits_of_row(const Params& p, const Place& place, int first_column, int row, float scale,
                                               float (&c)[kColumnPieces][4], int h) {
    row_gradient<Problem>(p, place, first_column, row, scale, c, h);
    if constexpr (kSame<typename Problem::Element, Fp16>) {
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) c[j][2 * h + e] = ptx::clamp_nan(c[j][2 * h + e], 65504.f);
    }
}

/// dz_j = (p_j·(a + b·z_j) − t·[j = y] − s·c_j) · dz_j/d(hidden · weightᵀ)_j of a chunk, in the Problem's dtype.
template <class Problem, class TileT>
struct DlogitsSm90 {
    using Element = typename Problem::Element;
    using MainloopT = MainloopSm90<LogitOperands<Problem>, TileT>;
    using PanelsT = PanelStore<Element, TileT, TileT::kBlockN / 64, 1>;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };

    enum : int { kSumBytes = Problem::bias ? 4 * 4 * TileT::kConsumers * TileT::kBlockN : 0 };

    enum : int { kBarriersAt = MainloopT::kRingBytes + PanelsT::kBytes + kSumBytes };
    enum : int { kSmemBytes = kBarriersAt + MainloopT::kBarrierBytes + TileNumbers<TileT>::kBytes };
    enum : int { kThreads = TileT::kThreads };

    using Params = TemperedOf<Problem, DlogitsSm90Params>;

    const Params& p;
    TileNumbers<TileT> numbers;
    MainloopT mainloop;
    const int rows;
    TileWalk<TileT, Problem::raster> walk;
    PanelsT panels;
    float* const column_sums;

    __device__ __forceinline__ explicit DlogitsSm90(const Params& params)
        : p(params),
          numbers(ptx::shared_address(dynamic_smem) + kBarriersAt + MainloopT::kBarrierBytes),
          mainloop(dynamic_smem, kBarriersAt),
          rows(listed_rows<Problem>(params.list, params.rows, 1)),
          walk(rows, params.columns),
          panels(mainloop.smem + MainloopT::kRingBytes, mainloop.place),
          column_sums(reinterpret_cast<float*>(dynamic_smem + MainloopT::kRingBytes + PanelsT::kBytes)) {}

    __device__ __forceinline__ void run() {
        run_tiles(
            mainloop, p.tickets, numbers, walk, [] { return kSlices; }, TileT::kTurns,
            [&] { mainloop.produce(p.hidden_map, p.weight_map, walk.m, walk.n, kSlices); }, [&] { compute(); });
        if (mainloop.place.consumer >= 0) panels.finish();
        mainloop.meet();
    }

    __device__ __forceinline__ void compute() {
        // Worked out anew for every tile: kept beside the accumulators, what follows from it would not fit.
        asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp));
        typename MainloopT::Accumulators c;
        clear_sums(c);
        mainloop.consume(c, kSlices);
        if constexpr (Problem::bias) add_bias<Problem>(p, mainloop.place, walk.n, c);
        const float scale = dlogits_scale<Problem>(p.scalars, false);
#pragma unroll
        for (int i = 0; i < MainloopT::kPiecesA; ++i) {
            panels.open();
            // Each row leaves its registers before the next one is begun: there are few besides the accumulators.
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                dlogits_of_row<Problem>(p, mainloop.place, walk.n, walk.m + mainloop.place.row(i, h), scale, c[i], h);
                panels.put(c[i], h, 0, 1.f);
            }
            const int first_row = walk.m + mainloop.place.first_row() + i * 64;
            const bool sums = Problem::bias && p.bias_partials != nullptr && first_row < rows;
            if constexpr (Problem::bias) {
                if (sums) sum_columns(c[i]);
            }
            panels.close(p.dlogits_map, walk.n, first_row);
            if constexpr (Problem::bias) {
                if (sums) write_sums(first_row);
            }
        }
    }

    // A partial sum of grad_bias: the columns of 64 rows, a warp's in its own row of shared memory (before close), then all four warps'
    // (after it).
    __device__ __forceinline__ float* warp_sums(int warp) const {
        return column_sums + (mainloop.place.consumer * 4 + warp) * TileT::kBlockN;
    }
    __device__ __forceinline__ void sum_columns(const float (&c)[MainloopT::kColumnPieces][4]) const {
        float* const sums = warp_sums(mainloop.place.warp) + mainloop.place.column(0, 0);
#pragma unroll
        for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float sum = c[j][e] + c[j][2 + e];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                if (mainloop.place.lane < 4) sums[j * 8 + e] = sum;
            }
        }
    }
    __device__ __forceinline__ void write_sums(int first_row) const {
        float* const to = p.bias_partials + first_row / 64 * p.ld + walk.n;
        for (int column = static_cast<int>(threadIdx.x) % 128; column < min(TileT::kBlockN, p.columns - walk.n); column += 128) {
            float sum = warp_sums(0)[column];
#pragma unroll
            for (int warp = 1; warp < 4; ++warp) sum += warp_sums(warp)[column];
            to[column] = sum;
        }
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void dlogits_sm90(const typename DlogitsSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.dlogits_map);
    DlogitsSm90<Problem, TileT>(p).run();
}

/// Stores a tile's sums from (first_row, n) of `map` on, which has kExtent columns; `adds`: adds them to the memory's contents.
template <int kExtent, class PanelsT, int kPiecesA, int kColumnPieces>
__device__ __forceinline__ void add_to_sum(PanelsT& panels, const TensorMap& map, const float (&c)[kPiecesA][kColumnPieces][4], int n,
                                           int first_row, bool adds) {
#pragma unroll
    for (int i = 0; i < kPiecesA; ++i) {
#pragma unroll
        for (int column = 0; column < kColumnPieces * 8; column += PanelsT::kPanelColumns) {
            if (kExtent % (kColumnPieces * 8) != 0 && n + column >= kExtent) continue;
            panels.open();
#pragma unroll
            for (int h = 0; h < 2; ++h) panels.put(c[i], h, column / 8, 1.f);
            panels.close(map, n + column, first_row + i * 64, adds);
        }
    }
}

/// A tile of grad_hidden, where its rows lie among the caller's.
template <class Problem, class MainloopT, class Params>
__device__ __forceinline__ void write_grad_hidden(const MainloopT& mainloop, const Params& p, typename MainloopT::Accumulators& c, int rows,
                                                  int m, int n) {
    using Out = GradHiddenOf<Problem>;
    constexpr int kHidden = Problem::hidden_size;
    const float factor = dlogits_scale<Problem>(p.scalars, true);
    const TileTarget<Out> result{static_cast<Out*>(p.grad_hidden) + n, kHidden, rows - m, kHidden - n};
    if (p.list.rows != nullptr) {
        const ListedRow* const listed = p.list.rows + p.list.first + m;
        store_rows_sm90(mainloop, c, result, factor, [&](int row) { return listed[row].row; });
    } else {
        store_rows_sm90(mainloop, c, result, factor, [&](int row) { return m + row; });
    }
}

/// grad_hidden[m: token, n: hidden] = Σ_k: vocabulary, summed over chunks in fp32. The copy engine adds a chunk's part to the sum, once
/// for every element, while the next tile is computed; in the last chunk the accumulators start from the sum. Several parts of the sum are
/// added up afterwards. Batch-invariant: in every chunk, so that it does not matter to a row how wide chunks are. Where exponentials are
/// retained the sum is one launch, whose last tiles may be made by several clusters each.
template <class Problem, class TileT>
struct GradHiddenSm90 {
    using Element = typename Problem::Element;
    using OperandsT =
        Operands<Element, Major::k, Access::chunks, WeightOperand<Problem>::hidden_major ? Major::k : Major::mn, Access::chunks>;
    using MainloopT = MainloopSm90<OperandsT, TileT>;
    using PanelsT = PanelStore<float, TileT, 1, 2>;
    enum : int { kHidden = Problem::hidden_size };
    enum : int { kBarriersAt = MainloopT::kRingBytes + PanelsT::kBytes };
    enum : int { kSmemBytes = kBarriersAt + MainloopT::kBarrierBytes + TileNumbers<TileT>::kBytes };
    enum : int { kThreads = TileT::kThreads };
    using Params = SmoothedOf<Problem, GradHiddenSm90Params, SmoothedGradHiddenSm90Params>;

    const Params& p;
    TileNumbers<TileT> numbers;
    MainloopT mainloop;
    const int rows;
    /// Whether the last tiles may be made in parts: beside 192 accumulators a thread there are no registers for it.
    enum : bool { kMakesParts = Problem::retain && MainloopT::kPiecesA * MainloopT::kColumnPieces * 4 <= 128 };
    Select<kMakesParts, TailWalk<TileT, Problem::raster>, TileWalk<TileT, Problem::raster>>
        walk;    ///< walk over the tiles of all parts, one part below the other as their sums lie
    int slices;  ///< slices of a part, but for the last part
    bool divided;
    PanelsT panels;
    Pace pace;

    __device__ __forceinline__ explicit GradHiddenSm90(const Params& params)
        : p(params),
          numbers(ptx::shared_address(dynamic_smem) + kBarriersAt + MainloopT::kBarrierBytes),
          mainloop(dynamic_smem, kBarriersAt),
          rows(listed_rows<Problem>(params.list, params.rows, 1)),
          walk(rows, kHidden),
          panels(mainloop.smem + MainloopT::kRingBytes, mainloop.place),
          pace(pace_of<Problem>(params, mainloop.rank), static_cast<int>(gridDim.x) / TileT::kCluster, static_cast<int>(walk.count),
               all_slices()) {
        const SumParts parts(p.share, rows);
        const PartSlices here(all_slices(), parts.count);
        slices = here.of_part;
        divided = parts.count > 1;
        if constexpr (kMakesParts) {
            if (!divided) walk.divide(static_cast<int>(gridDim.x) / TileT::kCluster, slices, p.tail_room);
        }
        if (here.count == 1) return;
        walk.clusters_m *= here.count;
        walk.count *= static_cast<unsigned>(here.count);
        pace.counters = nullptr;
    }

    __device__ __forceinline__ void run() {
        run_tiles(
            mainloop, p.tickets, numbers, walk, [&] { return slices_of_part(); }, TileT::kTurns,
            [&] {
                if (in_parts()) {
                    pace.counters = nullptr;
                } else {
                    pace.begin(walk.number);
                }
                const int depth = first_slice() * TileT::kBlockK;
                mainloop.produce(vocabulary_operand<Problem>(p), p.weight_map, row_of_part(), walk.n, slices_of_part(), pace, depth, depth);
            },
            [&] { compute(); });
        if (mainloop.place.consumer >= 0) panels.finish();
        mainloop.meet();
    }

    /// Part that the tile at hand belongs to.
    __device__ __forceinline__ int part() const { return walk.m / rows_of_part(); }
    __device__ __forceinline__ int rows_of_part() const { return ceil_div(rows, walk.kClusterRows) * walk.kClusterRows; }
    __device__ __forceinline__ int row_of_part() const { return walk.m - part() * rows_of_part(); }
    __device__ __forceinline__ int all_slices() const { return ceil_div(p.columns, TileT::kBlockK); }
    __device__ __forceinline__ int first_slice() const {
        if constexpr (kMakesParts) {
            if (walk.in_parts()) return walk.part() * tail_slices();
        }
        return part() * slices;
    }
    __device__ __forceinline__ int slices_of_part() const {
        if constexpr (kMakesParts) {
            if (walk.in_parts()) return min(tail_slices(), slices - walk.part() * tail_slices());
        }
        return min(slices, all_slices() - part() * slices);
    }
    __device__ __forceinline__ bool in_parts() const {
        if constexpr (kMakesParts) return walk.in_parts();
        return false;
    }
    __device__ __forceinline__ int tail_slices() const { return ceil_div(slices, walk.tail.count); }

    __device__ __forceinline__ void compute() {
        // Worked out anew for every tile: kept beside the accumulators, what follows from it would not fit.
        asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp));
        const long long origin = static_cast<long long>(walk.m) * kHidden + walk.n;
        const TileTarget<float> sum{p.accumulator + origin, kHidden, rows - walk.m, kHidden - walk.n};
        const bool writes = p.last != 0 && !divided;
        typename MainloopT::Accumulators c;
        clear_sums(c);
        // The sum is added to retained exponentials' products when these have been scaled.
        const bool adds_later = Problem::shard && Problem::retain && p.row_scales != nullptr;
        if ((writes || is_batch_invariant<Problem>()) && p.first == 0 && !adds_later) load_tile_sm90<true>(mainloop, c, sum);
        mainloop.template consume_at<kHidden>(c, walk.n, slices_of_part());
        if constexpr (kMakesParts) {
            if (walk.in_parts() && !meet_parts(c)) return;
        }
        if constexpr (Problem::retain) {
            if (p.row_scales != nullptr) scale_tile_rows(mainloop.place, p.row_scales, row_of_part(), rows, c);
            if constexpr (Problem::label_smoothing) {
                if (p.row_smoothing != nullptr && part() == 0) {
                    take_weight_smoothing<kHidden>(mainloop.place, p.row_smoothing, p.weight_sum, row_of_part(), rows, walk.n, c);
                }
            }
        }
        if (writes) {
            if (adds_later && p.first == 0) add_tile_sm90<true>(mainloop, c, sum);
            write_grad_hidden<Problem>(mainloop, p, c, rows, walk.m, walk.n);
        } else {
            const bool adds = p.first == 0 && !is_batch_invariant<Problem>();
            add_to_sum<kHidden>(panels, p.accumulator_map, c, walk.n, walk.m + mainloop.place.first_row(), adds);
        }
    }

    /// The last part of a tile gets what the others have found, which they leave for it and are done: false.
    __device__ __forceinline__ bool meet_parts(typename MainloopT::Accumulators& c) const {
        enum : int { kThreadsOfTile = TileT::kTurns ? 128 : 256 };
        enum : int { kFloats = MainloopT::kPiecesA * MainloopT::kColumnPieces * 4 * kThreadsOfTile };
        const int part = walk.part();
        const int last = walk.tail.count - 1;
        const int tile = static_cast<int>(walk.number) - walk.tail.full;
        const int thread = (TileT::kTurns ? 0 : mainloop.place.consumer * 128) + mainloop.place.warp * 32 + mainloop.place.lane;
        unsigned* const counter = p.tail_counters + tile;
        float* at = p.tail_sums + thread * 4 + (static_cast<long long>(tile) * TileT::kCluster + mainloop.rank) * kFloats;
        const long long next = static_cast<long long>(walk.tail.rest) * TileT::kCluster * kFloats;  // part
        if (part < last) {
            at += part * next;
#pragma unroll
            for (int i = 0; i < MainloopT::kPiecesA; ++i) {
#pragma unroll
                for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
                    const unsigned words[4] = {__float_as_uint(c[i][j][0]), __float_as_uint(c[i][j][1]), __float_as_uint(c[i][j][2]),
                                               __float_as_uint(c[i][j][3])};
                    ptx::st_global_v4(at + (i * MainloopT::kColumnPieces + j) * 4 * kThreadsOfTile, words);
                }
            }
            __syncwarp();
            if (mainloop.place.lane == 0) ptx::red_release_gpu_add(counter, 1u);
            return false;
        }
        if (mainloop.place.lane == 0) {
            while (ptx::ld_acquire_gpu(counter) < static_cast<unsigned>(last * TileT::kCluster * (kThreadsOfTile / 32))) {
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int other = 0; other < last; ++other, at += next) {
#pragma unroll
            for (int i = 0; i < MainloopT::kPiecesA; ++i) {
#pragma unroll
                for (int j = 0; j < MainloopT::kColumnPieces; ++j) {
                    unsigned words[4];
                    ptx::ld_global_v4(words, at + (i * MainloopT::kColumnPieces + j) * 4 * kThreadsOfTile);
#pragma unroll
                    for (int e = 0; e < 4; ++e) c[i][j][e] += __uint_as_float(words[e]);
                }
            }
        }
        return true;
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void grad_hidden_sm90(const typename GradHiddenSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.dlogits_map, p.weight_map, p.accumulator_map);
    GradHiddenSm90<Problem, TileT>(p).run();
}

}  // namespace flce

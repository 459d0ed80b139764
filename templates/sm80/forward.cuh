// Forward: logits tile by tile, reduced on the fly to RowSums. A block owns kBlockM tokens and a contiguous range of the vocabulary (a
// split).
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/sm80/retained_tile.cuh"

namespace flce {

template <class Problem, class TileT>
struct ForwardBlock {
    using Element = typename Problem::Element;
    using MainloopT = Mainloop<LogitOperands<Problem>, TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    using Fields = PartialFields<Problem>;
    using Params = TemperedOf<Problem, Select<Problem::retain, RetainForwardParams, ForwardParamsOf<Problem>>>;
    using WeightT = WeightOperand<Problem>;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };
    enum : int { kStates = TileT::kWarpsN * TileT::kBlockM };
    /// A row's label, its temperature and its reference.
    enum : int { kRowWords = 1 + (Problem::temperature ? 1 : 0) + (Problem::retain ? 1 : 0) };
    enum : int { kSmemBytes = MainloopT::kSmemBytes + 4 * (Fields::kCount * kStates + kRowWords * TileT::kBlockM) };
    enum : int { kThreads = TileT::kThreads };
    enum : int { kRowPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };

    /// Walks all slices of all tiles of the block, so that the next tile's first slices arrive during this tile's epilogue.
    struct Feed {
        const Params& p;
        typename MainloopT::LoaderA a;
        typename MainloopT::LoaderB b;
        int tile;
        int end;
        int slice = 0;

        __device__ __forceinline__ Feed(const Params& params, int first, int last) : p(params), tile(first), end(last) { start(); }
        __device__ __forceinline__ void start() {
            const long long row = static_cast<long long>(blockIdx.x) * TileT::kBlockM;
            const long long column = static_cast<long long>(tile) * TileT::kBlockN;
            a.start(static_cast<const Element*>(p.hidden) + row * Problem::hidden_size, Problem::hidden_size,
                    static_cast<int>(p.rows - row), Problem::hidden_size);
            b.start(weight_at<WeightT>(static_cast<const Element*>(p.weight), column, 0), kWeightLd<WeightT>,
                    static_cast<int>(forward_columns<Problem>(p) - column), Problem::hidden_size);
        }
        __device__ __forceinline__ void load_a(unsigned to) { a.load(to); }
        __device__ __forceinline__ void load_b(unsigned to) { b.load(to); }
        __device__ __forceinline__ void next() {
            if (++slice == kSlices && tile + 1 < end) {
                slice = 0;
                ++tile;
                start();
            }
        }
    };

    const Params& p;
    MainloopT mainloop;
    float* states;  // [fields][warps_n][kBlockM]
    int* targets;   // [kBlockM]; behind them temperatures and references, where the Problem has them

    __device__ __forceinline__ explicit ForwardBlock(const Params& params)
        : p(params),
          mainloop(dynamic_smem),
          states(reinterpret_cast<float*>(dynamic_smem + MainloopT::kSmemBytes)),
          targets(reinterpret_cast<int*>(states + Fields::kCount * kStates)) {}

    __device__ __forceinline__ void run() {
        if (goes_again() && !any_stale()) return;
        initialise();
        const int split = static_cast<int>(blockIdx.y);
        const int tiles = ceil_div(columns(), TileT::kBlockN);
        const int first = static_cast<int>(static_cast<long long>(tiles) * split / p.splits);
        const int end = static_cast<int>(static_cast<long long>(tiles) * (split + 1) / p.splits);
        Feed feed(p, first, end);
        mainloop.prologue(feed);
#pragma unroll 1
        for (int tile = first; tile < end; ++tile) {
            Accumulators c;
            clear_sums(c);
            mainloop.accumulate(feed, kSlices, c);
            reduce(c, forward_first_column<Problem>(p) + tile * TileT::kBlockN);
        }
        if (!goes_again()) finish(split);
    }

    static __device__ __forceinline__ long long first_row() { return static_cast<long long>(blockIdx.x) * TileT::kBlockM; }
    /// Whether the launch goes through stale rows again: rows whose reference turned out to be far below their logits. Only their
    /// exponentials are written.
    __device__ __forceinline__ bool goes_again() const {
        if constexpr (Problem::retain) return p.again != 0;
        return false;
    }
    /// Whether any of the block's rows is stale, or any other of the same kOutputRows.
    __device__ __forceinline__ bool any_stale() const {
        static_assert(TileT::kBlockM % kOutputRows == 0, "a block's rows begin with a flag's");
        bool found = false;
        if constexpr (Problem::retain) {
#pragma unroll
            for (int row = 0; row < TileT::kBlockM; row += kOutputRows) {
                found = found || (first_row() + row < p.rows && p.stale[(first_row() + row) / kOutputRows] != 0u);
            }
        }
        return found;
    }
    __device__ __forceinline__ int columns() const {
        const int all = forward_columns<Problem>(p);
        if constexpr (Problem::retain) return goes_again() ? min(all, p.retained_columns) : all;
        return all;
    }

    __device__ __forceinline__ void initialise() {
        const RowSums nothing = sums_of_nothing(kForwardHasFalls<Problem> ? infinity() : lowest_logit(), -infinity());
        for (int i = static_cast<int>(threadIdx.x); i < kStates; i += TileT::kThreads) Fields::store(states + i, kStates, nothing);
        const long long row0 = first_row();
        for (int i = static_cast<int>(threadIdx.x); i < TileT::kBlockM; i += TileT::kThreads) {
            targets[i] = row0 + i < p.rows ? load_target<Problem>(p.targets, row0 + i) : kIgnored;
            if constexpr (Problem::temperature) temperatures()[i] = row0 + i < p.rows ? p.temperatures[row0 + i] : 1.f;
            if constexpr (Problem::retain) {
                references()[i] = p.retained_columns > 0 && row0 + i < p.rows ? p.references[row0 + i] : 0.f;
            }
        }
    }

    struct RowTemperatures {
        const float* of_block;
        __device__ __forceinline__ float operator()(int row) const { return of_block[row]; }
    };
    __device__ __forceinline__ float* temperatures() const { return reinterpret_cast<float*>(targets + TileT::kBlockM); }
    __device__ __forceinline__ float* references() const { return temperatures() + (Problem::temperature ? int(TileT::kBlockM) : 0); }

    /// Adds a tile of logits to the warp's row states.
    __device__ __forceinline__ void reduce(Accumulators& c, int first_column) {
        // Numbers that follow from a thread's place are worked out anew after this: kept beside the accumulators, they would not fit.
        asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp_m), "+r"(mainloop.place.warp_n));
        float weighted[kRowPieces][2] = {};
        if constexpr (kForwardHasFalls<Problem>) {
            to_falls<Problem>(p, mainloop.place, first_column, TileT::kBlockN, c);
        } else {
            to_logits<Problem>(p, mainloop.place, first_column, TileT::kBlockN, RowTemperatures{temperatures()}, c, weighted);
            if constexpr (Problem::class_groups) {
                const auto group_of = [&](int row) { return first_row() + row < p.rows ? p.row_groups[first_row() + row] : +kNoGroup; };
                rule_out_groups<Problem>(p, mainloop.place, first_column, group_of, [&](int row) { return targets[row]; }, c);
            }
        }
        if constexpr (Problem::retain) {
            retain(c, first_column, weighted);
        } else {
#pragma unroll
            for (int i = 0; i < kRowPieces; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) reduce_row(c[i], h, mainloop.place.row(i, h), first_column, weighted[i][h]);
            }
        }
    }

    /// A tile where exponentials may be retained.
    __device__ __forceinline__ void retain(Accumulators& c, int first_column, const float (&weighted)[kRowPieces][2]) {
#pragma unroll
        for (int i = 0; i < kRowPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) pick_target(c[i], h, mainloop.place.row(i, h), first_column);
        }
        const RetainedTile<Problem, TileT, Params> tile{p, mainloop.place, states, references(), temperatures(), first_row(), first_column};
        tile.reduce(c, weighted);
    }

    __device__ __forceinline__ void reduce_row(const float (&c)[kColumnPieces][4], int h, int row, int first_column, float weighted) {
        pick_target(c, h, row, first_column);
        float tile_max = c[0][2 * h];
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) tile_max = fmaxf(tile_max, fmaxf(c[j][2 * h], c[j][2 * h + 1]));
        tile_max = Quad::largest(tile_max);
        float* const state = states + mainloop.place.warp_n * TileT::kBlockM + row;
        const RowSums old = Fields::load(state, kStates);
        RowSums now;
        now.max = fmaxf(old.max, tile_max);
        now.exp_sum = 0.f;
        now.exp_z_sum = 0.f;
        now.exp_sq_sum = 0.f;
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float difference = c[j][2 * h + e] - now.max;
                const float exponential = Problem::Math::exp(difference);
                now.exp_sum += exponential;
                if constexpr (Problem::entropy) now.exp_z_sum += exponential * fmaxf(difference, farthest_below());
                if constexpr (Problem::square_sum) now.exp_sq_sum = __fmaf_rn(exponential, exponential, now.exp_sq_sum);
            }
        }
        now.exp_sum = Quad::sum(now.exp_sum);
        const float shift = old.exp_sum > 0.f ? fmaxf(old.max - now.max, farthest_below()) : 0.f;
        const float factor = Problem::Math::exp(shift);
        if constexpr (Problem::entropy) {
            now.exp_z_sum = Quad::sum(now.exp_z_sum) + factor * (old.exp_z_sum + shift * old.exp_sum);
        }
        now.exp_sum += factor * old.exp_sum;
        if constexpr (Problem::square_sum) now.exp_sq_sum = Quad::sum(now.exp_sq_sum) + factor * factor * old.exp_sq_sum;
        if constexpr (Problem::top1) {
            const int first_class = first_column + mainloop.place.column(0, 0);
            const int found = tile_max >= old.max ? class_of(c, h, tile_max, first_class) : FLCE_NO_CLASS;
            now.top1 = first_of_largest(old.max, old.top1, tile_max, Quad::least(found));
        }
        if constexpr (Problem::label_smoothing) now.weighted_sum = old.weighted_sum + Quad::sum(weighted);
        __syncwarp();  // all four lanes have read the old state
        if (mainloop.place.lane % 4 == 0) Fields::store(state, kStates, now);
    }

    /// Exactly one thread of all blocks holds a row's target logit.
    __device__ __forceinline__ void pick_target(const float (&c)[kColumnPieces][4], int h, int row, int first_column) {
        const int within = targets[row] - first_column - mainloop.place.column(0, 0);
        if (!has_column<kColumnPieces>(within)) return;
        float logit = pick_column(c, h, within);
        if constexpr (kForwardHasFalls<Problem>) logit = Problem::falls(p.transform).logit(logit);
        p.target_logits[first_row() + row] = logit;
    }

    /// Merges the warps that share rows, in the order of their columns.
    __device__ __forceinline__ void finish(int split) {
        __syncthreads();  // all states are final
        const long long row0 = first_row();
        for (int row = static_cast<int>(threadIdx.x); row < TileT::kBlockM; row += TileT::kThreads) {
            if (row0 + row >= p.rows) break;
            RowSums sums = state_of(row, 0);
#pragma unroll
            for (int w = 1; w < TileT::kWarpsN; ++w) sums = merge(sums, state_of(row, w));
            Fields::store(p.partials + split * Fields::kCount * p.partial_rows + row0 + row, p.partial_rows, sums);
        }
    }
    __device__ __forceinline__ RowSums state_of(int row, int warp_n) const {
        const RowSums sums = Fields::load(states + warp_n * TileT::kBlockM + row, kStates);
        if constexpr (Problem::retain) return RetainedTile<Problem, TileT, Params>::whole(p, sums, references()[row]);
        return sums;
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void forward(const typename ForwardBlock<Problem, TileT>::Params& p) {
    ForwardBlock<Problem, TileT>(p).run();
}

}  // namespace flce

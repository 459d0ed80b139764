// Forward on sm_90a: logits tile by tile, reduced on the fly to RowSums. Every consumer thread keeps its own maxima and sums of its rows; they meet
// once, at the end of a block's part of the vocabulary.
#pragma once

#include "flce/logit_epilogue.cuh"
#include "flce/store_sm90.cuh"
#include "flce/vocabulary_walk.cuh"

namespace flce {

/// How the clusters of a launch share its work: the host's `forward_share` for the rows that there turn out to be.
template <class TileT>
struct ForwardShare {
    enum : int { kClusterRows = TileT::kBlockM * TileT::kCluster };
    enum : int { kWriters = TileT::kTurns ? TileT::kConsumers : 1 };  ///< consumers that have the same rows

    int rows;
    int row_clusters;
    int clusters;
    int stride;
    int splits;

    __device__ __forceinline__ ForwardShare(int rows_, int tiles, int most_clusters, int stride_)
        : rows(rows_), row_clusters(max(ceil_div(rows_, kClusterRows), 1)) {
        const bool few = static_cast<long long>(row_clusters) * tiles < most_clusters;  // each tile has a cluster of its own
        clusters = few ? row_clusters * tiles : most_clusters;
        stride = few ? row_clusters : stride_;
        splits = (few ? tiles : ceil_div(clusters, row_clusters) + 1) * kWriters;
    }
};

template <class Problem, class TileT>
struct ForwardSm90 {
    enum : bool { kFew = TileT::kCluster == 1 };  ///< tokens: a tile has all of them, and they are not listed
    enum : bool { kLists = Problem::lists_rows && !kFew };
    using MainloopT = MainloopSm90<LogitOperands<Problem>, TileT, kLists>;
    using Accumulators = typename MainloopT::Accumulators;
    using Fields = PartialFields<Problem>;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };
    enum : int { kTiles = ceil_div(Problem::vocab_size, TileT::kBlockN) };
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    using Share = ForwardShare<TileT>;
    enum : int { kClusterRows = Share::kClusterRows };
    enum : int { kConsumerThreads = 128 * TileT::kConsumers };
    enum : int { kStateBytes = 2 * kPieces * 2 * Fields::kCount * kConsumerThreads * 4 };  ///< both parts' states of every thread

    enum : int { kPanelWidth = TileT::kBlockN % 192 == 0 ? 3 : TileT::kBlockN % 128 == 0 ? 2 : 1 };  // panels that leave together
    using PanelsT = PanelStore<typename Problem::Element, TileT, kPanelWidth, 1>;
    enum : int { kPanelBytes = Problem::retain ? PanelsT::kBytes : 0 };

    const ForwardSm90Params& p;
    MainloopT mainloop;
    const Share share;
    const bool compact;  ///< listed rows have been brought together
    VocabularyWalk walk;
    PanelsT panels;
    float* const stash;
    RowSums sums[kPieces][2];  // of the part at hand, this thread's columns only

    __device__ __forceinline__ explicit ForwardSm90(const ForwardSm90Params& params)
        : p(params),
          mainloop(dynamic_smem, MainloopT::kRingBytes + kPanelBytes + kStateBytes),
          share(listed_rows<Problem>(params.list, params.rows, params.list.first == 0 ? 1 : 0), kTiles, params.clusters, params.stride),
          compact(kLists && params.compact_rows != 0 && *params.list.valid < params.compact_rows),
          walk(static_cast<int>(blockIdx.x) / TileT::kCluster, share.clusters, share.row_clusters, share.stride),
          panels(mainloop.smem + MainloopT::kRingBytes, mainloop.place),
          stash(reinterpret_cast<float*>(dynamic_smem + MainloopT::kRingBytes + kPanelBytes) + static_cast<int>(threadIdx.x) - 128) {}

    __device__ __forceinline__ int first_row(int part) const {
        return walk.row_cluster_of(part) * kClusterRows + static_cast<int>(mainloop.rank) * TileT::kBlockM;
    }

    __device__ __forceinline__ void run() {
        if (blockIdx.x == 0 && threadIdx.x == 0) p.scalars->splits = share.splits;
        if (share.rows == 0 || static_cast<int>(blockIdx.x) / TileT::kCluster >= share.clusters) return mainloop.meet();
        if constexpr (Problem::retain) {
            if (p.again != 0 && !any_stale(0, share.rows)) return mainloop.meet();
        }
        if (mainloop.place.consumer < 0) {
            ptx::setmaxnreg_dec<kProducerRegisters>();
            bring_all();
        } else {
            ptx::setmaxnreg_inc<kConsumerRegisters>();
            consume();
        }
        if constexpr (Problem::retain) {
            if (mainloop.place.consumer >= 0) panels.finish();
        }
        mainloop.meet();
    }

    /// This block's rows of a part of the vocabulary, as they lie in hidden, or where it has been brought together.
    struct TileRows {
        const ListedRow* listed;  ///< null: they are the rows from `first` on
        int first;
        int last;  ///< of the tile, that is listed; −1: none is

        __device__ __forceinline__ bool neighbours() const {
            return listed == nullptr || last < 0 || listed[last].row - listed[0].row == last;
        }
        __device__ __forceinline__ int begin() const { return listed == nullptr || last < 0 ? first : listed[0].row; }
    };
    __device__ __forceinline__ TileRows listed_rows_of(int part) const {
        const int first = first_row(part);
        const int last = min(TileT::kBlockM, share.rows - first) - 1;
        if constexpr (!kLists) return {nullptr, first, last};
        if (compact) return {nullptr, p.list.first + first, last};
        return {p.list.rows != nullptr ? p.list.rows + p.list.first + first : nullptr, first, last};
    }

    /// The producer's warpgroup. Where rows lie is looked up once for a part: a tile would wait as long for it as the ring holds out.
    __device__ __forceinline__ void bring_all() {
        const Place first = place_of(0);
        const Place second = place_of(1);
        while (next()) {
            const bool is_second = walk.part != 0;
            bring({is_second ? second.neighbours : first.neighbours, is_second ? second.begin : first.begin});
        }
    }
    struct Place {
        bool neighbours;
        int begin;
    };
    __device__ __forceinline__ Place place_of(int part) const {
        const TileRows rows = listed_rows_of(part);
        return {rows.neighbours(), rows.begin()};
    }

    /// Rows that are neighbours in hidden are the copy engine's, for one thread.
    __device__ __forceinline__ void bring(const Place& place) {
        const int n = walk.tile * TileT::kBlockN;
        if constexpr (kLists) {
            if (!place.neighbours) {
                const TileRows rows = listed_rows_of(walk.part);
                const auto row_of = [&](int row) { return row <= rows.last ? rows.listed[row].row : -1; };
                return mainloop.produce_rows(static_cast<const typename Problem::Element*>(p.hidden), Problem::hidden_size, row_of,
                                             p.weight_map, n, kSlices);
            }
        }
        if (threadIdx.x == 0) {
            mainloop.produce(compact ? p.compact_map : p.hidden_map, p.weight_map, place.begin, n, kSlices, NoPace{}, 0, 0,
                             kFew ? share.rows : TileT::kBlockM);
        } else {
            mainloop.skip(kSlices);
        }
    }

    /// On to the cluster's next tile: every thread of its blocks comes to the same ones.
    __device__ __forceinline__ bool next() {
        if constexpr (Problem::retain) {
            if (p.again != 0) {
                while (walk.next(ceil_div(p.retained_columns, TileT::kBlockN))) {
                    const int row = walk.row_cluster_of(walk.part) * kClusterRows;
                    if (any_stale(row, min(row + kClusterRows, share.rows))) return true;
                }
                return false;
            }
        }
        return walk.next(kTiles);
    }
    __device__ __forceinline__ bool any_stale(int begin, int end) const {
        bool any = false;
        for (int row = begin; row < end; row += kOutputRows) any = any || p.stale[row / kOutputRows] != 0u;
        return any;
    }

    __device__ __forceinline__ void consume() {
        forget();
        stash_part(0);
        stash_part(1);
        int part = 0;
        for (int turn = 0; next(); ++turn) {
            if (TileT::kTurns && turn % TileT::kConsumers != mainloop.place.consumer) {
                mainloop.skip(kSlices);
                continue;
            }
            if (walk.part != part) {
                stash_part(part);
                part = walk.part;
                fetch_part(part);
            }
            Accumulators c;
            MainloopT::clear(c);
            mainloop.consume(c, kSlices, kLists && !listed_rows_of(walk.part).neighbours());
            reduce(c, walk.tile * TileT::kBlockN);
        }
        if constexpr (Problem::retain) {
            if (p.again != 0) return;
        }
        finish(part);
        if (walk.has_second()) {
            stash_part(part);
            fetch_part(part ^ 1);
            finish(part ^ 1);
        }
    }

    __device__ __forceinline__ void forget() {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) sums[i][h] = {-infinity(), 0.f, 0.f, 0.f, -infinity()};
    }
    __device__ __forceinline__ float* stashed(int part, int i, int h) const {
        return stash + ((part * kPieces + i) * 2 + h) * Fields::kCount * kConsumerThreads;
    }
    __device__ __forceinline__ void stash_part(int part) const {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) Fields::store(stashed(part, i, h), kConsumerThreads, sums[i][h]);
    }
    __device__ __forceinline__ void fetch_part(int part) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) sums[i][h] = Fields::load(stashed(part, i, h), kConsumerThreads);
    }

    /// Adds a tile of logits to this thread's sums; what is retained of it leaves for memory.
    __device__ __forceinline__ void reduce(Accumulators& c, int first_column) {
        float weighted[kPieces][2] = {};
        to_logits<Problem>(p, mainloop.place, first_column, TileT::kBlockN, c, weighted);
        const int row0 = first_row(walk.part);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row0 + mainloop.place.row(i, h);
                const int target = row < share.rows ? listed_row<Problem>(p.list, p.targets, row).target : kIgnored;
                const int within = target - first_column - mainloop.place.column(0, 0);
                if (target >= 0 && has_column<kColumnPieces>(within)) p.target_logits[row] = pick_column(c[i], h, within);
                if constexpr (Problem::label_smoothing) {
                    sums[i][h].weighted_sum += weighted[i][h];
                    asm volatile("" : "+f"(sums[i][h].weighted_sum));  // here: put off, it would need a second copy of the accumulators
                }
            }
        }
        if constexpr (Problem::retain) {
            if (p.retained_columns > 0) return retain(c, first_column);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) reduce_row(c[i], h, sums[i][h]);
    }

    /// Logits become exponentials of what they are above the row's reference, which are added up. Those that are retained leave for memory.
    __device__ __forceinline__ void retain(Accumulators& c, int first_column) {
        constexpr int kGroup = kPanelWidth * 8;  // column pieces
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                exponentials_of_row(c[i], h, reference_of(first_row(walk.part) + mainloop.place.row(i, h)), sums[i][h]);
            if (first_column >= p.retained_columns) continue;
#pragma unroll
            for (int first = 0; first < kColumnPieces; first += kGroup) {
                panels.open();
#pragma unroll
                for (int h = 0; h < 2; ++h) panels.put(c[i], h, first, 1.f);
                panels.close(BlockedMap{p.retained_map, kRetainedShift}, first_column + first * 8,
                             first_row(walk.part) + mainloop.place.first_row() + i * 64);
            }
        }
    }
    __device__ __forceinline__ float reference_of(int row) const { return row < share.rows ? p.references[row] : 0.f; }

    /// Whether a row's sums are of what is retained, relative to its reference, which spares them exponentials of their own: where the largest logit so far
    /// is near it. Others are relative to that logit.
    static __device__ __forceinline__ bool shares(float max, float reference) {
        return kPowers<Problem> && !Problem::entropy && PowersAbove::takes(reference) && fabsf(max - reference) <= kMostAboveReference;
    }

    /// Where they are far from the reference, exponentials are cut off: a row that is ignored, whatever it holds, has to multiply a finite number by 0.
    static __device__ __forceinline__ void exponentials_of_row(float (&c)[kColumnPieces][4], int h, float reference, RowSums& sums) {
        constexpr float kMostPower = 100.f;
        const PowersAbove above(reference);
        const float old_max = sums.max;
        const float now_max = fmaxf(old_max, row_max(c, h));
        const bool shared = shares(old_max, reference);
        if (shares(now_max, reference)) {
            if (!shared) sums.exp_sum = sums.exp_sum > 0.f ? sums.exp_sum * above.exp(old_max) : 0.f;
            sums.max = now_max;
            float exp_sum[2] = {0.f, 0.f};
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) exp_sum[e] += c[j][2 * h + e] = above.exp(c[j][2 * h + e]);
            }
            sums.exp_sum += exp_sum[0] + exp_sum[1];
            return;
        }
        if (shared) to_own_max(sums, reference);
        reference -= reduce_row(c, h, sums);
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) c[j][2 * h + e] = ptx::ex2_approx_ftz(fminf((c[j][2 * h + e] - reference) * log2_e(), kMostPower));
        }
    }
    /// The largest logit's own exponential becomes exactly 1, so that confident tokens keep their small losses.
    static __device__ __forceinline__ void to_own_max(RowSums& sums, float reference) {
        sums.exp_sum /= PowersAbove(reference).exp(sums.max);
    }

    static __device__ __forceinline__ float row_max(const float (&c)[kColumnPieces][4], int h) {
        float max = fmaxf(c[0][2 * h], c[0][2 * h + 1]);
#pragma unroll
        for (int j = 1; j < kColumnPieces; ++j) max = fmaxf(max, fmaxf(c[j][2 * h], c[j][2 * h + 1]));
        return max;
    }

    /// Adds a row of logits to its sums, and returns what it has taken from each of them: nothing, or their maximum where that is huge.
    static __device__ __forceinline__ float reduce_row(float (&c)[kColumnPieces][4], int h, RowSums& sums) {
        const float old_max = sums.max;
        const float now_max = fmaxf(old_max, row_max(c, h));
        const float shift = sums.exp_sum > 0.f ? old_max - now_max : 0.f;
        const float shrunk = Problem::Math::exp(shift);
        if constexpr (Problem::entropy) sums.exp_z_sum = shrunk * (sums.exp_z_sum + shift * sums.exp_sum);
        sums.exp_sum *= shrunk;
        sums.max = now_max;
        float taken = 0.f;
        if (!SummedAbove<Problem>::takes(now_max)) {  // a column's that does not exist, too
            taken = now_max;
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) c[j][2 * h + e] -= now_max;
        }
        const float reference = now_max - taken;
        const SummedAbove<Problem> above(reference);
        float exp_sum[2] = {0.f, 0.f};
        float exp_z_sum = 0.f;
#pragma unroll
        for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float exponential = above.exp(c[j][2 * h + e]);
                exp_sum[e] += exponential;
                if constexpr (Problem::entropy) exp_z_sum += exponential * (c[j][2 * h + e] - reference);
            }
        }
        const float factor = above.factor(reference);
        sums.exp_sum = __fmaf_rn(factor, exp_sum[0] + exp_sum[1], sums.exp_sum);
        if constexpr (Problem::entropy) sums.exp_z_sum = __fmaf_rn(factor, exp_z_sum, sums.exp_z_sum);
        return taken;
    }

    /// Merges the four lanes that share a row and writes a partial result: one for each cluster that has a part of the rows, by turns one a consumer.
    __device__ __forceinline__ void finish(int part) {
        const int row_cluster = walk.row_cluster_of(part);
        const int cluster = static_cast<int>(blockIdx.x) / TileT::kCluster;
        const int first_cluster = row_cluster * share.clusters / share.row_clusters;
        const int last_cluster = ((row_cluster + 1) * share.clusters - 1) / share.row_clusters;
        const int split = (cluster - first_cluster) * Share::kWriters + (TileT::kTurns ? mainloop.place.consumer : 0);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = first_row(part) + mainloop.place.row(i, h);
                if constexpr (Problem::retain) {
                    if (p.retained_columns > 0 && shares(sums[i][h].max, reference_of(row))) to_own_max(sums[i][h], reference_of(row));
                }
                const RowSums all = merge_quad(sums[i][h]);
                if (mainloop.place.lane % 4 != 0 || row >= share.rows) continue;
                write_partial(split, row, all);
                if (cluster == last_cluster) {
                    for (int rest = split + Share::kWriters; rest < share.splits; rest += Share::kWriters) {
                        write_partial(rest, row, {-infinity(), 0.f, 0.f, 0.f, -infinity()});
                    }
                }
            }
        }
    }
    __device__ __forceinline__ void write_partial(int split, int row, const RowSums& sums) const {
        const long long ld = partial_rows_of(share.rows);
        Fields::store(p.partials + split * Fields::kCount * ld + row, ld, sums);
    }

    static __device__ __forceinline__ RowSums merge_quad(RowSums mine) {
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            RowSums other;
            other.max = __shfl_xor_sync(0xffffffffu, mine.max, lanes);
            other.exp_sum = __shfl_xor_sync(0xffffffffu, mine.exp_sum, lanes);
            other.exp_z_sum = Problem::entropy ? __shfl_xor_sync(0xffffffffu, mine.exp_z_sum, lanes) : 0.f;
            other.weighted_sum = Problem::label_smoothing ? __shfl_xor_sync(0xffffffffu, mine.weighted_sum, lanes) : 0.f;
            other.target_logit = -infinity();
            // The lower lane first in both, so that all four get the same bits.
            mine = (threadIdx.x & lanes) == 0 ? merge(mine, other) : merge(other, mine);
        }
        return mine;
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void forward_sm90(const ForwardSm90Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map);
    ForwardSm90<Problem, TileT>(p).run();
}

}  // namespace flce

// Forward on sm_90a: logits tile by tile, reduced on the fly to RowSums. Every consumer thread keeps its own maxima and sums of its rows;
// they meet at the end of a stretch of the vocabulary, of which a cluster's share has up to eight (share_jobs.cuh).
#pragma once

#include "flce/sm90/forward_director.cuh"
#include "flce/sm90/forward_share.cuh"
#include "flce/sm90/row_reduction.cuh"
#include "flce/sm90/share_jobs.cuh"
#include "flce/sm90/stale_rows.cuh"
#include "flce/sm90/store.cuh"
#include "flce/sm90/vocabulary_walk.cuh"

namespace flce {

template <class Problem, class TileT>
struct ForwardSm90 {
    enum : bool { kFew = TileT::kCluster == 1 };  ///< few tokens: one tile holds every token, so no list of valid rows is needed
    enum : bool { kLists = Problem::lists_rows && !kFew };
    enum : int { kSegment = Problem::segment_tiles };  ///< tiles of a segment, which has sums of its own; 0: a share's tiles are added up
    static_assert(kSegment == 0 || (TileT::kTurns && kSegment % 2 == 0), "a tile of a segment always has the same consumer");
    using MainloopT = MainloopSm90<LogitOperands<Problem>, TileT, kLists>;
    using Accumulators = typename MainloopT::Accumulators;
    using Fields = PartialFields<Problem>;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };
    using Params = TemperedOf<Problem, Select<Problem::rounds_weight, ForwardStretchSm90Params, ForwardSm90Params>>;
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    enum : bool { kFalls = Problem::has_falls };
    using Rows = Select<kFalls, FallReduction<Problem, kColumnPieces>, RowReduction<Problem, kColumnPieces>>;
    enum : int { kClusterRows = TileT::kBlockM * TileT::kCluster };
    enum : int { kWriters = ForwardShare::writers_of(TileT::kTurns) };
    enum : int { kConsumerThreads = 128 * TileT::kConsumers };
    /// Clusters of rows that a share may have. Every thread has its sums of all of them.
    enum : int { kParts = kFew ? 1 : 2 };
    enum : int { kStateBytes = kParts * kPieces * 2 * Fields::kCount * kConsumerThreads * 4 };

    // Panels that leave together. Three of them have no room beside more sums of rows than every Problem has.
    enum : int { kPanelWidth = TileT::kBlockN % 192 == 0 ? (Fields::kCount > 2 ? 1 : 3) : TileT::kBlockN % 128 == 0 ? 2 : 1 };
    using PanelsT = PanelStore<typename Problem::Element, TileT, kPanelWidth, 1>;
    enum : int { kPanelBytes = Problem::retain ? PanelsT::kBytes : 0 };

    enum : int { kBarriersAt = MainloopT::kRingBytes + kPanelBytes + kStateBytes };
    enum : int { kWordsAt = kBarriersAt + MainloopT::kBarrierBytes + TileNumbers<TileT>::kBytes };
    enum : int { kDirectorAt = kWordsAt + TileWords<TileT>::kBytes };
    enum : int { kDirectorBytes = 128 };
    static_assert(sizeof(DirectorState) <= kDirectorBytes, "it lies behind everything else");
    enum : int { kSmemBytes = kDirectorAt + kDirectorBytes };
    enum : int { kThreads = TileT::kThreads };
    enum : unsigned { kWarps = TileT::kCluster * TileT::kConsumers * 4 };  ///< warps of a cluster's consumers

    const Params& p;
    TileNumbers<TileT> jobs;
    TileWords<TileT> words;
    MainloopT mainloop;
    const ForwardShare share;
    const bool compact;  ///< listed rows have been brought together
    PanelsT panels;
    float* const stash;  ///< this thread's sums of its rows of all parts: registers are few beside the accumulators

    __device__ __forceinline__ explicit ForwardSm90(const Params& params)
        : p(params),
          jobs(ptx::shared_address(dynamic_smem) + kBarriersAt + MainloopT::kBarrierBytes),
          words(ptx::shared_address(dynamic_smem) + kWordsAt),
          mainloop(dynamic_smem, kBarriersAt),
          share(listed_rows<Problem>(params.list, params.rows, params.list.first == 0 ? 1 : 0), dealt(params), kClusterRows, kWriters,
                params.clusters, kSegment > 0),
          compact(kLists && params.compact_rows != 0 && *params.list.valid < params.compact_rows),
          panels(mainloop.smem + MainloopT::kRingBytes, mainloop.place),
          stash(reinterpret_cast<float*>(dynamic_smem + MainloopT::kRingBytes + kPanelBytes) + static_cast<int>(threadIdx.x) - 128) {}

    /// Tiles of the vocabulary in this launch.
    static __device__ __forceinline__ int tiles(const Params& params) {
        return ceil_div(forward_columns<Problem>(params), TileT::kBlockN);
    }

    /// Number of things that are dealt to clusters: tiles, or segments.
    static __device__ __forceinline__ int dealt(const Params& params) {
        return kSegment > 0 ? ForwardShare::segments_of(tiles(params), kSegment) : tiles(params);
    }

    static __device__ __forceinline__ int cluster() { return static_cast<int>(blockIdx.x) / TileT::kCluster; }
    __device__ __forceinline__ int first_row(int row_cluster) const {
        return row_cluster * kClusterRows + (TileT::kCluster > 1 ? static_cast<int>(mainloop.rank) * TileT::kBlockM : 0);
    }
    /// First column of the tile among the launch's columns.
    static __device__ __forceinline__ int first_column_of(const TileWord& tile) { return static_cast<int>(tile.number) * TileT::kBlockN; }

    __device__ __forceinline__ void run() {
        if (blockIdx.x == 0 && threadIdx.x == 0) p.scalars->splits = share.splits;
        if (share.rows == 0 || cluster() >= share.clusters) return mainloop.meet();
        if constexpr (Problem::retain) {
            if (p.again != 0 && !stale().template any_at_all<kThreads>()) return mainloop.meet();
        }
        if (threadIdx.x == 0) director().start();  // while it has registers
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

    /// This block's rows of a part of the vocabulary, as they lie in hidden, or in the compact rows.
    struct TileRows {
        const ListedRow* listed;  ///< null: rows from `first` on
        int first;
        int last;  ///< last listed row of the tile, counted from `first`; −1: none is listed

        __device__ __forceinline__ bool neighbours() const {
            return listed == nullptr || last < 0 || listed[last].row - listed[0].row == last;
        }
        __device__ __forceinline__ int begin() const { return listed == nullptr || last < 0 ? first : listed[0].row; }
    };
    __device__ __forceinline__ TileRows listed_rows_of(int row_cluster) const {
        const int first = first_row(row_cluster);
        const int last = min(TileT::kBlockM, share.rows - first) - 1;
        if constexpr (!kLists) return {nullptr, first, last};
        if (compact) return {nullptr, p.list.first + first, last};
        return {p.list.rows != nullptr ? p.list.rows + p.list.first + first : nullptr, first, last};
    }

    /// The producer's warpgroup. Its first thread finds out which word comes next, and all blocks of a cluster find an equal word.
    __device__ __forceinline__ void bring_all() {
        bool told = false;  // whether the next word is told already
        while (true) {
            if (!told && threadIdx.x == 0) words.tell(director().go_on());
            const TileWord word = words.take();
            if (word.kind() == TileWord::kStop) break;
            told = word.kind() == TileWord::kTile && bring(word);
        }
    }
    /// Tells what comes after the tile that is being brought. The first thread would wait for room in the ring otherwise, and consumers
    /// hear of a stretch's end before they are at it.
    struct TellsNext {
        enum : int { kSlice = kSlices > 1 ? 1 : 0 };
        ForwardSm90& forward;
        __device__ __forceinline__ void before(int slice) const {
            if (slice == kSlice) forward.words.tell(forward.director().go_on());
        }
    };

    __device__ __forceinline__ ForwardDirector<ForwardSm90> director() { return {*this}; }

    /// Rows that are neighbours in hidden are the copy engine's, for one thread. Returns whether what comes next has been told.
    __device__ __forceinline__ bool bring(const TileWord& tile) {
        const int n = first_column_of(tile);
        if constexpr (kLists) {
            if (!tile.neighbours()) {
                const TileRows rows = listed_rows_of(tile.row_cluster());
                const auto row_of = [&](int row) { return row <= rows.last ? rows.listed[row].row : -1; };
                mainloop.produce_rows(static_cast<const typename Problem::Element*>(p.hidden), Problem::hidden_size, row_of, p.weight_map,
                                      n, kSlices);
                return false;
            }
        }
        if (threadIdx.x == 0) {
            mainloop.produce(compact ? p.compact_map : p.hidden_map, p.weight_map, director().state().begin[tile.part()], n, kSlices,
                             TellsNext{*this}, 0, 0, kFew ? share.rows : TileT::kBlockM);
        } else {
            mainloop.skip(kSlices);
        }
        return true;
    }

    /// Whether only stale rows are gone through, and what of them.
    __device__ __forceinline__ bool goes_again() const {
        if constexpr (Problem::retain) return p.again != 0;
        return false;
    }
    __device__ __forceinline__ int tiles_again() const {
        if constexpr (Problem::retain) return ceil_div(p.retained_columns, TileT::kBlockN);
        return 0;
    }
    __device__ __forceinline__ StaleRows stale() const { return {p.stale, share.rows}; }
    __device__ __forceinline__ bool any_stale_of(int row_cluster) const {
        if constexpr (Problem::retain) return stale().any(row_cluster * kClusterRows, kClusterRows);
        return false;
    }

    __device__ __forceinline__ void consume() {
        int holder = 0;  // the consumer whose turn it is
        forget();
#pragma unroll 1
        for (TileWord word = words.take(); word.kind() != TileWord::kStop; word = words.take()) {
            if (word.kind() == TileWord::kEnd) {
                if constexpr (kSegment > 0) {
                    end_segment(word);
                } else {
                    end_stretch(word);
                }
                continue;
            }
            if constexpr (TileT::kTurns) {
                const int consumer = word.consumer();
                if (consumer != holder && consumer != mainloop.place.consumer) mainloop.pass_turn();
                holder = consumer ^ 1;
                if (consumer != mainloop.place.consumer) {
                    mainloop.skip(kSlices);
                    continue;
                }
            }
            // Numbers that follow from a thread's place are worked out anew for every tile: kept beside the accumulators, they would not
            // fit.
            asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp));
            Accumulators c;
            MainloopT::clear(c);
            mainloop.consume(c, kSlices, kLists && !word.neighbours());
            reduce(c, words.again());  // not kept while the tile was multiplied
        }
    }

    __device__ __forceinline__ void end_segment(const TileWord& word) {
        asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp));
        finish(ShareJob{word.number}, word.part(), word.row_cluster());
        forget();
    }

    /// Sums up a share stretch by stretch. Each stretch is added to the sums of the stretches before, so that the result does not depend on
    /// how many clusters worked on the share.
    __device__ __forceinline__ void end_stretch(const TileWord& word) {
        const ShareJob job{word.number};
        // Worked out here, and not kept from stretch to stretch: registers are few.
        asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp));
        if (!Problem::retain || p.again == 0) {
            if (job.is_others() && job.stretch() > 0) wait_for_stretches(job);
#pragma unroll 1
            for (int part = 0; part < (word.has_second() ? 2 : 1); ++part) finish(job, part, word.row_cluster() + part);
            if (job.is_others()) tell_stretch(job, word.is_last());
        }
        forget();
    }

    __device__ __forceinline__ unsigned* done(const ShareJob& job) const { return ShareJobs::done(p.shares, share.clusters, job.share()); }
    /// Waits until the stretches before are written.
    __device__ __forceinline__ void wait_for_stretches(const ShareJob& job) const {
        if (mainloop.place.lane == 0) {
            while (ptx::ld_acquire_gpu(done(job)) < static_cast<unsigned>(job.stretch()) * kWarps) {
            }
        }
        __syncwarp();
    }
    __device__ __forceinline__ void tell_stretch(const ShareJob& job, bool is_last) const {
        __syncwarp();
        if (mainloop.place.lane != 0) return;
        const unsigned before = ptx::atom_release_gpu_add(done(job), 1u);
        if (is_last && before + 1 == static_cast<unsigned>(job.stretch() + 1) * kWarps) *done(job) = 0u;  // for the next launch
    }

    __device__ __forceinline__ float* stashed(int part, int i, int h) const {
        return stash + ((part * kPieces + i) * 2 + h) * Fields::kCount * kConsumerThreads;
    }
    __device__ __forceinline__ RowSums sums_of(int part, int i, int h) const { return Fields::load(stashed(part, i, h), kConsumerThreads); }
    __device__ __forceinline__ void keep(int part, int i, int h, const RowSums& sums) const {
        Fields::store(stashed(part, i, h), kConsumerThreads, sums);
    }
    __device__ __forceinline__ void forget() const {
#pragma unroll
        for (int i = 0; i < kParts * kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) keep(0, i, h, sums_of_nothing(kFalls ? infinity() : lowest_logit(), -infinity()));
    }

    /// Adds a tile of logits to this thread's sums; retained exponentials of the tile leave for memory.
    __device__ __forceinline__ void reduce(Accumulators& c, const TileWord& tile) {
        const int column = first_column_of(tile);
        const int first_column = forward_first_column<Problem>(p) + column;
        const int row0 = first_row(tile.row_cluster());
        float weighted[kPieces][2] = {};
        if constexpr (kFalls) {
            to_falls<Problem>(p, mainloop.place, first_column, TileT::kBlockN, c);
        } else {
            to_logits<Problem>(
                p, mainloop.place, first_column, TileT::kBlockN, [&](int row) { return temperature_of(row0 + row); }, c, weighted);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row0 + mainloop.place.row(i, h);
                const int target = row < share.rows ? listed_row<Problem>(p.list, p.targets, row).target : kIgnored;
                const int within = target - first_column - mainloop.place.column(0, 0);
                if (target >= 0 && has_column<kColumnPieces>(within)) p.target_logits[row] = logit_of(pick_column(c[i], h, within));
                if constexpr (Problem::label_smoothing) {
                    float* const at = stashed(tile.part(), i, h) + Fields::kWeighted * kConsumerThreads;
                    float sum = *at + weighted[i][h];
                    asm volatile("" : "+f"(sum));  // here: put off, it would need a second copy of the accumulators
                    *at = sum;
                }
            }
        }
        if constexpr (kFalls) {
            add_falls(c, first_column, row0, tile.part());
        } else {
            add_logits(c, first_column, row0, tile.part());
        }
    }
    __device__ __forceinline__ void add_logits(Accumulators& c, int first_column, int row0, int part) {
        if constexpr (Problem::retain) {
            if (p.retained_columns > 0) return retain(c, first_column, row0, part);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                RowSums sums = sums_of(part, i, h);
                Rows::reduce_row(c[i], h, first_column + mainloop.place.column(0, 0), sums);
                keep(part, i, h, sums);
            }
    }

    /// Temperature of a row of the launch.
    __device__ __forceinline__ float temperature_of(int row) const {
        if constexpr (Problem::temperature) {
            if (row >= share.rows) return 1.f;
            if constexpr (Problem::lists_rows) {
                if (p.list.rows != nullptr) row = p.list.rows[p.list.first + row].row;
            }
            return p.temperatures[row];
        }
        return 1.f;
    }

    /// Turns logits into exponentials above the row's reference and adds those up. Retained exponentials leave for memory.
    __device__ __forceinline__ void retain(Accumulators& c, int first_column, int row0, int part) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = row0 + mainloop.place.row(i, h);
                const int column = first_column + mainloop.place.column(0, 0);
                RowSums sums = sums_of(part, i, h);
                if (Problem::stores_derivative && first_column >= p.retained_columns) {
                    Rows::exponentials_of_row(c[i], h, reference_of(row), NothingStored{}, column, sums);
                } else {
                    Rows::exponentials_of_row(c[i], h, reference_of(row), stored_factor(row), column, sums);
                }
                keep(part, i, h, sums);
            }
            if (first_column < p.retained_columns) store_piece(c[i], first_column, row0 + mainloop.place.first_row() + i * 64);
        }
    }
    /// Exponentials leave for memory.
    __device__ __forceinline__ void store_piece(const float (&c)[kColumnPieces][4], int first_column, int first_row) {
        constexpr int kGroup = kPanelWidth * 8;  // column pieces
#pragma unroll
        for (int first = 0; first < kColumnPieces; first += kGroup) {
            panels.open();
#pragma unroll
            for (int h = 0; h < 2; ++h) panels.put(c, h, first, 1.f);
            panels.close(BlockedMap{p.retained_map, kRetainedShift}, first_column + first * 8, first_row);
        }
    }

    /// Logit of a tile's accumulator `c`.
    __device__ __forceinline__ float logit_of(float c) const {
        if constexpr (kFalls) {
            return Problem::falls(p.transform).logit(c);
        } else {
            return c;
        }
    }
    /// Adds up exponentials of falls, and has those that are retained leave for memory.
    __device__ __forceinline__ void add_falls(Accumulators& c, int first_column, int row0, int part) {
        bool stored = false;
        if constexpr (Problem::retain) stored = first_column < p.retained_columns;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const FallPowersAbove above = Rows::above(p, reference_of(row0 + mainloop.place.row(i, h)));
                RowSums sums = sums_of(part, i, h);
                if (Problem::retain && stored) {
                    Rows::template add<true>(c[i], h, above, sums);
                } else {
                    Rows::template add<false>(c[i], h, above, sums);
                }
                keep(part, i, h, sums);
            }
            if constexpr (Problem::retain) {
                if (stored) store_piece(c[i], first_column, row0 + mainloop.place.first_row() + i * 64);
            }
        }
    }
    __device__ __forceinline__ StoredFactor<Problem> stored_factor(int row) const {
        return {LogitDerivative<Problem>(p.transform, Problem::stores_derivative ? temperature_of(row) : 1.f)};
    }
    __device__ __forceinline__ float reference_of(int row) const {
        if (kFalls && (!Problem::retain || p.retained_columns == 0)) return 0.f;
        return row < share.rows ? p.references[row] : 0.f;
    }

    /// Merges the four lanes that share a row and adds what they have to a partial result: one for each share that has a part of the rows,
    /// or for a segment, whose number is then the job's; by turns one a consumer.
    /// Each lane of the four writes a row of its own, and the code is short: it runs rarely, so that it has to be fetched every time,
    /// beside the multiplication that it must not hold up.
    __device__ __forceinline__ void finish(const ShareJob& job, int part, int row_cluster) {
        static_assert(kWrittenRows <= 4, "a row for each of the four lanes");
        RowSums mine;
#pragma unroll 1
        for (int row = 0; row < kWrittenRows; ++row) {
            const RowSums all = Rows::merge_quad(whole_sums(part, row, row_cluster));
            if (mainloop.place.lane % 4 == row) mine = all;
        }
        if (mainloop.place.lane % 4 < kWrittenRows) write_partial(job, row_cluster, mine);
    }

    enum : int { kWrittenRows = 2 * kPieces };
    /// Sums of a thread's row number `row`, relative to the largest logit.
    __device__ __forceinline__ RowSums whole_sums(int part, int row, int row_cluster) const {
        const int i = row / 2;
        const int h = row % 2;
        RowSums sums = sums_of(part, i, h);
        if constexpr (kFalls) {
            Rows::to_own_max(sums, Rows::above(p, reference_of(first_row(row_cluster) + mainloop.place.row(i, h))));
        } else if constexpr (Problem::retain) {
            if (p.retained_columns > 0) {
                const float reference = reference_of(first_row(row_cluster) + mainloop.place.row(i, h));
                if (Rows::shares(sums.max, reference)) Rows::to_own_max(sums, reference);
            }
        }
        return sums;
    }

    /// Writes partial sums of the one row, of the quad's four, that this lane has.
    __device__ __forceinline__ void write_partial(const ShareJob& job, int row_cluster, const RowSums& sums) const {
        ForwardShare of = share;
        asm volatile(""
                     : "+r"(of.rows), "+r"(of.row_clusters), "+r"(of.clusters),
                       "+r"(of.splits));  // keeps the compiler from working out derived numbers earlier
        const int of_four = mainloop.place.lane % 4;
        const int row = first_row(row_cluster) + mainloop.place.row(of_four / 2, of_four % 2);
        if (row >= of.rows) return;
        const long long ld = partial_rows_of(of.rows);
        if constexpr (kSegment > 0) {
            const int split = static_cast<int>(job.number) * kWriters + mainloop.place.consumer;
            return Fields::store(p.partials + split * Fields::kCount * ld + row, ld, sums);
        }
        const int first_share = row_cluster * of.clusters / of.row_clusters;
        const int last_share = ((row_cluster + 1) * of.clusters - 1) / of.row_clusters;
        const int writer = TileT::kTurns ? mainloop.place.consumer : 0;
        const int split = (job.share() - first_share) * kWriters + writer;
        float* const at = p.partials + split * Fields::kCount * ld + row;
        if (job.stretch() > 0) {
            Fields::store(at, ld, merge(Fields::load(at, ld), sums));
            return;
        }
        Fields::store(at, ld, sums);
        if (job.share() != last_share) return;
#pragma unroll 1
        for (int rest = kWriters; rest < of.splits - split; rest += kWriters) {
            Fields::store(at + rest * Fields::kCount * ld, ld, sums_of_nothing(-infinity(), -infinity()));
        }
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void forward_sm90(const typename ForwardSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map);
    ForwardSm90<Problem, TileT>(p).run();
}

}  // namespace flce

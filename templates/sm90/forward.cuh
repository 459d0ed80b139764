// Forward on sm_90a: logits tile by tile, reduced on the fly to RowSums. Every consumer thread keeps its own maxima and sums of its rows;
// they meet at the end of a stretch of the vocabulary, of which a cluster's share has up to eight (share_jobs.cuh).
//
// A walk says who takes which tile (forward_walk.cuh), a form what a logit is and how logits are reduced (logit_form.cuh), a sink where
// their exponentials go (exponential_sink.cuh). Here is what connects them: the producer brings the walk's tiles, consumers multiply them.
#pragma once

#include "flce/sm90/forward_walk.cuh"
#include "flce/sm90/logit_form.cuh"
#include "flce/sm90/named_picks.cuh"
#include "flce/sm90/top_lists.cuh"

namespace flce {

template <class Problem, class TileT>
struct ForwardSm90 {
    using Launch = ForwardLaunch<Problem, TileT>;
    using Params = typename Launch::Params;
    using Walk = ForwardWalk<Launch>;
    using MainloopT = MainloopSm90<LogitOperands<Problem>, TileT, Launch::kLists>;
    using Accumulators = typename MainloopT::Accumulators;
    using Form = FormOf<Launch, MainloopT>;
    using Sink = ExponentialSink<Launch>;
    using Sums = ForwardSums<Launch, Form>;
    using Lists = TopListsSm90<Launch, Form>;
    using Picks = NamedPicks<Launch, Form>;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };
    enum : unsigned { kWarps = TileT::kCluster * TileT::kConsumers * 4 };  ///< warps of a cluster's consumers

    enum : int { kPanelsAt = MainloopT::kRingBytes };
    enum : int { kSumsAt = kPanelsAt + Sink::kBytes };
    enum : int { kListsAt = kSumsAt + Sums::kBytes };
    enum : int { kPicksAt = kListsAt + Lists::kBytes };
    enum : int { kBarriersAt = kPicksAt + Picks::kBytes };
    enum : int { kJobsAt = kBarriersAt + MainloopT::kBarrierBytes };
    enum : int { kWordsAt = kJobsAt + TileNumbers<TileT>::kBytes };
    enum : int { kWalkAt = kWordsAt + TileWords<TileT>::kBytes };
    enum : int { kWalkBytes = 128 };
    static_assert(sizeof(typename Walk::State) <= kWalkBytes, "it lies behind everything else");
    enum : int { kSmemBytes = kWalkAt + kWalkBytes };
    enum : int { kThreads = TileT::kThreads };

    const Params& p;
    TileNumbers<TileT> jobs;
    TileWords<TileT> words;
    MainloopT mainloop;
    const Launch launch;
    Sink sink;
    float* const stash;  ///< ForwardSums::stash; behind it that of TopListsSm90

    __device__ __forceinline__ explicit ForwardSm90(const Params& params)
        : p(params),
          jobs(ptx::shared_address(dynamic_smem) + kJobsAt),
          words(ptx::shared_address(dynamic_smem) + kWordsAt),
          mainloop(dynamic_smem, kBarriersAt),
          launch(params, mainloop.rank),
          sink(params, mainloop.smem + kPanelsAt, mainloop.place),
          stash(reinterpret_cast<float*>(dynamic_smem + kSumsAt) + static_cast<int>(threadIdx.x) - 128) {}

    __device__ __forceinline__ Walk walk() { return {launch, jobs, *reinterpret_cast<typename Walk::State*>(dynamic_smem + kWalkAt)}; }
    __device__ __forceinline__ Form form() const { return {launch}; }
    __device__ __forceinline__ Sums sums() const { return {launch, mainloop.place, stash}; }
    __device__ __forceinline__ Lists lists() const { return {launch, mainloop.place, stash + Sums::kBytes / 4}; }

    __device__ __forceinline__ Picks picks() const {
        const unsigned record = ptx::shared_address(dynamic_smem) + kPicksAt + (threadIdx.x - 128u) * 8u;
        return {launch, mainloop.place, record};
    }

    __device__ __forceinline__ void run() {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            p.scalars->splits = launch.share.splits;
            if constexpr (Problem::top_k > 0) p.scalars->top_splits = lists().of_row();
        }
        if (!launch.has_work()) return mainloop.meet();
        if (launch.goes_again() && !launch.any_stale()) return mainloop.meet();
        if (threadIdx.x == 0) walk().start();  // while it has registers
        if (mainloop.place.consumer < 0) {
            ptx::setmaxnreg_dec<kProducerRegisters>();
            bring_all();
        } else {
            ptx::setmaxnreg_inc<kConsumerRegisters>();
            consume_all();
            sink.finish();
        }
        mainloop.meet();
    }

    /// First column of the tile among the launch's columns.
    static __device__ __forceinline__ int first_column_of(const TileWord& tile) { return static_cast<int>(tile.number) * TileT::kBlockN; }

    /// The producer's warpgroup. Its first thread finds out which word comes next, and all blocks of a cluster find an equal word.
    __device__ __forceinline__ void bring_all() {
        bool told = false;  // whether the next word is told already
        while (true) {
            if (!told && threadIdx.x == 0) words.tell(walk().go_on());
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
            if (slice == kSlice) forward.words.tell(forward.walk().go_on());
        }
    };
    /// Rows that are neighbours in hidden are the copy engine's, for one thread. Returns whether what comes next has been told.
    __device__ __forceinline__ bool bring(const TileWord& tile) {
        const int n = first_column_of(tile);
        if constexpr (Launch::kLists) {
            if (!tile.neighbours()) {
                const auto rows = launch.tile_rows(tile.row_cluster());
                const auto row_of = [&](int row) { return row <= rows.last ? rows.listed[row].row : -1; };
                mainloop.produce_rows(static_cast<const typename Problem::Element*>(p.hidden), Problem::hidden_size, row_of, p.weight_map,
                                      n, kSlices);
                return false;
            }
        }
        if (threadIdx.x == 0) {
            mainloop.produce(launch.compact ? p.compact_map : p.hidden_map, p.weight_map, walk().d.begin[tile.part()], n, kSlices,
                             TellsNext{*this}, 0, 0, Launch::kFew ? launch.share.rows : TileT::kBlockM);
        } else {
            mainloop.skip(kSlices);
        }
        return true;
    }

    /// Numbers that follow from a thread's place are worked out anew after this: kept beside the accumulators, they would not fit.
    __device__ __forceinline__ void forget_place() { asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp)); }

    __device__ __forceinline__ void consume_all() {
        int holder = 0;  // the consumer whose turn it is
        sums().forget();
        if constexpr (Problem::top_k > 0) lists().forget();
#pragma unroll 1
        for (TileWord word = words.take(); word.kind() != TileWord::kStop; word = words.take()) {
            if (word.kind() == TileWord::kEnd) {
                forget_place();
                end(word);
                sums().forget();
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
            forget_place();
            if constexpr (Problem::top_k > 0) lists().begin(word.part(), word.row_cluster());
            if constexpr (Problem::picks_named) picks().begin(static_cast<int>(word.number), word.row_cluster());
            Accumulators c;
            clear_sums(c);
            mainloop.consume(c, kSlices, Launch::kLists && !word.neighbours());
            reduce(c, words.again());  // not kept while the tile was multiplied
        }
    }

    /// Writes the sums of a segment, or of a stretch of a share.
    __device__ __forceinline__ void end(const TileWord& word) const {
        const ShareJob job{word.number};
        if constexpr (Launch::kSegment > 0) {
            if constexpr (Problem::top_k > 0) lists().tell(word.part(), word.row_cluster());
            return sums().finish(form(), sink, job, word.part(), word.row_cluster());
        }
        if (launch.goes_again()) return;
        const StretchOrder order(p.shares, launch.share.clusters, job, kWarps, mainloop.place.lane);
        if (job.is_others() && job.stretch() > 0) order.wait();
#pragma unroll 1
        for (int part = 0; part < (word.has_second() ? 2 : 1); ++part) {
            sums().finish(form(), sink, job, part, word.row_cluster() + part);
            if constexpr (Problem::top_k > 0) lists().tell(part, word.row_cluster() + part);
        }
        if (job.is_others()) order.tell(word.is_last());
    }

    /// Adds a tile of logits to this thread's sums; exponentials of the tile leave for the sink.
    __device__ __forceinline__ void reduce(Accumulators& c, const TileWord& word) {
        const LogitTile tile{forward_first_column<Problem>(p) + first_column_of(word), launch.first_row(word.row_cluster()), word.part()};
        float weighted[Form::kPieces][2] = {};
        form().make(mainloop.place, tile, c, weighted);
        if constexpr (Problem::top_k > 0) lists().add(c, tile);
        if constexpr (Problem::picks_named) picks().wait();
#pragma unroll
        for (int i = 0; i < Form::kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = tile.first_row + mainloop.place.row(i, h);
                const int target = launch.target_of(row);
                const int within = target - tile.first_column - mainloop.place.column(0, 0);
                if (target >= 0 && has_column<Form::kColumnPieces>(within)) {
                    p.target_logits[row] = form().logit(pick_column(c[i], h, within));
                }
                if constexpr (Problem::picks_named) picks().pick(form(), c[i], i, h, row);
                if constexpr (Problem::label_smoothing) sums().add_weighted(tile.part, 2 * i + h, weighted[i][h]);
            }
        }
        form().reduce(c, mainloop.place, tile, sums(), sink);
    }
};

template <class Problem, class TileT>
__device__ __forceinline__ void forward_sm90(const typename ForwardSm90<Problem, TileT>::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map);
    ForwardSm90<Problem, TileT>(p).run();
}

}  // namespace flce

// Both heads of a divergence on sm_90a: a tile of the student's products, which its threads park in memory, then the same tile of the
// teacher's, in whose epilogue both become logits, and are summed up. The thread that parked a product reads it, from L2. So logits exist
// nowhere else, but where they are retained.
//
// Consumers take turns with tiles that are neighbours, and with the heads: student of tile 0, of tile 1, teacher of tile 0, of tile 1. So a
// teacher's multiplication runs beside each of the long epilogues. A job is a strip of the vocabulary for a cluster's rows, whose sums are
// partial results; clusters take jobs by tickets.
#pragma once

#include "flce/common/heads.cuh"
#include "flce/sm90/heads_gradients.cuh"
#include "flce/sm90/tickets.cuh"

namespace flce {

/// Jobs of a launch by number. Clusters of rows come in blocks, whose hidden states stay in L2 while they go through all strips; those of
/// one strip run side by side.
template <class TileT>
struct HeadsWalk {
    enum : int { kClusterRows = TileT::kBlockM * TileT::kCluster };

    int row_clusters;
    int block_clusters;
    int strips;
    int tiles;
    int pairs;
    int row = 0;  ///< first row of this block's tiles
    int strip = 0;
    int tile = 0;  ///< first tile of the strip, and the one behind its last
    int end = 0;

    __device__ __forceinline__ HeadsWalk(int rows, int columns, const HeadsJobs& jobs)
        : row_clusters(ceil_div(rows, kClusterRows)),
          block_clusters(jobs.block_clusters),
          strips(jobs.strips),
          tiles(ceil_div(columns, TileT::kBlockN)),
          pairs(jobs.pairs) {}

    /// False where there is no such job.
    __device__ __forceinline__ bool go_to(unsigned number, unsigned rank) {
        const int job = static_cast<int>(number);
        if (job >= row_clusters * strips) return false;
        const int before = job / (block_clusters * strips) * block_clusters;  // clusters of rows in the blocks before
        const int of_block = min(block_clusters, row_clusters - before);
        const int within = job - before * strips;
        row = ((before + within % of_block) * TileT::kCluster + static_cast<int>(rank)) * TileT::kBlockM;
        strip = within / of_block;
        tile = begin_of(strip);
        end = begin_of(strip + 1);
        return true;
    }
    __device__ __forceinline__ int begin_of(int of) const {
        if (pairs >= 0) return of + min(of, pairs);
        return static_cast<int>(static_cast<long long>(tiles) * of / strips);
    }
};

/// Makes both heads' products and hands them to `Epilogue`, which derives from it and has
///
///     static int columns_of(params);                   number of the launch's columns
///     int begin_column() const, end_column() const;    columns of the launch, counted as biases are
///     void begin_strip() const, end_strip() const;
///     Row row_of(row) const;                           numbers that a thread keeps of a row while it goes through a tile
///     void reduce(state, student, teacher, row, column) const;    products of a group of the row, from `column` on
///     void end_row(state, of_quad) const;                         of_quad: number of the row among the quad's
///     void work_beside(warp) const;                               what the producer's other warps do, numbered from 0
///
/// kFields: numbers that each consumer thread keeps from tile to tile.
template <class Epilogue, class Problem, class Teacher, class TileT, class Params_, int kFields>
struct HeadsSm90 {
    using Params = Params_;
    using MainloopT = MainloopSm90<LogitOperands<Problem>, TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    enum : int { kSlices = ceil_div(Problem::hidden_size, TileT::kBlockK) };
    enum : int { kTeacherSlices = ceil_div(Teacher::hidden_size, TileT::kBlockK) };
    enum : int { kConsumerThreads = 128 * TileT::kConsumers };
    enum : int { kPieces = MainloopT::kPiecesA };
    enum : int { kGroups = TileT::kBlockN / kPairGroup };
    enum : int { kOfGroup = kPairGroup / 4 };  ///< columns of a group that a thread has
    static_assert(TileT::kTurns && 2 * kPieces <= 4, "each lane of a quad keeps the sums of one of its rows");

    enum : int { kRowFours = MainloopT::kColumnPieces / 2 };  ///< products of a row, in fours

    enum : int { kFieldsAt = MainloopT::kRingBytes };
    enum : int { kStagedAt = kFieldsAt + kFields * kConsumerThreads * 4 };
    enum : int { kBarriersAt = kStagedAt + kRowFours * kConsumerThreads * 16 };
    enum : int { kSmemBytes = kBarriersAt + MainloopT::kBarrierBytes + TileNumbers<TileT>::kBytes };
    enum : int { kThreads = TileT::kThreads };

    const Params& p;
    TileNumbers<TileT> numbers;
    MainloopT mainloop;
    HeadsWalk<TileT> walk;

    __device__ __forceinline__ explicit HeadsSm90(const Params& params)
        : p(params),
          numbers(ptx::shared_address(dynamic_smem) + kBarriersAt + MainloopT::kBarrierBytes),
          mainloop(dynamic_smem, kBarriersAt),
          walk(params.rows, Epilogue::columns_of(params), params.jobs) {}

    __device__ __forceinline__ void run() {
        if (mainloop.place.consumer < 0) {
            ptx::setmaxnreg_dec<kProducerRegisters>();
            if (threadIdx.x == 0) bring_tiles(p.tickets, numbers, walk, mainloop.rank, [&] { bring(); });
            if (threadIdx.x >= 32) epilogue().work_beside(static_cast<int>(threadIdx.x) / 32 - 1);
        } else {
            ptx::setmaxnreg_inc<kConsumerRegisters>();
            while (walk.go_to(numbers.take(), mainloop.rank)) consume_strip();
        }
        mainloop.meet();
    }

    __device__ __forceinline__ const Epilogue& epilogue() const { return static_cast<const Epilogue&>(*this); }
    __device__ __forceinline__ int first_column(int tile) const { return epilogue().begin_column() + tile * TileT::kBlockN; }

    /// The producer: the slices of a strip, as consumers take turns.
    __device__ __forceinline__ void bring() {
#pragma unroll 1
        for (int tile = walk.tile; tile < walk.end; tile += 2) {
#pragma unroll 1
            for (int n = tile; n < min(tile + 2, walk.end); ++n) {
                mainloop.produce(p.hidden_map, p.weight_map, walk.row, first_column(n), kSlices);
            }
#pragma unroll 1
            for (int n = tile; n < min(tile + 2, walk.end); ++n) {
                mainloop.produce(p.teacher_hidden_map, p.teacher_weight_map, walk.row, first_column(n), kTeacherSlices);
            }
        }
    }

    __device__ __forceinline__ void consume_strip() {
        epilogue().begin_strip();
#pragma unroll 1
        for (int tile = walk.tile; tile < walk.end; tile += 2) {
            const int mine = tile + mainloop.place.consumer;
            const bool other = mainloop.place.consumer == 1 || tile + 1 < walk.end;  // whether the other consumer has a tile
            if (mine >= walk.end) {
                mainloop.skip(kSlices);
                mainloop.pass_turn();
                mainloop.skip(kTeacherSlices);
                mainloop.pass_turn();
                continue;
            }
            {
                Accumulators c;
                multiply(c, kSlices, other);
                park(c);
            }
            Accumulators c;
            multiply(c, kTeacherSlices, other);
            reduce_tile(c, first_column(mine));
        }
        epilogue().end_strip();
    }

    /// A head's products of this consumer's tile. `other`: whether the other consumer has a tile, whose slices come before its own or
    /// behind them.
    __device__ __forceinline__ void multiply(Accumulators& c, int slices, bool other) {
        if (mainloop.place.consumer == 1) mainloop.skip(slices);
        forget_place();
        clear_sums(c);
        mainloop.consume(c, slices);
        if (mainloop.place.consumer == 0 && other) mainloop.skip(slices);
        forget_place();
    }

    /// Numbers that follow from a thread's place are worked out anew after this: kept beside the accumulators, they would not fit.
    __device__ __forceinline__ void forget_place() { asm volatile("" : "+r"(mainloop.place.lane), "+r"(mainloop.place.warp)); }

    /// This thread's number in its warpgroup, worked out anew each time.
    __device__ __forceinline__ int thread() const {
        int lane = mainloop.place.lane;
        asm volatile("" : "+r"(lane));
        return mainloop.place.warp * 32 + lane;
    }

    /// Place of a parked tile's first four products of this thread; the next four lie 128 places behind.
    __device__ __forceinline__ float4* parked() const {
        const int tile = static_cast<int>(blockIdx.x) * TileT::kConsumers + mainloop.place.consumer;
        return reinterpret_cast<float4*>(p.parked + static_cast<long long>(tile) * (TileT::kBlockM * TileT::kBlockN)) + thread();
    }
    static __device__ __forceinline__ int parked_at(int i, int h, int j) { return ((i * 2 + h) * MainloopT::kColumnPieces + j) / 2 * 128; }

    __device__ __forceinline__ void park(const Accumulators& c) const {
        float4* const to = parked();
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int j = 0; j < MainloopT::kColumnPieces; j += 2) {
                    __stcg(to + parked_at(i, h, j),
                           make_float4(c[i][j][2 * h], c[i][j][2 * h + 1], c[i][j + 1][2 * h], c[i][j + 1][2 * h + 1]));
                }
            }
        }
    }

    /// Goes through a tile from `column` on, row by row and group by group. `c`: the teacher's products. A row's are staged in shared
    /// memory, so that its groups are a loop: unrolled twelvefold its code would not fit into the instruction cache.
    __device__ __forceinline__ void reduce_tile(const Accumulators& c, int column) const {
        float4* const staged = reinterpret_cast<float4*>(dynamic_smem + kStagedAt) + mainloop.place.consumer * (kRowFours * 128) + thread();
        const float4* from = parked();
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int j = 0; j < MainloopT::kColumnPieces; j += 2) {
                    staged[j / 2 * 128] = make_float4(c[i][j][2 * h], c[i][j][2 * h + 1], c[i][j + 1][2 * h], c[i][j + 1][2 * h + 1]);
                }
                const int row = walk.row + mainloop.place.row(i, h);
                auto state = epilogue().row_of(row);
#pragma unroll 1
                for (int group = 0; group < kGroups; ++group) {
                    const int first = column + group * kPairGroup;
                    if (first >= epilogue().end_column()) break;
                    float student[kOfGroup];
                    float teacher[kOfGroup];
#pragma unroll
                    for (int four = 0; four < kOfGroup / 4; ++four) {
                        put_four(student, four, __ldcg(from + parked_at(i, h, 0) + (group * (kOfGroup / 4) + four) * 128));
                    }
#pragma unroll
                    for (int four = 0; four < kOfGroup / 4; ++four) {
                        put_four(teacher, four, staged[(group * (kOfGroup / 4) + four) * 128]);
                    }
                    epilogue().reduce(state, student, teacher, row, first);
                }
                epilogue().end_row(state, 2 * i + h);
            }
        }
    }
    static __device__ __forceinline__ void put_four(float (&to)[kOfGroup], int four, const float4& numbers) {
        to[4 * four] = numbers.x;
        to[4 * four + 1] = numbers.y;
        to[4 * four + 2] = numbers.z;
        to[4 * four + 3] = numbers.w;
    }
    /// Column of this thread's number e of the group from `column` on.
    __device__ __forceinline__ int column_of(int column, int e) const { return column + mainloop.place.column(e / 2, e % 2); }

    /// This thread's number of those that lie from `at` on in shared memory.
    __device__ __forceinline__ float* of_thread(int at) const {
        return reinterpret_cast<float*>(dynamic_smem + at) + mainloop.place.consumer * 128 + thread();
    }
};

/// Logits of a tile are added to sums, and retained. `Sums`: LaneDivergence, or LaneMixture for the walk that knows the normalizers.
template <class Problem, class Teacher, class TileT, class Sums>
struct HeadSumsSm90
    : HeadsSm90<HeadSumsSm90<Problem, Teacher, TileT, Sums>, Problem, Teacher, TileT, TemperedOf<Problem, HeadsSm90Params>, Sums::kCount> {
    using Base =
        HeadsSm90<HeadSumsSm90<Problem, Teacher, TileT, Sums>, Problem, Teacher, TileT, TemperedOf<Problem, HeadsSm90Params>, Sums::kCount>;
    using Base::Base;
    using Base::column_of;
    using Base::kConsumerThreads;
    using Base::kOfGroup;
    using Base::mainloop;
    using Base::p;
    using Base::walk;
    using Params = typename Base::Params;

    /// Whether a launch may leave gradients in the place of pairs: one walk has all that they need. Gradients in fp16 have a scale that
    /// follows from the row's divergence, of which backward has to have the same bits: those that divergence_outputs writes.
    enum : bool {
        kLeavesGradients = Problem::retain && !Problem::bias && !Problem::shard && !Sums::kSecond && Problem::divergence_form != kMixture &&
                           kSame<typename Problem::Element, Bf16>
    };
    using Gradients = HeadsGradients<Problem, TileT>;

    struct Row {
        Sums sums;
        TemperingOf<Problem> tempering;
    };

    static __device__ __forceinline__ int columns_of(const Params& params) { return vocab_columns<Problem>(params) - params.first_column; }
    __device__ __forceinline__ int begin_column() const { return p.first_column; }
    __device__ __forceinline__ int end_column() const { return vocab_columns<Problem>(p); }

    __device__ __forceinline__ Row row_of(int row) const {
        float temperature = 1.f;
        if constexpr (Problem::temperature) temperature = row < p.rows ? p.temperatures[row] : 1.f;
        Row state{{}, TemperingOf<Problem>(temperature)};
        state.sums.begin(p, min(row, p.rows - 1));
        return state;
    }

    __device__ __forceinline__ void reduce(Row& state, float (&student)[kOfGroup], float (&teacher)[kOfGroup], int row, int column) const {
        const int columns = end_column();
#pragma unroll
        for (int e = 0; e < kOfGroup; ++e) {
            const int read = Problem::bias || Teacher::bias ? min(column_of(column, e), columns - 1) : 0;
            student[e] = state.tempering.divided(logit_of<Problem>(student[e], p.bias, read, p.transform).value);
            teacher[e] = state.tempering.divided(logit_of<Teacher>(teacher[e], p.teacher_bias, read, p.teacher_transform).value);
        }
        if (column + kPairGroup > columns) {
#pragma unroll
            for (int e = 0; e < kOfGroup; ++e) {
                if (column_of(column, e) >= columns) student[e] = teacher[e] = masked_logit();
            }
        }
        const auto logits = [&](int e) { return LogitPair{student[e], teacher[e]}; };
        if constexpr (Problem::retain && !Sums::kSecond) {
            if (column < p.retained.columns) retain(logits, row, column);
        }
        state.sums.template add<kOfGroup>(logits);
    }

    template <class Logits>
    __device__ __forceinline__ void retain(const Logits& logits, int row, int column) const {
        LogitPair most{lowest_logit(), lowest_logit()};
#pragma unroll
        for (int e = 0; e < kOfGroup; ++e) {
            most.student = fmaxf(most.student, logits(e).student);
            most.teacher = fmaxf(most.teacher, logits(e).teacher);
        }
        const unsigned reference = PairBlock::reference_of({lanes_largest<4>(most.student), lanes_largest<4>(most.teacher)});
        if (row >= p.rows) return;
        most = PairBlock::references_in(reference);
        const PairBlock block(p.retained, column);
        const int within = column % kPairColumns;
        if (mainloop.place.lane % 4 == 0) block.references_of(row)[within / kPairGroup] = reference;
        unsigned* const to = block.pairs_of(row) + within + mainloop.place.column(0, 0);
#pragma unroll
        for (int e = 0; e < kOfGroup; e += 2) {
            __stcs(reinterpret_cast<uint2*>(to + e * 4),
                   make_uint2(PairBlock::pack(logits(e), most), PairBlock::pack(logits(e + 1), most)));
        }
    }

    /// Place of the sums of the one row, of a quad's, that this lane keeps.
    __device__ __forceinline__ float* sums_of_row() const { return Base::of_thread(Base::kFieldsAt); }
    __device__ __forceinline__ void begin_strip() const {
        Sums none;
        none.begin(p, 0);
        none.store(sums_of_row(), kConsumerThreads);
    }
    __device__ __forceinline__ void end_row(Row& state, int of_quad) const {
        state.sums.template merge_lanes<4>();
        if (mainloop.place.lane % 4 != of_quad) return;
        state.sums.add_stored(sums_of_row(), kConsumerThreads);
        state.sums.store(sums_of_row(), kConsumerThreads);
    }
    __device__ __forceinline__ void end_strip() const {
        const int of_quad = mainloop.place.lane % 4;
        const int row = walk.row + mainloop.place.row(of_quad / 2, of_quad % 2);
        if (of_quad < 2 * Base::kPieces && row < p.rows) {
            const float* const from = sums_of_row();
            const long long split = walk.strip * TileT::kConsumers + mainloop.place.consumer;
            float* const to = p.partials + split * Sums::kCount * p.partial_rows + row;
#pragma unroll
            for (int i = 0; i < Sums::kCount; ++i) to[i * p.partial_rows] = from[i * kConsumerThreads];
        }
        if constexpr (kLeavesGradients) Gradients(p).end_strip(walk.row, mainloop.place.lane);
    }
    __device__ __forceinline__ void work_beside(int warp) const {
        if constexpr (kLeavesGradients) Gradients(p).leave(warp);
    }
};

template <class Heads>
__device__ __forceinline__ void sum_heads(const typename Heads::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.teacher_hidden_map, p.teacher_weight_map);
    Heads(p).run();
}

template <class Problem, class Teacher, class TileT>
using HeadsSumsSm90 = HeadSumsSm90<Problem, Teacher, TileT, LaneDivergence<Problem>>;
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void heads_sums_sm90(const typename HeadsSumsSm90<Problem, Teacher, TileT>::Params& p) {
    sum_heads<HeadsSumsSm90<Problem, Teacher, TileT>>(p);
}
template <class Problem, class Teacher, class TileT>
using HeadsMixtureSm90 = HeadSumsSm90<Problem, Teacher, TileT, LaneMixture<Problem>>;
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void heads_mixture_sm90(const typename HeadsMixtureSm90<Problem, Teacher, TileT>::Params& p) {
    sum_heads<HeadsMixtureSm90<Problem, Teacher, TileT>>(p);
}

/// Logits of a tile become the student's gradients, in the Problem's dtype.
template <class Problem, class Teacher, class TileT>
struct HeadsDlogitsSm90
    : HeadsSm90<HeadsDlogitsSm90<Problem, Teacher, TileT>, Problem, Teacher, TileT, TemperedOf<Problem, HeadsDlogitsSm90Params>, 0> {
    using Base =
        HeadsSm90<HeadsDlogitsSm90<Problem, Teacher, TileT>, Problem, Teacher, TileT, TemperedOf<Problem, HeadsDlogitsSm90Params>, 0>;
    using Base::Base;
    using Base::column_of;
    using Base::kOfGroup;
    using Base::p;
    using Params = typename Base::Params;
    using Element = typename Problem::Element;
    static_assert(!Problem::bias, "a bias's gradient is not added up here");

    struct Row {
        DivergenceUpstream<Problem> of;
        TemperingOf<Problem> tempering;
    };

    static __device__ __forceinline__ int columns_of(const Params& params) { return params.columns; }
    __device__ __forceinline__ int begin_column() const { return 0; }
    __device__ __forceinline__ int end_column() const { return p.columns; }
    __device__ __forceinline__ void begin_strip() const {}
    __device__ __forceinline__ void end_strip() const {}
    __device__ __forceinline__ void end_row(const Row& /*state*/, int /*of_quad*/) const {}
    __device__ __forceinline__ void work_beside(int /*warp*/) const {}

    __device__ __forceinline__ Row row_of(int row) const {
        const DivergenceUpstream<Problem> of(p, row, dlogits_scale<Problem>(p.scalars, false));
        return {of, TemperingOf<Problem>(of.temperature)};
    }

    __device__ __forceinline__ void reduce(const Row& state, float (&student)[kOfGroup], const float (&teacher)[kOfGroup], int row,
                                           int column) const {
#pragma unroll
        for (int e = 0; e < kOfGroup; ++e) {
            const int read = Teacher::bias ? min(column_of(column, e), p.columns - 1) : 0;
            const Logit z = logit_of<Problem>(student[e], nullptr, 0, p.transform);
            const float t = logit_of<Teacher>(teacher[e], p.teacher_bias, read, p.teacher_transform).value;
            const float dz = state.of.slope(state.tempering.divided(z.value), state.tempering.divided(t), p.beta) * z.derivative;
            student[e] = state.of.counts ? dz : 0.f;
            if constexpr (kSame<Element, Fp16>) student[e] = ptx::clamp_nan(student[e], 65504.f);
        }
        if (row >= p.rows) return;
        Element* const to = static_cast<Element*>(p.dlogits) + row * p.ld;
#pragma unroll
        for (int e = 0; e < kOfGroup; e += 2) {
            const int first = column_of(column, e);
            const float second = first + 1 < p.columns ? student[e + 1] : 0.f;
            if (first < p.columns) *reinterpret_cast<unsigned*>(to + first) = Numeric<Element>::pack(student[e], second);
        }
    }
};

template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void heads_dlogits_sm90(const typename HeadsDlogitsSm90<Problem, Teacher, TileT>::Params& p) {
    prefetch_maps(p.hidden_map, p.weight_map, p.teacher_hidden_map, p.teacher_weight_map);
    HeadsDlogitsSm90<Problem, Teacher, TileT> heads(p);  // behind the launch before
    write_factors<Problem>(p.factors, p.scalars);
    heads.run();
}

}  // namespace flce

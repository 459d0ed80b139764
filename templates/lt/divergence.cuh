// A divergence from a teacher's head: after both heads' products of a stretch of the vocabulary their rows are summed up, or become the
// student's gradient. A warp has two rows, as in forward and dlogits. `Teacher`: the teacher's head as a Problem.
#pragma once

#include "flce/common/heads.cuh"
#include "flce/common/row_outputs.cuh"
#include "flce/lt/dlogits.cuh"
#include "flce/lt/pairs.cuh"

namespace flce {

/// The two rows of both heads that a warp has of a tile, as logits.
template <class Problem, class Teacher>
struct HeadTile {
    LtSums student;
    LtSums teacher;

    /// Retains the tile's logits. For a whole warp.
    __device__ __forceinline__ void store_retained(const RetainedPairs& p, const LtPlace& place, int rows, int column) const {
        const PairBlock block(p, column);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            const int row = place.row(0, h);
#pragma unroll
            for (int j = 0; j < LtPlace::kColumnPieces; j += 2) {
                const int first = place.column(j, 0);
                const unsigned reference = PairBlock::reference_of(
                    {lanes_largest<kPairGroup / 4>(largest(student, j, h)), lanes_largest<kPairGroup / 4>(largest(teacher, j, h))});
                if (row >= rows) continue;
                if (first % kPairGroup == 0) block.references_of(row)[first / kPairGroup] = reference;
                const LogitPair most = PairBlock::references_in(reference);
                const uint4 four = make_uint4(PairBlock::pack(at(j, 2 * h), most), PairBlock::pack(at(j, 2 * h + 1), most),
                                              PairBlock::pack(at(j + 1, 2 * h), most), PairBlock::pack(at(j + 1, 2 * h + 1), most));
                // The next product's operands shall stay in L2.
                __stcs(reinterpret_cast<uint4*>(block.pairs_of(row) + first), four);
            }
        }
    }
    /// Logits in place of the sums of that number in LtSums.
    __device__ __forceinline__ LogitPair at(int j, int e) const { return {student[0][j][e], teacher[0][j][e]}; }
    /// The largest of a row's four neighbours; the lowest finite number where there is none.
    static __device__ __forceinline__ float largest(const LtSums& c, int j, int h) {
        const float first = fmaxf(c[0][j][2 * h], c[0][j][2 * h + 1]);
        return fmaxf(lowest_logit(), fmaxf(first, fmaxf(c[0][j + 1][2 * h], c[0][j + 1][2 * h + 1])));
    }

    /// `first_column`: of the tile in the vocabulary. Columns that do not exist are masked.
    template <class Params>
    __device__ __forceinline__ void load(const Params& p, const LtPlace& place, int tile, int first_column) {
        load_sums(p.sums, p.ld, place, p.rows, tile * kLtTileColumns, p.columns, student);
        load_sums(p.teacher_sums, p.ld, place, p.rows, tile * kLtTileColumns, p.columns, teacher);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            float temperature = 1.f;
            if constexpr (Problem::temperature) temperature = place.row(0, h) < p.rows ? p.temperatures[place.row(0, h)] : 1.f;
            const TemperingOf<Problem> tempering(temperature);
#pragma unroll
            for (int j = 0; j < LtPlace::kColumnPieces; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = first_column + place.column(j, e);
                    const bool is_class = column < vocab_columns<Problem>(p);
                    const int read = min(column, vocab_columns<Problem>(p) - 1);
                    float& s = student[0][j][2 * h + e];
                    float& t = teacher[0][j][2 * h + e];
                    s = is_class ? tempering.divided(logit_of<Problem>(s, p.bias, read, p.transform).value) : masked_logit();
                    t = is_class ? tempering.divided(logit_of<Teacher>(t, p.teacher_bias, read, p.teacher_transform).value)
                                 : masked_logit();
                }
            }
        }
    }
};

/// Walks a block's part of a stretch, tile by tile. `Sums` has what is summed up of a row: add(tile, h) and, at the end, store.
/// kPairs: all of its columns are retained.
template <class Problem, class Teacher, class Sums, bool kPairs = false>
struct HeadsBlock {
    using Params = TemperedOf<Problem, LtDivergenceParams>;
    enum : int { kSmemBytes = 0 };
    enum : int { kThreads = kLtThreads };

    const Params& p;

    __device__ __forceinline__ explicit HeadsBlock(const Params& params) : p(params) {}

    __device__ __forceinline__ void run() {
        wait_for_product();
        LtPlace place;
        place.first_row = (static_cast<int>(blockIdx.x) * (kLtThreads / 32) + LtPlace::warp()) * LtPlace::kRows;
        if (place.first_row >= p.rows) return;
        Sums sums[LtPlace::kRows];
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) sums[h].begin(p, min(place.row(0, h), p.rows - 1));
        const int split = static_cast<int>(blockIdx.y);
        const int tiles = ceil_div(p.columns, kLtTileColumns);
        const int first = static_cast<int>(static_cast<long long>(tiles) * split / p.splits);
        const int end = static_cast<int>(static_cast<long long>(tiles) * (split + 1) / p.splits);
        if constexpr (kPairs) {
            add_pairs_of(place, first, end, sums);
        } else {
            add_tiles(place, first, end, sums);
        }
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            sums[h].template merge_lanes<32>();
            if (LtPlace::lane() != 0 || place.row(0, h) >= p.rows) continue;
            float* const at = p.partials + split * Sums::kCount * p.partial_rows + place.row(0, h);
            if (p.first == 0) sums[h].add_stored(at, p.partial_rows);
            sums[h].store(at, p.partial_rows);
        }
    }

    __device__ __forceinline__ void add_tiles(const LtPlace& place, int first, int end, Sums (&sums)[LtPlace::kRows]) const {
#pragma unroll 1
        for (int tile = first; tile < end; ++tile) {
            const int first_column = p.first_column + tile * kLtTileColumns;
            const bool retained = Problem::retain && first_column < p.retained.columns;
            if constexpr (Problem::retain && Sums::kSecond) {
                if (retained) {
                    add_retained(place, first_column, sums);
                    continue;
                }
            }
            HeadTile<Problem, Teacher> logits;
            logits.load(p, place, tile, first_column);
            if (retained) logits.store_retained(p.retained, place, p.rows, first_column);
#pragma unroll
            for (int h = 0; h < LtPlace::kRows; ++h) {
                sums[h].template add<2 * LtPlace::kColumnPieces>([&](int i) { return logits.at(i / 2, 2 * h + i % 2); });
            }
        }
    }

    /// Adds tiles that are retained. The next one is on its way while one is added.
    __device__ __forceinline__ void add_pairs_of(const LtPlace& place, int first, int end, Sums (&sums)[LtPlace::kRows]) const {
        if (first >= end) return;
        PairTile next;
        next.load_pairs(p.retained, place, p.rows, p.first_column + first * kLtTileColumns);
#pragma unroll 1
        for (int tile = first; tile < end; ++tile) {
            const int column = p.first_column + tile * kLtTileColumns;
            PairTile pairs = next;
            pairs.load_references(p.retained, place, p.rows, column);
            if (tile + 1 < end) next.load_pairs(p.retained, place, p.rows, column + kLtTileColumns);
#pragma unroll
            for (int h = 0; h < LtPlace::kRows; ++h) {
                add_fours<PairTile::kPieces>(sums[h], [&](int i) { return FourPairs{pairs.pairs[h][i], pairs.references[h][i]}; });
            }
        }
    }
    /// Adds a tile that is retained, four pairs at a time.
    __device__ __forceinline__ void add_retained(const LtPlace& place, int column, Sums (&sums)[LtPlace::kRows]) const {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            if (place.row(0, h) >= p.rows) continue;
            add_fours<PairTile::kPieces>(sums[h], [&](int i) {
                FourPairs four;
                four.load(p.retained, place.row(0, h), column + place.column(2 * i, 0));
                return four;
            });
        }
    }
};

template <class Problem, class Teacher, class TileT>
struct DivergenceSumsBlock : HeadsBlock<Problem, Teacher, LaneDivergence<Problem>> {
    using HeadsBlock<Problem, Teacher, LaneDivergence<Problem>>::HeadsBlock;
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_sums(const typename DivergenceSumsBlock<Problem, Teacher, TileT>::Params& p) {
    DivergenceSumsBlock<Problem, Teacher, TileT>(p).run();
}

template <class Problem, class Teacher, class TileT>
struct MixtureBlock : HeadsBlock<Problem, Teacher, LaneMixture<Problem>> {
    using HeadsBlock<Problem, Teacher, LaneMixture<Problem>>::HeadsBlock;
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_mixture(const typename MixtureBlock<Problem, Teacher, TileT>::Params& p) {
    MixtureBlock<Problem, Teacher, TileT>(p).run();
}

template <class Problem, class Teacher, class TileT>
struct PairsBlock : HeadsBlock<Problem, Teacher, LaneMixture<Problem>, true> {
    using HeadsBlock<Problem, Teacher, LaneMixture<Problem>, true>::HeadsBlock;
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_pairs(const typename PairsBlock<Problem, Teacher, TileT>::Params& p) {
    PairsBlock<Problem, Teacher, TileT>(p).run();
}

enum : int { kPartsAtOnce = 6 };  ///< parts of a row's sums that a thread reads together

/// A mixture's sums of a row, as merged_divergence has a divergence's.
__device__ __forceinline__ MixtureTerm merged_mixture(const float* at, int parts, long long part_stride, long long stride) {
    MixtureTerm all{0.f, 0.f};
#pragma unroll 8
    for (int part = 0; part < parts; ++part) {
        all = {all.divergence + at[part * part_stride], all.student + at[part * part_stride + stride]};
    }
    return all;
}

/// A shard's sums of a row, which divergence_outputs merges; sums of nothing where the row is ignored, or the shard has no class. A thread
/// has a row.
template <class Problem>
__device__ __forceinline__ void divergence_shard_sums(const DivergenceShardSumsParams& p) {
    const int row = static_cast<int>(blockIdx.x) * kOutputRows + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kOutputRows || row >= p.rows) return;
    const bool counts = load_target<Problem>(p.targets, p.temperature, row) >= 0 && p.targets.columns > 0;
    const int parts = counts ? p.splits : 0;
    float* const to = p.sums + row;
    if (p.mixture != 0) {
        const MixtureTerm all = merged_mixture(p.partials + row, parts, 2 * p.partial_rows, p.partial_rows);
        to[0] = all.divergence;
        to[p.ld] = all.student;
    } else {
        LaneDivergence<Problem> lane;
        lane.all = merged_divergence<kPartsAtOnce>(p.partials + row, parts, kDivergenceFields * p.partial_rows, p.partial_rows);
        lane.store(to, p.ld);
    }
}

/// Outputs of a row from its sums, merged over the splits, or the shards. Returns the divergence.
template <class Problem>
__device__ __forceinline__ float finish_divergence(const DivergenceOutputsParams& p, int row) {
    const float* const partials = p.partials + row;
    if (p.mixture != 0) {
        const MixtureTerm all = merged_mixture(partials, p.splits, p.split_stride, p.partial_rows);
        p.student_divergence[row] = all.student;
        return all.divergence;
    }
    const DivergenceSums all = merged_divergence<kPartsAtOnce>(partials, p.splits, p.split_stride, p.partial_rows);
    const DivergenceRow found = divergence_row(all, Problem::divergence_form == kReverse);
    p.lse[row] = found.lse;
    p.teacher_lse[row] = found.teacher_lse;
    if (p.entropy != nullptr) p.entropy[row] = found.entropy;
    if (p.teacher_entropy != nullptr) p.teacher_entropy[row] = found.teacher_entropy;
    p.student_divergence[row] = found.kl;
    return found.kl;
}

/// Writes outputs of each row, a thread a row, and with `last` the losses.
template <class Problem>
__device__ __forceinline__ void divergence_outputs(const DivergenceOutputsParams& p) {
    const int row = static_cast<int>(blockIdx.x) * kOutputRows + static_cast<int>(threadIdx.x);
    LossPartial mine{0.f, 0.f, 0.f, 0.f};
    if (threadIdx.x < kOutputRows && row < p.rows) {
        const int target = load_target<Problem>(p.targets, p.temperature, row);
        if (target >= 0) {
            const float share = share_of_token(p.count, p.token_weight, row);
            mine = {finish_divergence<Problem>(p, row) * value_or(p.token_weight, row, 1.f), 0.f, share, share};
        } else {
            p.student_divergence[row] = 0.f;
            if (p.mixture == 0) p.lse[row] = p.teacher_lse[row] = 0.f;
            if (p.entropy != nullptr) p.entropy[row] = 0.f;
            if (p.teacher_entropy != nullptr) p.teacher_entropy[row] = 0.f;
            if (target == kOutOfRange && p.invalid_label != nullptr) {
                atomicMin(p.invalid_label, static_cast<unsigned long long>(p.first_row + row));
            }
        }
        if (p.last != 0 && p.loss != nullptr) p.loss[row] = mine.cross_entropy;
        if (p.last != 0 && p.z_loss != nullptr) p.z_loss[row] = 0.f;
    }
    if (p.last != 0) write_losses<Problem>(p, mine);
}

/// Parameters of dlogits of retained logits.
template <class Problem>
struct RetainedRows {
    using Params = TemperedOf<Problem, LtDivergenceDlogitsParams>;
};

/// Dlogits of retained logits. A row's pairs are on their way while the gradients of the row before it are made.
template <class Problem, class Teacher, class TileT>
struct RetainedDlogits : DlogitsBlock<Problem, RetainedRows<Problem>> {
    using Base = DlogitsBlock<Problem, RetainedRows<Problem>>;
    using Base::Base;
    using Base::column0;
    using Base::kWarpRows;
    using Base::p;
    using Base::place;

    __device__ __forceinline__ void run() {
        wait_for_product();
        write_factors<Problem>(p.factors, p.scalars);
        const float scale = dlogits_scale<Problem>(p.scalars, false) * p.derivative;
        const int first = static_cast<int>(blockIdx.x) * kLtBlockRows + LtPlace::warp() * kWarpRows;
        const int end = min(first + kWarpRows, p.rows);
        const int column = static_cast<int>(p.first_column) + column0;
        PairTile pairs;
        place.first_row = first;
        pairs.load_pairs(p.retained, place, p.rows, column);
#pragma unroll 1
        for (int row = first; row < end; row += LtPlace::kRows) {
            place.first_row = row;
            // A bias's sums and a softcap's slopes leave no registers for both rows' references.
            constexpr bool kFew = Problem::bias || Problem::stores_derivative;
            if constexpr (!kFew) pairs.load_references(p.retained, place, p.rows, column);
#pragma unroll
            for (int h = 0; h < LtPlace::kRows; ++h) {
                float c[LtPlace::kColumnPieces][4];
                place.first_row = row;
                if constexpr (kFew) pairs.load_references(p.retained, place, p.rows, column, h);
                replace_row(pairs, h, row + h, scale, c);
                place.first_row = row + LtPlace::kRows;
                if (place.first_row < end) pairs.load_row(p.retained, place, p.rows, column, h);
                if (row + h < p.rows) this->write(c, h, row + h);
            }
        }
        if constexpr (Problem::bias) {
            if (p.bias_partials != nullptr) this->sum_columns();
        }
    }

    __device__ __forceinline__ void replace_row(const PairTile& pairs, int h, int row, float scale,
                                                float (&c)[LtPlace::kColumnPieces][4]) const {
        const DivergenceUpstream<Problem> of(p, row, scale);
        const LogitDerivative<Problem> derivative(p.transform, of.temperature);
#pragma unroll
        for (int i = 0; i < PairTile::kPieces; ++i) {
            const PairLogs logs(pairs.references[h][i], of.lse, of.teacher_lse);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const unsigned pair = pairs.pair(h, i, e);
                float dz = of.upstream * slope_of_logs(Problem::divergence_form, logs.of(pair), of.of_row, p.beta);
                if constexpr (Problem::stores_derivative) dz *= derivative(PairBlock::unpack(pair, logs.references).student);
                c[2 * i + e / 2][2 * h + e % 2] = of.counts ? dz : 0.f;
            }
        }
    }
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_retained(const typename RetainedDlogits<Problem, Teacher, TileT>::Params& p) {
    RetainedDlogits<Problem, Teacher, TileT>(p).run();
}

using LtRow = float[LtPlace::kColumnPieces][4];

/// The gradients of a warp's rows of sums, for a divergence.
template <class Problem, class Teacher>
struct DivergenceRows {
    using Params = TemperedOf<Problem, LtDivergenceDlogitsParams>;

    static __device__ __forceinline__ void load(const Params& p, const LtPlace& place, int column0, LtSums& c) {
        load_sums(p.sums, p.sums_ld, place, p.rows, column0, p.columns, c);
    }

    static __device__ __forceinline__ void replace(const Params& p, const LtPlace& place, int column0, float scale, LtSums& c) {
        LtSums teacher;
        load_sums(p.teacher_sums, p.sums_ld, place, p.rows, column0, p.columns, teacher);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) replace_row(p, place, column0, place.row(0, h), scale, c[0], teacher[0], h);
    }

    static __device__ __forceinline__ void replace_row(const Params& p, const LtPlace& place, int column0, int row, float scale, LtRow& c,
                                                       const LtRow& teacher, int h) {
        const DivergenceUpstream<Problem> of(p, row, scale);
        const TemperingOf<Problem> tempering(of.temperature);
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = min(column0 + place.column(j, e), p.columns - 1);
                const Logit z = logit_of<Problem>(c[j][2 * h + e], p.bias, column, p.transform);
                const float t = logit_of<Teacher>(teacher[j][2 * h + e], p.teacher_bias, column, p.teacher_transform).value;
                const float slope = of.slope(tempering.divided(z.value), tempering.divided(t), p.beta);
                c[j][2 * h + e] = of.counts ? slope * z.derivative : 0.f;
            }
        }
    }
};

template <class Problem, class Teacher, class TileT>
struct DivergenceDlogits : DlogitsBlock<Problem, DivergenceRows<Problem, Teacher>> {
    using DlogitsBlock<Problem, DivergenceRows<Problem, Teacher>>::DlogitsBlock;
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_dlogits(const typename DivergenceDlogits<Problem, Teacher, TileT>::Params& p) {
    DivergenceDlogits<Problem, Teacher, TileT>(p).run();
}

}  // namespace flce

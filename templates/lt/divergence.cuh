// A divergence from a teacher's head: after both heads' products of a stretch of the vocabulary their rows are summed up, or become the
// student's gradient. A warp has two rows, as in forward and dlogits. `Teacher`: the teacher's head as a Problem.
#pragma once

#include "flce/common/divergence_math.cuh"
#include "flce/common/row_outputs.cuh"
#include "flce/lt/dlogits.cuh"

namespace flce {

/// A logit of `sum` at the vocabulary's `column`, from which on `bias` begins.
template <class Problem>
__device__ __forceinline__ Logit logit_of(float sum, const void* bias, int column, const float* transform) {
    if constexpr (Problem::bias) sum += to_float(static_cast<const typename Problem::Element*>(bias)[column]);
    return Problem::transform(sum, transform);
}

/// One head's part of LtRetainedHeads.
struct RetainedHead {
    unsigned short* values;  ///< [tokens, kLtTileColumns] of the block, from the launch's first row on
    float* largest;          ///< [tokens]

    /// `head`: 0 the student's, 1 the teacher's. `column`: of the vocabulary.
    __device__ __forceinline__ RetainedHead(const LtRetainedHeads& p, int head, int column) {
        char* const block = static_cast<char*>(p.data) + column / kLtTileColumns * p.block_bytes;
        values = reinterpret_cast<unsigned short*>(block) + (head * p.tokens + p.first_row) * kLtTileColumns;
        largest = reinterpret_cast<float*>(block + 4ll * p.tokens * kLtTileColumns) + head * p.tokens + p.first_row;
    }

    /// A warp's rows become logits; rows that do not exist are 0.
    __device__ __forceinline__ void load(const LtPlace& place, int rows, LtSums& c) const {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            const bool exists = place.row(0, h) < rows;
            const float most = exists ? largest[place.row(0, h)] : 0.f;
            const unsigned short* const row = values + static_cast<long long>(place.row(0, h)) * kLtTileColumns;
#pragma unroll
            for (int j = 0; j < LtPlace::kColumnPieces; j += 2) {
                const uint2 words = exists ? *reinterpret_cast<const uint2*>(row + place.column(j, 0)) : make_uint2(0u, 0u);
                c[0][j][2 * h] = Numeric<Fp16>::first(words.x) + most;
                c[0][j][2 * h + 1] = Numeric<Fp16>::second(words.x) + most;
                c[0][j + 1][2 * h] = Numeric<Fp16>::first(words.y) + most;
                c[0][j + 1][2 * h + 1] = Numeric<Fp16>::second(words.y) + most;
            }
        }
    }

    /// For a whole warp.
    __device__ __forceinline__ void store(const LtPlace& place, int rows, const LtSums& c) const {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            float most = lowest_logit();
#pragma unroll
            for (int j = 0; j < LtPlace::kColumnPieces; ++j) most = fmaxf(most, fmaxf(c[0][j][2 * h], c[0][j][2 * h + 1]));
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
            if (place.row(0, h) >= rows) continue;
            if (LtPlace::lane() == 0) largest[place.row(0, h)] = most;
            unsigned short* const row = values + static_cast<long long>(place.row(0, h)) * kLtTileColumns;
#pragma unroll
            for (int j = 0; j < LtPlace::kColumnPieces; j += 2) {
                const uint2 words = make_uint2(Numeric<Fp16>::pack(c[0][j][2 * h] - most, c[0][j][2 * h + 1] - most),
                                               Numeric<Fp16>::pack(c[0][j + 1][2 * h] - most, c[0][j + 1][2 * h + 1] - most));
                __stcs(reinterpret_cast<uint2*>(row + place.column(j, 0)), words);  // the next product's operands shall stay in L2
            }
        }
    }
};

/// The two rows of both heads that a warp has of a tile, as logits.
template <class Problem, class Teacher>
struct HeadTile {
    LtSums student;
    LtSums teacher;

    template <class Params>
    __device__ __forceinline__ void load_retained(const Params& p, const LtPlace& place, int first_column) {
        RetainedHead(p.retained, 0, first_column).load(place, p.rows, student);
        RetainedHead(p.retained, 1, first_column).load(place, p.rows, teacher);
    }
    template <class Params>
    __device__ __forceinline__ void store_retained(const Params& p, const LtPlace& place, int first_column) const {
        RetainedHead(p.retained, 0, first_column).store(place, p.rows, student);
        RetainedHead(p.retained, 1, first_column).store(place, p.rows, teacher);
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
template <class Problem, class Teacher, class Sums>
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
#pragma unroll 1
        for (int tile = first; tile < end; ++tile) {
            HeadTile<Problem, Teacher> logits;
            const int first_column = p.first_column + tile * kLtTileColumns;
            const bool retained = Problem::retain && first_column < p.retained.columns;
            if (retained && Sums::kSecond) {
                logits.load_retained(p, place, first_column);
            } else {
                logits.load(p, place, tile, first_column);
                if (retained) logits.store_retained(p, place, first_column);
            }
#pragma unroll
            for (int h = 0; h < LtPlace::kRows; ++h) sums[h].add(logits.student[0], logits.teacher[0], h);
        }
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            sums[h].merge_lanes();
            if (LtPlace::lane() != 0 || place.row(0, h) >= p.rows) continue;
            float* const at = p.partials + split * Sums::kCount * p.partial_rows + place.row(0, h);
            if (p.first == 0) sums[h].add_stored(at, p.partial_rows);
            sums[h].store(at, p.partial_rows);
        }
    }
};

/// Exponentials of logits that are summed up: fp32 operands have exact ones.
template <class Problem>
using HeadMath = Select<Numeric<typename Problem::Element>::kHalf, FastMath, ExactDivergence>;

/// ExactDivergence's functions for 16-bit operands: the logarithm's error is a unit of the last place of 1, and so is the exponential's.
struct FastDivergence {
    static __device__ __forceinline__ float exp(float x) { return FastMath::exp(x); }
    static __device__ __forceinline__ float log_mixture(float ratio, float beta) {
        const float below = FastMath::exp(-fabsf(ratio));
        const float of_other = ratio <= 0.f ? beta : 1.f - beta;
        return fmaxf(ratio, 0.f) + ptx::lg2_approx_ftz(__fmaf_rn(of_other, below - 1.f, 1.f)) * ln_2();
    }
};

template <class Problem>
using DivergenceMath = Select<Numeric<typename Problem::Element>::kHalf, FastDivergence, ExactDivergence>;

using LtRow = float[LtPlace::kColumnPieces][4];

/// Fields of sums in memory, `stride` numbers apart.
enum : int { kDivergenceFields = sizeof(DivergenceSums) / sizeof(float) };
__device__ __forceinline__ DivergenceSums load_divergence(const float* at, long long stride) {
    return {{at[0], at[stride], at[2 * stride], at[3 * stride]}, {at[4 * stride], at[5 * stride], at[6 * stride], at[7 * stride]}};
}

/// Sums of a walk that does not know the normalizers.
template <class Problem>
struct LaneDivergence {
    enum : int { kCount = kDivergenceFields };
    enum : bool { kSecond = false };
    DivergenceSums all;

    template <class Params>
    __device__ __forceinline__ void begin(const Params& /*p*/, int /*row*/) {
        all = divergence_of_nothing();
    }
    __device__ __forceinline__ void add(const LtRow& student, const LtRow& teacher, int h) {
        float student_max = all.student.max;
        float teacher_max = all.teacher.max;
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                student_max = fmaxf(student_max, student[j][2 * h + e]);
                teacher_max = fmaxf(teacher_max, teacher[j][2 * h + e]);
            }
        }
        move_to(all, student_max, teacher_max);
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float student_below = student[j][2 * h + e] - student_max;
                const float teacher_below = teacher[j][2 * h + e] - teacher_max;
                const float gap = teacher_below - student_below;
                add_class(all.student, HeadMath<Problem>::exp(student_below), student_below, gap);
                add_class(all.teacher, HeadMath<Problem>::exp(teacher_below), teacher_below, gap);
            }
        }
    }
    __device__ __forceinline__ void merge_lanes() {
        float student_max = all.student.max;
        float teacher_max = all.teacher.max;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            student_max = fmaxf(student_max, __shfl_xor_sync(0xffffffffu, student_max, lanes));
            teacher_max = fmaxf(teacher_max, __shfl_xor_sync(0xffffffffu, teacher_max, lanes));
        }
        move_to(all, student_max, teacher_max);
        add_up(all.student);
        add_up(all.teacher);
    }
    static __device__ __forceinline__ void add_up(HeadSums& head) {
        head.exp_sum = warp_total(head.exp_sum);
        head.exp_z_sum = warp_total(head.exp_z_sum);
        head.gap_sum = warp_total(head.gap_sum);
    }
    __device__ __forceinline__ void add_stored(const float* at, long long stride) { all = merge(load_divergence(at, stride), all); }
    __device__ __forceinline__ void store(float* at, long long stride) const {
        const HeadSums& s = all.student;
        const HeadSums& t = all.teacher;
        const float fields[kCount] = {s.max, s.exp_sum, s.exp_z_sum, s.gap_sum, t.max, t.exp_sum, t.exp_z_sum, t.gap_sum};
#pragma unroll
        for (int i = 0; i < kCount; ++i) at[i * stride] = fields[i];
    }
};

/// Sums of a mixture's divergences.
template <class Problem>
struct LaneMixture {
    enum : int { kCount = sizeof(MixtureTerm) / sizeof(float) };
    enum : bool { kSecond = true };  ///< a walk that finds what the first has retained
    MixtureTerm all;
    float lse;
    float teacher_lse;
    float beta;

    template <class Params>
    __device__ __forceinline__ void begin(const Params& p, int row) {
        all = {0.f, 0.f};
        lse = p.lse[row];
        teacher_lse = p.teacher_lse[row];
        beta = p.beta;
    }
    __device__ __forceinline__ void add(const LtRow& student, const LtRow& teacher, int h) {
#pragma unroll
        for (int j = 0; j < LtPlace::kColumnPieces; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const MixtureTerm term =
                    mixture_term<DivergenceMath<Problem>>(student[j][2 * h + e] - lse, teacher[j][2 * h + e] - teacher_lse, beta);
                all.divergence += term.divergence;
                all.student += term.student;
            }
        }
    }
    __device__ __forceinline__ void merge_lanes() { all = {warp_total(all.divergence), warp_total(all.student)}; }
    __device__ __forceinline__ void add_stored(const float* at, long long stride) {
        all.divergence += at[0];
        all.student += at[stride];
    }
    __device__ __forceinline__ void store(float* at, long long stride) const {
        at[0] = all.divergence;
        at[stride] = all.student;
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

/// A row's sums of `parts` parts, which lie `part_stride` numbers apart, and their fields `stride`.
__device__ __forceinline__ DivergenceSums merged_divergence(const float* at, int parts, long long part_stride, long long stride) {
    DivergenceSums all = divergence_of_nothing();
    for (int part = 0; part < parts; ++part) all = merge(all, load_divergence(at + part * part_stride, stride));
    return all;
}
__device__ __forceinline__ MixtureTerm merged_mixture(const float* at, int parts, long long part_stride, long long stride) {
    MixtureTerm all{0.f, 0.f};
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
        lane.all = merged_divergence(p.partials + row, parts, kDivergenceFields * p.partial_rows, p.partial_rows);
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
    const DivergenceSums all = merged_divergence(partials, p.splits, p.split_stride, p.partial_rows);
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

/// Numbers that a row's gradients of a divergence need beside its logits. An ignored row's are 0.
template <class Problem>
struct DivergenceUpstream {
    float upstream = 0.f;
    float lse = 0.f;
    float teacher_lse = 0.f;
    float of_row = 0.f;
    float temperature = 1.f;
    bool counts = false;

    template <class Params>
    __device__ __forceinline__ DivergenceUpstream(const Params& p, int row, float scale) {
        if (row >= p.rows) return;
        const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
        if (target.target < 0) return;
        counts = true;
        upstream = static_cast<const float4*>(p.coefficients)[row].x * scale;
        lse = target.lse;
        teacher_lse = p.teacher_lse[row];
        of_row = p.student_divergence[row];
        if constexpr (Problem::temperature) temperature = p.temperatures[row];
    }
    /// `student`, `teacher`: logits.
    __device__ __forceinline__ float slope(float student, float teacher, float beta) const {
        return upstream *
               divergence_slope<DivergenceMath<Problem>>(Problem::divergence_form, student - lse, teacher - teacher_lse, of_row, beta);
    }
};

/// The gradients of a warp's rows of retained logits.
template <class Problem>
struct RetainedRows {
    using Params = TemperedOf<Problem, LtDivergenceDlogitsParams>;

    static __device__ __forceinline__ void load(const Params& p, const LtPlace& place, int column0, LtSums& c) {
        RetainedHead(p.retained, 0, static_cast<int>(p.first_column) + column0).load(place, p.rows, c);
    }
    static __device__ __forceinline__ void replace(const Params& p, const LtPlace& place, int column0, float scale, LtSums& c) {
        LtSums teacher;
        RetainedHead(p.retained, 1, static_cast<int>(p.first_column) + column0).load(place, p.rows, teacher);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
            const DivergenceUpstream<Problem> of(p, place.row(0, h), scale * p.derivative);
            const LogitDerivative<Problem> derivative(p.transform, of.temperature);
#pragma unroll
            for (int j = 0; j < LtPlace::kColumnPieces; ++j) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float z = c[0][j][2 * h + e];
                    float dz = of.slope(z, teacher[0][j][2 * h + e], p.beta);
                    if constexpr (Problem::stores_derivative) dz *= derivative(z);
                    c[0][j][2 * h + e] = of.counts ? dz : 0.f;
                }
            }
        }
    }
};

template <class Problem, class Teacher, class TileT>
struct RetainedDlogits : DlogitsBlock<Problem, RetainedRows<Problem>> {
    using DlogitsBlock<Problem, RetainedRows<Problem>>::DlogitsBlock;
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_retained(const typename RetainedDlogits<Problem, Teacher, TileT>::Params& p) {
    RetainedDlogits<Problem, Teacher, TileT>(p).run();
}

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

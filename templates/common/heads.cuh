// Sums of both heads of a divergence, in the threads that share a row, and pairs of logits that are retained.
#pragma once

#include "flce/common/divergence_math.cuh"
#include "flce/common/heads_params.cuh"
#include "flce/common/logit_epilogue.cuh"

namespace flce {

/// A logit of `sum` at the vocabulary's `column`, from which on `bias` begins.
template <class Problem>
__device__ __forceinline__ Logit logit_of(float sum, const void* bias, int column, const float* transform) {
    if constexpr (Problem::bias) sum += to_float(static_cast<const typename Problem::Element*>(bias)[column]);
    return Problem::transform(sum, transform);
}

/// Exponentials of logits that are summed up: fp32 operands have exact ones, and long sums of products powers of two, as in PowersAbove.
struct HeadPowers {
    static __device__ __forceinline__ float exp(float x) { return ptx::ex2_approx_ftz(x * log2_e()); }
};
template <class Problem>
using HeadMath = Select<!Numeric<typename Problem::Element>::kHalf, ExactDivergence, Select<kPowers<Problem>, HeadPowers, FastMath>>;

/// ExactDivergence's functions for 16-bit operands: the logarithm's error is a unit of the last place of 1, and so is the exponential's.
struct FastDivergence {
    static __device__ __forceinline__ float exp(float x) { return FastMath::exp(x); }
    static __device__ __forceinline__ float log_mixture(float ratio, float beta) {
        const float below = FastMath::exp(-fabsf(ratio));
        const float of_other = ratio <= 0.f ? beta : 1.f - beta;
        return fmaxf(ratio, 0.f) + ptx::lg2_approx_ftz(__fmaf_rn(of_other, below - 1.f, 1.f)) * ln_2();
    }
};

/// mixture_term for 16-bit operands, without branches: a class that one head rules out has a ratio at the end of the exponential's range,
/// from which the other's share of the mixture follows.
__device__ __forceinline__ MixtureTerm fast_mixture_term(float log_p, float log_q, float beta) {
    constexpr float kFar = 80.f;
    const float ratio = fminf(fmaxf(log_q - log_p, -kFar), kFar);
    const float above_p = FastDivergence::log_mixture(ratio, beta);
    const float student = -FastMath::exp(log_p) * above_p;
    return {__fmaf_rn(1.f - beta, student, beta * FastMath::exp(log_q) * (ratio - above_p)), student};
}

template <class Problem>
using DivergenceMath = Select<Numeric<typename Problem::Element>::kHalf, FastDivergence, ExactDivergence>;

/// Fields of sums in memory, `stride` numbers apart.
enum : int { kDivergenceFields = sizeof(DivergenceSums) / sizeof(float) };
__device__ __forceinline__ DivergenceSums load_divergence(const float* at, long long stride) {
    return {{at[0], at[stride], at[2 * stride], at[3 * stride]}, {at[4 * stride], at[5 * stride], at[6 * stride], at[7 * stride]}};
}

/// A row's sums of `parts` parts, which lie `part_stride` numbers apart, and their fields `stride`. kAtOnce: parts that are read together,
/// since a thread waits for memory most of its time.
template <int kAtOnce>
__device__ __forceinline__ DivergenceSums merged_divergence(const float* at, int parts, long long part_stride, long long stride) {
    DivergenceSums all = divergence_of_nothing();
#pragma unroll 1
    for (int first = 0; first < parts; first += kAtOnce) {
        DivergenceSums some[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            some[i] = first + i < parts ? load_divergence(at + (first + i) * part_stride, stride) : divergence_of_nothing();
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) all = merge(all, some[i]);
    }
    return all;
}

/// Logits of one class, or the largest logits of some.
struct LogitPair {
    float student;
    float teacher;
};

/// Sums over, and the largest of, kLanes neighbouring lanes of a warp; all of them get the result, the same bits each.
template <int kLanes>
__device__ __forceinline__ float lanes_total(float of_lane) {
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) of_lane += __shfl_xor_sync(0xffffffffu, of_lane, lanes);
    return of_lane;
}
template <int kLanes>
__device__ __forceinline__ float lanes_largest(float of_lane) {
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) of_lane = fmaxf(of_lane, __shfl_xor_sync(0xffffffffu, of_lane, lanes));
    return of_lane;
}

/// A block of RetainedPairs, from the launch's first row on.
struct PairBlock {
    const RetainedPairs& p;
    long long block;

    /// `column`: of the vocabulary, in the block.
    __device__ __forceinline__ PairBlock(const RetainedPairs& pairs, int column) : p(pairs), block(column / kPairColumns) {}
    /// The kPairColumns pairs of a row.
    __device__ __forceinline__ unsigned* pairs_of(int row) const {
        return reinterpret_cast<unsigned*>(static_cast<char*>(p.data) + block * p.block_bytes + (p.first_row + row) * p.row_bytes);
    }
    /// The kPairGroups references of a row.
    __device__ __forceinline__ unsigned* references_of(int row) const {
        return reinterpret_cast<unsigned*>(static_cast<char*>(p.data) + p.references + block * p.reference_block_bytes +
                                           (p.first_row + row) * p.reference_row_bytes);
    }
    /// References of a group by its largest logits. They are finite, so that a logit of −∞ stays one.
    static __device__ __forceinline__ unsigned reference_of(const LogitPair& largest) {
        return Numeric<Bf16>::pack(fmaxf(largest.student, -0x1p100f), fmaxf(largest.teacher, -0x1p100f));
    }
    static __device__ __forceinline__ LogitPair references_in(unsigned word) {
        return {Numeric<Bf16>::first(word), Numeric<Bf16>::second(word)};
    }
    static __device__ __forceinline__ unsigned pack(const LogitPair& logits, const LogitPair& reference) {
        return Numeric<Fp16>::pack(logits.student - reference.student, logits.teacher - reference.teacher);
    }
    static __device__ __forceinline__ LogitPair unpack(unsigned pair, const LogitPair& reference) {
        return {Numeric<Fp16>::first(pair) + reference.student, Numeric<Fp16>::second(pair) + reference.teacher};
    }
};

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
    /// Adds kCount classes; `of`: the logits of each.
    template <int kCount, class Of>
    __device__ __forceinline__ void add(const Of& of) {
        float student_max = all.student.max;
        float teacher_max = all.teacher.max;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            student_max = fmaxf(student_max, of(i).student);
            teacher_max = fmaxf(teacher_max, of(i).teacher);
        }
        move_to(all, student_max, teacher_max);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float student_below = of(i).student - student_max;
            const float teacher_below = of(i).teacher - teacher_max;
            const float gap = teacher_below - student_below;
            add_class(all.student, HeadMath<Problem>::exp(student_below), student_below, gap);
            add_class(all.teacher, HeadMath<Problem>::exp(teacher_below), teacher_below, gap);
        }
    }
    template <int kLanes>
    __device__ __forceinline__ void merge_lanes() {
        move_to(all, lanes_largest<kLanes>(all.student.max), lanes_largest<kLanes>(all.teacher.max));
        add_up<kLanes>(all.student);
        add_up<kLanes>(all.teacher);
    }
    template <int kLanes>
    static __device__ __forceinline__ void add_up(HeadSums& head) {
        head.exp_sum = lanes_total<kLanes>(head.exp_sum);
        head.exp_z_sum = lanes_total<kLanes>(head.exp_z_sum);
        head.gap_sum = lanes_total<kLanes>(head.gap_sum);
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
    template <int kCount, class Of>
    __device__ __forceinline__ void add(const Of& of) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const MixtureTerm term = term_of(of(i).student - lse, of(i).teacher - teacher_lse);
            all.divergence += term.divergence;
            all.student += term.student;
        }
    }
    __device__ __forceinline__ MixtureTerm term_of(float log_p, float log_q) const {
        if constexpr (Numeric<typename Problem::Element>::kHalf) return fast_mixture_term(log_p, log_q, beta);
        return mixture_term<ExactDivergence>(log_p, log_q, beta);
    }
    template <int kLanes>
    __device__ __forceinline__ void merge_lanes() {
        all = {lanes_total<kLanes>(all.divergence), lanes_total<kLanes>(all.student)};
    }
    __device__ __forceinline__ void add_stored(const float* at, long long stride) {
        all.divergence += at[0];
        all.student += at[stride];
    }
    __device__ __forceinline__ void store(float* at, long long stride) const {
        at[0] = all.divergence;
        at[stride] = all.student;
    }
};

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

}  // namespace flce

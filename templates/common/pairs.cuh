// Retained pairs of logits as a walk over a row reads them: a mixture's sums, and the student's gradients in the place of pairs. Pairs are
// rounded to 2^-11, so that logarithms of probabilities are taken to base 2, as the hardware's exponentials want them, and their products'
// rounding is not made up for.
#pragma once

#include "flce/common/heads.cuh"

namespace flce {

/// Logarithms of a row's probabilities of both heads, to base 2, from pairs of one group.
struct PairLogs {
    LogitPair references;
    float student;  ///< logarithm at the reference, and so is `teacher`
    float teacher;

    __device__ __forceinline__ PairLogs(unsigned word, float lse, float teacher_lse)
        : references(PairBlock::references_in(word)),
          student((references.student - lse) * log2_e()),
          teacher((references.teacher - teacher_lse) * log2_e()) {}
    __device__ __forceinline__ LogitPair of(unsigned pair) const {
        return {__fmaf_rn(Numeric<Fp16>::first(pair), log2_e(), student), __fmaf_rn(Numeric<Fp16>::second(pair), log2_e(), teacher)};
    }
};

/// log2(m / p) of one class, as FastDivergence::log_mixture. The ratio of both probabilities is cut off where one head rules the class out:
/// the other's share of the mixture follows from such a ratio too.
__device__ __forceinline__ float log2_mixture(const LogitPair& logs, float beta) {
    constexpr float kFar = 115.f;
    const float ratio = fminf(fmaxf(logs.teacher - logs.student, -kFar), kFar);
    const float of_other = ratio <= 0.f ? beta : 1.f - beta;
    return fmaxf(ratio, 0.f) + ptx::lg2_approx_ftz(__fmaf_rn(of_other, ptx::ex2_approx_ftz(-fabsf(ratio)) - 1.f, 1.f));
}

/// Sums of a mixture over classes, logarithms to base 2.
struct PairMixture {
    float both = 0.f;     ///< Σ p·log2(m / p) + q·log2(m / q)
    float student = 0.f;  ///< Σ p·log2(m / p)

    /// Adds a class. One exponential is of the larger probability; the smaller one follows from it and the ratio, cut off as above.
    __device__ __forceinline__ void add(const LogitPair& logs, float beta) {
        const float ratio = logs.teacher - logs.student;
        const float far = fminf(fabsf(ratio), 115.f);
        const float below = ptx::ex2_approx_ftz(-far);
        const float larger = ptx::ex2_approx_ftz(fmaxf(logs.student, logs.teacher));
        const float smaller = larger * below;
        const float above_larger = ptx::lg2_approx_ftz(__fmaf_rn(ratio <= 0.f ? beta : 1.f - beta, below - 1.f, 1.f));
        const float above_smaller = far + above_larger;
        both = __fmaf_rn(larger, above_larger, both);
        both = __fmaf_rn(smaller, above_smaller, both);
        student = __fmaf_rn(ratio <= 0.f ? larger : smaller, ratio <= 0.f ? above_larger : above_smaller, student);
    }
    /// The row's terms. They are NaN where a normalizer is no number, which the larger of two logarithms need not show.
    __device__ __forceinline__ MixtureTerm term(float lse, float teacher_lse, float beta) const {
        const float of_student = __fmaf_rn(student, -ln_2(), (lse - lse) + (teacher_lse - teacher_lse));
        return {__fmaf_rn(beta * (student - both), ln_2(), (1.f - beta) * of_student), of_student};
    }
};

/// Derivative of a row's divergence by the student's logit of one class, from logarithms to base 2: divergence_slope.
__device__ __forceinline__ float slope_of_logs(int form, const LogitPair& logs, float of_row, float beta) {
    const float p = ptx::ex2_approx_ftz(logs.student);
    if (form == kForward) return p - ptx::ex2_approx_ftz(logs.teacher);
    if (form == kMixture) return (1.f - beta) * p * -__fmaf_rn(log2_mixture(logs, beta), ln_2(), of_row);
    return p == 0.f ? 0.f : p * __fmaf_rn(logs.student - logs.teacher, ln_2(), -of_row);
}

/// The factor by which gradients are stored in the place of pairs, or its inverse: in fp16 a power of two that brings a row's bound just
/// under 2^15, as dlogits_scale does. `of_row`: student_divergence of the token.
template <class Problem>
__device__ __forceinline__ float pair_gradient_scale(float of_row, bool inverse) {
    if constexpr (!kSame<typename Problem::Element, Fp16>) return 1.f;
    const unsigned exponent = min(__float_as_uint(2.f * (fabsf(of_row) + 1.f)) >> 23, 254u);
    return __uint_as_float((inverse ? exponent - 14u : 268u - exponent) << 23);
}

/// Four neighbouring pairs of a row, from `column` on, and their references. Classes past the vocabulary are −∞.
struct FourPairs {
    uint4 pairs;
    unsigned references;

    __device__ __forceinline__ void load(const RetainedPairs& p, int row, int column) {
        const PairBlock block(p, column);
        const bool written = column / kPairGroup * kPairGroup < p.columns;
        load(block.pairs_of(row) + column % kPairColumns, written);
        references = written ? block.references_of(row)[column % kPairColumns / kPairGroup] : 0u;
    }
    /// `written`: whether their group is, of which there is nothing past the vocabulary.
    __device__ __forceinline__ void load(const unsigned* at, bool written) {
        constexpr unsigned kNone = 0xfc00fc00u;
        pairs = written ? __ldcs(reinterpret_cast<const uint4*>(at)) : make_uint4(kNone, kNone, kNone, kNone);
    }
    __device__ __forceinline__ unsigned pair(int e) const { return e < 2 ? (e == 0 ? pairs.x : pairs.y) : (e == 2 ? pairs.z : pairs.w); }
};

/// A row of retained pairs that become gradients in their place: all of its pairs lie side by side, and so do its references. A gradient
/// lies at or before its pair, which has to be read before.
template <class Problem>
struct PairRow {
    using Element = typename Problem::Element;
    static_assert(sizeof(Element) == 2, "a gradient lies in half of its pair's place");

    unsigned* pairs;
    const unsigned* references;
    bool counts;
    float temperature = 1.f;
    float lse = 0.f;
    float teacher_lse = 0.f;
    float of_row = 0.f;  ///< student_divergence of the token
    float scale = 1.f;

    /// `p`: TemperedOf ForwardParams, with retained pairs.
    template <class Params>
    __device__ __forceinline__ PairRow(const Params& p, int row)
        : pairs(PairBlock(p.retained, 0).pairs_of(row)), references(PairBlock(p.retained, 0).references_of(row)) {
        const float* temperatures = nullptr;
        if constexpr (Problem::temperature) temperatures = p.temperatures;
        counts = load_target<Problem>(p.targets, temperatures, row) >= 0;
        if constexpr (Problem::temperature) {
            if (counts) temperature = temperatures[row];
        }
    }
    /// Numbers of a row that counts.
    __device__ __forceinline__ void set(float lse_, float teacher_lse_, float of_row_) {
        lse = lse_;
        teacher_lse = teacher_lse_;
        of_row = of_row_;
        scale = pair_gradient_scale<Problem>(of_row, false);
    }

    /// Gradients of four neighbours, packed as they are stored.
    __device__ __forceinline__ uint2 gradients_of(const FourPairs& four, const LogitDerivative<Problem>& derivative, float beta) const {
        const PairLogs logs(four.references, lse, teacher_lse);
        float slopes[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const unsigned pair = four.pair(e);
            float slope = slope_of_logs(Problem::divergence_form, logs.of(pair), of_row, beta);
            if constexpr (Problem::stores_derivative) slope *= derivative(PairBlock::unpack(pair, logs.references).student);
            slopes[e] = counts ? slope : 0.f;
            if constexpr (kSame<Element, Fp16>) slopes[e] = ptx::clamp_nan(slopes[e] * scale, 65504.f);
        }
        return make_uint2(Numeric<Element>::pack(slopes[0], slopes[1]), Numeric<Element>::pack(slopes[2], slopes[3]));
    }
    __device__ __forceinline__ void store(int column, const uint2& gradients) const {
        *reinterpret_cast<uint2*>(reinterpret_cast<Element*>(pairs) + column) = gradients;
    }
};

/// kFours times 128 columns of such a row, for a warp: a lane has four neighbours of each.
template <int kFours>
struct PairTurn {
    enum : int { kCount = kFours };
    enum : int { kColumns = 128 * kFours };

    FourPairs fours[kFours];

    /// Columns from `first` on. `written`: columns of all groups, past which there is nothing.
    __device__ __forceinline__ void load(const unsigned* pairs, int first, int lane, int written) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            const int column = first + i * 128 + lane * 4;
            fours[i].load(pairs + column, column < written);
        }
    }
    /// The lane's i-th four, for a whole warp. `reference`: a lane's of 32 groups, of which the turn's first is `group`.
    __device__ __forceinline__ FourPairs four(int i, unsigned reference, int group, int lane) const {
        return {fours[i].pairs, __shfl_sync(0xffffffffu, reference, group + 128 / kPairGroup * i + lane / 16)};
    }
};
/// A lane's reference, of 32 groups that begin with `group`.
__device__ __forceinline__ unsigned lane_reference(const unsigned* references, int group, int lane, int written) {
    return (group + lane) * kPairGroup < written ? references[group + lane] : 0u;
}
/// Columns of all groups that are written.
__device__ __forceinline__ int written_columns(const RetainedPairs& p) { return ceil_div(p.columns, +kPairGroup) * kPairGroup; }

}  // namespace flce

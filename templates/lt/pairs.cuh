// Walks over retained pairs of logits: a mixture's sums, and the student's gradients. Pairs are rounded to 2^-11, so that logarithms of
// probabilities are taken to base 2, as the hardware's exponentials want them, and their products' rounding is not made up for.
#pragma once

#include "flce/common/heads.cuh"
#include "flce/lt/sums.cuh"

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

/// Pairs of a warp's rows in a block. A lane has four neighbours of every 128 columns.
struct PairTile {
    enum : int { kPieces = LtPlace::kColumnPieces / 2 };
    uint4 pairs[LtPlace::kRows][kPieces];
    unsigned references[LtPlace::kRows][kPieces];

    /// `column`: of the vocabulary. Rows that do not exist are −∞, and so are groups past the vocabulary, which nobody has written.
    __device__ __forceinline__ PairTile(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
        load_pairs(p, place, rows, column);
        load_references(p, place, rows, column);
    }
    PairTile() = default;
    __device__ __forceinline__ void load_pairs(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
        constexpr unsigned kNone = 0xfc00fc00u;
        const PairBlock block(p, column);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const auto* const at = reinterpret_cast<const uint4*>(block.pairs + place.row(0, h) * static_cast<long long>(kPairColumns) +
                                                                      place.column(2 * i, 0));
                pairs[h][i] = has(p, place, rows, column, h, i) ? __ldcs(at) : make_uint4(kNone, kNone, kNone, kNone);
            }
        }
    }
    __device__ __forceinline__ void load_references(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
        const PairBlock block(p, column);
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) {
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const auto* const at =
                    block.references + place.row(0, h) * static_cast<long long>(kPairGroups) + place.column(2 * i, 0) / kPairGroup;
                references[h][i] = has(p, place, rows, column, h, i) ? *at : 0u;
            }
        }
    }
    static __device__ __forceinline__ bool has(const RetainedPairs& p, const LtPlace& place, int rows, int column, int h, int i) {
        return place.row(0, h) < rows && column + place.column(2 * i, 0) / kPairGroup * kPairGroup < p.columns;
    }
    __device__ __forceinline__ unsigned pair(int h, int i, int e) const {
        const uint4& four = pairs[h][i];
        return e < 2 ? (e == 0 ? four.x : four.y) : (e == 2 ? four.z : four.w);
    }
};

/// log2(m / p) of one class from log2(q / p), as FastDivergence::log_mixture.
__device__ __forceinline__ float log2_mixture(float ratio, float beta) {
    const float below = ptx::ex2_approx_ftz(-fabsf(ratio));
    const float of_other = ratio <= 0.f ? beta : 1.f - beta;
    return fmaxf(ratio, 0.f) + ptx::lg2_approx_ftz(__fmaf_rn(of_other, below - 1.f, 1.f));
}
/// log2(q / p), cut off where one head rules the class out: the other's share of the mixture follows from such a ratio too.
__device__ __forceinline__ float log2_ratio(const LogitPair& logs) {
    constexpr float kFar = 115.f;
    return fminf(fmaxf(logs.teacher - logs.student, -kFar), kFar);
}

/// A mixture's sums of a warp's rows over a block of pairs.
template <class Problem>
__device__ __forceinline__ void add_pairs(const PairTile& tile, LaneMixture<Problem> (&sums)[LtPlace::kRows]) {
#pragma unroll
    for (int h = 0; h < LtPlace::kRows; ++h) {
        LaneMixture<Problem>& of_row = sums[h];
        MixtureTerm all{0.f, 0.f};
#pragma unroll
        for (int i = 0; i < PairTile::kPieces; ++i) {
            const PairLogs logs(tile.references[h][i], of_row.lse, of_row.teacher_lse);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const LogitPair of = logs.of(tile.pair(h, i, e));
                const float ratio = log2_ratio(of);
                const float above_p = log2_mixture(ratio, of_row.beta);
                all.student = __fmaf_rn(-ptx::ex2_approx_ftz(of.student), above_p, all.student);
                all.divergence = __fmaf_rn(ptx::ex2_approx_ftz(of.teacher), ratio - above_p, all.divergence);
            }
        }
        of_row.all.student = __fmaf_rn(all.student, ln_2(), of_row.all.student);
        of_row.all.divergence += ln_2() * __fmaf_rn(1.f - of_row.beta, all.student, of_row.beta * all.divergence);
    }
}

/// Derivative of a row's divergence by the student's logit of one class, from logarithms to base 2: divergence_slope.
__device__ __forceinline__ float slope_of_logs(int form, const LogitPair& logs, float of_row, float beta) {
    const float p = ptx::ex2_approx_ftz(logs.student);
    if (form == kForward) return p - ptx::ex2_approx_ftz(logs.teacher);
    if (form == kMixture) return (1.f - beta) * p * -__fmaf_rn(log2_mixture(log2_ratio(logs), beta), ln_2(), of_row);
    return p == 0.f ? 0.f : p * __fmaf_rn(logs.student - logs.teacher, ln_2(), -of_row);
}

}  // namespace flce

// Walks over retained pairs of logits: a mixture's sums, and the student's gradients, of a chunk or in the place of pairs. Pairs are
// rounded to 2^-11, so that logarithms of probabilities are taken to base 2, as the hardware's exponentials want them, and their products'
// rounding is not made up for.
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

/// A row of retained pairs, of PairRowsParams.
template <class Problem>
struct PairRow {
    using Element = typename Problem::Element;
    static_assert(sizeof(Element) == 2, "a gradient lies in half of its pair's place");

    int row;
    float lse = 0.f;
    float teacher_lse = 0.f;
    float temperature = 1.f;
    bool counts = false;

    template <class Params>
    __device__ __forceinline__ PairRow(const Params& p, int row_) : row(row_) {
        const float* temperatures = nullptr;
        if constexpr (Problem::temperature) temperatures = p.temperatures;
        counts = load_target<Problem>(p.targets, temperatures, row) >= 0;
        if (!counts) return;
        lse = p.lse[row];
        teacher_lse = p.teacher_lse[row];
        if constexpr (Problem::temperature) temperature = temperatures[row];
    }

    /// Writes four neighbours' gradients from `column` on, each times `scale`.
    template <class Params>
    __device__ __forceinline__ void write(const Params& p, int column, float (&four)[4], float scale) const {
        if constexpr (kSame<Element, Fp16>) {
#pragma unroll
            for (float& each : four) each = ptx::clamp_nan(each * scale, 65504.f);
        }
        Element* const to = reinterpret_cast<Element*>(PairBlock(p.retained, 0).pairs_of(row)) + column;
        *reinterpret_cast<uint2*>(to) = make_uint2(Numeric<Element>::pack(four[0], four[1]), Numeric<Element>::pack(four[2], four[3]));
    }
};

/// Four neighbouring pairs of a row, from `column` on, and their references. Classes past the vocabulary are −∞.
struct FourPairs {
    uint4 pairs;
    unsigned references;

    __device__ __forceinline__ void load(const RetainedPairs& p, int row, int column) {
        constexpr unsigned kNone = 0xfc00fc00u;
        pairs = make_uint4(kNone, kNone, kNone, kNone);
        references = 0u;
        if (column / kPairGroup * kPairGroup >= p.columns) return;  // nobody has written that group
        const PairBlock block(p, column);
        pairs = __ldcs(reinterpret_cast<const uint4*>(block.pairs_of(row) + column % kPairColumns));
        references = block.references_of(row)[column % kPairColumns / kPairGroup];
    }
    __device__ __forceinline__ unsigned pair(int e) const { return e < 2 ? (e == 0 ? pairs.x : pairs.y) : (e == 2 ? pairs.z : pairs.w); }
};

/// Pairs of a warp's rows in a block. A lane has four neighbours of every 128 columns.
struct PairTile {
    enum : int { kPieces = LtPlace::kColumnPieces / 2 };
    uint4 pairs[LtPlace::kRows][kPieces];
    unsigned references[LtPlace::kRows][kPieces];

    /// `column`: of the vocabulary. Rows that do not exist are −∞, and so are groups past the vocabulary, which nobody has written.
    __device__ __forceinline__ void load_pairs(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) load_row(p, place, rows, column, h);
    }
    __device__ __forceinline__ void load_row(const RetainedPairs& p, const LtPlace& place, int rows, int column, int h) {
        constexpr unsigned kNone = 0xfc00fc00u;
        const PairBlock block(p, column);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const auto* const at = reinterpret_cast<const uint4*>(block.pairs_of(place.row(0, h)) + place.column(2 * i, 0));
            pairs[h][i] = has(p, place, rows, column, h, i) ? __ldcs(at) : make_uint4(kNone, kNone, kNone, kNone);
        }
    }
    __device__ __forceinline__ void load_references(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) load_references(p, place, rows, column, h);
    }
    __device__ __forceinline__ void load_references(const RetainedPairs& p, const LtPlace& place, int rows, int column, int h) {
        const PairBlock block(p, column);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const auto* const at = block.references_of(place.row(0, h)) + place.column(2 * i, 0) / kPairGroup;
            references[h][i] = has(p, place, rows, column, h, i) ? *at : 0u;
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

/// Adds kFours times four pairs of a row to a mixture's sums. `of`: the i-th FourPairs.
template <int kFours, class Problem, class Of>
__device__ __forceinline__ void add_fours(LaneMixture<Problem>& of_row, const Of& of) {
    PairMixture all;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
        const FourPairs four = of(i);
        const PairLogs logs(four.references, of_row.lse, of_row.teacher_lse);
#pragma unroll
        for (int e = 0; e < 4; ++e) all.add(logs.of(four.pair(e)), of_row.beta);
    }
    const MixtureTerm term = all.term(of_row.lse, of_row.teacher_lse, of_row.beta);
    of_row.all.student += term.student;
    of_row.all.divergence += term.divergence;
}

/// Gradients of a launch's rows in the place of their pairs, all of which are retained; a block has a row. The gradients of a class lie at
/// or before its pair: warps have tiles of the row side by side, and write when all of them have read.
template <class Problem, class Teacher, class TileT>
struct PairGradients {
    using Params = TemperedOf<Problem, PairRowsParams>;
    enum : int { kSmemBytes = 0 };
    enum : int { kThreads = kLtThreads };
    enum : int { kFours = kPairColumns / 128 };  ///< a lane's fours of a tile
    enum : int { kTurn = kThreads / 32 * kPairColumns };

    const Params& p;

    __device__ __forceinline__ explicit PairGradients(const Params& params) : p(params) {}

    __device__ __forceinline__ void run() const {
        wait_for_product();
        const PairRow<Problem> row(p, static_cast<int>(blockIdx.x));
        const float of_row = row.counts ? p.student_divergence[row.row] : 0.f;
        const float scale = pair_gradient_scale<Problem>(of_row, false);
        const LogitDerivative<Problem> derivative(p.transform, row.temperature);
        const int columns = ceil_div(p.retained.columns, +kPairColumns) * kPairColumns;
        const int own = LtPlace::warp() * kPairColumns + LtPlace::lane() * 4;
        FourPairs next[kFours];
        load(next, row.row, own);
#pragma unroll 1
        for (int turn = 0; turn < columns; turn += kTurn) {
            float slopes[kFours][4];
#pragma unroll
            for (int i = 0; i < kFours; ++i) {
                const PairLogs logs(next[i].references, row.lse, row.teacher_lse);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const unsigned pair = next[i].pair(e);
                    float slope = slope_of_logs(Problem::divergence_form, logs.of(pair), of_row, p.beta);
                    if constexpr (Problem::stores_derivative) slope *= derivative(PairBlock::unpack(pair, logs.references).student);
                    slopes[i][e] = row.counts ? slope : 0.f;
                }
            }
            load(next, row.row, turn + kTurn + own);
            __syncthreads();  // all warps have read this turn's pairs
#pragma unroll
            for (int i = 0; i < kFours; ++i) {
                const int column = turn + own + i * 128;
                if (column < columns) row.write(p, column, slopes[i], scale);
            }
        }
    }
    __device__ __forceinline__ void load(FourPairs (&fours)[kFours], int row, int column) const {
#pragma unroll
        for (int i = 0; i < kFours; ++i) fours[i].load(p.retained, row, column + i * 128);
    }
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_gradients(const typename PairGradients<Problem, Teacher, TileT>::Params& p) {
    PairGradients<Problem, Teacher, TileT>(p).run();
}

}  // namespace flce

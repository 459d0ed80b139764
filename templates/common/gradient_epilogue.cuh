// Gradients of a tile's logits, computed again, in the place of its sums: what logit_epilogue.cuh has for forward.
#pragma once

#include "flce/common/logit_epilogue.cuh"

namespace flce {

/// Adds the columns' bias.
template <class Problem, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void add_bias(const DlogitsParams& p, const Place& place, int first_column,
                                         float (&c)[kPieces][kColumnPieces][4]) {
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = first_column + place.column(j, e);
            const float bias = column < p.columns ? to_float(static_cast<const typename Problem::Element*>(p.bias)[column]) : 0.f;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                c[i][j][e] += bias;
                c[i][j][2 + e] += bias;
            }
        }
    }
}

/// Numbers of a class that a gradient reads, where the Problem has them.
struct ClassTerm {
    float offset;
    float weight;
};

/// Terms of the chunk's classes from a thread's first column on. They are read again for every row.
template <class Problem, class Columns>
struct ClassTerms {
    enum : bool { kOffsets = Problem::class_offset, kWeights = Problem::label_smoothing && Problem::class_weight };
    NumbersOf<kOffsets, Columns, float> offsets;
    NumbersOf<kWeights, Columns, float> weights;

    __device__ __forceinline__ ClassTerms(const DlogitsParams& p, int column)
        : offsets(p.class_offset + column, p.columns - column), weights(p.class_weight + column, p.columns - column) {}
    __device__ __forceinline__ ClassTerm at(int j, int e) const { return {offsets.at(j, e, 0.f), weights.at(j, e, 1.f)}; }
    /// `column`: one of the chunk's.
    static __device__ __forceinline__ ClassTerm of(const DlogitsParams& p, int column) {
        return {kOffsets ? p.class_offset[column] : 0.f, kWeights ? p.class_weight[column] : 1.f};
    }
};

/// Coefficients of a row that the Problem has: coefficients of terms that do not exist are 0. All have been divided by the row's
/// temperature.
template <class Problem, class Above>
struct GradientRow {
    float a;
    float b;
    float t;
    float s;
    Above above_lse;
    TemperingOf<Problem> tempering;

    __device__ __forceinline__ GradientRow(const DlogitsParams& /*p*/, const float4& k, float scale, float lse, float temperature)
        : t(k.z * scale), s(k.w * scale), above_lse(lse), tempering(temperature) {
        const float factor = scale * above_lse.factor(lse);
        a = k.x * factor;
        b = k.y * factor;
    }

    /// The gradient for hidden · weightᵀ + bias = x of a class.
    __device__ __forceinline__ float operator()(const DlogitsParams& p, float x, const ClassTerm& of_class, bool is_target) const {
        Logit z = Problem::transform(x, p.transform);
        if constexpr (Problem::class_offset) z.value += of_class.offset;
        z.value = tempering.divided(z.value);
        const float p_j = above_lse.exp(z.value);
        float dz = p_j * (Problem::entropy ? a + b * logit_of_share(p_j, z.value) : a);
        if (is_target) dz -= t;
        if constexpr (Problem::label_smoothing) dz -= s * of_class.weight;
        return dz * z.derivative;
    }
};

/// A row's gradients where falls tell its logits: a fall's exponential and its slope are one multiply-add each. `Above` makes exponentials
/// of falls (FallPowersAbove, FallDifferencesAbove). Slopes are a quarter of dz/dy/cap; the coefficients have the factor of 4.
template <class Problem, class Above>
struct FallGradientRow {
    float a;
    float t;
    Above above_lse;

    __device__ __forceinline__ FallGradientRow(const DlogitsParams& p, const float4& k, float scale, float lse, float /*temperature*/)
        : above_lse(Problem::falls(p.transform), lse) {
        // The coefficients come first: the scale may be 2^126, where they are tiny or 0, and four times that is out of range.
        const float of_quarters = 4.f * Problem::logit_scale(p.transform);
        a = k.x * scale * of_quarters * above_lse.factor(lse);
        t = k.z * scale * of_quarters;
    }

    __device__ __forceinline__ float operator()(const DlogitsParams& /*p*/, float x, const ClassTerm& /*of_class*/, bool is_target) const {
        const float fall = above_lse.falls.of(x);
        float dz = above_lse.exp(fall) * a;
        if (is_target) dz -= t;
        return dz * Falls::quarter_slope(fall);
    }
};

/// GradientRow or FallGradientRow, as the Problem's logits are told. kPrecise: exponentials of rounded differences.
template <class Problem, bool kPrecise>
using GradientOf =
    Select<Problem::has_falls, FallGradientRow<Problem, Select<kPrecise, FallDifferencesAbove<typename Problem::Math>, FallPowersAbove>>,
           GradientRow<Problem, Select<kPrecise, DifferencesAbove<typename Problem::Math>, RoundedAbove<Problem>>>>;

/// A thread's columns of a row, from `column` on, none of them the target's.
template <class Problem, class Columns, class GradientT, int kColumnPieces>
__device__ __forceinline__ void replace_by_gradients(const GradientT& gradient, const DlogitsParams& p, int column,
                                                     float (&c)[kColumnPieces][4], int h) {
    const ClassTerms<Problem, Columns> terms(p, column);
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) c[j][2 * h + e] = gradient(p, c[j][2 * h + e], terms.at(j, e), false);
    }
}

/// Gradients of a row's group, from `column` of the chunk on, become 0.
template <class Columns, class Params, int kColumnPieces>
__device__ __forceinline__ void zero_group(const Params& p, int row_group, int column, float (&c)[kColumnPieces][4], int h) {
    const ColumnNumbers<Columns, int> groups(p.class_groups + p.first_column + column, p.columns - column);
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (groups.at(j, e, -1) == row_group && row_group >= 0) c[j][2 * h + e] = 0.f;
        }
}

/// One row of hidden · weightᵀ + bias becomes its gradient, scaled. `first_column` is the tile's in the chunk.
template <class Problem, class Params, class Place, int kColumnPieces>
__device__ __forceinline__ void row_gradient(const Params& p, const Place& place, int first_column, int row, float scale,
                                             float (&c)[kColumnPieces][4], int h) {
    float4 k = make_float4(0.f, 0.f, 0.f, 0.f);
    RowTarget target{infinity(), kIgnored};
    float temperature = 1.f;
    if (row < p.rows) {
        k = static_cast<const float4*>(p.coefficients)[row];
        target = static_cast<const RowTarget*>(p.row_targets)[row];
        if constexpr (Problem::temperature) temperature = p.temperatures[row];
    }
    if constexpr (!Problem::lists_rows) {
        // An ignored row's gradient is 0 whatever its logits are: NaN times 0 is not. Where rows are listed there is none.
        if (target.target < 0) {
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j) c[j][2 * h] = c[j][2 * h + 1] = 0.f;
        }
    }
    // The target's column counted from this thread's first one; outside where another tile or nobody has it. Few threads have one: a branch
    // of their own costs less than a comparison for every element.
    const int column = first_column + place.column(0, 0);
    const int within = target.target - static_cast<int>(p.first_column) - column;
    using Columns = typename Place::Columns;
    const bool has_target = target.target >= 0 && has_column<kColumnPieces, Columns>(within);
    float at_target = 0.f;
    using Above = RoundedAbove<Problem>;
    const GradientOf<Problem, true> precise(p, k, scale, target.lse, temperature);
    if (has_target) at_target = precise(p, pick_column<Columns>(c, h, within), ClassTerms<Problem, Columns>::of(p, column + within), true);
    if (kSame<Above, DifferencesAbove<typename Problem::Math>> || !Above::takes(target.lse)) {
        replace_by_gradients<Problem, Columns>(precise, p, column, c, h);
    } else {
        replace_by_gradients<Problem, Columns>(GradientOf<Problem, false>(p, k, scale, target.lse, temperature), p, column, c, h);
    }
    if constexpr (Problem::class_groups) zero_group<Columns>(p, row < p.rows ? p.row_groups[row] : +kNoGroup, column, c, h);
    if (has_target) replace_column<Columns>(c, h, within, at_target);
}

}  // namespace flce

// Epilogue of a tile of hidden · weightᵀ in the accumulators, for any mainloop: c[i][j][2·h + e] is at place.row(i, h), place.column(j, e).
// A Place's Columns tell how far column(j, 0) is from column(0, 0).
#pragma once

#include "flce/common/problem.cuh"

namespace flce {

/// A row's numbers that backward needs besides its coefficients. lse = +inf makes every p of an ignored row 0.
struct RowTarget {
    float lse;
    int target;
};

/// Fields of RowSums that a Problem needs in memory, in this order: max, exp_sum, exp_z_sum, weighted_sum, exp_sq_sum, top1 (an integer's
/// bits).
template <class Problem>
struct PartialFields {
    enum : int { kExpZ = 2 };
    enum : int { kWeighted = 2 + (Problem::entropy ? 1 : 0) };
    enum : int { kSquares = kWeighted + (Problem::label_smoothing ? 1 : 0) };
    enum : int { kTop1 = kSquares + (Problem::square_sum ? 1 : 0) };
    enum : int { kCount = kTop1 + (Problem::top1 ? 1 : 0) };

    /// `stride` elements lie between two fields.
    static __device__ __forceinline__ RowSums load(const float* at, long long stride) {
        RowSums r = sums_of_nothing(0.f, -infinity());
        r.max = at[0];
        r.exp_sum = at[stride];
        r.exp_z_sum = Problem::entropy ? at[kExpZ * stride] : 0.f;
        r.weighted_sum = Problem::label_smoothing ? at[kWeighted * stride] : 0.f;
        if constexpr (Problem::square_sum) r.exp_sq_sum = at[kSquares * stride];
        if constexpr (Problem::top1) r.top1 = __float_as_int(at[kTop1 * stride]);
        return r;
    }
    static __device__ __forceinline__ void store(float* at, long long stride, const RowSums& r) {
        at[0] = r.max;
        at[stride] = r.exp_sum;
        if constexpr (Problem::entropy) at[kExpZ * stride] = r.exp_z_sum;
        if constexpr (Problem::label_smoothing) at[kWeighted * stride] = r.weighted_sum;
        if constexpr (Problem::square_sum) at[kSquares * stride] = r.exp_sq_sum;
        if constexpr (Problem::top1) at[kTop1 * stride] = __int_as_float(r.top1);
    }
};

/// Leading dimension of the partial sums of `rows` rows, where forward has a list.
__device__ __forceinline__ long long partial_rows_of(int rows) { return ceil_div(rows, 32) * 32ll; }

/// Products up to which a framework's sums are exact to fp32's last place, and have to be here.
enum : int { kShortSum = 128 };

/// Distance from the reference, in nats, above which forward's exponentials are not to be relied on: they are cut off at 2^100.
enum : int { kMostAboveReference = 60 };
/// kMostAboveReference where there is a teacher: the divisor of its classes' dz may be 2^-24 of the teacher's sizes, and the quotients have
/// to stay in range.
enum : int { kMostAboveTaught = 30 };

template <class Problem>
constexpr bool kPowers = Numeric<typename Problem::Element>::kHalf && Problem::hidden_size >= kLongSum;
/// Ways to exponentials: one for those that are summed, one for those that will be rounded to the Problem's dtype.
template <class Problem>
using SummedAbove = Select<kPowers<Problem>, PowersAbove, DifferencesAbove<typename Problem::Math>>;
template <class Problem>
using RoundedAbove = Select<Numeric<typename Problem::Element>::kHalf, PowersAbove, DifferencesAbove<typename Problem::Math>>;

template <class Problem>
using LogitOperands =
    Operands<typename Problem::Element, Major::k, Access::chunks, WeightOperand<Problem>::hidden_major ? Major::mn : Major::k,
             weight_access<Problem>(), (Problem::hidden_size <= kShortSum)>;

/// Columns past the vocabulary become `none`. Only the last tile has such columns, so that other tiles are spared a comparison for every
/// element.
template <class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void mask_columns(const Place& place, int first_column, int end, float (&c)[kPieces][kColumnPieces][4],
                                             float none) {
    asm volatile("" : "+r"(first_column));  // no column is compared earlier: the results would need registers
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (first_column + place.column(j, e) < end) continue;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) c[i][j][e] = c[i][j][2 + e] = none;
        }
    }
}

/// Divides a row's logits by its temperature T. 1/T comes in two parts: rounded to one float, 1/T would be off by an equal factor in every
/// logit of the row, which no sum averages out. With two parts a quotient is rounded once, and at T = 1 it is the logit. Both parts are
/// above 0, so that −inf stays −inf. Neither part needs a division, whose subroutine would cost registers. A number that is not a
/// temperature is cut off: its row is ignored, and must not be NaN where exponentials are retained.
struct Tempering {
    float high;  ///< a little below 1/T
    float low;   ///< 1/T − high

    __device__ __forceinline__ explicit Tempering(float temperature) {
        const float t = fminf(fmaxf(temperature, 0x1p-100f), 0x1p100f);
        high = __uint_as_float(__float_as_uint(ptx::rcp_approx_ftz(t)) - 2u);  // rcp is off by a unit of the last place at most
        low = __fmaf_rn(-t, high, 1.f) * high;
    }
    __device__ __forceinline__ float divided(float logit) const { return __fmaf_rn(logit, high, logit * low); }
};
struct NoTempering {
    __device__ __forceinline__ explicit NoTempering(float /*temperature*/) {}
    __device__ __forceinline__ float divided(float logit) const { return logit; }
};
template <class Problem>
using TemperingOf = Select<Problem::temperature, Tempering, NoTempering>;

/// Derivative of a row's logits from the logits, without the factors that all logits share. A logit as large as the softcap allows has
/// derivative 0. Where logits are divided by a temperature a comparison tells such a logit, since the logit before the division is then
/// known only to a unit of the last place.
template <class Problem>
struct LogitDerivative {
    const float* transform;
    float temperature;
    float largest;

    __device__ __forceinline__ LogitDerivative(const float* transform_, float temperature_)
        : transform(transform_), temperature(temperature_) {
        if constexpr (Problem::stores_derivative && Problem::temperature) {
            largest = Tempering(temperature).divided(Problem::softcap(transform));
        }
    }
    __device__ __forceinline__ float operator()(float logit) const {
        if constexpr (Problem::temperature) {
            const float derivative = __saturatef(Problem::derivative_at(logit * temperature, transform));
            return fabsf(logit) < largest ? derivative : 0.f;
        } else {
            return __saturatef(Problem::derivative_at(logit, transform));
        }
    }
};

/// weighted += Σ c_j·z_j of the thread's columns. kRagged: some of them may not exist.
template <class Problem, bool kRagged, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void add_weighted(const ForwardParams& p, const Place& place, int first_column,
                                             const float (&c)[kPieces][kColumnPieces][4], float (&weighted)[kPieces][2]) {
    const int end = Problem::shard ? p.targets.columns : Problem::vocab_size;
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = first_column + place.column(j, e);
            float weight = 1.f;
            if constexpr (Problem::class_weight) weight = p.class_weight[kRagged ? min(column, end - 1) : column];
            const bool there = !kRagged || column < end;  // behind the end are copies of the last column, which may be −inf
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) weighted[i][h] += weight * (there ? c[i][j][2 * h + e] : 0.f);
        }
    }
}

/// Divides each row by its temperature.
template <class Place, class TemperatureOf, int kPieces, int kColumnPieces>
__device__ __forceinline__ void divide_rows(const Place& place, const TemperatureOf& temperature_of,
                                            float (&c)[kPieces][kColumnPieces][4]) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Tempering tempering(temperature_of(place.row(i, h)));
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) c[i][j][2 * h + e] = tempering.divided(c[i][j][2 * h + e]);
        }
    }
}

/// Replaces each sum of c, with its column's bias, by function(sum), and adds its column's offset.
template <class Problem, class Place, class Function, int kPieces, int kColumnPieces>
__device__ __forceinline__ void replace_sums(const ForwardParams& p, const Place& place, int first_column, int end,
                                             const Function& function, float (&c)[kPieces][kColumnPieces][4]) {
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float bias = 0.f;
            float offset = 0.f;
            const int column = min(first_column + place.column(j, e), end - 1);
            if constexpr (Problem::bias) bias = to_float(static_cast<const typename Problem::Element*>(p.bias)[column]);
            if constexpr (Problem::class_offset) offset = p.class_offset[column];
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& z = c[i][j][2 * h + e];
                    if constexpr (Problem::bias) z += bias;
                    z = function(z);
                    if constexpr (Problem::class_offset) z += offset;
                }
            }
        }
    }
}

/// c becomes logits; columns past the vocabulary become masked_logit(). weighted += Σ c_j·z_j of the thread's columns, with label
/// smoothing. `temperature_of`: a row of the tile has it, where the Problem has temperatures.
template <class Problem, class Place, class TemperatureOf, int kPieces, int kColumnPieces>
__device__ __forceinline__ void to_logits(const ForwardParams& p, const Place& place, int first_column, int columns,
                                          const TemperatureOf& temperature_of, float (&c)[kPieces][kColumnPieces][4],
                                          float (&weighted)[kPieces][2]) {
    const int end = Problem::shard ? p.targets.columns : Problem::vocab_size;
    const bool ragged = first_column + columns > end;
    replace_sums<Problem>(p, place, first_column, end, [&](float sum) { return Problem::transform(sum, p.transform).value; }, c);
    if constexpr (Problem::temperature) divide_rows(place, temperature_of, c);
    if (ragged) {
        if constexpr (Problem::label_smoothing) add_weighted<Problem, true>(p, place, first_column, c, weighted);
        mask_columns(place, first_column, end, c, masked_logit());
    } else {
        if constexpr (Problem::label_smoothing) add_weighted<Problem, false>(p, place, first_column, c, weighted);
    }
}

/// Groups of a thread's columns, of which there are `count` from the first one on. Each is read where it is compared: kept beside the
/// accumulators, neither groups nor their addresses would fit.
template <class Columns>
struct ColumnGroups {
    const int* first;
    int count;

    __device__ __forceinline__ ColumnGroups(const int* first_, int count_) : first(first_), count(count_) {
        asm volatile("" : "+l"(first), "+r"(count));  // no address is worked out earlier
    }
    __device__ __forceinline__ int at(int j, int e) const {
        const int column = Columns::of(j) + e;
        return ptx::ld_global_s32(first + column, column < count, -1);
    }
};

/// Logits of a row's group, but for its target's, become −inf. Few tiles have any: a comparison for every element finds out. `group_of`,
/// `target_of`: a row of the tile has them.
template <class Problem, class Params, class Place, class GroupOf, class TargetOf, int kPieces, int kColumnPieces>
__device__ __forceinline__ void rule_out_groups(const Params& p, const Place& place, int first_column, const GroupOf& group_of,
                                                const TargetOf& target_of, float (&c)[kPieces][kColumnPieces][4]) {
    using Groups = ColumnGroups<typename Place::Columns>;
    const int first = first_column + place.column(0, 0);
    const int count = (Problem::shard ? p.targets.columns : Problem::vocab_size) - first;
    int groups[kPieces][2];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int group = group_of(place.row(i, h));
            groups[i][h] = group < 0 ? +kNoGroup : group;
        }
    bool found = false;
    const Groups of_columns(p.class_groups + first, count);
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int group = of_columns.at(j, e);
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) found = found || group == groups[i][h];
        }
    }
    if (!found) return;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int group = group_of(place.row(i, h));
            if (group < 0) continue;
            const Groups again(p.class_groups + first, count);
            const int target = target_of(place.row(i, h)) - first;
#pragma unroll
            for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (again.at(j, e) == group && Place::Columns::of(j) + e != target) c[i][j][2 * h + e] = -infinity();
                }
        }
    }
}

/// c becomes falls; falls of columns past the vocabulary are infinite.
template <class Problem, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void to_falls(const ForwardParams& p, const Place& place, int first_column, int columns,
                                         float (&c)[kPieces][kColumnPieces][4]) {
    const int end = Problem::shard ? p.targets.columns : Problem::vocab_size;
    const Falls falls = Problem::falls(p.transform);
    replace_sums<Problem>(p, place, first_column, end, [&](float sum) { return falls.of(sum); }, c);
    if (first_column + columns > end) mask_columns(place, first_column, end, c, infinity());
}

/// Columns of a thread's in the result of an mma: pairs, eight columns apart.
struct MmaColumns {
    static __device__ __forceinline__ constexpr int of(int j) { return 8 * j; }
    template <int kColumnPieces>
    static __device__ __forceinline__ bool have(int within) {
        return within >= 0 && within < 8 * kColumnPieces && (within & 7) < 2;
    }
};

/// Whether a thread has the column that lies `within` columns from its first one.
template <int kColumnPieces, class Columns = MmaColumns>
__device__ __forceinline__ bool has_column(int within) {
    return Columns::template have<kColumnPieces>(within);
}

/// The row's accumulator of that column.
template <class Columns = MmaColumns, int kColumnPieces>
__device__ __forceinline__ float pick_column(const float (&c)[kColumnPieces][4], int h, int within) {
    float value = 0.f;
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
        int candidate = within;
        asm volatile("" : "+r"(candidate));  // a chain of selects would become an indexed load, and c an array in local memory
        if (candidate == Columns::of(j)) value = c[j][2 * h];
        if (candidate == Columns::of(j) + 1) value = c[j][2 * h + 1];
    }
    return value;
}
template <class Columns = MmaColumns, int kColumnPieces>
__device__ __forceinline__ void replace_column(float (&c)[kColumnPieces][4], int h, int within, float value) {
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
        int candidate = within;
        asm volatile("" : "+r"(candidate));
        if (candidate == Columns::of(j)) c[j][2 * h] = value;
        if (candidate == Columns::of(j) + 1) c[j][2 * h + 1] = value;
    }
}

/// The first of a thread's columns of a row whose logit is `largest`, or FLCE_NO_CLASS. `first`: the class of its first column.
template <class Columns = MmaColumns, int kColumnPieces>
__device__ __forceinline__ int class_of(const float (&c)[kColumnPieces][4], int h, float largest, int first) {
    int within = -1;
#pragma unroll
    for (int column = 2 * kColumnPieces - 1; column >= 0; --column) {
        if (c[column / 2][2 * h + column % 2] == largest) within = Columns::of(column / 2) + column % 2;
    }
    return within < 0 ? FLCE_NO_CLASS : first + within;
}

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

    /// The gradient for hidden · weightᵀ + bias = x at `column` of the chunk.
    __device__ __forceinline__ float operator()(const DlogitsParams& p, float x, int column, bool is_target) const {
        Logit z = Problem::transform(x, p.transform);
        if constexpr (Problem::class_offset) z.value += ptx::ld_global_f32(p.class_offset + min(column, p.columns - 1));
        z.value = tempering.divided(z.value);
        const float p_j = above_lse.exp(z.value);
        float dz = p_j * (Problem::entropy ? a + b * logit_of_share(p_j, z.value) : a);
        if (is_target) dz -= t;
        if constexpr (Problem::label_smoothing) {
            float weight = 1.f;
            // Read again for every row: kept, the columns' weights would not fit beside the accumulators.
            if constexpr (Problem::class_weight) weight = ptx::ld_global_f32(p.class_weight + min(column, p.columns - 1));
            dz -= s * weight;
        }
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

    __device__ __forceinline__ float operator()(const DlogitsParams& /*p*/, float x, int /*column*/, bool is_target) const {
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
template <class Columns, class GradientT, int kColumnPieces>
__device__ __forceinline__ void replace_by_gradients(const GradientT& gradient, const DlogitsParams& p, int column,
                                                     float (&c)[kColumnPieces][4], int h) {
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) c[j][2 * h + e] = gradient(p, c[j][2 * h + e], column + Columns::of(j) + e, false);
    }
}

/// Gradients of a row's group, from `column` of the chunk on, become 0.
template <class Columns, class Params, int kColumnPieces>
__device__ __forceinline__ void zero_group(const Params& p, int row_group, int column, float (&c)[kColumnPieces][4], int h) {
    const ColumnGroups<Columns> groups(p.class_groups + p.first_column + column, p.columns - column);
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (groups.at(j, e) == row_group && row_group >= 0) c[j][2 * h + e] = 0.f;
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
    if (has_target) at_target = precise(p, pick_column<Columns>(c, h, within), column + within, true);
    if (kSame<Above, DifferencesAbove<typename Problem::Math>> || !Above::takes(target.lse)) {
        replace_by_gradients<Columns>(precise, p, column, c, h);
    } else {
        replace_by_gradients<Columns>(GradientOf<Problem, false>(p, k, scale, target.lse, temperature), p, column, c, h);
    }
    if constexpr (Problem::class_groups) zero_group<Columns>(p, row < p.rows ? p.row_groups[row] : +kNoGroup, column, c, h);
    if (has_target) replace_column<Columns>(c, h, within, at_target);
}

}  // namespace flce

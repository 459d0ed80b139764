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

/// Numbers of a thread's columns, of which there are `count` from the first one on. Each is read where it is used: kept beside the
/// accumulators, neither numbers nor their addresses would fit.
template <class Columns, class Number>
struct ColumnNumbers {
    const Number* first;
    int count;

    __device__ __forceinline__ ColumnNumbers(const Number* first_, int count_) : first(first_), count(count_) {
        asm volatile("" : "+l"(first), "+r"(count));  // no address is worked out earlier
    }
    __device__ __forceinline__ Number at(int j, int e, Number absent) const {
        const int column = Columns::of(j) + e;
        return ptx::ld_global(first + column, column < count, absent);
    }
};
/// Numbers that a Problem has none of.
template <class Number>
struct NoNumbers {
    __device__ __forceinline__ NoNumbers(const Number* /*first*/, int /*count*/) {}
    __device__ __forceinline__ Number at(int /*j*/, int /*e*/, Number absent) const { return absent; }
};
template <bool kThere, class Columns, class Number>
using NumbersOf = Select<kThere, ColumnNumbers<Columns, Number>, NoNumbers<Number>>;

/// weighted += Σ c_j·z_j of the thread's columns. kRagged: some of them may not exist.
template <class Problem, bool kRagged, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void add_weighted(const ForwardParams& p, const Place& place, int first_column,
                                             const float (&c)[kPieces][kColumnPieces][4], float (&weighted)[kPieces][2]) {
    const int end = Problem::shard ? p.targets.columns : Problem::vocab_size;
    const int first = first_column + place.column(0, 0);
    const NumbersOf<Problem::class_weight, typename Place::Columns, float> weights(p.class_weight + first, end - first);
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = first_column + place.column(j, e);
            const float weight = weights.at(j, e, 1.f);
            const bool there = !kRagged || column < end;  // behind the end are copies of the last column, which may be −inf
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) weighted[i][h] += weight * (there ? c[i][j][2 * h + e] : 0.f);
        }
    }
}

/// Replaces each sum of c, with its column's bias, by function(sum), and adds its column's offset.
template <class Problem, class Place, class Function, int kPieces, int kColumnPieces>
__device__ __forceinline__ void replace_sums(const ForwardParams& p, const Place& place, int first_column, int end,
                                             const Function& function, float (&c)[kPieces][kColumnPieces][4]) {
    const int first = first_column + place.column(0, 0);
    const NumbersOf<Problem::class_offset, typename Place::Columns, float> offsets(p.class_offset + first, end - first);
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            float bias = 0.f;
            const int column = min(first_column + place.column(j, e), end - 1);
            if constexpr (Problem::bias) bias = to_float(static_cast<const typename Problem::Element*>(p.bias)[column]);
            const float offset = offsets.at(j, e, 0.f);
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

/// Logits of a row's group, but for its target's, become −inf. Few tiles have any: a comparison for every element finds out. `group_of`,
/// `target_of`: a row of the tile has them.
template <class Problem, class Params, class Place, class GroupOf, class TargetOf, int kPieces, int kColumnPieces>
__device__ __forceinline__ void rule_out_groups(const Params& p, const Place& place, int first_column, const GroupOf& group_of,
                                                const TargetOf& target_of, float (&c)[kPieces][kColumnPieces][4]) {
    using Groups = ColumnNumbers<typename Place::Columns, int>;
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
            const int group = of_columns.at(j, e, -1);
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
                    if (again.at(j, e, -1) == group && Place::Columns::of(j) + e != target) c[i][j][2 * h + e] = -infinity();
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

}  // namespace flce

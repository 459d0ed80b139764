// Names that a generated configuration gives the kernels, and small helpers that every kernel shares.
//
//     struct Problem : flce::PlainProblem {
//         using Element = flce::Bf16;                 hidden, weight, bias, grad_hidden
//         using GradWeight = flce::Bf16;              grad_weight, grad_bias
//         using Math = flce::FastMath;
//         enum : int { hidden_size, vocab_size, raster }; enum : long long { padded_vocab_size };
//         enum : bool { hidden_major, bias, class_weight, label_smoothing, entropy, accumulate, retain };
//         enum : bool { lists_rows };                 kernels may have a RowList
//         enum : bool { rounds_weight };              what GEMMs read of the weight has been rounded into the workspace, vocab_major
//         enum : bool { temperature = true };         only what differs from PlainProblem
//         enum : bool { shard = true };               and then
//         enum : int { whole_vocab_size };            classes of all shards; vocab_size is the most that one has, a call has any fewer
//         static flce::Logit transform(float x, const float* p);
//         static float derivative_at(float z, const float* p);  where stores_derivative, and
//         static float softcap(const float* p);
//     };
//
// Constants of kernels are enumerators, or functions where they are no integers: NVRTC gives every constexpr variable, used or not, memory
// in each module, and the driver takes longer to set up ninety of them than to load the code.
#pragma once

#include "flce/common/numeric.cuh"
#include "flce/common/operands.cuh"
#include "flce/common/params.cuh"
#include "flce/common/row_math.cuh"
#include "flce/common/sum_parts.cuh"
#include "flce/common/tile_order.cuh"

namespace flce {

/// Defaults of a Problem.
struct PlainProblem {
    enum : bool { class_offset = false };                ///< a class's logits have a number of its own added behind the softcap
    enum : bool { class_groups = false };                ///< classes of a row's group, but for its target, have logits of −inf
    enum : bool { temperature = false };                 ///< a row's logits are divided by a number of its own
    enum : bool { top1 = false };                        ///< RowSums::top1 is wanted
    enum : int { top_k = 0 };                            ///< classes of the largest logits that are wanted
    enum : bool { stretches = false };                   ///< a launch of forward may compute some columns of the vocabulary
    enum : bool { square_sum = false };                  ///< RowSums::exp_sq_sum is wanted
    enum : bool { given_scales = false };                ///< scales of 8-bit operands of the logits are the caller's
    enum : bool { stores_derivative = false };           ///< retained exponentials are multiplied by the logits' derivative
    enum : bool { teacher = false };                     ///< rows have classes that a teacher names
    enum : bool { picks_named = false };                 ///< forward picks the logits of a teacher's classes from its tiles
    enum : bool { support = false };                     ///< a row's softmax is over the classes that its teacher names
    enum : bool { divergence = false };                  ///< the loss is a divergence from a teacher's head
    enum : bool { sums_bias = false };                   ///< SumsBias
    enum : bool { shard = false };                       ///< the vocabulary lies on several ranks
    enum : bool { float_grad_hidden = false };           ///< grad_hidden is fp32 whatever Element is
    enum : bool { has_falls = false };                   ///< Falls tell logits; there are falls(const float* p), logit_scale(p)
    enum : int { weight_format = kWeightNumbers };       ///< where rounds_weight, and with fp8: what the weight is in memory
    enum : bool { turns_exponentials = true };           ///< with fp8: exponentials are stored by classes, too
    enum : int { weight_block = 0 };                     ///< rows and columns of a block that has an e4m3 weight's scale; 0: a row has one
    enum : int { retained_columns = kRetainedColumns };  ///< columns of a block of retained exponentials
    enum : int { segment_tiles = 0 };  ///< batch-invariant: forward's tiles that are summed up apart from all others; else 0
};

/// Whether a row's results have the same bits whatever other rows there are.
template <class Problem>
__host__ __device__ constexpr bool is_batch_invariant() {
    return Problem::segment_tiles > 0;
}

/// Classes that a label may name.
template <class Problem>
__host__ __device__ constexpr int whole_vocab_size() {
    if constexpr (Problem::shard) {
        return Problem::whole_vocab_size;
    } else {
        return Problem::vocab_size;
    }
}

/// Element type of grad_hidden.
template <class Problem>
using GradHiddenOf = Select<Problem::float_grad_hidden, float, typename Problem::Element>;

/// Problem for a kernel that is launched where nothing is retained.
template <class Problem>
struct Unretained : Problem {
    enum : bool { retain = false };
    enum : bool { stores_derivative = false };
};

/// Problem for a kernel of grad_weight with room to add up grad_bias of retained exponentials.
template <class Problem>
struct SumsBias : Problem {
    enum : bool { sums_bias = true };
};

/// A kernel's parameters, with groups of rows and classes and the rows' temperatures where there are any.
template <class Problem, class Params>
using GroupedOf = Select<Problem::class_groups, Grouped<Params>, Params>;
template <class Problem, class Params>
using TemperedOf = Select<Problem::temperature, Tempered<GroupedOf<Problem, Params>>, GroupedOf<Problem, Params>>;

/// A kernel's parameters, with `Added` where retained exponentials and label smoothing meet.
template <class Problem, class Params, class Added>
using SmoothedOf = Select<Problem::retain && Problem::label_smoothing, Added, Params>;

/// A logit and its derivative with respect to hidden · weightᵀ + bias.
struct Logit {
    float value;
    float derivative;
};

extern __shared__ __align__(1024) unsigned char dynamic_smem[];  // the copy engine's swizzle repeats every 1024 bytes

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

/// Rows of this many elements start on 16-byte boundaries.
template <class T>
__host__ __device__ constexpr bool rows_aligned(long long elements) {
    return elements * static_cast<long long>(sizeof(T)) % 16 == 0;
}

/// First element of the weight's rows (or columns, hidden_major) from `vocab` on and columns of hidden from `hidden` on, or of
/// its gradient's.
template <class Problem, class T>
__device__ __forceinline__ T* weight_at(T* weight, long long vocab, long long hidden) {
    return Problem::hidden_major ? weight + hidden * Problem::padded_vocab_size + vocab : weight + vocab * Problem::hidden_size + hidden;
}
template <class Problem>
constexpr long long kWeightLd = Problem::hidden_major ? Problem::padded_vocab_size : Problem::hidden_size;

/// The weight as GEMMs read it.
template <class Problem>
struct WeightOperand {
    enum : bool { hidden_major = Problem::hidden_major && !Problem::rounds_weight };
    enum : int { hidden_size = Problem::hidden_size };
    enum : long long { padded_vocab_size = Problem::padded_vocab_size };
};

/// Whether the vocabulary, of any shard, is known to end on 16 bytes.
template <class Problem, class T>
__host__ __device__ constexpr bool vocabulary_aligned() {
    return !Problem::shard && rows_aligned<T>(Problem::vocab_size);
}

/// How the weight's rows can be read. Whole vocab_major rows end on a chunk; hidden_major rows end where the vocabulary does.
template <class Problem>
__host__ __device__ constexpr Access weight_access() {
    if (!rows_aligned<typename Problem::Element>(kWeightLd<WeightOperand<Problem>>)) return Access::elements;
    return vocabulary_aligned<Problem, typename Problem::Element>() || !WeightOperand<Problem>::hidden_major ? Access::chunks
                                                                                                             : Access::partial;
}

/// Classes of the vocabulary that the call's weight has.
template <class Problem, class Params>
__device__ __forceinline__ int vocab_columns(const Params& p) {
    if constexpr (Problem::shard) {
        return p.targets.columns;
    } else {
        return Problem::vocab_size;
    }
}

/// The columns of the vocabulary that a launch of forward computes, and the first of them.
template <class Problem>
using ForwardParamsOf = Select<Problem::rounds_weight, ForwardStretchParams, ForwardParams>;
template <class Problem>
constexpr bool kStretches = Problem::rounds_weight || Problem::stretches;
template <class Problem, class Params>
__device__ __forceinline__ int forward_columns(const Params& p) {
    if constexpr (kStretches<Problem>) {
        return p.columns;
    } else {
        return vocab_columns<Problem>(p);
    }
}
template <class Problem, class Params>
__device__ __forceinline__ int forward_first_column(const Params& p) {
    if constexpr (kStretches<Problem>) {
        return p.first_column;
    } else {
        return 0;
    }
}

/// A row's label: its index, kIgnored, or kOutOfRange, which counts as ignored. In a shard the index is counted from its first class on,
/// and kElsewhere, above every index, says that another shard has the class.
enum : int { kIgnored = -1 };
enum : int { kOutOfRange = -2 };
enum : int { kElsewhere = 0x7fffffff };
/// The index of a label that is a class of the whole layer's, in a shard. `p`: TargetParams or TeacherParams.
template <class Params>
__device__ __forceinline__ int index_in_shard(const Params& p, long long label) {
    const long long index = label - p.first_class;
    return index >= 0 && index < p.columns ? static_cast<int>(index) : kElsewhere;
}
template <class Problem>
__device__ __forceinline__ int load_target(const TargetParams& p, long long row) {
    const long long label = p.bits == 64 ? static_cast<const long long*>(p.target)[row] : static_cast<const int*>(p.target)[row];
    if (label == p.ignore_index) return kIgnored;
    if constexpr (Problem::shard) {
        return label >= 0 && label < Problem::whole_vocab_size ? index_in_shard(p, label) : kOutOfRange;
    } else {
        return label >= 0 && label < Problem::vocab_size ? static_cast<int>(label) : kOutOfRange;
    }
}

/// A row's label, where rows have temperatures: one that is no temperature is a fault, as a label out of range is.
template <class Problem>
__device__ __forceinline__ int load_target(const TargetParams& p, const float* temperature, long long row) {
    const int target = load_target<Problem>(p, row);
    if constexpr (Problem::temperature) {
        if (target >= 0 && !is_temperature(temperature[row])) return kOutOfRange;
    }
    return target;
}

/// Rows of a launch that has a list and room for `rows`: at least `least`, of which the last is then an ignored one.
template <class Problem>
__device__ __forceinline__ int listed_rows(const RowList& list, int rows, int least) {
    if constexpr (!Problem::lists_rows) return rows;
    if (list.rows == nullptr) return rows;
    return min(max(*list.valid - list.first, least), rows);
}
/// Row `row` of a launch.
template <class Problem>
__device__ __forceinline__ ListedRow listed_row(const RowList& list, const TargetParams& targets, int row) {
    if constexpr (Problem::lists_rows) {
        if (list.rows != nullptr) return list.rows[list.first + row];
    }
    return {row, load_target<Problem>(targets, row)};
}
/// Entry of a row that is ignored, too, where its temperature is a fault. A list has such rows as ignored already.
template <class Problem>
__device__ __forceinline__ ListedRow listed_row(const RowList& list, const TargetParams& targets, const float* temperature, int row) {
    if constexpr (Problem::lists_rows) {
        if (list.rows != nullptr) return list.rows[list.first + row];
    }
    return {row, load_target<Problem>(targets, temperature, row)};
}

/// The factor that dz is multiplied with before dz is rounded to 16 bits, or its inverse. The factor divides by t and by the logits' scale,
/// so that the targets' entries are p − 1, near −1 where p is small. Otherwise all targets' entries would have the same rounding error, of
/// the mean's divisor and of the scale, and the errors would add up. In fp16 a power of two on top brings the largest bound of any row just
/// under 2^15, so that means over many tokens do not underflow.
template <class Problem>
__device__ __forceinline__ float dlogits_scale(const PassScalars* scalars, bool inverse) {
    if constexpr (sizeof(typename Problem::Element) == 4) return 1.f;
    const float largest = __uint_as_float(scalars->target_bits);
    const float unit = largest > 1e-30f && largest < 1e30f ? largest : 1.f;
    float power = 1.f;
    if constexpr (kSame<typename Problem::Element, Fp16>) {
        const unsigned bound = __float_as_uint(__uint_as_float(scalars->dlogits_bound_bits) / unit);
        const unsigned exponent = min(max(bound >> 23, 15u), 254u);
        power = __uint_as_float((inverse ? exponent - 14u : 268u - exponent) << 23);
    }
    return inverse ? unit * power : power / unit;
}

/// Writes the factor of grad_weight's product by a library and, for what is there already, 0 and 1.
template <class Problem>
__device__ __forceinline__ void write_factors(float* factors, const PassScalars* scalars) {
    if (factors == nullptr || blockIdx.x != 0 || blockIdx.y != 0 || threadIdx.x != 0) return;
    factors[0] = dlogits_scale<Problem>(scalars, true);
    factors[1] = 0.f;
    factors[2] = 1.f;
}

}  // namespace flce

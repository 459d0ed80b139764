// Makes a row's outputs and its part of the loss of the row's partial sums. All reductions in a fixed order.
#pragma once

#include "flce/common/output_params.cuh"
#include "flce/common/teacher_kernels.cuh"

namespace flce {

enum Reduction : int { kNone = 0, kSum = 1, kMean = 2, kWeightedMean = 3 };  // ReductionCode

struct SumOp {
    template <class T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct MaxOp {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Value of the lane whose number differs in `lanes`.
template <class T>
__device__ __forceinline__ T of_other_lane(T value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, value, lanes);
}

/// Reduction over the block in a fixed tree; every thread gets the result. `scratch` holds one T a warp.
template <int kThreads, class T, class Op>
__device__ __forceinline__ T block_reduce(T value, T* scratch, Op op) {
    constexpr unsigned kWarps = kThreads / 32;
    static_assert((kWarps & (kWarps - 1)) == 0 && kWarps <= 32, "a warp reduces what the warps have");
    for (int lanes = 16; lanes > 0; lanes /= 2) value = op(value, of_other_lane(value, lanes));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = scratch[threadIdx.x % kWarps];
#pragma unroll
    for (int lanes = kWarps / 2; lanes > 0; lanes /= 2) value = op(value, of_other_lane(value, lanes));
    __syncthreads();  // scratch may be used again
    return value;
}

/// LossPartials of many rows. A float holds no count of very many tokens.
struct LossSums {
    float cross_entropy;
    float z_loss;
    float class_weight;
    double tokens;

    __device__ __forceinline__ void add(const LossPartial& part) {
        cross_entropy += part.cross_entropy;
        z_loss += part.z_loss;
        class_weight += part.class_weight;
        tokens += part.tokens;
    }
    __device__ __forceinline__ LossSums operator+(const LossSums& other) const {
        return {cross_entropy + other.cross_entropy, z_loss + other.z_loss, class_weight + other.class_weight, tokens + other.tokens};
    }
};
__device__ __forceinline__ LossSums of_other_lane(const LossSums& sums, int lanes) {
    return {of_other_lane(sums.cross_entropy, lanes), of_other_lane(sums.z_loss, lanes), of_other_lane(sums.class_weight, lanes),
            of_other_lane(sums.tokens, lanes)};
}

/// Sums of the block's threads, on every thread.
template <int kThreads>
__device__ __forceinline__ LossSums sum_losses(const LossSums& sums) {
    __shared__ LossSums scratch[kThreads / 32];
    return block_reduce<kThreads>(sums, scratch, SumOp{});
}

/// A token's part of a mean's divisor. `token_weights`: the rows', or null.
__device__ __forceinline__ float share_of_token(const CountParams& p, const float* token_weights, long long row) {
    return p.reduction == kWeightedMean && token_weights != nullptr ? token_weights[row] : 1.f;
}

/// A mean's divisors as factors: 0 where there is nothing to divide by.
struct MeanFactors {
    float cross_entropy;
    float z_loss;
};
__device__ __forceinline__ float reciprocal_or_zero(double x) { return x != 0. ? static_cast<float>(1. / x) : 0.f; }

/// `class_weights` and `tokens`: a LossPartial's of all rows. Weights may be negative, and their sum too.
template <class Problem>
__device__ __forceinline__ MeanFactors mean_factors(const CountParams& p, float class_weights, double tokens) {
    if (p.reduction != kMean && p.reduction != kWeightedMean) return {1.f, 1.f};
    if (p.num_valid != nullptr) {
        double n = 0.;
        if (p.code == 0) n = *static_cast<const float*>(p.num_valid);
        if (p.code == 1) n = *static_cast<const int*>(p.num_valid);
        if (p.code == 2) n = static_cast<double>(*static_cast<const long long*>(p.num_valid));
        const float factor = reciprocal_or_zero(n > 0. ? n : 0.);
        return {factor, factor};
    }
    const float by_tokens = reciprocal_or_zero(tokens);
    return {Problem::class_weight ? reciprocal_or_zero(class_weights) : by_tokens, by_tokens};
}

/// A row's number in a tensor that a call may be without.
__device__ __forceinline__ float value_or(const float* values, long long row, float absent) {
    return values != nullptr ? values[row] : absent;
}

/// `class_weight`: of the classes. In a shard, which may not have the row's target, of the rows' targets.
template <class Problem>
__device__ __forceinline__ float class_weight_of(const float* class_weight, long long row, int target) {
    if constexpr (Problem::class_weight) return Problem::shard ? class_weight[row] : class_weight[target];
    return 1.f;
}

template <class Problem>
__device__ __forceinline__ float hard_weight_of(float given) {
    if constexpr (Problem::teacher) return given;
    return 1.f;
}

/// Σ c_j: V where there are no class weights.
template <class Problem>
__device__ __forceinline__ float class_weight_total(const PassScalars* scalars) {
    if constexpr (Problem::class_weight && Problem::label_smoothing) return scalars->class_weight_total;
    return static_cast<float>(whole_vocab_size<Problem>());
}

/// Divides the sums over all rows and writes the scalars that are wanted. For one thread.
template <class Problem>
__device__ __forceinline__ void write_loss(const CountParams& p, const LossSums& sums, float* loss, float* z_loss) {
    const MeanFactors factors = mean_factors<Problem>(p, sums.class_weight, sums.tokens);
    if (loss != nullptr) *loss = sums.cross_entropy * factors.cross_entropy + sums.z_loss * factors.z_loss;
    if (z_loss != nullptr) *z_loss = sums.z_loss * factors.z_loss;
}

/// Adds a part of a row to `all`, whose max is the largest of all parts'.
template <class Problem>
__device__ __forceinline__ void add_part(RowSums& all, const RowSums& part) {
    const float difference = part.exp_sum > 0.f ? fmaxf(part.max - all.max, farthest_below()) : 0.f;
    const float factor = ::expf(difference);
    all.exp_sum += factor * part.exp_sum;
    if constexpr (Problem::entropy) all.exp_z_sum += factor * (part.exp_z_sum + difference * part.exp_sum);
    if constexpr (Problem::label_smoothing) all.weighted_sum += part.weighted_sum;
    if constexpr (Problem::square_sum) all.exp_sq_sum += factor * factor * part.exp_sq_sum;
    if constexpr (Problem::top1) all.top1 = first_of_largest(all.max, all.top1, part.max, part.top1);
}

/// Merges a row's sums with those of the lane `lanes` away (a power of two): the lower lane's first in both, so that all get the same bits.
template <class Problem>
__device__ __forceinline__ RowSums merge_with_lane(const RowSums& mine, int lanes) {
    RowSums other;
    other.max = __shfl_xor_sync(0xffffffffu, mine.max, lanes);
    other.exp_sum = __shfl_xor_sync(0xffffffffu, mine.exp_sum, lanes);
    other.exp_z_sum = Problem::entropy ? __shfl_xor_sync(0xffffffffu, mine.exp_z_sum, lanes) : 0.f;
    other.weighted_sum = Problem::label_smoothing ? __shfl_xor_sync(0xffffffffu, mine.weighted_sum, lanes) : 0.f;
    other.target_logit = -infinity();
    other.exp_sq_sum = Problem::square_sum ? __shfl_xor_sync(0xffffffffu, mine.exp_sq_sum, lanes) : 0.f;
    other.top1 = Problem::top1 ? __shfl_xor_sync(0xffffffffu, mine.top1, lanes) : FLCE_NO_CLASS;
    return (threadIdx.x & static_cast<unsigned>(lanes)) == 0 ? merge(mine, other) : merge(other, mine);
}

/// Merges every kStep-th of a row's `splits` parts, from number `first` on; the parts lie `split_stride` elements apart. The largest logit
/// first, so that no part waits for the exponential of the one before. The first part, often the only one, is read once. kAtOnce: most
/// parts whose loads are on their way together.
template <class Problem, int kStep, int kAtOnce = 16>
__device__ __forceinline__ RowSums merge_splits(const float* at, long long split_stride, long long field_stride, int first, int splits) {
    using Fields = PartialFields<Problem>;
    RowSums all = sums_of_nothing(-infinity(), -infinity());
    if (first >= splits) return all;
    const RowSums head = Fields::load(at + first * split_stride, field_stride);
    all.max = fmaxf(all.max, head.max);
#pragma unroll kAtOnce
    for (int split = first + kStep; split < splits; split += kStep) all.max = fmaxf(all.max, at[split * split_stride]);
    add_part<Problem>(all, head);
#pragma unroll kAtOnce
    for (int split = first + kStep; split < splits; split += kStep) {
        add_part<Problem>(all, Fields::load(at + split * split_stride, field_stride));
    }
    return all;
}

/// Factors and subtrahends of every row of a call. `class_weight_total`: Σ c_j.
template <class Problem>
__device__ __forceinline__ LossOptions loss_options(const OutputsParams& p, float class_weight_total) {
    return {
        p.label_smoothing, p.smoothing_per_class, class_weight_total, p.z_loss_weight, p.dft != 0, hard_weight_of<Problem>(p.hard_weight)};
}

/// Writes outputs of the caller's row.
template <class Problem>
__device__ __forceinline__ void write_outputs(const OutputsParams& p, int row, const RowOutputs& out, int top1) {
    p.lse[row] = out.lse;
    if (p.loss != nullptr) p.loss[row] = out.cross_entropy + out.z_loss;
    if (p.z_loss != nullptr) p.z_loss[row] = out.z_loss;
    if (p.logprobs != nullptr) p.logprobs[row] = out.logprob;
    if (p.entropy != nullptr) p.entropy[row] = out.entropy;
    if constexpr (Problem::square_sum) {
        if (p.log_sum_sq_probs != nullptr) p.log_sum_sq_probs[row] = out.log_sum_sq_probs;
    }
    if constexpr (Problem::top1) {
        if (p.top1 != nullptr) p.top1[row] = top1;
    }
}

/// Adds up what the block's threads have of the loss.
template <class Problem>
__device__ __forceinline__ void write_losses(const OutputsParams& p, const LossPartial& mine) {
    if (p.loss_partials == nullptr && p.scalar_loss == nullptr && p.scalar_z_loss == nullptr) return;
    const LossSums sums = sum_losses<kOutputThreads>({mine.cross_entropy, mine.z_loss, mine.class_weight, mine.tokens});
    if (threadIdx.x != 0) return;
    if (p.loss_partials != nullptr) {
        p.loss_partials[blockIdx.x] = {sums.cross_entropy, sums.z_loss, sums.class_weight, static_cast<float>(sums.tokens)};
    } else {
        write_loss<Problem>(p.count, sums, p.scalar_loss, p.scalar_z_loss);
    }
}

/// The teacher's cross entropy of the block's rows, whose classes' logits become log-probabilities. `row`: the caller's, −1 where it is
/// ignored; `first`: the first thread of a row, which has its sums. For the whole block; `row_of_block` is the thread's.
template <class Problem>
__device__ __forceinline__ float teacher_cross_entropy_of(const TeacherParams& p, bool first, int row_of_block, int row, int target,
                                                          float target_logit, const RowSums& sums) {
    __shared__ TaughtRow taught[kOutputRows];
    if (first) taught[row_of_block] = {row, target, target_logit, sums.max, logf(sums.exp_sum), 0.f};
    __syncthreads();  // every row is there
    finish_teacher<Problem, kOutputThreads>(p, taught);
    return taught[row_of_block].cross_entropy;
}

/// The splits of each row of a block of kOutputThreads, several threads a row.
template <class Problem>
struct MergedSplits {
    using Fields = PartialFields<Problem>;
    // A warp reads neighbouring rows of a split; a row's threads are in different warps.
    enum : int { kParts = kOutputThreads / kOutputRows };

    int row_of_block;
    int part;  ///< number of this thread among its row's threads; thread 0 has the sums
    int row;   ///< row of the launch

    __device__ __forceinline__ MergedSplits()
        : row_of_block(static_cast<int>(threadIdx.x) % kOutputRows),
          part(static_cast<int>(threadIdx.x) / kOutputRows),
          row(static_cast<int>(blockIdx.x) * kOutputRows + row_of_block) {}

    /// `rows`: rows of the launch that count; `none`: this row is ignored, or has no class.
    __device__ __forceinline__ RowSums sums(const SplitSumsParams& p, int rows, bool none) const {
        __shared__ float parts[kParts][Fields::kCount][kOutputRows];
        // With a list only forward knows how its work was divided. Running sums of stretches are one part.
        constexpr bool kDivided = Problem::lists_rows && !kStretches<Problem>;
        const int all_splits = kDivided ? p.scalars->splits : p.splits;
        const int splits = none ? 0 : all_splits;
        const long long partial_rows = kDivided ? partial_rows_of(rows) : p.partial_rows;
        Fields::store(&parts[part][0][row_of_block], kOutputRows,
                      merge_splits<Problem, kParts>(p.partials + row, Fields::kCount * partial_rows, partial_rows, part, splits));
        __syncthreads();
        if (part != 0 || none) return sums_of_nothing(-infinity(), -infinity());
        return merge_splits<Problem, 1>(&parts[0][0][row_of_block], Fields::kCount * kOutputRows, kOutputRows, 0, kParts);
    }
};

/// Whether a row's exponentials are out of range. The row's reference is then corrected to lse of the classes at hand. Exponentials are
/// within ±87 of the reference, in nats; an exponential that is `most` below the largest does not count any more.
__device__ __forceinline__ bool corrects_reference(const SplitSumsParams& p, int row, const RowSums& sums, float lse, int most) {
    const bool stale = !(sums.max - p.references[row] <= most);
    if (stale) p.references[row] = lse;
    p.retained_target_logits[row] = sums.target_logit;
    return stale;
}
__device__ __forceinline__ void tell_stale(const SplitSumsParams& p, bool stale) {
    if (p.references == nullptr) return;
    stale = __syncthreads_or(stale) != 0;
    if (threadIdx.x == 0) p.stale[blockIdx.x] = stale ? 1u : 0u;
}

/// Merges the splits of each row and writes its outputs; one LossPartial a block, or the scalar loss.
template <class Problem>
__device__ __forceinline__ void row_outputs_kernel(const RowOutputsParams& p) {
    const MergedSplits<Problem> merged;
    const int row = merged.row;
    const bool first = merged.part == 0;
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    const ListedRow listed = row < rows ? listed_row<Problem>(p.list, p.targets, p.temperature, row) : ListedRow{0, kIgnored};
    const int target = listed.target;
    RowSums sums = merged.sums(p.found, rows, target < 0);
    if (first && target >= 0) sums.target_logit = p.found.target_logits[row];
    float of_teacher = 0.f;
    if constexpr (Problem::teacher) {
        of_teacher = teacher_cross_entropy_of<Problem>(p.teacher, first, merged.row_of_block, target >= 0 ? listed.row : -1, target,
                                                       sums.target_logit, sums);
    }
    LossPartial mine{0.f, 0.f, 0.f, 0.f};
    RowOutputs out{0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    int top1 = -1;
    bool stale = false;
    if (first && target >= 0) {
        const float c_y = class_weight_of<Problem>(p.class_weight, listed.row, target);
        out = row_outputs(sums, c_y, value_or(p.token_weight, listed.row, 1.f), of_teacher,
                          loss_options<Problem>(p, class_weight_total<Problem>(p.found.scalars)));
        top1 = sums.top1 == FLCE_NO_CLASS ? 0 : sums.top1;
        if (p.found.references != nullptr) {
            stale = corrects_reference(p.found, row, sums, out.lse, Problem::teacher ? kMostAboveTaught : kMostAboveReference);
        }
        const float share = share_of_token(p.count, p.token_weight, listed.row);
        mine = {out.cross_entropy, out.z_loss, share * c_y, share};
    } else if (first && target == kOutOfRange && p.invalid_label != nullptr) {
        atomicMin(p.invalid_label, static_cast<unsigned long long>(p.first_row + row));
    }
    if (first && row < rows) write_outputs<Problem>(p, listed.row, out, top1);
    tell_stale(p.found, stale);
    write_losses<Problem>(p, mine);
}

/// The scalar loss, in one block.
template <class Problem>
__device__ __forceinline__ void reduce_loss(const ReduceLossParams& p) {
    LossSums sums{0.f, 0.f, 0.f, 0.};
    for (long long i = threadIdx.x; i < p.blocks; i += kReduceThreads) sums.add(p.loss_partials[i]);
    sums = sum_losses<kReduceThreads>(sums);
    if (threadIdx.x == 0) write_loss<Problem>(p.count, sums, p.loss, p.z_loss);
}

}  // namespace flce

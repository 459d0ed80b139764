// Kernels over rows: from partial sums to outputs and the loss, from upstream gradients to coefficients. All reductions in a fixed order.
#pragma once

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

/// Reduction over the block in a fixed tree; every thread gets the result. `scratch` holds one T a warp.
template <int kThreads, class T, class Op>
__device__ __forceinline__ T block_reduce(T value, T* scratch, Op op) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lanes));
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 == 0) scratch[warp] = value;
    __syncthreads();
    T result = scratch[0];
    for (int w = 1; w < kThreads / 32; ++w) result = op(result, scratch[w]);
    __syncthreads();  // scratch may be used again
    return result;
}

/// What a token counts for in what a mean divides by. `token_weights`: the rows', or null.
__device__ __forceinline__ float share_of_token(const CountParams& p, const float* token_weights, long long row) {
    return p.reduction == kWeightedMean && token_weights != nullptr ? token_weights[row] : 1.f;
}

/// What a mean divides by, as factors: 0 where there is nothing to divide by.
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

/// A row's, of a tensor that a call may be without.
__device__ __forceinline__ float value_or(const float* values, long long row, float absent) {
    return values != nullptr ? values[row] : absent;
}

template <class Problem>
__device__ __forceinline__ float class_weight_of(const float* class_weight, int target) {
    if constexpr (Problem::class_weight) return class_weight[target];
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
    return static_cast<float>(Problem::vocab_size);
}

/// Divides the sums over all rows and writes the scalars that are wanted. For one thread. `tokens`: LossPartial's, which a float holds no
/// sum of where there are very many.
template <class Problem>
__device__ __forceinline__ void write_loss(const CountParams& p, const LossPartial& sums, double tokens, float* loss, float* z_loss) {
    const MeanFactors factors = mean_factors<Problem>(p, sums.class_weight, tokens);
    if (loss != nullptr) *loss = sums.cross_entropy * factors.cross_entropy + sums.z_loss * factors.z_loss;
    if (z_loss != nullptr) *z_loss = sums.z_loss * factors.z_loss;
}

/// What every kStep-th of a row's `splits` parts from number `first` on comes to; they lie `split_stride` elements apart. The largest logit
/// first, so that no part waits for the exponential of the one before.
template <class Problem, int kStep>
__device__ __forceinline__ RowSums merge_splits(const float* at, long long split_stride, long long field_stride, int first, int splits) {
    using Fields = PartialFields<Problem>;
    RowSums all = sums_of_nothing(-infinity(), -infinity());
#pragma unroll 16
    for (int split = first; split < splits; split += kStep) all.max = fmaxf(all.max, at[split * split_stride]);
#pragma unroll 16
    for (int split = first; split < splits; split += kStep) {
        const RowSums part = Fields::load(at + split * split_stride, field_stride);
        const float difference = part.exp_sum > 0.f ? fmaxf(part.max - all.max, farthest_below()) : 0.f;
        const float factor = ::expf(difference);
        all.exp_sum += factor * part.exp_sum;
        if constexpr (Problem::entropy) all.exp_z_sum += factor * (part.exp_z_sum + difference * part.exp_sum);
        if constexpr (Problem::label_smoothing) all.weighted_sum += part.weighted_sum;
        if constexpr (Problem::square_sum) all.exp_sq_sum += factor * factor * part.exp_sq_sum;
        if constexpr (Problem::top1) all.top1 = first_of_largest(all.max, all.top1, part.max, part.top1);
    }
    return all;
}

/// Merges the splits of each row and writes its outputs; one LossPartial a block, or the scalar loss.
template <class Problem>
__device__ __forceinline__ void row_outputs_kernel(const RowOutputsParams& p) {
    using Fields = PartialFields<Problem>;
    __shared__ float scratch[kOutputThreads / 32];
    // A warp reads neighbouring rows of a split; a row's threads are in different warps.
    constexpr int kParts = kOutputThreads / kOutputRows;
    __shared__ float parts[kParts][Fields::kCount][kOutputRows];
    const int row_of_block = static_cast<int>(threadIdx.x) % kOutputRows;
    const int part = static_cast<int>(threadIdx.x) / kOutputRows;
    const int row = static_cast<int>(blockIdx.x) * kOutputRows + row_of_block;
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    // Where forward has a list, it alone knows how it has divided its work. Running sums of stretches are one part.
    constexpr bool kDivided = Problem::lists_rows && !Problem::rounds_weight;
    const int all_splits = kDivided ? p.scalars->splits : p.splits;
    const ListedRow listed = row < rows ? listed_row<Problem>(p.list, p.targets, p.temperature, row) : ListedRow{0, kIgnored};
    const int target = listed.target;
    LossPartial mine{0.f, 0.f, 0.f, 0.f};
    RowOutputs out{0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    int top1 = -1;
    bool stale = false;
    const int splits = target < 0 ? 0 : all_splits;
    const long long partial_rows = kDivided ? partial_rows_of(rows) : p.partial_rows;
    Fields::store(&parts[part][0][row_of_block], kOutputRows,
                  merge_splits<Problem, kParts>(p.partials + row, Fields::kCount * partial_rows, partial_rows, part, splits));
    __syncthreads();
    RowSums sums = sums_of_nothing(-infinity(), -infinity());
    if (part == 0 && target >= 0) {
        sums = merge_splits<Problem, 1>(&parts[0][0][row_of_block], Fields::kCount * kOutputRows, kOutputRows, 0, kParts);
    }
    float teacher_cross_entropy = 0.f;
    if constexpr (Problem::teacher) {
        __shared__ TaughtRow taught[kOutputRows];
        if (part == 0) {
            const float target_logit = target >= 0 ? p.target_logits[row] : 0.f;
            taught[row_of_block] = {target >= 0 ? listed.row : -1, target, target_logit, sums.max, logf(sums.exp_sum), 0.f};
        }
        __syncthreads();  // every row is there
        finish_teacher<Problem, kOutputThreads>(p.teacher, taught);
        teacher_cross_entropy = taught[row_of_block].cross_entropy;
    }
    if (part == 0 && target >= 0) {
        sums.target_logit = p.target_logits[row];
        const float c_y = class_weight_of<Problem>(p.class_weight, target);
        const LossOptions options{p.label_smoothing,
                                  p.smoothing_per_class,
                                  class_weight_total<Problem>(p.scalars),
                                  p.z_loss_weight,
                                  p.dft != 0,
                                  hard_weight_of<Problem>(p.hard_weight)};
        out = row_outputs(sums, c_y, value_or(p.token_weight, listed.row, 1.f), teacher_cross_entropy, options);
        top1 = sums.top1 == FLCE_NO_CLASS ? 0 : sums.top1;
        if (p.references != nullptr) {
            // Exponentials are within ±87 of the reference, in nats; what is 60 below the largest does not count any more.
            stale = !(sums.max - p.references[row] <= (Problem::teacher ? kMostAboveTaught : kMostAboveReference));
            if (stale) p.references[row] = out.lse;
            p.retained_target_logits[row] = sums.target_logit;
        }
        const float share = share_of_token(p.count, p.token_weight, listed.row);
        mine = {out.cross_entropy, out.z_loss, share * c_y, share};
    } else if (part == 0 && target == kOutOfRange && p.invalid_label != nullptr) {
        atomicMin(p.invalid_label, static_cast<unsigned long long>(p.first_row + row));
    }
    if (part == 0 && row < rows) {
        p.lse[listed.row] = out.lse;
        if (p.loss != nullptr) p.loss[listed.row] = out.cross_entropy + out.z_loss;
        if (p.z_loss != nullptr) p.z_loss[listed.row] = out.z_loss;
        if (p.logprob != nullptr) p.logprob[listed.row] = out.logprob;
        if (p.entropy != nullptr) p.entropy[listed.row] = out.entropy;
        if constexpr (Problem::square_sum) {
            if (p.log_sum_sq_probs != nullptr) p.log_sum_sq_probs[listed.row] = out.log_sum_sq_probs;
        }
        if constexpr (Problem::top1) {
            if (p.top1 != nullptr) p.top1[listed.row] = top1;
        }
    }
    if (p.references != nullptr) {
        stale = __syncthreads_or(stale) != 0;
        if (threadIdx.x == 0) p.stale[blockIdx.x] = stale ? 1u : 0u;
    }
    if (p.loss_partials == nullptr && p.scalar_loss == nullptr && p.scalar_z_loss == nullptr) return;
    mine.cross_entropy = block_reduce<kOutputThreads>(mine.cross_entropy, scratch, SumOp{});
    mine.z_loss = block_reduce<kOutputThreads>(mine.z_loss, scratch, SumOp{});
    mine.class_weight = block_reduce<kOutputThreads>(mine.class_weight, scratch, SumOp{});
    mine.tokens = block_reduce<kOutputThreads>(mine.tokens, scratch, SumOp{});
    if (threadIdx.x != 0) return;
    if (p.loss_partials != nullptr) {
        p.loss_partials[blockIdx.x] = mine;
    } else {
        write_loss<Problem>(p.count, mine, mine.tokens, p.scalar_loss, p.scalar_z_loss);
    }
}

/// The scalar loss, in one block.
template <class Problem>
__device__ __forceinline__ void reduce_loss(const ReduceLossParams& p) {
    __shared__ float scratch[kReduceThreads / 32];
    __shared__ double counts[kReduceThreads / 32];
    LossPartial sums{0.f, 0.f, 0.f, 0.f};
    double tokens = 0.;
    for (long long i = threadIdx.x; i < p.blocks; i += kReduceThreads) {
        const LossPartial part = p.loss_partials[i];
        sums.cross_entropy += part.cross_entropy;
        sums.z_loss += part.z_loss;
        sums.class_weight += part.class_weight;
        tokens += part.tokens;
    }
    sums.cross_entropy = block_reduce<kReduceThreads>(sums.cross_entropy, scratch, SumOp{});
    sums.z_loss = block_reduce<kReduceThreads>(sums.z_loss, scratch, SumOp{});
    sums.class_weight = block_reduce<kReduceThreads>(sums.class_weight, scratch, SumOp{});
    tokens = block_reduce<kReduceThreads>(tokens, counts, SumOp{});
    if (threadIdx.x == 0) write_loss<Problem>(p.count, sums, tokens, p.loss, p.z_loss);
}

/// Sets a pass's scalars, but for the totals of class weights: the divisors, from the valid tokens where `want_count` says so, and bounds
/// that rows raise. One block; the sums do not depend on its size while a thread has one row.
template <class Problem, int kThreads>
__device__ __forceinline__ void start_scalars(const TargetParams& targets, const float* temperatures, const CountParams& counting,
                                              const float* class_weights, const float* token_weights, long long num_tokens, int want_count,
                                              PassScalars* scalars) {
    __shared__ float scratch[kThreads / 32];
    __shared__ double counts[kThreads / 32];
    float class_weight = 0.f;
    double tokens = 0.;
    if (want_count != 0) {
        for (long long row = threadIdx.x; row < num_tokens; row += kThreads) {
            const int target = load_target<Problem>(targets, temperatures, row);
            if (target < 0) continue;
            const float share = share_of_token(counting, token_weights, row);
            class_weight += share * class_weight_of<Problem>(class_weights, target);
            tokens += share;
        }
        class_weight = block_reduce<kThreads>(class_weight, scratch, SumOp{});
        tokens = block_reduce<kThreads>(tokens, counts, SumOp{});
    }
    if (threadIdx.x != 0) return;
    const MeanFactors factors = mean_factors<Problem>(counting, class_weight, tokens);
    scalars->cross_entropy_scale = factors.cross_entropy;
    scalars->z_loss_scale = factors.z_loss;
    scalars->dlogits_bound_bits = 0u;
    scalars->target_bits = 0u;
    scalars->tickets = {0u, 0u};
}

/// Lists valid rows in order and then the others, from the last to the first; their outputs become 0. One block: it goes through the labels
/// from the front, each thread has the same number of neighbours, and places are counted.
template <class Problem>
__device__ __forceinline__ void list_rows(const PrepareParams& p) {
    constexpr int kOfThread = 4;
    __shared__ int valid_of_warp[kReduceThreads / 32];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int before = 0;  // valid rows of the rounds before
    for (long long begin = 0; begin < p.num_tokens; begin += kReduceThreads * kOfThread) {
        const long long first = begin + static_cast<long long>(threadIdx.x) * kOfThread;
        int targets[kOfThread];
        int mine = 0;
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
            targets[i] = first + i < p.num_tokens ? load_target<Problem>(p.targets, p.temperature, first + i) : kIgnored;
            mine += targets[i] >= 0 ? 1 : 0;
        }
        int up_to = mine;  // of this warp, up to this thread
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, up_to, lanes);
            if (lane >= lanes) up_to += other;
        }
        if (lane == 31) valid_of_warp[warp] = up_to;
        __syncthreads();
        int place = before + up_to - mine;
        for (int w = 0; w < kReduceThreads / 32; ++w) {
            if (w < warp) place += valid_of_warp[w];
            before += valid_of_warp[w];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
            const long long row = first + i;
            if (row >= p.num_tokens) break;
            const bool valid = targets[i] >= 0;
            // `row − place` rows before this one are not valid.
            p.list[valid ? place : p.num_tokens - 1 - (row - place)] = {static_cast<int>(row), targets[i]};
            place += valid ? 1 : 0;
            if (valid) continue;
            if (targets[i] == kOutOfRange && p.invalid_label != nullptr) atomicMin(p.invalid_label, static_cast<unsigned long long>(row));
#pragma unroll
            for (float* output : p.outputs) {
                if (output != nullptr) output[row] = 0.f;
            }
            if (p.top1 != nullptr) p.top1[row] = -1;
        }
    }
    if (threadIdx.x == 0) p.scalars->valid_rows = before;
}

/// What a pass needs before any row is looked at, in one block.
template <class Problem>
__device__ __forceinline__ void prepare(const PrepareParams& p) {
    if (p.want_class_weights != 0) {
        __shared__ float scratch[kReduceThreads / 32];
        float total = 0.f;
        float largest = 0.f;
        for (int j = static_cast<int>(threadIdx.x); j < Problem::vocab_size; j += kReduceThreads) {
            total += p.class_weight[j];
            largest = fmaxf(largest, fabsf(p.class_weight[j]));
        }
        total = block_reduce<kReduceThreads>(total, scratch, SumOp{});
        largest = block_reduce<kReduceThreads>(largest, scratch, MaxOp{});
        if (threadIdx.x == 0) {
            p.scalars->class_weight_total = total;
            p.scalars->class_weight_max = largest;
        }
    }
    start_scalars<Problem, kReduceThreads>(p.targets, p.temperature, p.count, p.class_weight, p.token_weight, p.num_tokens, p.want_count,
                                           p.scalars);
    for (int i = static_cast<int>(threadIdx.x); i < p.counter_count; i += kReduceThreads) p.counters[i] = 0u;
    if constexpr (Problem::lists_rows) {
        if (p.list != nullptr) list_rows<Problem>(p);
    }
}

/// Coefficients of a row whose logits are divided by a temperature: dz is what is above them, which is divided as well.
__device__ __forceinline__ RowCoefficients divided(const RowCoefficients& k, float temperature) {
    return {k.a / temperature, k.b / temperature, k.t / temperature, k.s / temperature};
}

/// What the losses of all rows of a call are multiplied with.
__device__ __forceinline__ float common_factor(const RowCoefficientsParams& p) {
    if (p.count.reduction == kNone) return 1.f;
    return (p.grad_loss == nullptr ? p.absent_grad_loss : p.grad_loss[0]) * p.scalars->cross_entropy_scale;
}

template <class Problem>
__device__ __forceinline__ void row_coefficients_kernel(const RowCoefficientsParams& p) {
    if (p.prepares != 0) {
        start_scalars<Problem, kRowThreads>(p.targets, p.temperature, p.count, p.class_weight, p.token_weight, p.rows, p.want_count,
                                            p.scalars);
        __syncthreads();  // every thread reads the scalars and raises the bounds
    }
    const int row = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
    TeacherSums teacher{0.f, 0.f};
    if constexpr (Problem::teacher) {  // of every lane's row: before any lane is through
        const ListedRow taught = row < p.rows ? listed_row<Problem>(p.list, p.targets, p.temperature, row) : ListedRow{0, kIgnored};
        teacher = teacher_sums<Problem>(p.teacher, taught.target >= 0 ? taught.row : -1);
    }
    if (row >= p.rows) return;
    float4 packed = make_float4(0.f, 0.f, 0.f, 0.f);
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, row);
    const int target = listed.target;
    float of_teacher = 0.f;
    RowTarget row_target{infinity(), kIgnored};
    float temperature = 1.f;
    if (target >= 0) {
        const LossOptions options{p.label_smoothing, p.smoothing_per_class, class_weight_total<Problem>(p.scalars),
                                  p.z_loss_weight,   p.logprob != nullptr,  hard_weight_of<Problem>(p.hard_weight)};
        const float factor = loss_factor(value_or(p.token_weight, listed.row, 1.f), value_or(p.logprob, listed.row, 0.f), options);
        const float g = factor * (p.grad_loss == nullptr ? p.absent_grad_loss : p.grad_loss[p.count.reduction == kNone ? listed.row : 0]);
        const RowUpstream upstream{g * p.scalars->cross_entropy_scale, g * p.scalars->z_loss_scale, value_or(p.grad_lse, listed.row, 0.f),
                                   value_or(p.grad_logprob, listed.row, 0.f), value_or(p.grad_entropy, listed.row, 0.f)};
        const float entropy = value_or(p.entropy, listed.row, 0.f);
        row_target = {p.lse[listed.row], target};
        const float c_y = class_weight_of<Problem>(p.class_weight, target);
        RowCoefficients k = row_coefficients(upstream, row_target.lse, entropy, c_y, teacher.sum, options);
        if constexpr (Problem::teacher) of_teacher = teacher_weight(upstream, options);
        if constexpr (Problem::temperature) {
            temperature = p.temperature[listed.row];
            k = divided(k, temperature);
            if constexpr (Problem::teacher) of_teacher /= temperature;
        }
        packed = make_float4(k.a, k.b, k.t, k.s);
        if constexpr (sizeof(typename Problem::Element) == 2) {
            const float unit = is_batch_invariant<Problem>() ? common_factor(p) : k.t;
            atomicMax(&p.scalars->target_bits, __float_as_uint(fabsf(unit)));
        }
        if constexpr (kSame<typename Problem::Element, Fp16>) {
            // |p·g·(lse − h − z)| ≤ |g|·(h + 1/e) for the entropy's part; the other terms bound themselves, as p ≤ 1.
            const float without_entropy = k.a + k.b * (row_target.lse - entropy);
            const float largest_weight = Problem::class_weight && Problem::label_smoothing ? p.scalars->class_weight_max : 1.f;
            float bound = fabsf(without_entropy) + fabsf(k.t) + fabsf(k.s) * largest_weight + fabsf(k.b) * (fabsf(entropy) + 1.f);
            if constexpr (Problem::teacher) bound += fabsf(of_teacher) * teacher.sizes;
            // A row that is NaN or infinite must not take other rows' precision.
            if (bound < infinity()) atomicMax(&p.scalars->dlogits_bound_bits, __float_as_uint(bound * p.derivative_bound));
        }
    }
    static_cast<float4*>(p.coefficients)[row] = packed;
    static_cast<RowTarget*>(p.row_targets)[row] = row_target;
    if constexpr (Problem::temperature) p.row_temperatures[row] = temperature;
    if constexpr (Problem::teacher) p.row_teacher_weights[row] = of_teacher;
}

/// Adds the partial sums of columns, in order, to grad_bias.
template <class Problem>
__device__ __forceinline__ void grad_bias(const GradBiasParams& p) {
    using Out = typename Problem::GradWeight;
    const int column = static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x);
    if (column >= p.columns) return;
    float sum = p.first != 0 ? 0.f : p.accumulator[column];
    const int partials = ceil_div(listed_rows<Problem>(p.list, p.rows, 1), p.block_rows);
    for (int partial = 0; partial < partials; ++partial) sum += p.bias_partials[partial * p.ld + column];
    if (p.last == 0) {
        p.accumulator[column] = sum;
        return;
    }
    sum *= dlogits_scale<Problem>(p.scalars, true);
    Out* const out = static_cast<Out*>(p.grad_bias) + column;
    if constexpr (Problem::accumulate) sum += to_float(*out);
    *out = Numeric<Out>::from_float(sum);
}

/// A warp copies a row, or zeroes it where the list has none, or its token is ignored.
template <class Problem>
__device__ __forceinline__ void gather_rows(const GatherRowsParams& p) {
    using Element = typename Problem::Element;
    const int row = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows) return;
    bool listed;
    long long from = row;
    if (p.list.rows == nullptr) {
        listed = load_target<Problem>(p.targets, p.temperature, row) >= 0;
    } else {
        const int valid = *p.list.valid;
        if (p.unless_all != 0 && valid == p.rows) return;
        listed = p.list.first + row < valid;
        from = listed ? p.list.rows[p.list.first + row].row : 0;
    }
    const Element* const hidden = static_cast<const Element*>(p.hidden) + from * Problem::hidden_size;
    Element* const compact = static_cast<Element*>(p.compact) + static_cast<long long>(row) * Problem::hidden_size;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < Problem::hidden_size; k += 32 * 8) {
        unsigned words[4] = {0u, 0u, 0u, 0u};
        if (listed) ptx::ld_global_v4(words, hidden + k);
        ptx::st_global_v4(compact + k, words);
    }
}

/// A warp finishes a row of grad_hidden.
template <class Problem>
__device__ __forceinline__ void scatter_rows(const ScatterRowsParams& p) {
    using Element = typename Problem::Element;
    const int entry = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (entry >= p.rows) return;
    const int rows = listed_rows<Problem>(p.list, p.rows, 1);
    const bool listed = p.list.rows == nullptr || entry < *p.list.valid;
    const SumParts parts(p.share, rows);
    const bool summed = p.accumulator != nullptr && (p.share.room == 0 || parts.count > 1);
    if (listed && !summed) return;
    const float factor = dlogits_scale<Problem>(p.scalars, true);
    const float* const sum = p.accumulator + static_cast<long long>(entry) * Problem::hidden_size;
    const long long part = static_cast<long long>(parts.stride) * Problem::hidden_size;
    const long long row = p.list.rows == nullptr ? entry : p.list.rows[entry].row;
    Element* const to = static_cast<Element*>(p.grad_hidden) + row * Problem::hidden_size;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 2; k < Problem::hidden_size; k += 64) {
        float2 pair = make_float2(0.f, 0.f);
        if (listed) pair = *reinterpret_cast<const float2*>(sum + k);
        for (int i = 1; listed && i < parts.count; ++i) {
            const float2 more = *reinterpret_cast<const float2*>(sum + i * part + k);
            pair.x += more.x;
            pair.y += more.y;
        }
        *reinterpret_cast<unsigned*>(to + k) = Numeric<Element>::pack(pair.x * factor, pair.y * factor);
    }
}

/// Zeroes the gradient of a hidden_major weight's columns past V.
template <class Problem>
__device__ __forceinline__ void zero_columns(const ZeroColumnsParams& p) {
    using Out = typename Problem::GradWeight;
    const long long width = p.columns - p.first_column;
    const long long i = static_cast<long long>(blockIdx.x) * kRowThreads + threadIdx.x;
    if (i < width * p.rows) static_cast<Out*>(p.data)[i / width * p.columns + p.first_column + i % width] = Numeric<Out>::from_float(0.f);
}

}  // namespace flce

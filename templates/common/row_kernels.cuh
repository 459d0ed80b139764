// Kernels over rows beside those that write outputs: what a pass needs before it looks at a logit, from upstream gradients to coefficients,
// and rows that are brought together or put where they belong. All reductions in a fixed order.
#pragma once

#include "flce/common/row_outputs.cuh"

namespace flce {

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
        constexpr int kAtOnce = 4;  // loads that are on their way together
        for (long long first = threadIdx.x; first < num_tokens; first += kAtOnce * kThreads) {
            int found[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const long long row = first + i * kThreads;
                found[i] = row < num_tokens ? load_target<Problem>(targets, temperatures, row) : kIgnored;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (found[i] < 0) continue;
                const float share = share_of_token(counting, token_weights, first + i * kThreads);
                class_weight += share * class_weight_of<Problem>(class_weights, first + i * kThreads, found[i]);
                tokens += share;
            }
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

/// Lists valid rows in order and then the others, from the last to the first; their outputs become 0. Each block but the first has
/// kReduceThreads rows, a thread one, and counts the valid rows before them by itself: no block waits for another.
template <class Problem>
__device__ __forceinline__ void list_rows(const PrepareParams& p) {
    constexpr int kWarps = kReduceThreads / 32;
    static_assert(kWarps == 32, "a lane for each warp");
    constexpr int kAtOnce = 8;           // loads that are on their way together
    __shared__ int2 valid_rows[kWarps];  // valid rows that a warp has found: before this block's rows, and among its own
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const long long first = static_cast<long long>(blockIdx.x - 1) * kReduceThreads;
    const long long row = first + threadIdx.x;
    const int target = row < p.num_tokens ? load_target<Problem>(p.targets, p.temperature, row) : kIgnored;  // before those of earlier rows
    int earlier = 0;
    for (long long begin = threadIdx.x; begin < first; begin += kAtOnce * kReduceThreads) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const long long other = begin + i * kReduceThreads;
            if (other < first && load_target<Problem>(p.targets, p.temperature, other) >= 0) ++earlier;
        }
    }
    const bool valid = target >= 0;
    const unsigned of_warp = __ballot_sync(0xffffffffu, valid);
    earlier = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(earlier)));
    if (lane == 0) valid_rows[warp] = make_int2(earlier, __popc(of_warp));
    __syncthreads();
    const int2 of_other = valid_rows[lane];
    const int before = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(of_other.x + (lane < warp ? of_other.y : 0))));
    const int place = before + __popc(of_warp & ((1u << lane) - 1u));
    if (row >= p.num_tokens) return;
    // `row − place` rows before this one are not valid.
    p.list[valid ? place : p.num_tokens - 1 - (row - place)] = {static_cast<int>(row), target};
    if (row == p.num_tokens - 1) p.scalars->valid_rows = place + (valid ? 1 : 0);
    if (valid) return;
    if (target == kOutOfRange && p.invalid_label != nullptr) atomicMin(p.invalid_label, static_cast<unsigned long long>(row));
#pragma unroll
    for (float* output : p.outputs) {
        if (output != nullptr) output[row] = 0.f;
    }
    if (p.top1 != nullptr) p.top1[row] = -1;
}

/// Prepares a pass before any row is looked at: the first block makes the scalars, the others the list.
template <class Problem>
__device__ __forceinline__ void prepare(const PrepareParams& p) {
    if (blockIdx.x != 0) {
        if constexpr (Problem::lists_rows) list_rows<Problem>(p);
        return;
    }
    if (p.want_class_weights != 0) {
        __shared__ float scratch[kReduceThreads / 32];
        float total = 0.f;
        float largest = 0.f;
        for (int j = static_cast<int>(threadIdx.x); j < vocab_columns<Problem>(p); j += kReduceThreads) {
            total += p.class_weight[j];
            largest = fmaxf(largest, fabsf(p.class_weight[j]));
        }
        total = block_reduce<kReduceThreads>(total, scratch, SumOp{});
        largest = block_reduce<kReduceThreads>(largest, scratch, MaxOp{});
        if (threadIdx.x == 0) {
            if (Problem::shard && p.class_weight_total != nullptr) total = *p.class_weight_total;
            p.scalars->class_weight_total = total;
            p.scalars->class_weight_max = largest;
        }
    }
    start_scalars<Problem, kReduceThreads>(p.targets, p.temperature, p.count, Problem::shard ? p.target_class_weight : p.class_weight,
                                           p.token_weight, p.num_tokens, p.want_count, p.scalars);
    for (int i = static_cast<int>(threadIdx.x); i < p.counter_count; i += kReduceThreads) p.counters[i] = 0u;
}

/// Upstream gradients of a row whose logits are divided by a temperature: dz is the gradient before the division, and is divided as well.
/// Coefficients are linear in these, so that terms which cancel each other without a temperature still do, to the last bit.
__device__ __forceinline__ RowUpstream divided(const RowUpstream& g, float temperature) {
    return {g.cross_entropy / temperature, g.z_loss / temperature, g.lse / temperature, g.logprob / temperature, g.entropy / temperature};
}

/// Common factor of the losses of all rows of a call.
__device__ __forceinline__ float common_factor(const RowCoefficientsParams& p) {
    if (p.count.reduction == kNone) return 1.f;
    return (p.grad_loss == nullptr ? p.absent_grad_loss : p.grad_loss[0]) * p.scalars->cross_entropy_scale;
}

/// Sums of a teacher's probabilities in a block's rows, for the whole block. A warp has kAtOnce rows at a time.
template <class Problem>
__device__ __forceinline__ void teacher_of_rows(const RowCoefficientsParams& p, int first, int count, TeacherSums* of_rows) {
    constexpr int kAtOnce = 4;
    for (int at = static_cast<int>(threadIdx.x) / 32 * kAtOnce; at < count; at += kRowThreads / 32 * kAtOnce) {
        long long rows[kAtOnce];
        TeacherSums sums[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = first + at + i;
            const ListedRow listed = row < p.rows ? listed_row<Problem>(p.list, p.targets, p.temperature, row) : ListedRow{0, kIgnored};
            rows[i] = listed.target >= 0 ? listed.row : -1;
        }
        add_teacher<Problem>(p.teacher, rows, sums);
        if (threadIdx.x % 32 != 0) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) of_rows[at + i] = sums[i];
    }
    __syncthreads();  // every row's are there
}

template <class Problem>
using RowCoefficientsParamsOf = Select<Problem::class_groups, GroupedRowCoefficientsParams, RowCoefficientsParams>;
template <class Problem>
__device__ __forceinline__ void row_coefficients_kernel(const RowCoefficientsParamsOf<Problem>& p) {
    if (p.prepares != 0) {
        start_scalars<Problem, kRowThreads>(p.targets, p.temperature, p.count, p.class_weight, p.token_weight, p.rows, p.want_count,
                                            p.scalars);
        __syncthreads();  // every thread reads the scalars and raises the bounds
    }
    const int block_rows = Problem::teacher ? p.block_rows : +kRowThreads;
    const int row = static_cast<int>(blockIdx.x) * block_rows + static_cast<int>(threadIdx.x);
    TeacherSums teacher{0.f, 0.f};
    if constexpr (Problem::teacher) {
        __shared__ TeacherSums of_rows[kRowThreads];
        teacher_of_rows<Problem>(p, static_cast<int>(blockIdx.x) * block_rows, block_rows, of_rows);
        teacher = of_rows[threadIdx.x];
    }
    if (row >= p.rows || static_cast<int>(threadIdx.x) >= block_rows) return;
    float4 packed = make_float4(0.f, 0.f, 0.f, 0.f);
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, row);
    const int target = listed.target;
    float of_teacher = 0.f;
    RowTarget row_target{infinity(), kIgnored};
    float temperature = 1.f;
    if (target >= 0) {
        const LossOptions options{p.label_smoothing, p.smoothing_per_class, class_weight_total<Problem>(p.scalars),
                                  p.z_loss_weight,   p.logprobs != nullptr, hard_weight_of<Problem>(p.hard_weight)};
        const float factor = loss_factor(value_or(p.token_weight, listed.row, 1.f), value_or(p.logprobs, listed.row, 0.f), options);
        const float g = factor * (p.grad_loss == nullptr ? p.absent_grad_loss : p.grad_loss[p.count.reduction == kNone ? listed.row : 0]);
        RowUpstream upstream{g * p.scalars->cross_entropy_scale, g * p.scalars->z_loss_scale, value_or(p.grad_lse, listed.row, 0.f),
                             value_or(p.grad_logprobs, listed.row, 0.f), value_or(p.grad_entropy, listed.row, 0.f)};
        const float given = value_or(p.entropy, listed.row, 0.f);
        const float entropy = Problem::divergence ? 0.f : given;
        row_target = {p.lse[listed.row], target};
        const float c_y = class_weight_of<Problem>(p.class_weight, listed.row, target);
        if constexpr (Problem::temperature) {
            temperature = p.temperature[listed.row];
            upstream = divided(upstream, temperature);
        }
        const RowCoefficients k = row_coefficients(upstream, row_target.lse, entropy, c_y, teacher.sum, options);
        if constexpr (Problem::teacher) of_teacher = teacher_weight(upstream, options);
        packed = make_float4(k.a, k.b, k.t, k.s);
        if constexpr (sizeof(typename Problem::Element) == 2) {
            const float unit = is_batch_invariant<Problem>() ? common_factor(p) : k.t;
            atomicMax(&p.scalars->target_bits, __float_as_uint(fabsf(unit) * p.derivative_bound));
        }
        if constexpr (kSame<typename Problem::Element, Fp16>) {
            // |p·g·(lse − h − z)| ≤ |g|·(h + 1/e) for the entropy's part; the other terms bound themselves, as p ≤ 1.
            const float without_entropy = k.a + k.b * (row_target.lse - entropy);
            const float largest_weight = Problem::class_weight && Problem::label_smoothing ? p.scalars->class_weight_max : 1.f;
            float bound = fabsf(without_entropy) + fabsf(k.t) + fabsf(k.s) * largest_weight + fabsf(k.b) * (fabsf(entropy) + 1.f);
            if constexpr (Problem::teacher) bound += fabsf(of_teacher) * teacher.sizes;
            // p·(log p/q − KL): terms above 0 are at most KL and 1 more, since those below 0 are −1 at the least, all together.
            if constexpr (Problem::divergence) bound = fabsf(k.a) * 2.f * (fabsf(given) + 1.f);
            // A row that is NaN or infinite must not take other rows' precision.
            if (bound < infinity()) atomicMax(&p.scalars->dlogits_bound_bits, __float_as_uint(bound * p.derivative_bound));
        }
    }
    static_cast<float4*>(p.coefficients)[row] = packed;
    static_cast<RowTarget*>(p.row_targets)[row] = row_target;
    if constexpr (Problem::temperature) p.row_temperatures[row] = temperature;
    if constexpr (Problem::class_groups) p.row_groups[row] = target >= 0 ? p.groups[listed.row] : +kNoGroup;
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

/// A warp copies a row of hidden states, or zeroes it where there is none.
template <class Problem>
__device__ __forceinline__ void bring_row(const typename Problem::Element* from, typename Problem::Element* to) {
    constexpr int kEach = 16 / sizeof(typename Problem::Element);
    for (int k = static_cast<int>(threadIdx.x) % 32 * kEach; k < Problem::hidden_size; k += 32 * kEach) {
        unsigned words[4] = {0u, 0u, 0u, 0u};
        if (from != nullptr) ptx::ld_global_v4(words, from + k);
        ptx::st_global_v4(to + k, words);
    }
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
    bring_row<Problem>(listed ? hidden : nullptr, static_cast<Element*>(p.compact) + static_cast<long long>(row) * Problem::hidden_size);
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

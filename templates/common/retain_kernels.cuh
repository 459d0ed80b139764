// Rows of a forward that retains exponentials, E_j = d_j·exp(z_j − reference), and of a backward that multiplies them. d_j is the
// derivative of a logit where a softcap makes it differ from class to class, else 1.
#pragma once

#include "flce/common/shard_kernels.cuh"

namespace flce {

/// d of the target.
template <class Problem>
__device__ __forceinline__ float target_derivative(const RetainedRowsParams& p, float logit, int row) {
    if constexpr (Problem::stores_derivative) {
        return LogitDerivative<Problem>(p.transform, Problem::temperature ? p.row_temperatures[row] : 1.f)(logit);
    } else {
        return 1.f;
    }
}

/// The place of a class's exponential.
template <class Problem>
__device__ __forceinline__ typename Problem::Element* exponential_at(const RetainedRowsParams& p, int row, int column) {
    constexpr int kColumns = Problem::retained_columns;
    char* const block = static_cast<char*>(p.exponentials) + column / kColumns * p.block_bytes;
    return reinterpret_cast<typename Problem::Element*>(block) + static_cast<long long>(row) * kColumns + column % kColumns;
}

/// Divisor of a row's dz where dz is stored: a, but at least a millionth of t and 2^-24 of the teacher's sizes. z-loss can make a vanish,
/// and so can a teacher whose probabilities add up to 0. A millionth of t does not show beside t, and neither does the rounding of the
/// teacher's sum.
__device__ __forceinline__ float divisor_of(float a, float t, float of_teacher) {
    const float least = fmaxf(1e-6f * fabsf(t), 0x1p-24f * of_teacher);
    return fabsf(a) < least ? copysignf(least, a) : a;
}

/// exp(reference − lse) of a shard's row with elements that are divided by it. Classes of other shards may be far above all classes of this
/// shard; the quotients stay finite. The row's other exponentials are at most e^kMostAboveWritten, and 2^-100 times that is next to
/// nothing. Where nothing is divided by the share, it may be 0.
__device__ __forceinline__ float share_to_divide(float share) { return fmaxf(share, 0x1p-100f); }

/// The factor that stored exponentials lack: where falls tell logits, exponentials are stored times a quarter of their slopes.
template <class Problem>
__device__ constexpr float stored_parts() {
    return Problem::has_falls ? 4.f : 1.f;
}

/// A row of retained_rows: the row's coefficients, the divisor of its dz, and stored_parts · exp(reference − lse).
struct RetainedRow {
    int row;
    float4 k;
    RowTarget target;
    float divisor;
    float share;
};

/// The target's exponential.
template <class Problem>
__device__ __forceinline__ void write_target(const RetainedRowsParams& p, const RetainedRow& r) {
    const float logit = p.target_logits[r.row];
    const float dz = ::expf(logit - r.target.lse) - r.k.z / r.divisor;
    *exponential_at<Problem>(p, r.row, r.target.target) =
        Numeric<typename Problem::Element>::from_float(dz / r.share * target_derivative<Problem>(p, logit, r.row));
}

/// The named classes' exponentials, as teacher_dlogits makes their dz, and the row's divisor, which follows from what their probabilities
/// come to. Returns whether the target is one of them. For all threads of a row.
template <class Problem>
__device__ __forceinline__ bool write_named(const RetainedRowsParams& p, RetainedRow& r) {
    using Named = NamedOf<Problem>;
    __shared__ typename Named::Shared shared;
    Named named(shared, threadIdx.x / Named::kThreads);
    const long long first = teacher_row(p.list, r.row) * p.teacher.top_k;
    const LaunchColumns launch{0, Problem::shard ? p.teacher.columns : static_cast<int>(Problem::vocab_size)};
    const bool found = named.template load<Problem>(p.teacher, first, launch);
    const float weight = p.row_teacher_weights[r.row];
    if constexpr (Problem::shard) {
        if (found) r.share = share_to_divide(r.share);
    }
    r.divisor = divisor_of(r.k.x, r.k.z, fabsf(weight) * named.template sizes<Problem>(p.teacher, first, launch));
    if (r.divisor == 0.f) return true;  // every dz of the row is 0
    bool has_target = false;
    named.for_each(p.teacher, first, [&](int k, int column, float probability) {
        const bool is_target = column == r.target.target;
        has_target = has_target || is_target;
        if (column >= p.columns) return;
        const float logprob = p.teacher.logprobs[first + k];
        const float dz = ::expf(logprob) * r.k.x - (is_target ? r.k.z : 0.f) - weight * probability;
        *exponential_at<Problem>(p, r.row, column) = Numeric<typename Problem::Element>::from_float(
            dz / r.divisor / r.share * slope_in_row<Problem>(p, r.row, logprob, r.target.lse, 0.f));
    });
    return named.any(has_target);
}

/// A row's scale as two numbers of 16 bits: the rounded scale, and the rest that rounding left out; a rest of 0 where it is infinite.
template <class Element>
__device__ __forceinline__ void write_factor(Element* to, long long pitch, float scale) {
    const Element rounded = Numeric<Element>::from_float(scale);
    const float rest = scale - to_float(rounded);
    to[0] = rounded;
    to[pitch] = Numeric<Element>::from_float(fabsf(rest) < infinity() ? rest : 0.f);
}

/// Scales the hidden states of a row of a launch, by the kThreads threads that have the row. Where the scale is 0 the hidden states may be
/// anything.
template <class Problem, int kThreads = 32>
__device__ __forceinline__ void scale_hidden(const void* hidden, const RowList& list, int row, float scale, void* scaled) {
    using Element = typename Problem::Element;
    const long long source = list.rows != nullptr ? list.rows[list.first + row].row : row;
    static_assert(Problem::hidden_size % 8 == 0, "rows that the copy engine reads are multiples of 16 bytes");
    const Element* const from = static_cast<const Element*>(hidden) + source * Problem::hidden_size;
    Element* const to = static_cast<Element*>(scaled) + static_cast<long long>(row) * Problem::hidden_size;
#pragma unroll 4
    for (int k = static_cast<int>(threadIdx.x) % kThreads * 8; k < Problem::hidden_size; k += kThreads * 8) {
        unsigned words[4];
        ptx::ld_global_v4(words, from + k);
#pragma unroll
        for (unsigned& h : words) {
            h = scale == 0.f ? 0u : Numeric<Element>::pack(Numeric<Element>::first(h) * scale, Numeric<Element>::second(h) * scale);
        }
        ptx::st_global_v4(to + k, words);
    }
}

/// A warp has a row, or a block where rows name many classes. dz_j = (p_j·a − t·[j = y])·d_j as scale·E_j: the target's E_y becomes
/// d_y·(p_y − t/a) / exp(reference − lse), from the logit in fp32, so that confident tokens keep their small gradients, and so do the
/// gradients of the classes that a teacher names. Another backward does this again. E, dz's other factor, meets hidden with the scale in it
/// and is the plain operand of both GEMMs. Label smoothing takes s·c_j from every dz_j of a row; this term has no part in E, and the GEMMs'
/// epilogues subtract it (smoothing_sums).
template <class Problem>
__device__ __forceinline__ void retained_rows(const RetainedRowsParams& p) {
    using Element = typename Problem::Element;
    constexpr int kThreads = NamedOf<Problem>::kThreads;
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / kThreads;
    const int lane = static_cast<int>(threadIdx.x) % kThreads;
    if (blockIdx.x == 0) {
        for (int i = static_cast<int>(threadIdx.x); i < p.counter_count; i += kRowThreads) p.counters[i] = 0u;
    }
    if (row >= p.rows) return;
    const float4 k = static_cast<const float4*>(p.coefficients)[row];
    const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
    float scale = 0.f;
    float smoothing = 0.f;
    if (target.target >= 0) {
        const float derivative = p.derivative * dlogits_scale<Problem>(p.scalars, false);
        smoothing = k.w * derivative;
        RetainedRow r{row, k, target, divisor_of(k.x, k.z, 0.f), stored_parts<Problem>() * ::expf(p.references[row] - target.lse)};
        if constexpr (Problem::shard) {
            if (target.target == kElsewhere) {
                r.k.z = 0.f;
                r.divisor = k.x;
            } else {
                r.share = share_to_divide(r.share);
            }
        }
        bool is_named = false;
        if constexpr (Problem::teacher) is_named = write_named<Problem>(p, r);
        scale = r.divisor * r.share * derivative;
        if (lane == 0 && !is_named && target.target < p.columns && r.divisor != 0.f) write_target<Problem>(p, r);
    }
    if (lane == 0) p.row_scales[row] = scale;
    if (Problem::label_smoothing && lane == 0) p.row_smoothing[row] = smoothing;
    if constexpr (Problem::bias) {
        if (lane == 0 && p.bias_factors != nullptr) write_factor(static_cast<Element*>(p.bias_factors) + row, p.factor_pitch, scale);
    }
    if (p.scaled_hidden != nullptr) scale_hidden<Problem, kThreads>(p.hidden, p.list, row, scale, p.scaled_hidden);
}

/// sum += factor · eight neighbours, which may be anything where the factor is 0.
template <class Element>
__device__ __forceinline__ void add_products(float factor, const unsigned (&words)[4], float (&sum)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned pair = factor == 0.f ? 0u : words[i];
        sum[2 * i] = __fmaf_rn(factor, Numeric<Element>::first(pair), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(factor, Numeric<Element>::second(pair), sum[2 * i + 1]);
    }
}

/// sums = Σ factor(i)·matrix[row_of(i)] over i from `first` to `end`. The matrix has `columns` columns, a multiple of 8. A row whose factor
/// is 0 may hold anything. One block works on it: each thread has 8 neighbouring columns, and threads take turns with the rows.
template <class Element, class RowOf, class Factor>
__device__ __forceinline__ void sum_rows_of_stretch(const Element* matrix, int columns, int first, int end, const RowOf& row_of,
                                                    const Factor& factor, float* sums) {
    __shared__ float others[kRowThreads][8];
    const int pieces = columns / 8;
    const int beside = min(pieces, static_cast<int>(kRowThreads));  // threads that read a row
    const int turns = kRowThreads / beside;
    const int turn = static_cast<int>(threadIdx.x) / beside;
    for (int piece0 = 0; piece0 < pieces; piece0 += beside) {
        const int piece = piece0 + static_cast<int>(threadIdx.x) % beside;
        float sum[8] = {};
        if (turn < turns && piece < pieces) {
#pragma unroll 8
            for (int i = first + turn; i < end; i += turns) {
                unsigned words[4];
                ptx::ld_global_v4(words, matrix + row_of(i) * columns + piece * 8);
                add_products<Element>(factor(i), words, sum);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) others[threadIdx.x][i] = sum[i];
        __syncthreads();
        if (turn == 0 && piece < pieces) {
            for (int other = 1; other < turns; ++other)
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += others[threadIdx.x + static_cast<unsigned>(other * beside)][i];
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[piece * 8 + i] = sum[i];
        }
        __syncthreads();
    }
}

/// Σ_j c_j·weight[k, j] of a hidden_major weight. A warp has a hidden dimension k at a time. The sums lie where the first stretch's would.
template <class Problem, class ClassWeight>
__device__ __forceinline__ void sum_columns_of_weight(const SmoothingSumsParams& p, const ClassWeight& class_weight) {
    using Element = typename Problem::Element;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    for (int k = warp; k < Problem::hidden_size; k += kSmoothingParts * (kRowThreads / 32)) {
        const Element* const row = static_cast<const Element*>(p.weight) + k * Problem::padded_vocab_size;
        float sum = 0.f;
        if constexpr (Problem::padded_vocab_size % 2 == 0) {
            for (int j = lane * 2; j < p.columns; j += 64) {
                const unsigned pair = *reinterpret_cast<const unsigned*>(row + j);
                sum = __fmaf_rn(class_weight(j), Numeric<Element>::first(pair), sum);
                if (j + 1 < p.columns) sum = __fmaf_rn(class_weight(j + 1), Numeric<Element>::second(pair), sum);
            }
        } else {  // every other row begins in the middle of a pair
            for (int j = lane; j < p.columns; j += 32) sum = __fmaf_rn(class_weight(j), to_float(row[j]), sum);
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (lane == 0) p.weight_sums[k] = sum;
    }
}

/// Label smoothing takes s_i·c_j from dz_ij: a product, so that gradients lack s_i·Σ_j c_j·weight[j] and c_j·Σ_i s_i·hidden[i]. The first
/// kSmoothingParts blocks make the first sum, the others the second one, each of a stretch; smoothing_totals adds the stretches up.
template <class Problem>
__device__ __forceinline__ void smoothing_sums(const SmoothingSumsParams& p) {
    using Element = typename Problem::Element;
    const auto class_weight = [&](int j) { return Problem::class_weight ? p.class_weight[j] : 1.f; };
    const int part = static_cast<int>(blockIdx.x) % kSmoothingParts;
    const bool of_weight = static_cast<int>(blockIdx.x) < kSmoothingParts;
    const int count = of_weight ? p.columns : p.rows;
    const int first = static_cast<int>(static_cast<long long>(count) * part / kSmoothingParts);
    const int end = static_cast<int>(static_cast<long long>(count) * (part + 1) / kSmoothingParts);
    if (!of_weight) {
        const auto row_of = [&](int i) -> long long { return p.list.rows != nullptr ? p.list.rows[p.list.first + i].row : i; };
        const auto smoothing = [&](int i) { return p.row_smoothing[i]; };
        sum_rows_of_stretch(static_cast<const Element*>(p.hidden), Problem::hidden_size, first, end, row_of, smoothing,
                            p.hidden_sums + part * Problem::hidden_size);
    } else if constexpr (Problem::hidden_major) {
        sum_columns_of_weight<Problem>(p, class_weight);
    } else {
        const auto row_of = [](int j) -> long long { return j; };
        sum_rows_of_stretch(static_cast<const Element*>(p.weight), Problem::hidden_size, first, end, row_of, class_weight,
                            p.weight_sums + part * Problem::hidden_size);
    }
}

/// Σ_i s_i of all rows, by one block.
template <class Problem>
__device__ __forceinline__ void sum_smoothing(const SmoothingTotalsParams& p) {
    __shared__ float of_warp[kRowThreads / 32];
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    float sum = 0.f;
    for (int row = static_cast<int>(threadIdx.x); row < rows; row += kRowThreads) sum += p.row_smoothing[row];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int other = 1; other < kRowThreads / 32; ++other) sum += of_warp[other];
    *p.smoothing_total = sum;
}

/// Adds up the stretches. A block has 32 hidden dimensions of one of the sums, and its warps take turns with the stretches. A block behind
/// these adds up the rows' shares, where grad_bias needs that.
template <class Problem>
__device__ __forceinline__ void smoothing_totals(const SmoothingTotalsParams& p) {
    constexpr int kWarps = kRowThreads / 32;
    constexpr int kBlocks = ceil_div(Problem::hidden_size, 32);
    if constexpr (Problem::bias) {
        if (static_cast<int>(blockIdx.x) == 2 * kBlocks) {
            sum_smoothing<Problem>(p);
            return;
        }
    }
    __shared__ float of_warp[kWarps][32];
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const bool of_weight = static_cast<int>(blockIdx.x) < kBlocks;
    const int k = static_cast<int>(blockIdx.x) % kBlocks * 32 + lane;
    const float* const parts = of_weight ? p.weight_sums : p.hidden_sums;
    const int count = of_weight && Problem::hidden_major ? 1 : kSmoothingParts;
    float sum = 0.f;
    if (k < Problem::hidden_size) {
#pragma unroll 4
        for (int part = warp; part < count; part += kWarps) sum += parts[part * Problem::hidden_size + k];
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || k >= Problem::hidden_size) return;
    for (int other = 1; other < kWarps; ++other) sum += of_warp[other][lane];
    (of_weight ? p.weight_sum : p.hidden_sum)[k] = sum;
}

/// grad_bias of the retained columns: Σ_i scale_i·E_ij, less what label smoothing takes. A block has kBiasColumns columns; 16 threads read
/// a row of them, and the others the next rows.
template <class Problem>
__device__ __forceinline__ void retained_bias(const RetainedBiasParams& p) {
    using Element = typename Problem::Element;
    using Out = typename Problem::GradWeight;
    constexpr int kBeside = kBiasColumns / 8;
    constexpr int kTurns = kRowThreads / kBeside;
    constexpr int kColumns = Problem::retained_columns;
    __shared__ float sums[kTurns][kBiasColumns];
    __shared__ float taken[kTurns];
    const int turn = static_cast<int>(threadIdx.x) / kBeside;
    const int within = static_cast<int>(threadIdx.x) % kBeside * 8;
    const int column0 = static_cast<int>(blockIdx.x) * kBiasColumns;
    const Element* const block =
        reinterpret_cast<const Element*>(static_cast<const char*>(p.exponentials) + column0 / kColumns * p.block_bytes) +
        column0 % kColumns + within;
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    float sum[8] = {};
    float smoothing = 0.f;
#pragma unroll 8
    for (int row = turn; row < rows; row += kTurns) {
        const float scale = p.row_scales[row];
        if constexpr (Problem::label_smoothing) smoothing += p.row_smoothing[row];
        unsigned words[4];
        ptx::ld_global_v4(words, block + static_cast<long long>(row) * kColumns);
        add_products<Element>(scale, words, sum);  // a scale of 0 is an ignored row's
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[turn][within + i] = sum[i];
    if (within == 0) taken[turn] = smoothing;
    __syncthreads();
    const int column = column0 + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) >= kBiasColumns || column >= p.columns) return;
    float total = 0.f;
    float all_taken = 0.f;
    for (int other = 0; other < kTurns; ++other) {
        total += sums[other][threadIdx.x];
        all_taken += taken[other];
    }
    if constexpr (Problem::label_smoothing) total -= all_taken * (Problem::class_weight ? p.class_weight[column] : 1.f);
    total *= dlogits_scale<Problem>(p.scalars, true);
    Out* const out = static_cast<Out*>(p.grad_bias) + column;
    if constexpr (Problem::accumulate) total += to_float(*out);
    *out = Numeric<Out>::from_float(total);
}

}  // namespace flce

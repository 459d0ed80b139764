// Kernels over rows: targets' logits, rows' powers and sums, and backward's numbers of rows.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/common/row_kernels.cuh"
#include "flce/fp8/weight_codes.cuh"

namespace flce {

/// Number of the warp, over all blocks: its row.
__device__ __forceinline__ int row_of_warp() {
    return static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
}

/// The sum of products of a row's codes and a class's, for all lanes of a warp. Of int8 it is that of the tensor cores.
template <class Problem>
__device__ __forceinline__ float product_of_codes(const Bf16* a, const RowCodes<Problem>& of_a, const ClassNumbers<Problem>& b,
                                                  const RowCodes<Problem>& of_b) {
    using N = Numeric<Bf16>;
    int whole = 0;
    float sum = 0.f;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < Problem::hidden_size; k += 256) {
        unsigned x[4];
        unsigned y[4];
        ptx::ld_global_v4(x, a + k);
        b.load(k, y);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned u = of_a.pack(N::first(x[i]), N::second(x[i]), N::first(x[i + 1]), N::second(x[i + 1]));
            const unsigned v = of_b.pack(N::first(y[i]), N::second(y[i]), N::first(y[i + 1]), N::second(y[i + 1]));
            if constexpr (Problem::int8_logits) {
                whole = __dp4a(static_cast<int>(u), static_cast<int>(v), whole);
            } else {
#pragma unroll
                for (int half = 0; half < 32; half += 16) {
                    const float2 p = unpack_fp8<false>(u >> half & 0xffffu);
                    const float2 q = unpack_fp8<false>(v >> half & 0xffffu);
                    sum = __fmaf_rn(p.x, q.x, __fmaf_rn(p.y, q.y, sum));
                }
            }
        }
    }
    if constexpr (Problem::int8_logits) return static_cast<float>(__reduce_add_sync(0xffffffffu, whole));
    return warp_sum(sum);
}

/// Sum of products of a row's codes and given ones of a class, for all lanes of a warp.
template <class Problem>
__device__ __forceinline__ float product_of_codes(const Bf16* a, const RowCodes<Problem>& of_a, const unsigned char* codes) {
    using N = Numeric<Bf16>;
    float sum = 0.f;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < Problem::hidden_size; k += 256) {
        unsigned x[4];
        ptx::ld_global_v4(x, a + k);
        const uint2 y = __ldg(reinterpret_cast<const uint2*>(codes + k));
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const unsigned u = of_a.pack(N::first(x[i]), N::second(x[i]), N::first(x[i + 1]), N::second(x[i + 1]));
            const unsigned v = i == 0 ? y.x : y.y;
#pragma unroll
            for (int half = 0; half < 32; half += 16) {
                const float2 p = unpack_fp8<false>(u >> half & 0xffffu);
                const float2 q = unpack_fp8<false>(v >> half & 0xffffu);
                sum = __fmaf_rn(p.x, q.x, __fmaf_rn(p.y, q.y, sum));
            }
        }
    }
    return warp_sum(sum);
}

/// hidden · weightᵀ of a row and a class, for all lanes of a warp. `largest`: bits of the row's largest number.
template <class Problem, class Params>
__device__ __forceinline__ float product_of_class(const Params& p, int row, int column, unsigned largest) {
    const Bf16* const hidden = static_cast<const Bf16*>(p.hidden) + static_cast<long long>(row) * Problem::hidden_size;
    if constexpr (has_given_codes<Problem>()) {
        const unsigned char* const codes =
            static_cast<const unsigned char*>(p.weight) + static_cast<long long>(column) * Problem::hidden_size;
        const RowCodes<Problem> of_hidden(largest, p.hidden_scale);
        return fp8::product_of(product_of_codes<Problem>(hidden, of_hidden, codes), of_hidden.scale, p.class_scales[column]);
    } else {
        const ClassNumbers<Problem> weight(p.weight, column);
        const RowCodes<Problem> of_hidden(largest, p.hidden_scale);
        const RowCodes<Problem> of_weight(weight.largest(), p.weight_scale);
        return fp8::product_of(product_of_codes<Problem>(hidden, of_hidden, weight, of_weight), of_hidden.scale, of_weight.scale);
    }
}
/// The logit of a product.
template <class Problem, class Params>
__device__ __forceinline__ float logit_of_product(const Params& p, float product, int column, float temperature) {
    if constexpr (Problem::bias) product += to_float(static_cast<const Bf16*>(p.bias)[column]);
    float logit = Problem::transform(product, p.transform).value;
    if constexpr (Problem::class_offset) logit += p.class_offset[column];
    if constexpr (Problem::temperature) logit = Tempering(temperature).divided(logit);
    return logit;
}

template <class Problem, class Params>
__device__ __forceinline__ void fp8_targets(const Params& p) {
    const int row = row_of_warp();
    if (row >= p.rows) return;
    const int target = load_target<Problem>(p.targets, p.temperature, row);
    float logit = 0.f;
    if (has_class<Problem>(target)) {
        const Bf16* const hidden = static_cast<const Bf16*>(p.hidden) + static_cast<long long>(row) * Problem::hidden_size;
        const float product = product_of_class<Problem>(p, row, target, largest_of_row<Problem>(hidden));
        logit = logit_of_product<Problem>(p, product, target, Problem::temperature ? p.temperature[row] : 1.f);
    }
    if (threadIdx.x % 32 == 0) p.target_logits[row] = logit;
}

/// A row's power: 0 where its logits are no numbers.
__device__ __forceinline__ float power_or_zero(float power) { return fabsf(power) < infinity() ? power : 0.f; }
/// Power of a shard's row without its target, where the first classes are ruled out. Any logit lies far above, so that fp8_stale gives the
/// row another one. Without a logit the row's factor is 0.
__device__ constexpr float power_of_none() { return -0x1p24f; }

template <class Problem>
__device__ __forceinline__ void fp8_powers(const Fp8PowersParams& p) {
    const int row = static_cast<int>(blockIdx.x * kRowThreads + threadIdx.x);
    if (row >= p.rows) return;
    const int target = load_target<Problem>(p.targets, p.temperature, row);
    const bool there = target >= 0;
    float largest = there ? p.target_logits[row] : 0.f;
    if (Problem::shard && target == kElsewhere) largest = -infinity();
    for (int split = 0; there && split < p.splits; ++split)
        largest = fmaxf(largest, p.partials[split * +PartialFields<Problem>::kCount * p.partial_rows + row]);
    float power = there ? power_or_zero(fp8::exponent_of_reference(largest, !Problem::e5m2_dlogits)) : 0.f;
    if (Problem::shard && largest <= lowest_logit()) power = power_of_none();
    p.powers[row] = power;
}

/// Eight threads have a row.
template <class Problem>
__device__ __forceinline__ void fp8_merge(const Fp8MergeParams& p) {
    constexpr int kRows = 32;
    constexpr int kParts = kRowThreads / kRows;
    using Fields = PartialFields<Problem>;
    constexpr int kFields = Fields::kCount;
    static_assert(!Problem::square_sum && !Problem::top1, "a largest logit and sums that tiles write");
    __shared__ float parts[kParts][kFields][kRows];
    const int in_block = static_cast<int>(threadIdx.x) % kRows;
    const int part = static_cast<int>(threadIdx.x) / kRows;
    const int row = static_cast<int>(blockIdx.x) * kRows + in_block;
    const int splits = row < p.rows ? p.splits : 0;
    Fields::store(&parts[part][0][in_block], kRows,
                  merge_splits<Problem, kParts>(p.partials + row, kFields * p.partial_rows, p.partial_rows, part, splits));
    __syncthreads();  // every part is there
    if (part != 0 || row >= p.rows) return;
    RowSums sums = merge_splits<Problem, 1>(&parts[0][0][in_block], kFields * kRows, kRows, 0, kParts);
    if (p.first == 0) sums = merge(Fields::load(p.running + row, p.partial_rows), sums);
    Fields::store(p.running + row, p.partial_rows, sums);
}

/// A block has a cluster's rows.
template <class Problem>
__device__ __forceinline__ void fp8_stale(const Fp8StaleParams& p) {
    static_assert(+kFp8ClusterRows == +kRowThreads);
    const int row = static_cast<int>(blockIdx.x * kRowThreads + threadIdx.x);
    bool stale = false;
    if (row < p.rows) {
        const float largest = p.running[row];
        stale = fp8::power_of_logit(largest, p.powers[row]) > p.most && largest < infinity();
        if (stale) p.powers[row] = power_or_zero(fp8::exponent_of_sum(largest, !Problem::e5m2_dlogits));
        p.retained_target_logits[row] = p.target_logits[row];
    }
    stale = __syncthreads_or(stale) != 0;
    if (threadIdx.x != 0) return;
    p.again[blockIdx.x] = stale ? 1u : 0u;
    if (stale) *p.any = 1u;
}

/// A warp has a row.
template <class Problem>
__device__ __forceinline__ void fp8_rows(const Fp8RowsParams& p) {
    const int row = row_of_warp();
    if (row >= p.rows) return;
    const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
    float power = 0.f;
    float factor = 0.f;
    float2 of_logit = make_float2(0.f, 0.f);
    if (target.target >= 0) {
        const unsigned largest =
            largest_of_row<Problem>(static_cast<const Bf16*>(p.hidden) + static_cast<long long>(row) * Problem::hidden_size);
        power =
            p.retained_powers != nullptr ? p.retained_powers[row] : power_or_zero(fp8::exponent_of_sum(target.lse, !Problem::e5m2_dlogits));
        const float4 k = static_cast<const float4*>(p.coefficients)[row];
        float a = k.x;
        if constexpr (Problem::entropy) {
            const fp8::RowShares shares = fp8::row_shares(k.x, k.y, target.lse);
            a = shares.scale;
            of_logit = make_float2(shares.at_lse - shares.slope * target.lse, shares.slope);
        }
        factor = fp8::row_factor(a * p.derivative, power, target.lse);
        const float bound = fabsf(factor) * __uint_as_float(largest);
        if (threadIdx.x % 32 == 0 && bound < infinity()) atomicMax(&p.largest->hidden, __float_as_uint(bound));
    }
    if (threadIdx.x % 32 != 0) return;
    p.powers[row] = power;
    p.factors[row] = factor;
    if constexpr (Problem::entropy) reinterpret_cast<float2*>(p.row_shares)[row] = of_logit;
    if constexpr (Problem::label_smoothing) {
        p.row_smoothing[row] = target.target >= 0 ? static_cast<const float4*>(p.coefficients)[row].w * p.derivative : 0.f;
    }
    if (p.retained_powers == nullptr) return;
    p.target_logits[row] = p.retained_target_logits[row];
    if (row == 0) p.largest->weight = p.retained_largest->weight;
}

template <class Problem>
__device__ __forceinline__ void fp8_target_dz(const Fp8TargetDzParams& p) {
    const int row = static_cast<int>(blockIdx.x * kRowThreads + threadIdx.x);
    if (row >= p.rows) return;
    const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
    float dz = 0.f;
    if (has_class<Problem>(target.target)) {
        const float4 k = static_cast<const float4*>(p.coefficients)[row];
        const float logit = p.target_logits[row];
        const float probability = ::expf(logit - target.lse);
        const float factor = Problem::entropy && probability > 0.f ? __fmaf_rn(k.y, logit, k.x) : k.x;  // a logit may be -infinity
        dz = (probability * factor - k.z) * p.derivative;
        if constexpr (Problem::stores_derivative) {
            dz *= LogitDerivative<Problem>(p.transform, Problem::temperature ? p.row_temperatures[row] : 1.f)(logit);
        }
    }
    p.target_dz[row] = dz;
}

/// Takes factor · four numbers off.
__device__ __forceinline__ void take(float factor, const float* numbers, float4& from) {
    const float4 x = *reinterpret_cast<const float4*>(numbers);
    from = make_float4(__fmaf_rn(-factor, x.x, from.x), __fmaf_rn(-factor, x.y, from.y), __fmaf_rn(-factor, x.z, from.z),
                       __fmaf_rn(-factor, x.w, from.w));
}

/// Eight numbers of grad_hidden.
__device__ __forceinline__ void store_eight(Bf16* to, const float (&x)[8]) {
    using N = Numeric<Bf16>;
    const unsigned words[4] = {N::pack(x[0], x[1]), N::pack(x[2], x[3]), N::pack(x[4], x[5]), N::pack(x[6], x[7])};
    ptx::st_global_v4(to, words);
}
__device__ __forceinline__ void store_eight(float* to, const float (&x)[8]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
}

/// A target's row of the weight: words of eight numbers, which are pairs. Not `here`: words are 0, and so are numbers.
template <class Problem, class Params>
struct TargetRow {
    using Words = unsigned[4];
    ClassNumbers<Problem> numbers;

    __device__ __forceinline__ TargetRow(const Params& p, int target, bool here) : numbers(p.weight, here ? target : 0) {}
    __device__ __forceinline__ void load(int k, Words& words) const { numbers.load(k, words); }
    __device__ __forceinline__ float first(const Words& words, int i) const { return Numeric<Bf16>::first(words[i]); }
    __device__ __forceinline__ float second(const Words& words, int i) const { return Numeric<Bf16>::second(words[i]); }
};
template <class Problem>
struct TargetRow<Problem, Fp8FinishOfCodesParams> {
    using Words = unsigned[2];
    const unsigned char* codes;
    float scale;

    __device__ __forceinline__ TargetRow(const Fp8FinishOfCodesParams& p, int target, bool here)
        : codes(static_cast<const unsigned char*>(p.weight) + static_cast<long long>(here ? target : 0) * Problem::hidden_size),
          scale(here ? p.class_scales[target] : 0.f) {}
    __device__ __forceinline__ void load(int k, Words& words) const {
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(codes + k));
        words[0] = both.x;
        words[1] = both.y;
    }
    __device__ __forceinline__ float first(const Words& words, int i) const { return pair(words, i).x * scale; }
    __device__ __forceinline__ float second(const Words& words, int i) const { return pair(words, i).y * scale; }

private:
    __device__ __forceinline__ float2 pair(const Words& words, int i) const {
        return unpack_fp8<false>(words[i / 2] >> i % 2 * 16 & 0xffffu);
    }
};

/// A warp has a row. Of a shard it is a part, to which a target that another shard has adds nothing.
template <class Problem, class Params>
__device__ __forceinline__ void fp8_finish(const Params& p) {
    const int row = row_of_warp();
    if (row >= p.rows) return;
    const int target = static_cast<const RowTarget*>(p.row_targets)[row].target;
    const bool here = has_class<Problem>(target);
    const float dz = p.target_dz[row];
    const long long at = static_cast<long long>(row) * Problem::hidden_size;
    using Row = TargetRow<Problem, Params>;
    const Row weight(p, target, here);
    // A target's row is rounded as all others are: a difference would be a class's in every step.
    const float factor = fp8_factor(*p.largest);
    const float dz_of_code = dz * __frcp_rn(factor);
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < Problem::hidden_size; k += 256) {
        float out[8] = {};
        if (target >= 0) {
            float4 first = *reinterpret_cast<const float4*>(p.sum + at + k);
            float4 second = *reinterpret_cast<const float4*>(p.sum + at + k + 4);
            if constexpr (Problem::label_smoothing) {
                take(p.row_smoothing[row], p.weight_sum + k, first);
                take(p.row_smoothing[row], p.weight_sum + k + 4, second);
            }
            const float sums[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
            typename Row::Words w = {};
            if (here) weight.load(k, w);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                out[2 * i] = __fmaf_rn(dz_of_code, fp8::rounded_to_e4m3(weight.first(w, i) * factor), sums[2 * i]);
                out[2 * i + 1] = __fmaf_rn(dz_of_code, fp8::rounded_to_e4m3(weight.second(w, i) * factor), sums[2 * i + 1]);
            }
        }
        store_eight(static_cast<GradHiddenOf<Problem>*>(p.grad_hidden) + at + k, out);
    }
}

}  // namespace flce

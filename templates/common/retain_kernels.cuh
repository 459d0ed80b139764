// Rows of a forward that retains exponentials, E_j = exp(z_j − reference), and of a backward that multiplies them. A warp has a row.
#pragma once

#include "flce/common/logit_epilogue.cuh"

namespace flce {

/// The target's logit, which is near the largest one wherever a model has learnt anything: above it by 60 only where the loss is. Ignored
/// tokens take class 0's.
template <class Problem>
__device__ __forceinline__ void references(const ReferencesParams& p) {
    using Element = typename Problem::Element;
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (row >= listed_rows<Problem>(p.list, p.rows, 1)) return;
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, row);
    const int target = max(listed.target, 0);
    const Element* const h = static_cast<const Element*>(p.hidden) + static_cast<long long>(listed.row) * Problem::hidden_size;
    const Element* const w = weight_at<Problem>(static_cast<const Element*>(p.weight), target, 0);
    constexpr long long kStep = Problem::hidden_major ? Problem::padded_vocab_size : 1;
    float sum = 0.f;
    for (int k = lane; k < Problem::hidden_size; k += 32) sum = __fmaf_rn(to_float(h[k]), to_float(w[k * kStep]), sum);
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane != 0) return;
    const float logit = Problem::transform(sum, p.transform).value;
    if constexpr (Problem::temperature) {
        p.references[row] = Tempering(p.temperature[listed.row]).divided(logit);
    } else {
        p.references[row] = logit;
    }
}

/// dz_j = p_j·a − t·[j = y] as scale·E_j: the target's E_y becomes (p_y − t/a) / exp(reference − lse), from the logit in fp32, so
/// that confident tokens keep their small gradients. The same again for another backward. E, dz's other factor, meets hidden with the scale
/// in it and is the plain operand of both GEMMs.
template <class Problem>
__device__ __forceinline__ void retained_rows(const RetainedRowsParams& p) {
    using Element = typename Problem::Element;
    const int row = (static_cast<int>(blockIdx.x) * kRowThreads + static_cast<int>(threadIdx.x)) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (blockIdx.x == 0) {
        for (int i = static_cast<int>(threadIdx.x); i < p.counter_count; i += kRowThreads) p.counters[i] = 0u;
    }
    if (row >= p.rows) return;
    const float4 k = static_cast<const float4*>(p.coefficients)[row];
    const RowTarget target = static_cast<const RowTarget*>(p.row_targets)[row];
    float scale = 0.f;
    if (target.target >= 0) {
        // z-loss can make a vanish; a millionth of t beside it does not show.
        const float least = 1e-6f * fabsf(k.z);
        const float a = fabsf(k.x) < least ? copysignf(least, k.x) : k.x;
        const float share = ::expf(p.references[row] - target.lse);
        scale = a * share * (p.derivative * dlogits_scale<Problem>(p.scalars, false));
        if (lane == 0 && target.target < p.columns && a != 0.f) {
            const float probability = ::expf(p.target_logits[row] - target.lse);
            char* const block = static_cast<char*>(p.exponentials) + target.target / kRetainedColumns * p.block_bytes;
            const long long at = static_cast<long long>(row) * kRetainedColumns + target.target % kRetainedColumns;
            reinterpret_cast<Element*>(block)[at] = Numeric<Element>::from_float((probability - k.z / a) / share);
        }
    }
    if (lane == 0) p.row_scales[row] = scale;
    const long long source = p.list.rows != nullptr ? p.list.rows[p.list.first + row].row : row;
    const unsigned* const from = reinterpret_cast<const unsigned*>(static_cast<const Element*>(p.hidden) + source * Problem::hidden_size);
    unsigned* const to =
        reinterpret_cast<unsigned*>(static_cast<Element*>(p.scaled_hidden) + static_cast<long long>(row) * Problem::hidden_size);
    for (int pair = lane; pair < Problem::hidden_size / 2; pair += 32) {
        const unsigned h = from[pair];
        to[pair] = scale == 0.f ? 0u : Numeric<Element>::pack(Numeric<Element>::first(h) * scale, Numeric<Element>::second(h) * scale);
    }
}

}  // namespace flce

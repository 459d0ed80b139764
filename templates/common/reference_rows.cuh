// A number near each row's logits, to which forward's exponentials are relative where they are retained.
#pragma once

#include "flce/common/row_kernels.cuh"

namespace flce {

/// The largest of `reference` and the logits of the classes that a row's teacher names, on every lane. In a shard only the shard's own
/// classes count. Beside a teacher alone the target may be any class.
template <class Problem>
__device__ __forceinline__ float largest_named(const TeacherParams& p, long long row, float reference) {
    for (int k = static_cast<int>(threadIdx.x) % 32; k < p.top_k; k += 32) {
        if (teacher_id<Problem>(p, row * p.top_k + k) >= 0) reference = fmaxf(reference, teacher_logit<Problem>(p, row, k));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) reference = fmaxf(reference, __shfl_xor_sync(0xffffffffu, reference, lanes));
    return reference;
}

/// A lane's part of the dot products of a row's hidden states with several rows of the weight: eight neighbours at a time.
template <class Problem, int kCount>
__device__ __forceinline__ void add_dot_products(const typename Problem::Element* h, const typename Problem::Element* const (&w)[kCount],
                                                 float (&sums)[kCount]) {
    using Element = typename Problem::Element;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (!Problem::hidden_major) {
#pragma unroll 2
        for (int k = lane * 8; k < Problem::hidden_size; k += 32 * 8) {
            unsigned of_hidden[4];
            ptx::ld_global_v4(of_hidden, h + k);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                unsigned of_weight[4];
                ptx::ld_global_v4(of_weight, w[i] + k);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    sums[i] = __fmaf_rn(Numeric<Element>::first(of_hidden[pair]), Numeric<Element>::first(of_weight[pair]), sums[i]);
                    sums[i] = __fmaf_rn(Numeric<Element>::second(of_hidden[pair]), Numeric<Element>::second(of_weight[pair]), sums[i]);
                }
            }
        }
    } else {
        constexpr long long kStep = Problem::hidden_major ? Problem::padded_vocab_size : 1;
        for (int k = lane; k < Problem::hidden_size; k += 32) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) sums[i] = __fmaf_rn(to_float(h[k]), to_float(w[i][k * kStep]), sums[i]);
        }
    }
}

/// The largest of several classes' logits of a row, on every lane of a warp.
template <class Problem, int kCount>
__device__ __forceinline__ float largest_of_classes(const ReferencesParams& p, const ListedRow& listed, const int (&ids)[kCount]) {
    using Element = typename Problem::Element;
    const Element* const h = static_cast<const Element*>(p.hidden) + static_cast<long long>(listed.row) * Problem::hidden_size;
    const Element* w[kCount];
    float sums[kCount] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) w[i] = weight_at<Problem>(static_cast<const Element*>(p.weight), ids[i], 0);
    add_dot_products<Problem>(h, w, sums);
    float largest = -infinity();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        float sum = sums[i];
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if constexpr (Problem::bias) sum += to_float(static_cast<const Element*>(p.bias)[ids[i]]);
        float logit = Problem::transform(sum, p.transform).value;
        if constexpr (Problem::temperature) logit = Tempering(p.temperature[listed.row]).divided(logit);
        largest = fmaxf(largest, logit);
    }
    return largest;
}

/// The largest of `reference` and the logits of a few of the classes that a row's teacher names, from all over its places. For Problems
/// whose forward finds the logits of named classes: none is known yet. A class is far above all of these few only where the row is nearly
/// certain of that class, and the row is then written again.
template <class Problem>
__device__ __forceinline__ float largest_of_some_named(const ReferencesParams& p, const ListedRow& listed, float reference) {
    constexpr int kAtOnce = 4;
    constexpr int kSamples = 8;
#pragma unroll 1
    for (int sample = 0; sample < kSamples; sample += kAtOnce) {
        int ids[kAtOnce];
        int known = kIgnored;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int k = static_cast<int>(static_cast<long long>(p.teacher.top_k) * (sample + i) / kSamples);
            ids[i] = teacher_id<Problem>(p.teacher, static_cast<long long>(listed.row) * p.teacher.top_k + k);
            if (ids[i] < 0 || ids[i] == kElsewhere) ids[i] = known;
            known = ids[i];
        }
        if (known < 0) continue;
#pragma unroll
        for (int& id : ids) id = id < 0 ? known : id;
        reference = fmaxf(reference, largest_of_classes<Problem>(p, listed, ids));
    }
    return reference;
}

/// The largest of `reference` and logits of the classes that a row's teacher names: all, where they are known.
template <class Problem>
__device__ __forceinline__ float reference_of_named(const ReferencesParams& p, const ListedRow& listed, float reference) {
    if constexpr (Problem::picks_named) {
        return largest_of_some_named<Problem>(p, listed, reference);
    } else {
        return largest_named<Problem>(p.teacher, listed.row, reference);
    }
}

/// Reference in a shard: the largest logit of the shard's among a row's target and named classes. Where the shard has none of them: the
/// largest of a few logits from all over the shard. A class is far above all of these few only where the row is certain of that class, and
/// the four dot products cost as much as four classes among the thousands of the exponentials. Where that class is more than
/// kMostAboveReference above the reference the row is written again, like any other.
template <class Problem>
__device__ __forceinline__ float reference_in_shard(const ReferencesParams& p, const ListedRow& listed) {
    constexpr int kSamples = 4;
    float reference = -infinity();
    if (listed.target >= 0 && listed.target != kElsewhere) reference = largest_of_classes<Problem>(p, listed, {listed.target});
    if constexpr (Problem::teacher) {
        if (listed.target >= 0) reference = reference_of_named<Problem>(p, listed, reference);
    }
    if (reference > -infinity()) return reference;
    int ids[kSamples];
    for (int sample = 0; sample < kSamples; ++sample) {
        ids[sample] = static_cast<int>(static_cast<long long>(p.targets.columns) * (2 * sample + 1) / (2 * kSamples));
    }
    return largest_of_classes<Problem>(p, listed, ids);
}

/// A warp has a row. The target's logit, which is near the largest one wherever a model has learnt anything: above it by 60 only where the
/// loss is. Ignored tokens take class 0's.
template <class Problem>
__device__ __forceinline__ float reference_of(const ReferencesParams& p, const ListedRow& listed) {
    if constexpr (Problem::shard) return reference_in_shard<Problem>(p, listed);
    float logit = largest_of_classes<Problem>(p, listed, {max(listed.target, 0)});
    if constexpr (Problem::teacher) {
        if (listed.target >= 0) logit = reference_of_named<Problem>(p, listed, logit);
    }
    return logit;
}

}  // namespace flce

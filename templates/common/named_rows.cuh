// The weight's rows of a row's named classes, and their products with the row.
#pragma once

#include "flce/common/logit_epilogue.cuh"

namespace flce {

/// The class at place `at` of the rows' ids, as load_target has labels; kIgnored: none; kOutOfRange, which counts as none.
template <class Problem>
__device__ __forceinline__ int teacher_id(const TeacherParams& p, long long at) {
    const long long id = p.bits == 64 ? static_cast<const long long*>(p.ids)[at] : static_cast<const int*>(p.ids)[at];
    if constexpr (Problem::shard) {
        if (id >= 0 && id < Problem::whole_vocab_size) return index_in_shard(p, id);
    } else {
        if (id >= 0 && id < Problem::vocab_size) return static_cast<int>(id);
    }
    return id == -1 ? kIgnored : kOutOfRange;
}

/// Place where forward keeps the logit of a row's class number k.
template <class Problem>
__device__ __forceinline__ float& teacher_logit(const TeacherParams& p, long long row, int k) {
    return Problem::shard ? p.logprobs[k * p.shard_rows + row] : p.logprobs[row * p.top_k + k];
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

/// Eight numbers that begin on 16 bytes, as memory has them.
template <class T>
struct EightOf {
    unsigned words[sizeof(T) == 4 ? 8 : 4];

    __device__ __forceinline__ void load(const T* from) {
        const uint4* const vectors = reinterpret_cast<const uint4*>(from);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(words) / sizeof(uint4)); ++i) {
            const uint4 vector = vectors[i];
            words[4 * i] = vector.x;
            words[4 * i + 1] = vector.y;
            words[4 * i + 2] = vector.z;
            words[4 * i + 3] = vector.w;
        }
    }
    __device__ __forceinline__ void store(T* to) const {
        uint4* const vectors = reinterpret_cast<uint4*>(to);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(words) / sizeof(uint4)); ++i) {
            vectors[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
    __device__ __forceinline__ float number(int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[i]);
        } else {
            return i % 2 == 0 ? Numeric<T>::first(words[i / 2]) : Numeric<T>::second(words[i / 2]);
        }
    }
    __device__ __forceinline__ void set(const float (&numbers)[8]) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < 8; ++i) words[i] = __float_as_uint(numbers[i]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = Numeric<T>::pack(numbers[2 * i], numbers[2 * i + 1]);
        }
    }
};

/// Eight numbers of a class's row of the weight, as the products read them.
template <class Problem>
struct WeightEight {
    using Element = typename Problem::Element;
    using Weight = Select<Problem::rounds_weight, float, Element>;
    Select<Problem::hidden_major, float[8], EightOf<Weight>> held;

    static __device__ __forceinline__ float as_read(float value) {
        return Problem::rounds_weight ? to_float(Numeric<Element>::from_float(value)) : value;
    }
    __device__ __forceinline__ void load(const void* weight, int id, int d) {
        const Weight* const at = weight_at<Problem>(static_cast<const Weight*>(weight), id, d);
        if constexpr (Problem::hidden_major) {
#pragma unroll
            for (int i = 0; i < 8; ++i) held[i] = to_float(at[i * Problem::padded_vocab_size]);
        } else {
            held.load(at);
        }
    }
    __device__ __forceinline__ float number(int i) const {
        if constexpr (Problem::hidden_major) {
            return as_read(held[i]);
        } else {
            return as_read(held.number(i));
        }
    }
};

/// The places of a row that name a class of this weight, in their order. For blocks of kRowThreads.
struct NamedPlaces {
    enum : int { kMost = 1024 };  // places of a row: Spec::teacher_top_k
    enum : int { kRounds = kMost / kRowThreads };
    enum : int { kWarps = kRowThreads / 32 };
    static_assert(kRounds * kWarps <= 32, "a lane for each warp's count");

    int count;
    int counts[kRounds * kWarps];  ///< places of each round and warp
    int ids[kMost];
    short places[kMost];

    /// For a whole block, which may read them afterwards. `first`: the row's first place. `other(k, id)` is called for all other places.
    template <class Problem, class Other>
    __device__ __forceinline__ void load(const TeacherParams& teacher, long long first, bool ignored, const Other& other) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int warp = static_cast<int>(threadIdx.x) / 32;
        int found[kRounds];
        unsigned here[kRounds];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {  // loads are on their way together
            const int k = kRowThreads * round + static_cast<int>(threadIdx.x);
            found[round] = k < teacher.top_k && !ignored ? teacher_id<Problem>(teacher, first + k) : kIgnored;
        }
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const bool named = found[round] >= 0 && !(Problem::shard && found[round] == kElsewhere);
            here[round] = __ballot_sync(0xffffffffu, named);
            if (lane == 0) counts[kWarps * round + warp] = __popc(here[round]);
        }
        __syncthreads();  // every warp's counts are there
        const int of_other = lane < kRounds * kWarps ? counts[lane] : 0;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const unsigned before = __reduce_add_sync(0xffffffffu, lane < kWarps * round + warp ? static_cast<unsigned>(of_other) : 0u);
            const int k = kRowThreads * round + static_cast<int>(threadIdx.x);
            const int at = static_cast<int>(before) + __popc(here[round] & ((1u << lane) - 1u));
            if ((here[round] >> lane & 1u) != 0u) {
                ids[at] = found[round];
                places[at] = static_cast<short>(k);
            } else if (k < teacher.top_k) {
                other(k, found[round]);
            }
        }
        const unsigned all = __reduce_add_sync(0xffffffffu, static_cast<unsigned>(of_other));
        if (threadIdx.x == 0) count = static_cast<int>(all);
        __syncthreads();  // the block has them
    }
};

/// hidden · weight of up to kAtOnce classes of a row, `first` among its named ones; a warp's every lane gets them.
template <class Problem, int kAtOnce>
__device__ __forceinline__ void products_of(const NamedPlaces& named, int first, const void* hidden, const void* weight,
                                            float (&sums)[kAtOnce]) {
    using Element = typename Problem::Element;
    const Element* const h = static_cast<const Element*>(hidden);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int ids[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        ids[i] = named.ids[min(first + i, named.count - 1)];
        sums[i] = 0.f;
    }
#pragma unroll 2
    for (int d = 8 * lane; d < Problem::hidden_size; d += 8 * 32) {
        EightOf<Element> of_hidden;
        WeightEight<Problem> of_weight[kAtOnce];
        of_hidden.load(h + d);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) of_weight[i].load(weight, ids[i], d);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i] = __fmaf_rn(of_hidden.number(j), of_weight[i].number(j), sums[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sums[i] = warp_sum(sums[i]);
}

/// Calls `put(i, logit)`, on one lane, with the logit of each of a row's named places. For a whole block.
template <class Problem, class Put>
__device__ __forceinline__ void named_logits(const TeacherLogitsParams& p, const NamedPlaces& named, long long row, const Put& put) {
    using Element = typename Problem::Element;
    constexpr int kAtOnce = 4;
    const Element* const hidden = static_cast<const Element*>(p.hidden) + row * Problem::hidden_size;
    for (int i = static_cast<int>(threadIdx.x) / 32 * kAtOnce; i < named.count; i += kRowThreads / 32 * kAtOnce) {
        float sums[kAtOnce];
        products_of<Problem>(named, i, hidden, p.weight, sums);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (static_cast<int>(threadIdx.x) % 32 != j || i + j >= named.count) continue;
            float x = sums[j];
            if constexpr (Problem::bias) x += to_float(static_cast<const Element*>(p.bias)[named.ids[i + j]]);
            float logit = Problem::transform(x, p.transform).value;
            if constexpr (Problem::class_offset) logit += p.class_offset[named.ids[i + j]];
            if constexpr (Problem::temperature) logit = Tempering(p.temperature[row]).divided(logit);
            put(i + j, logit);
        }
    }
}

/// The places of a row for named_logits, with the logits of all others: 0, −inf in a shard.
template <class Problem>
__device__ __forceinline__ void load_named(const TeacherLogitsParams& p, NamedPlaces& named, const ListedRow& listed) {
    named.load<Problem>(p.teacher, static_cast<long long>(listed.row) * p.teacher.top_k, listed.target < 0, [&](int k, int id) {
        teacher_logit<Problem>(p.teacher, listed.row, k) = Problem::shard ? -infinity() : 0.f;
        if (id == kOutOfRange && p.invalid_label != nullptr) {
            atomicMin(p.invalid_label, static_cast<unsigned long long>(p.first_row + listed.row));
        }
    });
}

}  // namespace flce

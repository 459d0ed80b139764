// grad_weight and grad_bias of sorted places: each class adds up its terms, in the order of rows. Places are cut into pieces of equal
// length, whatever classes they are of, so that a class which every row names does not leave a single block at work. A piece writes the
// gradients of classes that lie in it, and leaves the sums of those that reach over its ends to gather_joints.
#pragma once

#include "flce/gather/rows.cuh"

namespace flce {

/// Groups of a block's threads, each of which has a piece and eight columns a thread.
template <class Problem>
struct PieceGroups : HiddenGroups<Problem> {
    enum : int { kPlaces = HiddenGroups<Problem>::kCount > 32 ? 2048 / HiddenGroups<Problem>::kCount : 64 };  ///< looked up at a time
    enum : int { kPitch = Problem::hidden_size + 8 };  ///< numbers of a piece's sum; behind the columns is the bias's

    ClassPlace places[HiddenGroups<Problem>::kCount][kPlaces];
    float dz[HiddenGroups<Problem>::kCount][kPlaces];
};

/// The pieces of sorted places.
struct SortedPieces {
    const GatherWeightParams& p;

    /// Class of a sorted place; `nowhere` behind the last.
    __device__ __forceinline__ unsigned id(unsigned i) const { return i < p.places ? p.sorted[i].id : p.nowhere; }
    __device__ __forceinline__ unsigned begin(unsigned piece) const { return piece * static_cast<unsigned>(p.piece); }
    __device__ __forceinline__ unsigned end(unsigned piece) const { return min(begin(piece) + static_cast<unsigned>(p.piece), p.places); }
    /// Whether the class that a piece begins with began in the piece before.
    __device__ __forceinline__ bool comes_over(unsigned piece) const { return piece > 0 && id(begin(piece) - 1u) == id(begin(piece)); }
};

/// Writes eight numbers of a class's gradient, or adds them.
template <class Problem>
__device__ __forceinline__ void put_gradient(const GatherWeightParams& p, unsigned id, int d, const float (&sums)[8]) {
    using Out = typename Problem::GradWeight;
    Out* const to = weight_at<Problem>(static_cast<Out*>(p.grad_weight), id, d);
    if constexpr (Problem::hidden_major) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            Out* const at = to + i * Problem::padded_vocab_size;
            *at = Numeric<Out>::from_float(Problem::accumulate ? sums[i] + to_float(*at) : sums[i]);
        }
    } else {
        EightOf<Out> there;
        float results[8];
        if constexpr (Problem::accumulate) there.load(to);
#pragma unroll
        for (int i = 0; i < 8; ++i) results[i] = Problem::accumulate ? sums[i] + there.number(i) : sums[i];
        there.set(results);
        there.store(to);
    }
}
template <class Problem>
__device__ __forceinline__ void put_bias(const GatherWeightParams& p, unsigned id, float sum) {
    using Out = typename Problem::GradWeight;
    Out* const to = static_cast<Out*>(p.grad_bias) + id;
    *to = Numeric<Out>::from_float(Problem::accumulate ? sum + to_float(*to) : sum);
}

/// One thread's sums of the class at hand: eight columns from `d` on, and the bias's where `has_bias`.
template <class Problem>
struct ClassSums {
    float of_columns[8];
    float of_bias;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (float& sum : of_columns) sum = 0.f;
        of_bias = 0.f;
    }
    __device__ __forceinline__ void add(float dz, const EightOf<typename Problem::Element>& hidden) {
#pragma unroll
        for (int i = 0; i < 8; ++i) of_columns[i] = __fmaf_rn(dz, hidden.number(i), of_columns[i]);
        if constexpr (Problem::bias) of_bias += dz;
    }
    __device__ __forceinline__ void put(const GatherWeightParams& p, unsigned id, int d, bool has_bias) const {
        if (p.grad_weight != nullptr) put_gradient<Problem>(p, id, d, of_columns);
        if constexpr (Problem::bias) {
            if (has_bias) put_bias<Problem>(p, id, of_bias);
        }
    }
    /// A piece's sum of a class that reaches over one of its ends.
    __device__ __forceinline__ void leave(float* sums, int d, bool has_bias) const {
        EightOf<float> words;
        words.set(of_columns);
        words.store(sums + d);
        if (Problem::bias && has_bias) sums[Problem::hidden_size] = of_bias;
    }
    __device__ __forceinline__ void take(const float* sums, int d, bool has_bias) {
        EightOf<float> words;
        words.load(sums + d);
#pragma unroll
        for (int i = 0; i < 8; ++i) of_columns[i] += words.number(i);
        if (Problem::bias && has_bias) of_bias += sums[Problem::hidden_size];
    }
};

/// Gradients of the classes that lie in a piece; the sums of the first and last where they reach over its ends.
template <class Problem>
__device__ __forceinline__ void gather_weight(const GatherWeightParams& p) {
    using Element = typename Problem::Element;
    using Groups = PieceGroups<Problem>;
    constexpr int kAtOnce = sizeof(Element) == 4 ? 2 : 4;
    __shared__ Groups shared;
    const SortedPieces pieces{p};
    const int group = min(static_cast<int>(threadIdx.x) / Groups::kColumns, Groups::kCount - 1);
    const int column = static_cast<int>(threadIdx.x) - group * Groups::kColumns;
    const unsigned piece = blockIdx.x * Groups::kCount + group;
    const int d = 8 * (column + static_cast<int>(blockIdx.y) * Groups::kColumns);
    const bool there = column < Groups::kColumns && d < Problem::hidden_size;
    const bool has_bias = Problem::bias && p.grad_bias != nullptr && d == 0;
    const unsigned end = pieces.begin(piece) < p.places ? pieces.end(piece) : 0u;
    const Element* const hidden = static_cast<const Element*>(p.hidden) + (there ? d : 0);
    ClassSums<Problem> sums;
    sums.clear();
    unsigned id = p.nowhere;  // the class that sums are of
    bool head = end > 0u && pieces.comes_over(piece);
    const auto finish = [&] {  // the class at hand does not go on in the next piece
        if (id == p.nowhere || !there) return;
        if (head) {
            sums.leave(p.heads + static_cast<long long>(piece) * Groups::kPitch, d, has_bias);
        } else {
            sums.put(p, id, d, has_bias);
        }
    };
    for (int base = 0; base < p.piece; base += Groups::kPlaces) {
        const unsigned first = pieces.begin(piece) + base;
        const int count = first < end ? static_cast<int>(min(end - first, static_cast<unsigned>(Groups::kPlaces))) : 0;
        __syncthreads();  // the places before have been read
        for (int i = column; i < count && column < Groups::kColumns; i += Groups::kColumns) {
            ClassPlace place = p.sorted[first + i];
            shared.dz[group][i] = place.id == p.nowhere ? 0.f : p.dlogits[place.place];
            place.place /= static_cast<unsigned>(p.top_k);
            shared.places[group][i] = place;
        }
        __syncthreads();  // the group's places are there
        for (int i = 0; i < count; i += kAtOnce) {
            EightOf<Element> rows[kAtOnce];
            ClassPlace places[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                places[j] = shared.places[group][min(i + j, count - 1)];
                rows[j].load(hidden + static_cast<long long>(places[j].place) * Problem::hidden_size);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (i + j >= count) continue;
                if (places[j].id != id) {
                    finish();
                    if (id != p.nowhere) head = false;
                    sums.clear();
                    id = places[j].id;
                }
                if (id != p.nowhere) sums.add(shared.dz[group][i + j], rows[j]);
            }
        }
    }
    if (end == 0u || id == p.nowhere) return;
    if (head || pieces.id(end) != id) return finish();
    if (there) sums.leave(p.tails + static_cast<long long>(piece) * Groups::kPitch, d, has_bias);
}

/// Gradients of the classes that reach over ends of pieces, each by the block of the piece that it begins in.
template <class Problem>
__device__ __forceinline__ void gather_joints(const GatherWeightParams& p) {
    using Groups = PieceGroups<Problem>;
    const SortedPieces pieces{p};
    const unsigned piece = blockIdx.x;
    const unsigned id = pieces.id(pieces.end(piece) - 1u);
    if (id == p.nowhere || pieces.id(pieces.end(piece)) != id) return;
    if (pieces.id(pieces.begin(piece)) == id && pieces.comes_over(piece)) return;  // it began before
    unsigned last = piece + 1u;                                                    // the piece that it ends in
    while (pieces.id(pieces.end(last)) == id) ++last;
    for (int d = 8 * static_cast<int>(threadIdx.x); d < Problem::hidden_size; d += 8 * kRowThreads) {
        const bool has_bias = Problem::bias && p.grad_bias != nullptr && d == 0;
        ClassSums<Problem> sums;
        sums.clear();
        sums.take(p.tails + static_cast<long long>(piece) * Groups::kPitch, d, has_bias);
#pragma unroll 4
        for (unsigned of = piece + 1u; of <= last; ++of) {
            sums.take(p.heads + static_cast<long long>(of) * Groups::kPitch, d, has_bias);
        }
        sums.put(p, id, d, has_bias);
    }
}

}  // namespace flce

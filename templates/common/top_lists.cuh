// Lists of the classes of rows' largest logits, collected while logits go by: a list has room for more classes than are wanted, and is
// narrowed down to those where it is full. Which classes a row's lists have in the end does not depend on how its logits come to them.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/common/top_classes.cuh"

namespace flce {

enum : unsigned { kWholeWarp = 0xffffffffu };

/// Keys that a list has room for; top_list_keys of the host.
template <class Problem>
struct TopListSize {
    enum : int { kLaneKeys = Problem::top_k <= 64 ? 4 : Problem::top_k <= 128 ? 8 : 16 };
    enum : int { kKeys = 32 * kLaneKeys };
};

/// Narrows a list of `count` keys down to the kTopK largest and a few more, in any order. Returns the smallest of their logits. `count`
/// becomes their number. For a whole warp.
template <int kTopK, int kLaneKeys>
__device__ __forceinline__ float narrow_list(ClassKey* keys, int& count) {
    enum : unsigned { kMost = kTopK + kTopK / 4 };
    static_assert(kMost < 32 * kLaneKeys, "a narrowed list has free places");
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();  // keys of the other lanes are there
    ClassKey mine[kLaneKeys];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) mine[i] = 32 * i + lane < count ? keys[32 * i + lane] : 0ull;
    ClassKey bound = 0ull;  // kTopK keys, or more, are no smaller
    ClassKey bit = 1ull << 63;
    unsigned kept = static_cast<unsigned>(count);
#pragma unroll 1
    while (bit != 0ull && kept > kMost) {
        unsigned above = 0u;
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) above += mine[i] >= (bound | bit) ? 1u : 0u;
        above = __reduce_add_sync(kWholeWarp, above);
        if (above >= kTopK) {
            bound |= bit;
            kept = above;
        }
        bit >>= 1;
    }
    ClassKey least = ~0ull;
    count = 0;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
        const bool keeps = mine[i] >= bound && mine[i] != 0ull;
        const unsigned keeping = __ballot_sync(kWholeWarp, keeps);
        if (keeps) {
            keys[count + __popc(keeping & ((1u << lane) - 1u))] = mine[i];
            least = mine[i] < least ? mine[i] : least;
        }
        count += __popc(keeping);
    }
    __syncwarp();  // other lanes may write behind what is kept
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const ClassKey other = __shfl_xor_sync(kWholeWarp, least, lanes);
        least = other < least ? other : least;
    }
    return logit_of(least);
}

/// The list of a row as kLanes neighbouring lanes of a warp have it. Columns come to it in rising order, call by call.
template <class Problem, int kLanes>
struct TopList {
    using Size = TopListSize<Problem>;
    enum : int { kNarrowed = 1 << 30 };  ///< bit of TopState::count

    ClassKey* keys;
    float least;
    int size;
    bool narrowed;

    /// `number`: of the list; `fresh`: nothing has come to it.
    __device__ __forceinline__ void load(void* all_keys, const TopState* states, long long number, bool fresh) {
        keys = static_cast<ClassKey*>(all_keys) + number * Size::kKeys;
        const TopState before = fresh ? TopState{0.f, 0} : states[number];
        least = before.least;
        size = before.count & (kNarrowed - 1);
        narrowed = (before.count & kNarrowed) != 0;
    }
    /// For a whole warp; `writes`: this lane's row exists.
    __device__ __forceinline__ void store(TopState* states, long long number, bool writes) const {
        if (writes && threadIdx.x % kLanes == 0) states[number] = {least, size | (narrowed ? kNarrowed : 0)};
        __syncwarp();  // the next call reads it
    }

    /// Adds logits of each lane: those of `logits`, a LaneLogits. For a whole warp. The code is short: it runs once a tile, so that most of
    /// it has to be fetched every time.
    template <class Logits>
    __device__ __forceinline__ void add(const Logits& logits, bool is_row) {
        unsigned mask[Logits::kWords];  // logits that may be among the largest; an equal one of an earlier call belongs to a smaller class
#pragma unroll
        for (int word = 0; word < Logits::kWords; ++word) mask[word] = is_row ? logits.above(word, least, !narrowed) : 0u;
        int bit = lowest(mask);
#pragma unroll 1
        while (__any_sync(kWholeWarp, bit >= 0) != 0) {
            const float logit = logits.at(bit);
            const bool takes = bit >= 0 && (!narrowed || logit >= least);  // the list may have been narrowed since
            const unsigned of_row = __ballot_sync(kWholeWarp, takes) >> lane() / kLanes * kLanes & kOfRow;
            const int place = size + __popc(of_row & ((1u << lane() % kLanes) - 1u));
            const bool waits = takes && place >= Size::kKeys;
            if (takes && !waits) keys[place] = class_key(logit, logits.id_at(bit));
            if (!waits) bit = next(mask, bit);
            size = min(size + __popc(of_row), +Size::kKeys);
            narrow(__ballot_sync(kWholeWarp, waits));
        }
    }

private:
    enum : unsigned { kOfRow = kLanes == 32 ? kWholeWarp : (1u << kLanes % 32) - 1u };

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

    /// The lowest bit that is set; −1: none is.
    template <int kWords>
    static __device__ __forceinline__ int lowest(const unsigned (&mask)[kWords]) {
        int bit = -1;
#pragma unroll
        for (int word = kWords - 1; word >= 0; --word) bit = mask[word] != 0u ? 32 * word + __ffs(static_cast<int>(mask[word])) - 1 : bit;
        return bit;
    }
    /// The lowest bit behind `bit`, which is the lowest one.
    template <int kWords>
    static __device__ __forceinline__ int next(unsigned (&mask)[kWords], int bit) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) mask[word] &= bit / 32 == word ? mask[word] - 1u : ~0u;
        return lowest(mask);
    }
    /// Narrows the lists of the rows whose lanes are among `lanes`.
    __device__ __forceinline__ void narrow(unsigned lanes) {
#pragma unroll 1
        while (lanes != 0u) {
            const int first = (__ffs(static_cast<int>(lanes)) - 1) / kLanes * kLanes;
            lanes &= ~(kOfRow << first);
            ClassKey* const of_row =
                reinterpret_cast<ClassKey*>(__shfl_sync(kWholeWarp, reinterpret_cast<unsigned long long>(keys), first));
            int kept = __shfl_sync(kWholeWarp, size, first);
            const float found = narrow_list<Problem::top_k, Size::kLaneKeys>(of_row, kept);
            if (lane() / kLanes * kLanes != first) continue;
            least = found;
            size = kept;
            narrowed = true;
        }
    }
};

/// A lane's logits of a row in accumulators c[·][2·h + e], from class `first` on. `Columns`: as MmaColumns. Classes from `end` on do not
/// exist.
template <class Columns, int kColumnPieces>
struct LaneLogits {
    enum : int { kCount = 2 * kColumnPieces };
    enum : int { kWords = (kCount + 31) / 32 };

    const float (&c)[kColumnPieces][4];
    const int h;
    const int first;
    const int end;

    /// Bits of logits above `least`, or of `all`, that belong to classes.
    __device__ __forceinline__ unsigned above(int word, float least, bool all) const {
        unsigned bits = 0u;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i / 32 == word && (c[i / 2][2 * h + i % 2] > least || all)) bits |= 1u << i % 32;
        }
        if (first + Columns::of(kColumnPieces - 1) + 2 > end) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (i / 32 == word && first + Columns::of(i / 2) + i % 2 >= end) bits &= ~(1u << i % 32);
            }
        }
        return bits;
    }
    __device__ __forceinline__ int id_at(int bit) const { return first + within(bit); }
    __device__ __forceinline__ float at(int bit) const { return pick_column<Columns>(c, h, within(bit)); }

private:
    static __device__ __forceinline__ int within(int bit) { return Columns::of(bit / 2) + bit % 2; }
};

/// A row whose classes are written.
template <class Problem>
struct TopRow {
    const TopClassesParams& p;
    const int row;
    const float max;
    const float log_sum;

    /// Writes the class of the `rank`-th largest logit.
    __device__ __forceinline__ void write(int rank, ClassKey key) const {
        const float logit = logit_of(key);
        const int id = id_of(key);
        if constexpr (Problem::shard) {
            float* const to = p.shard_sums + (p.first_field + rank) * p.ld + row;
            to[0] = logit;
            to[Problem::top_k * p.ld] = __int_as_float(id == FLCE_NO_CLASS ? id : id + static_cast<int>(p.targets.first_class));
        } else {
            put(rank, (logit - max) - log_sum, id);
        }
    }
    __device__ __forceinline__ void write_none(int rank) const {
        if constexpr (Problem::shard) {
            write(rank, no_class_key());
        } else {
            put(rank, 0.f, -1);
        }
    }

private:
    __device__ __forceinline__ void put(int rank, float logprob, int id) const {
        p.logprobs[static_cast<long long>(row) * Problem::top_k + rank] = logprob;
        p.ids[static_cast<long long>(row) * Problem::top_k + rank] = id;
    }
};

/// Keys of a row in a block's shared memory.
template <class Problem>
struct TopKeys {
    enum : int { kTopK = Problem::top_k };
    enum : int { kOfLists = kMostLtSplits * TopListSize<Problem>::kKeys };
    enum : int { kRoom = kOfLists > 2048 ? kOfLists : 2048 };
    static_assert(kRoom >= kTopK + TopListSize<Problem>::kKeys, "room for a list beside what is kept");

    ClassKey keys[kRoom];
    ClassKey kept[kTopK];
    unsigned counts[kRowThreads / 32];
    int count;
    ClassKey bound;  ///< smaller keys are not among the largest

    /// Adds a list, for the whole block. Where there is no room, what is there is narrowed down first.
    __device__ __forceinline__ void add(const ClassKey* from, int size) {
        if (count + size > kRoom) narrow();
        for (int i = static_cast<int>(threadIdx.x); i < size; i += kRowThreads) {
            const ClassKey key = from[i];
            if (key >= bound) keys[atomicAdd(&count, 1)] = key;
        }
        __syncthreads();  // all of them are there
    }
    /// Keeps the kTopK largest of more, in any order. For the whole block.
    __device__ __forceinline__ void narrow() {
        ClassKey found = 0ull;
        for (int bit = 63; bit >= 0; --bit) {
            const ClassKey tried = found | 1ull << bit;
            unsigned above = 0u;
            for (int i = static_cast<int>(threadIdx.x); i < count; i += kRowThreads) above += keys[i] >= tried ? 1u : 0u;
            above = of_block(above);
            if (above >= kTopK) found = tried;
            if (above == kTopK) break;
        }
        const int all = count;
        __syncthreads();  // everybody has read the count
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < all; i += kRowThreads) {
            if (keys[i] >= found) kept[atomicAdd(&count, 1)] = keys[i];
        }
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < kTopK; i += kRowThreads) keys[i] = kept[i];
        if (threadIdx.x == 0) bound = found;
        __syncthreads();
    }

private:
    __device__ __forceinline__ unsigned of_block(unsigned of_thread) {
        const unsigned of_warp = __reduce_add_sync(kWholeWarp, of_thread);
        __syncthreads();  // sums of the bit before have been read
        if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = of_warp;
        __syncthreads();
        unsigned sum = 0u;
#pragma unroll
        for (int warp = 0; warp < kRowThreads / 32; ++warp) sum += counts[warp];
        return sum;
    }
};

/// Ranks the classes of a row's lists: a block has a row. A shard leaves them to merge.
template <class Problem>
__device__ __forceinline__ void top_classes(const TopClassesParams& p) {
    using List = TopList<Problem, 32>;
    constexpr bool kDivided = Problem::lists_rows;  // then only forward knows how its work was divided
    __shared__ TopKeys<Problem> top;
    __shared__ float of_sums[2];
    const int row = static_cast<int>(blockIdx.x);
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, row);  // ignored rows are listed behind the others
    const bool has_classes = row < rows && listed.target >= 0 && !(Problem::shard && p.targets.columns == 0);
    const long long ld = kDivided ? partial_rows_of(rows) : p.partial_rows;
    if (threadIdx.x == 0) {
        top.count = 0;
        top.bound = 0ull;
        if (!Problem::shard && has_classes) {
            const int splits = kDivided ? p.scalars->splits : p.splits;
            const RowSums sums = merge_splits<Problem, 1>(p.partials + row, PartialFields<Problem>::kCount * ld, ld, 0, splits);
            of_sums[0] = sums.max;
            of_sums[1] = logf(sums.exp_sum);
        }
    }
    __syncthreads();
    const int lists = !has_classes ? 0 : kDivided ? p.scalars->top_splits : p.splits;
#pragma unroll 1
    for (int list = 0; list < lists; ++list) {
        const long long number = list * ld + row;
        const ClassKey* const from = static_cast<const ClassKey*>(p.keys) + number * TopListSize<Problem>::kKeys;
        top.add(from, p.states[number].count & (List::kNarrowed - 1));
    }
    if (top.count > Problem::top_k) top.narrow();
    const TopRow<Problem> out{p, listed.row, of_sums[0], of_sums[1]};
    for (int i = static_cast<int>(threadIdx.x); i < top.count; i += kRowThreads) {
        int rank = 0;
        for (int other = 0; other < top.count; ++other) rank += top.keys[other] > top.keys[i] ? 1 : 0;
        out.write(rank, top.keys[i]);
    }
    for (int rank = top.count + static_cast<int>(threadIdx.x); rank < Problem::top_k; rank += kRowThreads) out.write_none(rank);
}

}  // namespace flce

// Lists of the classes of rows' largest logits, collected while logits go by: a list has room for more classes than are wanted, and is
// narrowed down to those where it is full. Which classes a row's lists have in the end does not depend on how its logits come to them.
#pragma once

#include "flce/common/logit_epilogue.cuh"
#include "flce/common/top_classes.cuh"

namespace flce {

enum : unsigned { kWholeWarp = 0xffffffffu };

/// Keys that a list has room for; top_list_keys of the host.
template <class Problem>
struct TopListSize {
    enum : int { kLaneKeys = Problem::top_k <= 64 ? 4 : Problem::top_k <= 128 ? 8 : 16 };
    enum : int { kKeys = 32 * kLaneKeys };
};

/// A class of a list: its logit as it is, which takes fewer instructions than a key where logits go by.
struct alignas(8) TopEntry {
    float logit;
    int id;
    __device__ __forceinline__ ClassKey key() const { return class_key(logit, id); }
};

/// Narrows a list of `count` entries down to the kTopK largest and a few more, in any order. Returns the smallest of their logits. `count`
/// becomes their number. For a whole warp.
template <int kTopK, int kLaneKeys>
__device__ __forceinline__ float narrow_list(TopEntry* entries, int& count) {
    enum : unsigned { kMost = kTopK + kTopK / 4 };
    static_assert(kMost < 32 * kLaneKeys, "a narrowed list has free places");
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();  // entries of the other lanes are there
    ClassKey mine[kLaneKeys];
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) mine[i] = 32 * i + lane < count ? entries[32 * i + lane].key() : 0ull;
    // The bits of logits that all have are the bound's.
    unsigned differing = 0u;
    const unsigned first = __shfl_sync(kWholeWarp, static_cast<unsigned>(mine[0] >> 32), 0);
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) differing |= mine[i] != 0ull ? static_cast<unsigned>(mine[i] >> 32) ^ first : 0u;
    const int shared = __clz(static_cast<int>(__reduce_or_sync(kWholeWarp, differing)));
    ClassKey bit = 1ull << (63 - shared);
    ClassKey bound = shared == 0 ? 0ull : static_cast<ClassKey>(first >> (32 - shared)) << (64 - shared);  // kTopK keys are no smaller
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
            entries[count + __popc(keeping & ((1u << lane) - 1u))] = {logit_of(mine[i]), id_of(mine[i])};
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

    TopEntry* lists;  ///< all of them
    float least;      ///< TopState's
    unsigned place;   ///< place of the next entry; lists begin at multiples of kKeys, and have a place that stays free

    static __device__ __forceinline__ float unknown() { return __int_as_float(0x7fffffff); }
    /// The first place of list `number`.
    static __device__ __forceinline__ unsigned place_of(long long number) { return static_cast<unsigned>(number) * Size::kKeys; }
    __device__ __forceinline__ int size() const { return static_cast<int>(place % Size::kKeys); }
    __device__ __forceinline__ TopState state() const { return {least, size()}; }

    /// Adds logits of each lane: those of `logits`, a LaneLogits. For a whole warp.
    template <class Logits>
    __device__ __forceinline__ void add(const Logits& logits) {
        if constexpr (kLanes == 32) return add_and_narrow(logits);  // a lane has few logits, of which fewer are wanted
        const int hits = logits.count_above(least);
        int upto = hits;  // hits up to this lane's
#pragma unroll
        for (int lanes = 1; lanes < kLanes; lanes *= 2) {
            const int before = __shfl_up_sync(kWholeWarp, upto, lanes, kLanes);
            if (lane() % kLanes >= lanes) upto += before;
        }
        const int more = __shfl_sync(kWholeWarp, upto, kLanes - 1, kLanes);
        const bool simple = least == least && size() + more < Size::kKeys && !logits.ragged();
        if (__all_sync(kWholeWarp, simple) == 0) return add_and_narrow(logits);
        logits.put_above(least, lists, place + static_cast<unsigned>(upto - hits));
        place += static_cast<unsigned>(more);
    }

private:
    enum : unsigned { kOfRow = kLanes == 32 ? kWholeWarp : (1u << kLanes % 32) - 1u };

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

    /// Adds logits of `mask` where there may be no room for all. Lanes take bits out one after the other, and wait for room. The code is
    /// short, as it is hardly ever run, and has to be fetched then.
    template <class Logits>
    __device__ __forceinline__ void add_and_narrow(const Logits& logits) {
        unsigned mask[Logits::kWords];
#pragma unroll
        for (int word = 0; word < Logits::kWords; ++word) mask[word] = logits.above(word, least);
        int bit = lowest(mask);
#pragma unroll 1
        while (__any_sync(kWholeWarp, bit >= 0) != 0) {
            const float logit = logits.at(bit);
            const bool takes = bit >= 0 && !(logit < least);  // the list may have been narrowed since
            const unsigned of_row = __ballot_sync(kWholeWarp, takes) >> lane() / kLanes * kLanes & kOfRow;
            const int mine = size() + __popc(of_row & ((1u << lane() % kLanes) - 1u));
            const bool waits = takes && mine >= Size::kKeys - 1;
            if (takes && !waits) lists[place - size() + mine] = {logit, logits.id_at(bit)};
            if (!waits) bit = next(mask, bit);
            place += min(__popc(of_row), Size::kKeys - 1 - size());
            narrow(__ballot_sync(kWholeWarp, waits));
        }
    }

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
            const unsigned of_row = __shfl_sync(kWholeWarp, place - size(), first);
            int kept = __shfl_sync(kWholeWarp, size(), first);
            const float found = narrow_list<Problem::top_k, Size::kLaneKeys>(lists + of_row, kept);
            if (lane() / kLanes * kLanes != first) continue;
            least = found;
            place = of_row + kept;
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

    /// Whether some of the columns are no classes.
    __device__ __forceinline__ bool ragged() const { return first + Columns::of(kColumnPieces - 1) + 2 > end; }
    __device__ __forceinline__ int count_above(float least) const {
        int counts[3] = {};  // one after the other, each addition would wait for the one before
#pragma unroll
        for (int i = 0; i < kCount; ++i) ptx::count_if_above(counts[i % 3], c[i / 2][2 * h + i % 2], least);
        return counts[0] + counts[1] + counts[2];
    }
    /// Writes the logits above `least`, in order.
    __device__ __forceinline__ void put_above(float least, TopEntry* lists, unsigned place) const {
        auto address = reinterpret_cast<unsigned long long>(lists + place);
#pragma unroll
        for (int i = 0; i < kCount; ++i) ptx::put_global_v2_if_above(address, c[i / 2][2 * h + i % 2], least, id_at(i));
    }
    /// Bits of logits of classes that are not up to `least`.
    __device__ __forceinline__ unsigned above(int word, float least) const {
        unsigned bits = 0u;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (i / 32 == word && !(c[i / 2][2 * h + i % 2] <= least)) bits |= 1u << i % 32;
        }
        if (ragged()) {
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

}  // namespace flce

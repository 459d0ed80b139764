// Choice of a row's largest logits among those that a warp has in its shared memory. A bound that enough of them reach is searched for
// (top_search.cuh) among all logits first, then among the few that reach the first bound. What is chosen is written down by its place.
#pragma once

#include "flce/common/top_lists.cuh"
#include "flce/common/top_search.cuh"

namespace flce {

/// Shared memory of a warp that chooses classes of a row.
template <class Problem>
struct TopRoom {
    enum : int { kTopK = Problem::top_k };
    enum : int { kMostKept = most_kept_classes(kTopK) };
    enum : int { kLogits = kDenseTopColumns };                                   ///< logits that are looked at together
    enum : int { kCandidates = kTopK <= 64 ? 256 : kTopK <= 128 ? 512 : 1024 };  ///< logits above the first bound
    enum : int { kLists = 144 };                                                 ///< lists that their logits come from
    enum : int { kEntryKeys = kTopK <= 64 ? 8 : kTopK <= 128 ? 16 : 32, kEntries = 32 * kEntryKeys };  ///< room of TopCollected

    union {
        alignas(16) float logits[kLogits];
        TopEntry entries[kEntries];
        ClassKey keys[kMostKept];
    };
    unsigned short places[kCandidates];  ///< places of chosen logits
    unsigned short begins[kLists];       ///< places of the lists' first logits
};

/// The largest logits of a row. For a whole warp, as all its functions are.
template <class Problem>
struct TopChoice {
    using Room = TopRoom<Problem>;
    enum : int { kGroup = 256 };  ///< logits that a warp looks at together: behind the last one −∞ fills a group up
    enum : int { kWords = ceil_div(Room::kLogits, 1024) };
    enum : int { kOfLane = Room::kCandidates / 32 };

    Room& room;
    int count = 0;        ///< chosen logits
    float least;          ///< TopState's
    unsigned equal = 0u;  ///< order of logits of which too many are equal

    /// `least_before`: bound that is known of columns before. Where hardly any logit is above it, nothing tells a better one.
    __device__ __forceinline__ TopChoice(Room& of_warp, float least_before) : room(of_warp), least(least_before) {}

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
    static __device__ __forceinline__ int filled(int size) { return ceil_div(size, kGroup) * kGroup; }

    /// Chooses top_k to kMostKept of `size` logits, or all where there are no more. Returns whether it has; else too many are equal, or one
    /// is NaN.
    __device__ __forceinline__ bool choose(int size) {
        if (size <= Room::kMostKept) {
            for (int i = lane(); i < size; i += 32) room.places[i] = static_cast<unsigned short>(i);
            count = size;
            __syncwarp();
            return true;
        }
        const unsigned largest = order_of(largest_of_lane(size));
        const unsigned least_largest = __reduce_min_sync(kWholeWarp, largest);
        if (least_largest == 0u) return false;  // NaN's
        TopBoundSearch search(__reduce_max_sync(kWholeWarp, largest), least_largest);
        const TopWanted kept{Room::kTopK, Room::kMostKept};
        if (choose_candidates(size, search, kept) && narrow(search, kept)) return true;
        equal = search.low;
        return false;
    }
    /// Chooses top_k exactly: logits above those that are equal, and of these the first ones.
    __device__ __forceinline__ void choose_first(int size) {
        Bits bits;
        Bits of_equal;
        least = logit_of_order(equal);
        reaching(size, least, of_equal);
        reaching(size, logit_of_order(equal + 1u), bits);
#pragma unroll
        for (int word = 0; word < kWords; ++word) of_equal[word] &= ~bits[word];
        const int wanted = Room::kTopK - count_of(bits);
        int low = 0;  // the least place up to which there are enough
        int high = size - 1;
        Bits upto;
#pragma unroll 1
        while (low < high) {
            const int middle = (low + high) / 2;
            take_upto(middle, of_equal, upto);
            if (count_of(upto) >= wanted) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        take_upto(low, of_equal, upto);
#pragma unroll
        for (int word = 0; word < kWords; ++word) bits[word] |= upto[word];
        count = Room::kTopK;
        write(bits);
    }

private:
    /// A bit for each of the lane's logits: in word w, bit 4·g + e is of place 1024·w + 128·g + 4·lane + e.
    using Bits = unsigned[kWords];

    /// Calls use(word, group, eight) for all of the lane's logits, eight of a group of the word's four. The code is short: a warp runs it
    /// two or three times, and it has to be fetched.
    template <class Use>
    __device__ __forceinline__ void each(int size, const Use& use) const {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
#pragma unroll 1
            for (int group = 0; group < 4 && 1024 * word + kGroup * group < size; ++group) {
                const float4* const from = reinterpret_cast<const float4*>(room.logits + 1024 * word + kGroup * group) + lane();
                const float4 a = from[0];
                const float4 b = from[32];
                use(word, group, {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w});
            }
        }
    }
    /// The largest of a lane's logits, or NaN where one of them is.
    __device__ __forceinline__ float largest_of_lane(int size) const {
        float largest = -infinity();
        each(size, [&](int, int, const float(&eight)[8]) {
#pragma unroll
            for (const float logit : eight) largest = ptx::max_nan(largest, logit);
        });
        return largest;
    }
    /// Bits of logits that reach a bound, and the warp's number of them.
    __device__ __forceinline__ int reaching(int size, float bound, Bits& bits) const {
#pragma unroll
        for (unsigned& word : bits) word = 0u;
        each(size, [&](int word, int group, const float(&eight)[8]) {
            unsigned of_eight = 0u;
#pragma unroll
            for (int i = 0; i < 8; ++i) ptx::or_if_reaches(of_eight, eight[i], bound, 1u << i);
            bits[word] |= of_eight << 8 * group;
        });
        return count_of(bits);
    }
    static __device__ __forceinline__ int count_of_lane(const Bits& bits) {
        int count = 0;
#pragma unroll
        for (const unsigned word : bits) count += __popc(word);
        return count;
    }
    static __device__ __forceinline__ int count_of(const Bits& bits) { return __reduce_add_sync(kWholeWarp, count_of_lane(bits)); }

    /// Writes down places of `bits`. Their number has been counted.
    __device__ __forceinline__ void write(const Bits& bits) {
        const int of_lane = count_of_lane(bits);
        int upto = of_lane;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const int before = __shfl_up_sync(kWholeWarp, upto, lanes);
            if (lane() >= lanes) upto += before;
        }
        unsigned short* to = room.places + upto - of_lane;
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
#pragma unroll 1
            for (unsigned left = bits[word]; left != 0u; left &= left - 1u) {
                const int bit = __ffs(static_cast<int>(left)) - 1;
                *to++ = static_cast<unsigned short>(1024 * word + bit / 4 * 128 + 4 * lane() + bit % 4);
            }
        }
        __syncwarp();
    }
    /// Chooses up to kCandidates.
    __device__ __forceinline__ bool choose_candidates(int size, TopBoundSearch& search, const TopWanted& kept) {
        const float target = 2 * kept.most >= 3 * kept.least ? kept.target() : TopWanted::log2_of(2 * kept.least);
        Bits bits;
#pragma unroll 1
        while (!search.ended()) {
            const unsigned tried = search.next(target);
            least = logit_of_order(tried);
            count = reaching(size, least, bits);
            if (count > kept.most || count < kept.least) search.tell(tried, count, kept.most, target);
            if (count >= kept.least && count <= Room::kCandidates) {
                write(bits);
                return true;
            }
        }
        return false;
    }
    /// Leaves kMostKept of the candidates at most.
    __device__ __forceinline__ bool narrow(TopBoundSearch& search, const TopWanted& kept) {
        if (count <= kept.most) return true;
        const float target = kept.target();
        float logits[kOfLane];
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const int of_lane = 32 * i + lane();
            logits[i] = of_lane < count ? room.logits[room.places[of_lane]] : -infinity();
        }
        int reaching = 0;
        while (true) {
            if (search.ended()) return false;
            const unsigned tried = search.next(target);
            least = logit_of_order(tried);
            reaching = 0;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                if (32 * i < count) reaching += __popc(__ballot_sync(kWholeWarp, logits[i] >= least));
            }
            if (reaching >= kept.least && reaching <= kept.most) break;
            search.tell(tried, reaching, kept.most, target);
        }
        const unsigned before = (1u << lane()) - 1u;
        unsigned short* to = room.places;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (32 * i >= count) break;
            const unsigned short place = room.places[32 * i + lane()];
            __syncwarp();  // places of this part have been read, and what is kept of it is no longer
            const unsigned keeping = __ballot_sync(kWholeWarp, logits[i] >= least);
            if (logits[i] >= least) to[__popc(keeping & before)] = place;
            to += __popc(keeping);
        }
        __syncwarp();
        count = reaching;
        return true;
    }
    /// Leaves bits of places up to `last`.
    static __device__ __forceinline__ void take_upto(int last, const Bits& bits, Bits& taken) {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            const int beyond = last - 4 * lane() - 1024 * word;
            const int places = beyond < 0 ? 0 : beyond / 128 * 4 + min(beyond % 128, 3) + 1;
            taken[word] = bits[word] & (places >= 32 ? ~0u : (1u << places) - 1u);
        }
    }
};

}  // namespace flce

// The kernel that picks the classes of rows' largest logits from what forward has collected: a warp has a row.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/common/top_lists.cuh"

namespace flce {

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

/// The largest entries of a row, collected by a warp in its shared memory from all that has been found, in any order.
template <class Problem>
struct TopCollected {
    enum : int { kTopK = Problem::top_k };
    enum : int { kLaneKeys = kTopK <= 128 ? 16 : 32 };
    enum : int { kRoom = 32 * kLaneKeys };
    enum : int { kRows = kTopThreads / 32 };  ///< rows of a block
    enum : int { kMostKept = kTopK + kTopK / 4 };

    TopEntry* const entries;
    int count = 0;
    float least = __int_as_float(0x7fffffff);  ///< entries below are not among the largest; NaN: it is not known of any

    __device__ __forceinline__ explicit TopCollected(TopEntry* of_warp) : entries(of_warp) {}

    /// Adds an entry of each lane that `has` one. For a whole warp.
    __device__ __forceinline__ void add(const TopEntry& entry, bool has) {
        has = has && !(entry.logit < least);
        unsigned of_warp = __ballot_sync(kWholeWarp, has);
        if (count + __popc(of_warp) > kRoom) {
            narrow();
            has = has && !(entry.logit < least);
            of_warp = __ballot_sync(kWholeWarp, has);
        }
        if (has) entries[count + __popc(of_warp & ((1u << threadIdx.x % 32) - 1u))] = entry;
        count += __popc(of_warp);
    }
    /// Adds `size` entries, of which `of(number)` is one. Loads of some of them are on their way together.
    template <class Of>
    __device__ __forceinline__ void add_all(int size, const Of& of) {
        constexpr int kAtOnce = 4;
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
        for (int first = 0; first < size; first += 32 * kAtOnce) {
            TopEntry some[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) some[i] = of(min(first + 32 * i + lane, size - 1));
#pragma unroll 1
            for (int i = 0; i < kAtOnce && first + 32 * i < size; ++i) {
                add(some[0], first + 32 * i + lane < size);
#pragma unroll
                for (int next = 1; next < kAtOnce; ++next) some[next - 1] = some[next];
            }
        }
    }
    /// Adds kOfLane entries of each lane before anything else, `size` of which there are: logits in registers tell a bound first. Kept are
    /// the kTopK largest, and a few more. Returns whether it has; else there are too many equal logits.
    template <int kOfLane>
    __device__ __forceinline__ bool add_first(const TopEntry (&some)[kOfLane], unsigned (&order)[kOfLane], int size) {
        unsigned all_bits = 0u;  // bits of order_of, which is 0 where there is no entry
        unsigned shared_bits = ~0u;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            all_bits |= order[i];
            shared_bits &= order[i] != 0u ? order[i] : ~0u;
        }
        all_bits = __reduce_or_sync(kWholeWarp, all_bits);
        shared_bits = __reduce_and_sync(kWholeWarp, shared_bits);
        const int shared = __clz(static_cast<int>(all_bits & ~shared_bits));  // the first bits, which all have, are the bound's
        unsigned bound = shared == 0 ? 0u : all_bits >> (32 - shared) << (32 - shared);
        int kept = size;
#pragma unroll 1
        for (unsigned bit = shared < 32 ? 1u << (31 - shared) : 0u; bit != 0u && kept > kMostKept; bit >>= 1) {
            int above = 0;
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) above += order[i] >= (bound | bit) ? 1 : 0;
            above = __reduce_add_sync(kWholeWarp, above);
            if (above < kTopK) continue;
            bound |= bit;
            kept = above;
        }
        if (kept > kRoom) return false;
        const unsigned before = (1u << threadIdx.x % 32) - 1u;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const bool keeps = order[i] >= bound && order[i] != 0u;
            const unsigned of_warp = __ballot_sync(kWholeWarp, keeps);
            if (keeps) entries[count + __popc(of_warp & before)] = {logit_of_order(order[i]), some[i].id};
            count += __popc(of_warp);
        }
        if (size > kMostKept) least = logit_of_order(bound);
        return true;
    }
    /// Calls put(rank, key) for the kTopK largest in order, or as many as there are. Nothing can be added behind it.
    template <class Put>
    __device__ __forceinline__ void rank(const Put& put) {
        if (count > kMostKept) narrow();
        __syncwarp();  // entries of the other lanes are there
        const int lane = static_cast<int>(threadIdx.x) % 32;
        ClassKey* const keys = reinterpret_cast<ClassKey*>(entries);
        for (int i = lane; i < count; i += 32) keys[i] = entries[i].key();
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < count; i += 32) {
            const ClassKey key = keys[i];
            int rank = 0;
#pragma unroll 8
            for (int other = 0; other < count; ++other) rank += keys[other] > key ? 1 : 0;
            if (rank < kTopK) put(rank, key);
        }
    }
    /// Copies the kTopK largest and a few more, in any order, and returns what is to be known of them.
    __device__ __forceinline__ TopState keep(TopEntry* to) {
        if (count > kMostKept) narrow();
        __syncwarp();
        for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) to[i] = entries[i];
        return {least, count};
    }

private:
    __device__ __noinline__ void narrow() { least = narrow_list<kTopK, kLaneKeys>(entries, count); }
};

/// Merges what forward has found of a row in this launch with its sums before: each lane some splits, then all lanes in a fixed order.
/// Returns the sums of all launches so far, in every lane. For a whole warp.
template <class Problem>
__device__ __forceinline__ RowSums merge_top_sums(const TopClassesParams& p, int row, long long partial_rows, int splits) {
    using Fields = PartialFields<Problem>;
    RowSums sums = merge_splits<Problem, 32>(p.partials + row, Fields::kCount * partial_rows, partial_rows,
                                             static_cast<int>(threadIdx.x) % 32, splits);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) sums = merge_with_lane<Problem>(sums, lanes);
    if (p.running == nullptr) return sums;
    if (p.kept_before != 0) sums = merge(Fields::load(p.running + row, p.running_rows), sums);
    __syncwarp();  // every lane has read it
    if (threadIdx.x % 32 == 0) Fields::store(p.running + row, p.running_rows, sums);
    return sums;
}

/// Adds all logits of a launch's columns, from class 0 on.
template <class Problem>
__device__ __forceinline__ void collect_dense(const float* logits, int columns, TopCollected<Problem>& top) {
    constexpr int kOfLane = kDenseTopColumns / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    TopEntry some[kOfLane];
    unsigned order[kOfLane];
    bool any_nan = false;  // NaN has the order of no entry
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) some[i] = {logits[min(32 * i + lane, columns - 1)], 32 * i + lane};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
        order[i] = 32 * i + lane < columns ? order_of(some[i].logit) : 0u;
        any_nan = any_nan || some[i].logit != some[i].logit;
    }
    if (__any_sync(kWholeWarp, any_nan) == 0 && top.add_first(some, order, columns)) return;
    top.add_all(columns, [&](int i) { return TopEntry{logits[i], i}; });
}

/// A row's lists of classes, and behind them the list that has been kept of columns before.
template <class Problem>
struct ListsOfRow {
    const TopClassesParams& p;
    int row;
    long long ld;  ///< rows of a launch's lists
    int lists;

    __device__ __forceinline__ int all() const { return lists + (p.kept_before != 0 ? 1 : 0); }
    __device__ __forceinline__ int size(int list) const {
        if (list >= all()) return 0;
        return list < lists ? p.states[list * ld + row].count : p.bounds[row].count;
    }
    __device__ __forceinline__ const TopEntry* entries(int list) const {
        if (list < lists) return static_cast<const TopEntry*>(p.keys) + (list * ld + row) * TopListSize<Problem>::kKeys;
        return static_cast<const TopEntry*>(p.kept) + static_cast<long long>(row) * TopCollected<Problem>::kMostKept;
    }
};

/// Adds the entries of all lists of a row. Where they are few, each lane has some of them in registers.
template <class Problem>
__device__ __forceinline__ void collect_lists(const ListsOfRow<Problem>& of, TopCollected<Problem>& top) {
    constexpr int kOfLane = 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int size = of.size(lane);
    const int all = __reduce_add_sync(kWholeWarp, size);
    const int parts = __reduce_add_sync(kWholeWarp, ceil_div(size, 32));
    bool any_nan = false;
    if (of.all() <= 32 && parts <= kOfLane) {
        TopEntry some[kOfLane];
        unsigned order[kOfLane];
        unsigned left = __ballot_sync(kWholeWarp, size > 0);
        int begin = 0;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const int list = max(__ffs(static_cast<int>(left)) - 1, 0);
            const int of_list = left == 0u ? 0 : __shfl_sync(kWholeWarp, size, list);
            order[i] = begin + lane < of_list ? 1u : 0u;
            some[i] = order[i] != 0u ? of.entries(list)[begin + lane] : TopEntry{0.f, 0};
            begin += 32;
            if (begin >= of_list) {
                left &= left - 1u;
                begin = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            any_nan = any_nan || some[i].logit != some[i].logit;
            order[i] = order[i] != 0u ? order_of(some[i].logit) : 0u;
        }
        if (__any_sync(kWholeWarp, any_nan) == 0 && top.add_first(some, order, all)) return;
    }
#pragma unroll 1
    for (int list = 0; list < of.all(); ++list) {
        const TopEntry* const from = of.entries(list);
        top.add_all(of.size(list), [&](int i) { return from[i]; });
    }
}

/// Ranks the classes of a row's lists: a warp has a row. A shard leaves them to merge. Where columns of the vocabulary follow, the classes
/// are kept, and so is the bound that logits of further ones have to exceed.
template <class Problem>
__device__ __forceinline__ void top_classes(const TopClassesParams& p) {
    using Collected = TopCollected<Problem>;
    constexpr bool kDivided = Problem::lists_rows;  // then only forward knows how its work was divided
    __shared__ TopEntry room[Collected::kRows][Collected::kRoom];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(blockIdx.x) * Collected::kRows + warp;
    if (row >= p.rows) return;
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, row);  // ignored rows are listed behind the others
    const bool has_classes = row < rows && listed.target >= 0 && !(Problem::shard && p.targets.columns == 0);
    const long long ld = kDivided ? partial_rows_of(rows) : p.partial_rows;
    RowSums sums = sums_of_nothing(0.f, 0.f);
    Collected top(room[warp]);
    TopEntry* const kept = static_cast<TopEntry*>(p.kept) + static_cast<long long>(row) * Collected::kMostKept;
    const int lists = p.dense != nullptr ? 0 : kDivided ? p.scalars->top_splits : p.splits;
    if (has_classes) {
        // Kept entries are as large. Where hardly any logit behind them is, nothing tells a better bound.
        if (p.kept_before != 0) top.least = p.bounds[row].least;
        sums = merge_top_sums<Problem>(p, row, ld, kDivided ? p.scalars->splits : p.splits);
        if (p.dense != nullptr) {
            collect_dense(p.dense + static_cast<long long>(row) * kDenseTopColumns, p.dense_columns, top);
        } else {
            collect_lists(ListsOfRow<Problem>{p, row, ld, lists}, top);
        }
    }
    if (p.last == 0) {
        // Nothing is wanted of a row without classes.
        const TopState bound = has_classes ? top.keep(kept) : TopState{infinity(), 0};
        if (lane == 0) p.bounds[row] = bound;
        for (int list = lane; list < lists && has_classes; list += 32) p.states[list * ld + row].count = 0;  // for the next launch
        return;
    }
    const TopRow<Problem> out{p, listed.row, sums.max, logf(sums.exp_sum)};
    top.rank([&](int rank, ClassKey key) { out.write(rank, key); });
    for (int rank = top.count + lane; rank < Problem::top_k; rank += 32) out.write_none(rank);
}

}  // namespace flce

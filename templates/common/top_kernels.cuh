// The kernel that picks the classes of rows' largest logits from what forward has collected: a warp has a row.
#pragma once

#include "flce/common/row_outputs.cuh"
#include "flce/common/top_choice.cuh"

namespace flce {

/// The largest entries of a row, collected by a warp in its shared memory from all that has been found, in any order. For rows of which
/// TopChoice makes nothing.
template <class Problem>
struct TopCollected {
    using Room = TopRoom<Problem>;
    enum : int { kTopK = Problem::top_k };

    TopEntry* const entries;
    int count = 0;
    float least;  ///< entries below are not among the largest; NaN: it is not known of any

    __device__ __forceinline__ TopCollected(Room& of_warp, float least_before) : entries(of_warp.entries), least(least_before) {}

    /// Adds an entry of each lane that `has` one. For a whole warp.
    __device__ __forceinline__ void add(const TopEntry& entry, bool has) {
        has = has && !(entry.logit < least);
        unsigned of_warp = __ballot_sync(kWholeWarp, has);
        if (count + __popc(of_warp) > Room::kEntries) {
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
        constexpr int kAtOnce = 2;
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
    /// The number of entries that are left, kMostKept at most, and the bound.
    __device__ __forceinline__ TopState end() {
        if (count > Room::kMostKept) narrow();
        __syncwarp();  // entries of the other lanes are there
        return {least, count};
    }

private:
    __device__ __forceinline__ void narrow() {
        const TopState left = narrowed(entries, count);
        least = left.least;
        count = left.count;
    }
    static __device__ __noinline__ TopState narrowed(TopEntry* entries, int count) {
        const float least = narrow_list<kTopK, Room::kEntryKeys>(entries, count);
        return {least, count};
    }
};

/// Adds up the lanes' sums of a row, relative to the largest logit of all: one exponential, where merging pairs takes five. Every lane gets
/// the same bits.
template <class Problem>
__device__ __forceinline__ RowSums merge_warp(const RowSums& mine) {
    float largest = mine.max;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, of_other_lane(largest, lanes));
    RowSums all = sums_of_nothing(largest, -infinity());
    add_part<Problem>(all, mine);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        all.exp_sum += of_other_lane(all.exp_sum, lanes);
        if constexpr (Problem::entropy) all.exp_z_sum += of_other_lane(all.exp_z_sum, lanes);
        if constexpr (Problem::label_smoothing) all.weighted_sum += of_other_lane(all.weighted_sum, lanes);
        if constexpr (Problem::square_sum) all.exp_sq_sum += of_other_lane(all.exp_sq_sum, lanes);
        if constexpr (Problem::top1) all.top1 = min(all.top1, of_other_lane(all.top1, lanes));
    }
    return all;
}

/// Merges what forward has found of a row in this launch with its sums before: each lane some splits, then all lanes. Returns the sums of
/// all launches so far, in every lane. For a whole warp.
template <class Problem>
__device__ __forceinline__ RowSums merge_top_sums(const TopClassesParams& p, int row, long long partial_rows, int splits) {
    using Fields = PartialFields<Problem>;
    RowSums sums = merge_warp<Problem>(merge_splits<Problem, 32, 4>(p.partials + row, Fields::kCount * partial_rows, partial_rows,
                                                                    static_cast<int>(threadIdx.x) % 32, splits));
    if (p.running == nullptr) return sums;
    if (p.kept_before != 0) sums = merge(Fields::load(p.running + row, p.running_rows), sums);
    __syncwarp();  // every lane has read it
    if (threadIdx.x % 32 == 0) Fields::store(p.running + row, p.running_rows, sums);
    return sums;
}

/// Where the logits of a row come from: the lists of the launch, and behind them the list that has been kept of columns before; or all
/// logits of the launch's columns.
template <class Problem>
struct LogitsOfRow {
    using Room = TopRoom<Problem>;

    const TopClassesParams& p;
    int row;
    long long ld;  ///< rows of a launch's lists
    int lists;

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ __forceinline__ bool dense() const { return p.dense != nullptr; }
    __device__ __forceinline__ const float* logits() const { return p.dense + static_cast<long long>(row) * kDenseTopColumns; }
    __device__ __forceinline__ int all() const { return lists + (p.kept_before != 0 ? 1 : 0); }
    __device__ __forceinline__ int size(int list) const {
        if (list >= all()) return 0;
        return list < lists ? p.states[list * ld + row].count : p.bounds[row].count;
    }
    __device__ __forceinline__ const TopEntry* entries(int list) const {
        if (list < lists) return static_cast<const TopEntry*>(p.keys) + (list * ld + row) * TopListSize<Problem>::kKeys;
        return static_cast<const TopEntry*>(p.kept) + static_cast<long long>(row) * Room::kMostKept;
    }

    /// Begins to copy all logits to `room`. Returns their number; −1: they are too many.
    __device__ __forceinline__ int fetch(Room& room) const {
        if (!dense()) return fetch_lists(room);
        const unsigned to = ptx::shared_address(room.logits);
#pragma unroll 4
        for (int i = 4 * lane(); i < p.dense_columns; i += 128) ptx::cp_async_cg_16(to + 4 * i, logits() + i, 16);
        return p.dense_columns;
    }
    /// Waits for what has been fetched, and fills the last group up.
    __device__ __forceinline__ void await(Room& room, int size) const {
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group<0>();
        __syncwarp();
        for (int i = size + lane(); i < TopChoice<Problem>::filled(size); i += 32) room.logits[i] = -infinity();
        __syncwarp();
    }
    /// Collects all logits, whatever they are.
    __device__ __forceinline__ TopState collect(Room& room, float least) const {
        TopCollected<Problem> top(room, least);
        if (dense()) {
            const float* const from = logits();
            top.add_all(p.dense_columns, [&](int i) { return TopEntry{from[i], i}; });
        } else {
#pragma unroll 1
            for (int list = 0; list < all(); ++list) {
                const TopEntry* const from = entries(list);
                top.add_all(size(list), [&](int i) { return from[i]; });
            }
        }
        return top.end();
    }
    /// The class of the logit at a place.
    __device__ __forceinline__ int id_at(const Room& room, int place) const {
        if (dense()) return place;
        int list = 0;
        for (int step = 1 << (31 - __clz(max(all() - 1, 1))); step > 0; step /= 2) {
            if (list + step < all() && room.begins[list + step] <= place) list += step;
        }
        return entries(list)[place - room.begins[list]].id;
    }

private:
    __device__ __forceinline__ int fetch_lists(Room& room) const {
        using Size = TopListSize<Problem>;
        if (all() > Room::kLists) return -1;
        int begin = 0;
        const TopEntry* from = entries(0) + lane();
#pragma unroll 1
        for (int first = 0; first < all(); first += 32) {
            const int of_lane = size(first + lane());
            int upto = of_lane;
#pragma unroll
            for (int lanes = 1; lanes < 32; lanes *= 2) {
                const int before = __shfl_up_sync(kWholeWarp, upto, lanes);
                if (lane() >= lanes) upto += before;
            }
            const int more = __shfl_sync(kWholeWarp, upto, 31);
            if (begin + more > Room::kLogits) return -1;
            if (first + lane() < all()) room.begins[first + lane()] = static_cast<unsigned short>(begin + upto - of_lane);
            unsigned to = ptx::shared_address(room.logits) + 4 * (begin + lane());
#pragma unroll 1
            for (int list = first; list < min(first + 32, all()); ++list) {
                const int size = __shfl_sync(kWholeWarp, of_lane, list - first);
                if (list == lists) from = entries(list) + lane();
#pragma unroll
                for (int part = 0; part < Size::kLaneKeys; ++part) {
                    if (32 * part + lane() < size) ptx::cp_async_ca_4(to + 128 * part, from + 32 * part);
                }
                to += 4 * size;
                from += ld * Size::kKeys;
            }
            begin += more;
        }
        return begin;
    }
};

/// The classes of a row's largest logits, in the lanes of a warp: entry j is lane j % 32's j / 32-th.
template <class Problem>
struct TopFound {
    using Room = TopRoom<Problem>;
    enum : int { kOfLane = ceil_div(Room::kMostKept, 32) };

    TopEntry mine[kOfLane];
    int count;
    float least;  ///< TopState's

    static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

    /// Takes what a choice has chosen.
    __device__ __forceinline__ TopFound(const LogitsOfRow<Problem>& of, const TopChoice<Problem>& choice)
        : count(choice.count), least(choice.least) {
        const Room& room = choice.room;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (32 * i + lane() >= count) continue;
            const int place = room.places[32 * i + lane()];
            mine[i] = {room.logits[place], of.id_at(room, place)};
        }
    }
    /// Takes what has been collected, which lies in the room.
    __device__ __forceinline__ TopFound(const Room& room, const TopState& collected) : count(collected.count), least(collected.least) {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (32 * i + lane() < count) mine[i] = room.entries[32 * i + lane()];
        }
    }
    /// Copies the entries, in any order, and returns what is to be known of them.
    __device__ __forceinline__ TopState keep(TopEntry* to) const {
        __syncwarp();  // entries of columns before have been read
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (32 * i + lane() < count) to[32 * i + lane()] = mine[i];
        }
        return {least, count};
    }
    /// Calls put(rank, key) for the top_k largest in order, or as many as there are.
    template <class Put>
    __device__ __forceinline__ void rank(Room& room, const Put& put) const {
        int ranks[kOfLane] = {};
        if (!rank_distinct(room, ranks)) rank_keys(room, ranks);
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (32 * i + lane() < count && ranks[i] < Room::kTopK) put(ranks[i], mine[i].key());
        }
    }

private:
    /// Counts logits above. Returns whether no two are equal: then the numbers' sum tells that all differ.
    __device__ __forceinline__ bool rank_distinct(Room& room, int (&ranks)[kOfLane]) const {
        __syncwarp();  // the room has been read
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            if (32 * i + lane() < filled()) room.logits[32 * i + lane()] = 32 * i + lane() < count ? mine[i].logit : -infinity();
        }
        __syncwarp();
#pragma unroll 2
        for (int other = 0; other < filled(); other += 4) {
            const float4 four = *reinterpret_cast<const float4*>(room.logits + other);
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                ptx::count_if_above(ranks[i], four.x, mine[i].logit);
                ptx::count_if_above(ranks[i], four.y, mine[i].logit);
                ptx::count_if_above(ranks[i], four.z, mine[i].logit);
                ptx::count_if_above(ranks[i], four.w, mine[i].logit);
            }
        }
        int sum = 0;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) sum += 32 * i + lane() < count ? ranks[i] : 0;
        return __reduce_add_sync(kWholeWarp, sum) == count * (count - 1) / 2;
    }
    __device__ __forceinline__ int filled() const { return ceil_div(count, 4) * 4; }
    __device__ __forceinline__ void rank_keys(Room& room, int (&ranks)[kOfLane]) const {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            ranks[i] = 0;
            if (32 * i + lane() < count) room.keys[32 * i + lane()] = mine[i].key();
        }
        __syncwarp();
#pragma unroll 1
        for (int other = 0; other < count; ++other) {
            const ClassKey key = room.keys[other];
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) ranks[i] += key > mine[i].key() ? 1 : 0;
        }
    }
};

/// A row of the launch, to whose classes a warp comes.
template <class Problem>
struct TopRow {
    using Room = TopRoom<Problem>;

    LogitsOfRow<Problem> of;
    int most_lists;  ///< lists whose states are zeroed for the next launch
    int listed_row;
    float max;
    float log_sum;

    /// Keeps the classes, and the bound that logits of further columns have to exceed; or ranks them. A shard leaves them to merge.
    __device__ __forceinline__ void end(Room& room, const TopFound<Problem>& top) const {
        const TopClassesParams& p = of.p;
        if (p.last == 0) {
            const TopState bound = top.keep(static_cast<TopEntry*>(p.kept) + static_cast<long long>(of.row) * Room::kMostKept);
            if (top.lane() == 0) p.bounds[of.row] = bound;
            for (int list = top.lane(); list < most_lists; list += 32) p.states[list * of.ld + of.row].count = 0;
            return;
        }
        top.rank(room, [&](int rank, ClassKey key) { write(rank, key); });
        write_none(top.count);
    }
    /// Finds classes of logits of which the choice makes nothing.
    __device__ __noinline__ static void end_slowly(TopRow row, Room& room, int size, unsigned equal, float least_before) {
        if (row.of.dense() && equal != 0u) {
            TopChoice<Problem> choice(room, least_before);
            choice.equal = equal;
            choice.choose_first(size);
            return row.end(room, TopFound<Problem>(row.of, choice));
        }
        __syncwarp();
        const TopState collected = row.of.collect(room, least_before);
        row.end(room, TopFound<Problem>(room, collected));
    }
    /// Writes that there are no classes from place `first` on.
    __device__ __forceinline__ void write_none(int first) const {
        for (int rank = first + static_cast<int>(threadIdx.x) % 32; rank < Problem::top_k; rank += 32) {
            if constexpr (Problem::shard) {
                write(rank, no_class_key());
            } else {
                put(rank, 0.f, -1);
            }
        }
    }

private:
    /// Writes the class of the `rank`-th largest logit.
    __device__ __forceinline__ void write(int rank, ClassKey key) const {
        const TopClassesParams& p = of.p;
        const float logit = logit_of(key);
        const int id = id_of(key);
        if constexpr (Problem::shard) {
            float* const to = p.shard_sums + (p.first_field + rank) * p.ld + listed_row;
            to[0] = logit;
            to[Problem::top_k * p.ld] = __int_as_float(id == FLCE_NO_CLASS ? id : id + static_cast<int>(p.targets.first_class));
        } else {
            put(rank, (logit - max) - log_sum, id);
        }
    }
    __device__ __forceinline__ void put(int rank, float logprob, int id) const {
        of.p.logprobs[static_cast<long long>(listed_row) * Problem::top_k + rank] = logprob;
        of.p.ids[static_cast<long long>(listed_row) * Problem::top_k + rank] = id;
    }
};

/// Finds the classes of a launch's rows: a warp has a row.
template <class Problem>
__device__ __forceinline__ void top_classes(const TopClassesParams& p) {
    using Room = TopRoom<Problem>;
    constexpr bool kDivided = Problem::lists_rows;  // then only forward knows how its work was divided
    __shared__ Room rooms[kTopThreads / 32];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = static_cast<int>(blockIdx.x) * (kTopThreads / 32) + warp;
    if (row >= p.rows) return;
    Room& room = rooms[warp];
    const int rows = listed_rows<Problem>(p.list, p.rows, 0);
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, row);  // ignored rows are listed behind the others
    const long long ld = kDivided ? partial_rows_of(rows) : p.partial_rows;
    const int most_lists = kDivided ? p.scalars->top_splits : p.splits;
    TopRow<Problem> of_row{{p, row, ld, p.dense != nullptr ? 0 : most_lists}, most_lists, listed.row, 0.f, 0.f};
    if (row >= rows || listed.target < 0 || (Problem::shard && p.targets.columns == 0)) {
        if (p.last != 0) return of_row.write_none(0);
        if (threadIdx.x % 32 == 0) p.bounds[row] = {infinity(), 0};  // nothing is wanted of it
        return;
    }
    const int size = of_row.of.fetch(room);
    const float least_before = p.kept_before != 0 ? p.bounds[row].least : __int_as_float(0x7fffffff);
    const RowSums sums = merge_top_sums<Problem>(p, row, ld, kDivided ? p.scalars->splits : p.splits);
    of_row.max = sums.max;
    of_row.log_sum = logf(sums.exp_sum);
    of_row.of.await(room, max(size, 0));
    TopChoice<Problem> choice(room, least_before);
    if (size < 0 || !choice.choose(size)) return TopRow<Problem>::end_slowly(of_row, room, size, choice.equal, least_before);
    of_row.end(room, TopFound<Problem>(of_row.of, choice));
}

}  // namespace flce

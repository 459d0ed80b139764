// Classes that rows name, by the tiles of forward that have them. Where a row names many classes forward then picks their logits from its
// own tiles (named_picks.cuh), which spares a product with a row of the weight for each.
#pragma once

#include "flce/common/teacher_kernels.cuh"
#include "flce/sm90/params.cuh"

namespace flce {

/// Taught, where forward picks the logits of named classes.
template <class Problem>
struct TaughtByTiles : Taught<Problem> {
    enum : bool { picks_named = true };
};
/// Problem for a kernel of forward that picks them.
template <class Problem>
struct PicksNamed : Problem {
    enum : bool { picks_named = true };
};

/// One place of a row's ids, as a tile sees it: the class's column in the tile, and the number of the place.
struct TileName {
    enum : int { kBits = 18 };  ///< 8 of the column, 10 of the place
    unsigned bits;

    static __device__ __forceinline__ TileName of(int column, int place) { return {static_cast<unsigned>(column << 10 | place)}; }
    __device__ __forceinline__ int column() const { return static_cast<int>(bits >> 10 & 0xffu); }
    __device__ __forceinline__ int place() const { return static_cast<int>(bits & 0x3ffu); }
};

/// The names of a row in a tile. Up to three lie in one number, so that one access brings them. More lie in the row's list, those of each
/// lane of a quad side by side: the number then has the first one's place there, and how many each lane has.
struct TileRecord {
    enum : int { kSlotBits = TileName::kBits + 1 };
    enum : int { kMost = 3 };
    enum : unsigned { kNameMask = (1u << TileName::kBits) - 1u };
    enum : unsigned { kHas = 1u << TileName::kBits };  ///< a slot has a name
    enum : int { kCountBits = 11 };                    ///< bits of a number of names, and of a place
    enum : int { kLeftAt = 32 };                       ///< number of names that are left of a lane's part of a list
    enum : unsigned long long { kListed = 1ull << 63 };
    unsigned long long bits;

    /// `names`: the row's, of which this tile's begin at `begin[0]` for the first lane of a quad, and end at `begin[4]`.
    static __device__ __forceinline__ TileRecord of(const unsigned* names, const int (&begin)[5]) {
        unsigned long long bits = 0ull;
        if (begin[4] - begin[0] <= kMost) {
            for (int i = begin[4] - 1; i >= begin[0]; --i) bits = bits << kSlotBits | kHas | names[i];
            return {bits};
        }
#pragma unroll
        for (int lane = 3; lane >= 0; --lane) bits = bits << kCountBits | static_cast<unsigned>(begin[lane + 1] - begin[lane]);
        return {kListed | bits << kCountBits | static_cast<unsigned>(begin[0])};
    }
    __device__ __forceinline__ bool is_list() const { return (bits & kListed) != 0ull; }
    /// A list's part for a lane of the quad.
    __device__ __forceinline__ TileRecord of_lane(int lane) const {
        constexpr unsigned kMask = (1u << kCountBits) - 1u;
        unsigned long long rest = bits;
        unsigned at = 0u;
        unsigned next = static_cast<unsigned>(rest) & kMask;
#pragma unroll 1
        for (int of = 0; of <= lane; ++of) {
            at += next;
            rest >>= kCountBits;
            next = static_cast<unsigned>(rest) & kMask;
        }
        return {next == 0u ? 0ull : kListed | static_cast<unsigned long long>(next) << kLeftAt | at};
    }
    __device__ __forceinline__ bool has_any() const { return bits != 0ull; }
    /// Takes the first name out, of a lane's part where it is a list. `list`: the row's.
    __device__ __forceinline__ TileName take(const unsigned* list) {
        if (is_list()) {
            const unsigned name = list[static_cast<unsigned>(bits)];
            bits -= (1ull << kLeftAt) - 1ull;
            if ((bits & ~kListed) >> kLeftAt == 0ull) bits = 0ull;
            return {name};
        }
        const unsigned first = static_cast<unsigned>(bits) & kNameMask;
        bits >>= kSlotBits;
        return {first};
    }
};

/// The sum of what the threads before this one have. For a whole block of kRowThreads; `of_warps`, shared, has a number for each warp.
__device__ __forceinline__ int sum_before(int value, int* of_warps) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int up_to = value;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, up_to, static_cast<unsigned>(lanes));
        up_to += lane < lanes ? 0 : other;
    }
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();  // every warp's sum is there
    const int of_other = lane < warp ? of_warps[lane] : 0;
    return up_to - value + __reduce_add_sync(0xffffffffu, of_other);
}

/// Numbers of a tile for each of a quad's lanes, of 16 bits each.
struct OfQuad {
    unsigned words[2];

    __device__ __forceinline__ int operator[](int lane) const { return static_cast<int>(words[lane / 2] >> lane % 2 * 16 & 0xffffu); }
};

__device__ __forceinline__ int total_of(const OfQuad& counts) { return counts[0] + counts[1] + counts[2] + counts[3]; }
/// Numbers of names become places, of which `begin` is the first. Returns the one behind.
__device__ __forceinline__ int to_begins(OfQuad& counts, int begin) {
    const OfQuad of = counts;
    const int second = begin + of[0];
    const int third = second + of[1];
    const int last = third + of[2];
    counts.words[0] = static_cast<unsigned>(second << 16 | begin);
    counts.words[1] = static_cast<unsigned>(last << 16 | third);
    return last + of[3];
}

/// Sorts the places of a row that name a class by the tiles of forward, and by the lanes of a quad that have their columns. A block has a
/// row. All other places have their logits at once.
template <class Problem>
__device__ __forceinline__ void named_tiles(const NamedTilesParams& p) {
    constexpr int kRounds = NamedPlaces::kRounds;
    constexpr int kMostTurns = ceil_div(ceil_div(Problem::vocab_size, 64), kRowThreads);
    __shared__ NamedPlaces named;
    __shared__ OfQuad begins[kMostTurns * kRowThreads + 1];  // how many names, and then the first one's place
    __shared__ unsigned names[NamedPlaces::kMost];
    __shared__ int of_warps[kRowThreads / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const int row = static_cast<int>(blockIdx.x);
    const int tiles = p.named.tiles;
    const int turns = ceil_div(tiles, kRowThreads);
    for (int tile = thread; tile <= turns * kRowThreads; tile += kRowThreads) begins[tile] = {};
    const ListedRow listed = listed_row<Problem>(p.list, p.targets, p.temperature, row);
    load_named<Problem>(p, named, listed);
    if (row >= listed_rows<Problem>(p.list, p.rows, 1)) return;
    int rank[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int i = kRowThreads * round + thread;
        if (i >= named.count) continue;
        const int tile = named.ids[i] / p.tile_columns;
        const int lane = (named.ids[i] - tile * p.tile_columns) % 8 / 2;
        rank[round] = static_cast<int>(atomicAdd(&begins[tile].words[lane / 2], 1u << lane % 2 * 16) >> lane % 2 * 16 & 0xffffu);
    }
    __syncthreads();  // every number of names is there
    int sum = 0;
    for (int turn = 0; turn < turns; ++turn) sum += total_of(begins[thread * turns + turn]);
    int next = sum_before(sum, of_warps);
    for (int turn = 0; turn < turns; ++turn) next = to_begins(begins[thread * turns + turn], next);
    if (thread == kRowThreads - 1) to_begins(begins[turns * kRowThreads], next);
    __syncthreads();  // every first place is there
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int i = kRowThreads * round + thread;
        if (i >= named.count) continue;
        const int tile = named.ids[i] / p.tile_columns;
        const int column = named.ids[i] - tile * p.tile_columns;
        names[begins[tile][column % 8 / 2] + rank[round]] = TileName::of(column, named.places[i]).bits;
    }
    __syncthreads();  // every name is there
    for (int tile = thread; tile < tiles; tile += kRowThreads) {
        const OfQuad of = begins[tile];
        const int begin[5] = {of[0], of[1], of[2], of[3], begins[tile + 1][0]};
        p.named.records[static_cast<long long>(row) * tiles + tile] = TileRecord::of(names, begin).bits;
    }
    for (int i = thread; i < named.count; i += kRowThreads) p.named.names[static_cast<long long>(row) * p.teacher.top_k + i] = names[i];
}

}  // namespace flce

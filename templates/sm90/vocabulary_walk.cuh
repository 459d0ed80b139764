// Tiles of logits that a cluster of cuda_sm90a's forward computes. Plain C++: the host tests it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// A stride round a circle of `count` units that visits each of them, and neighbours at times far apart: near the golden ratio of `count`,
/// prime to it.
FLCE_HOST_DEVICE constexpr int spreading_stride(int count) {
    int stride = count * 618 / 1000 > 1 ? count * 618 / 1000 : 1;
    while (true) {
        int a = count;
        int b = stride;
        while (b != 0) {
            const int rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) return stride;
        ++stride;
    }
}

/// Tiles step round a circle of units, tile t to unit t · stride; an arc has the tiles that step into it, in order. Those tiles are found
/// without a search, which would take as long as the weight's way through the ring where few clusters share rows: a step sequence that
/// leaves an arc comes back to it after one of three numbers of steps (the three-gap theorem).
struct ArcWalk {
    enum : int { kNone = 1 << 30 };

    int arc;       ///< units
    int place;     ///< in the arc, of the tile at hand
    int up;        ///< places: the shortest way forward that keeps inside
    int up_tiles;  ///< and in how many tiles
    int down;      ///< places: the shortest way back that keeps inside
    int down_tiles;
    int tile;  ///< kNone: the arc has no unit

    ArcWalk() = default;
    /// `in_order`: tile t belongs to unit t, and the arc has a unit at most.
    FLCE_HOST_DEVICE ArcWalk(int first, int arc_, int circle, int stride, bool in_order)
        : arc(arc_), place(0), up(arc_), up_tiles(circle), down(arc_), down_tiles(circle), tile(0) {
        if (arc == 0) {
            tile = kNone;
            return;
        }
        if (in_order) {
            up = 0;
            tile = first;
            return;
        }
        // From unit 0, where tile 0 is, into the arc.
        place = first == 0 ? 0 : circle - first;
        for (; place >= arc && tile < circle; ++tile) place = stepped(place, stride, circle);
        // Back into it from any place: `up` and `down` are never both possible, and where neither is, one after the other is.
        int gone = 0;
        for (int tiles = 1; tiles <= circle && (up == arc || down == arc); ++tiles) {
            gone = stepped(gone, stride, circle);
            if (up == arc && gone < arc) {
                up = gone;
                up_tiles = tiles;
            }
            if (down == arc && circle - gone < arc) {
                down = circle - gone;
                down_tiles = tiles;
            }
            if (gone == 0) break;
        }
    }
    FLCE_HOST_DEVICE void go_on() {
        const bool goes_up = place + up < arc;
        const bool goes_down = place >= down;
        tile += goes_up ? up_tiles : goes_down ? down_tiles : up_tiles + down_tiles;
        place += goes_up ? up : goes_down ? -down : up - down;
    }
    /// Most tiles from one in the arc to the next.
    [[nodiscard]] FLCE_HOST_DEVICE int longest_way() const { return arc == 1 ? up_tiles : up_tiles + down_tiles; }

private:
    static FLCE_HOST_DEVICE int stepped(int unit, int stride, int circle) {
        unit += stride;
        return unit >= circle ? unit - circle : unit;
    }
};

/// Clusters of rows × the vocabulary are divided evenly: no cluster has more than a tile more than another. On an axis where every cluster
/// of rows has `clusters` units, a cluster owns `row_clusters` units in a row, which belong to one cluster of rows or to two. A tile of the
/// vocabulary belongs to unit tile · stride mod clusters; so clusters that share rows work at the same part of the vocabulary at the same
/// time, and the weight is read from memory once. Needs row_clusters ≤ clusters, and a stride that is prime to `clusters`.
///
///     tiles      0 ──────────────────────── whole ───────── tiles
///                rounds of `clusters` tiles       the rest
///     circle     `clusters` units                 as many units as the rest has tiles
///
/// Units have as many tiles as there are whole rounds. Arcs of the units that the rest's tiles would step to have one more or one less than
/// they should; so the rest has a circle of its own, of which a cluster has its part to a unit, in the same clusters of rows.
struct VocabularyWalk {
    enum : int { kMostStretches = 4 };

    int clusters;
    int row_clusters;
    int stride;
    int rest_stride;
    int tiles;
    int whole;  ///< tiles of whole rounds
    int share;
    int row_cluster;  ///< row cluster of part 0
    ArcWalk at;
    int second;      ///< places of the arc at hand, the first that belongs to the next cluster of rows
    int first_part;  ///< part of the places before `second`
    bool in_rest;
    int tile;
    int part;  ///< -1 before the first tile

    VocabularyWalk() = default;
    FLCE_HOST_DEVICE VocabularyWalk(int share_, int clusters_, int row_clusters_, int stride_, int rest_stride_, int tiles_)
        : clusters(clusters_),
          row_clusters(row_clusters_),
          stride(stride_),
          rest_stride(rest_stride_),
          tiles(tiles_),
          whole(tiles_ / clusters_ * clusters_) {
        begin(share_);
    }
    /// A walk of another share.
    FLCE_HOST_DEVICE void begin(int share_) {
        share = share_;
        row_cluster = share_ * row_clusters / clusters;
        in_rest = false;
        part = -1;
    }
    /// A stride for the rest's circle.
    static FLCE_HOST_DEVICE int stride_of_rest(int clusters, int tiles) {
        return tiles % clusters > 1 ? spreading_stride(tiles % clusters) : 1;
    }
    /// On to the next tile; false past the last of `limit`, of which there are no more than `tiles`.
    FLCE_HOST_DEVICE bool next(int limit) {
        if (part >= 0) at.go_on();
        const bool is_rest = whole == 0 || (part >= 0 && at.tile >= whole);
        if (part < 0 || (is_rest && !in_rest)) enter(is_rest);
        tile = at.tile + (in_rest ? whole : 0);
        part = first_part + (at.place < second ? 0 : 1);
        return tile < limit;
    }
    /// Stretches into which the vocabulary may be divided, at most kMostStretches, so that each has a tile of every cluster.
    [[nodiscard]] FLCE_HOST_DEVICE int stretches() const {
        if (whole == 0) return 1;
        const int most = whole / ArcWalk(0, row_clusters, clusters, stride, row_clusters == 1).longest_way();
        return most < 1 ? 1 : most < kMostStretches ? most : kMostStretches;
    }
    /// The first tile of a stretch, of `count`; the last one has the rest as well.
    [[nodiscard]] FLCE_HOST_DEVICE int begin_of(int stretch, int count) const { return stretch == count ? tiles : stretch * whole / count; }
    [[nodiscard]] FLCE_HOST_DEVICE int row_cluster_of(int which) const { return row_cluster + which; }
    [[nodiscard]] FLCE_HOST_DEVICE bool has_second() const {
        return share * row_clusters - row_cluster * clusters + row_clusters > clusters;
    }

private:
    /// Onto a circle: the whole rounds', or the rest's.
    FLCE_HOST_DEVICE void enter(bool rest) {
        const int circle = rest ? tiles - whole : clusters;
        const int begin = rest ? (share * row_clusters * circle + clusters - 1) / clusters : share * row_clusters;
        const int end = rest ? ((share + 1) * row_clusters * circle + clusters - 1) / clusters : begin + row_clusters;
        const int rows = circle > 0 ? begin / circle : row_cluster;
        const int first = begin - rows * circle;
        in_rest = rest;
        first_part = rows - row_cluster;
        second = circle - first;
        at = ArcWalk(first, end - begin, circle, rest ? rest_stride : stride, row_clusters == 1);
    }
};

}  // namespace flce

// Which tiles of logits a cluster of cuda_sm90a's forward computes. Plain C++: the host tests it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// Clusters of rows × the vocabulary are divided evenly: on an axis where every cluster of rows has `clusters` units, a cluster owns
/// `row_clusters` units in a row, which belong to one cluster of rows or to two. A tile of the vocabulary belongs to unit tile · stride
/// mod clusters; so clusters that share rows work at the same part of the vocabulary at the same time, and the weight is read from memory
/// once. Needs row_clusters ≤ clusters, and a stride that gives consecutive tiles different units.
///
/// Tiles are found without a search, which would take as long as the weight's way through the ring where few clusters share rows. Tiles
/// step round the circle of units, and a step sequence that leaves an arc comes back to it after one of three numbers of steps (the
/// three-gap theorem).
struct VocabularyWalk {
    enum : int { kMostStretches = 4 };

    int row_cluster;  // of part 0
    int arc;          // units
    int second;       // of them, the first that belongs to part 1
    int place;        // in the arc, of the tile at hand
    int up;           // places: the shortest way forward that keeps inside
    int up_tiles;     // and in how many tiles
    int down;         // the same back
    int down_tiles;
    int tile;
    int part = -1;  // before the first tile

    VocabularyWalk() = default;
    FLCE_HOST_DEVICE VocabularyWalk(int cluster, int clusters, int row_clusters, int stride) : arc(row_clusters) {
        const int begin = cluster * row_clusters;
        row_cluster = begin / clusters;
        const int first = begin - row_cluster * clusters;
        second = clusters - first;
        up = down = arc;
        up_tiles = down_tiles = clusters;
        if (row_clusters == 1) {  // dealt out in order
            place = up = 0;
            tile = first;
            return;
        }
        // From unit 0, where tile 0 is, into the arc.
        tile = 0;
        place = first == 0 ? 0 : second;
        for (; place >= arc && tile < clusters; ++tile) place = stepped(place, stride, clusters);
        // Back into it from any place: `up` and `down` are never both possible, and where neither is, one after the other is.
        int gone = 0;
        for (int tiles = 1; tiles <= clusters && (up == arc || down == arc); ++tiles) {
            gone = stepped(gone, stride, clusters);
            if (up == arc && gone < arc) {
                up = gone;
                up_tiles = tiles;
            }
            if (down == arc && clusters - gone < arc) {
                down = clusters - gone;
                down_tiles = tiles;
            }
            if (gone == 0) break;
        }
    }
    /// On to the next tile; false past the last of `tiles`.
    FLCE_HOST_DEVICE bool next(int tiles) {
        if (part >= 0) {
            const bool goes_up = place + up < arc;
            const bool goes_down = place >= down;
            tile += goes_up ? up_tiles : goes_down ? down_tiles : up_tiles + down_tiles;
            place += goes_up ? up : goes_down ? -down : up - down;
        }
        part = place < second ? 0 : 1;
        return tile < tiles;
    }
    /// Stretches into which the vocabulary may be divided, at most kMostStretches, so that each has a tile of every cluster.
    FLCE_HOST_DEVICE int stretches(int clusters, int tiles) const {
        const int longest_way = arc == 1 ? clusters : up_tiles + down_tiles;
        const int most = tiles / longest_way;
        return most < 1 ? 1 : most < kMostStretches ? most : kMostStretches;
    }
    FLCE_HOST_DEVICE int row_cluster_of(int which) const { return row_cluster + which; }
    FLCE_HOST_DEVICE bool has_second() const { return second < arc; }

private:
    static FLCE_HOST_DEVICE int stepped(int unit, int stride, int clusters) {
        unit += stride;
        return unit >= clusters ? unit - clusters : unit;
    }
};

}  // namespace flce

// Which tiles of logits a cluster of cuda_sm90a's forward computes. Plain C++: the host tests it.
#pragma once

#if !defined(FLCE_HOST_DEVICE)
#if defined(__CUDACC__)
#define FLCE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLCE_HOST_DEVICE inline
#endif
#endif

namespace flce {

/// Clusters of rows × the vocabulary are divided evenly: on an axis where every cluster of rows has
/// `clusters` units, a cluster owns `row_clusters` units in a row, which belong to one cluster of rows or to two. A tile of the vocabulary belongs
/// to unit tile · stride mod clusters; so whoever shares rows works at the same part of the vocabulary at the same time, and the weight is read from
/// memory once. Needs row_clusters ≤ clusters, and a stride that gives consecutive tiles different units.
///
/// Where there is one cluster of rows, tiles are dealt out in order, and the next one is found without a search: with few tokens a search would take as
/// long as the weight's way through the ring.
struct VocabularyWalk {
    int clusters;
    int stride;
    int row_cluster;    // of part 0
    int first, end;     // units of part 0
    int end_of_second;  // units [0, …) of part 1
    int step;           // tiles from one that is looked at to the next
    int tile;
    int part = 1;
    int unit;

    FLCE_HOST_DEVICE VocabularyWalk(int cluster, int clusters_, int row_clusters, int stride_) : clusters(clusters_), stride(stride_) {
        const int begin = cluster * row_clusters;
        row_cluster = begin / clusters;
        first = begin - row_cluster * clusters;
        end = first + row_clusters < clusters ? first + row_clusters : clusters;
        end_of_second = first + row_clusters - clusters;
        const bool one = row_clusters == 1;
        step = one ? clusters : 1;
        tile = one ? first - clusters : -1;
        if (one) stride = 0;
        unit = one ? first : clusters - stride;
    }
    /// On to the next tile; false past the last of `tiles`.
    FLCE_HOST_DEVICE bool next(int tiles) {
        if (part == 0) {
            part = 1;
            if (unit < end_of_second) return true;
        }
        do {
            tile += step;
            if (tile >= tiles) return false;
            unit += stride;
            if (unit >= clusters) unit -= clusters;
            part = unit >= first && unit < end ? 0 : 1;
        } while (part == 1 && unit >= end_of_second);
        return true;
    }
    FLCE_HOST_DEVICE int row_cluster_of(int which) const { return row_cluster + which; }
    FLCE_HOST_DEVICE bool has_second() const { return end_of_second > 0; }
};

}  // namespace flce

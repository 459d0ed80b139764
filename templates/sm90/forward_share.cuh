// How the clusters of a launch of cuda_sm90a's forward share its work. Plain C++: the host plans launches and partial sums by it.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// Rows × the vocabulary are cut into tiles of clusters of rows, which are dealt out by VocabularyWalk. Where there are fewer tiles than
/// clusters, each tile has a cluster of its own. Every share of a cluster of rows has partial sums of its own.
///
/// Batch-invariant kernels deal out segments, some tiles of the vocabulary each, in the place of tiles. A segment has partial sums of its
/// own, so that it does not matter to a row which clusters work on it.
struct ForwardShare {
    int rows;
    int row_clusters;
    int clusters;  ///< clusters that have work
    int splits;    ///< partial sums of a row

    /// Partial sums of a row that a cluster writes: one for each consumer that has the row.
    static FLCE_HOST_DEVICE constexpr int writers_of(bool by_turns) { return by_turns ? 2 : 1; }

    /// Segments that `tiles` tiles make, each of `segment_tiles` but for the last.
    static FLCE_HOST_DEVICE constexpr int segments_of(int tiles, int segment_tiles) { return (tiles + segment_tiles - 1) / segment_tiles; }

    /// `tiles` of the vocabulary, or segments, for at most `most_clusters` clusters.
    FLCE_HOST_DEVICE ForwardShare(int rows_, int tiles, int cluster_rows, int writers, int most_clusters, bool segments)
        : rows(rows_), row_clusters(at_least_one(up_div(rows_, cluster_rows))) {
        const bool few = static_cast<long long>(row_clusters) * tiles < most_clusters;
        clusters = few ? row_clusters * tiles : most_clusters;
        splits = (few || segments ? tiles : up_div(clusters, row_clusters) + 1) * writers;
    }

    /// Lists of a row's classes, of all clusters that share the row.
    FLCE_HOST_DEVICE int lists(int writers) const { return (up_div(clusters, row_clusters) + 1) * writers; }

private:
    static FLCE_HOST_DEVICE int at_least_one(int count) { return count > 1 ? count : 1; }
    static FLCE_HOST_DEVICE constexpr int up_div(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace flce

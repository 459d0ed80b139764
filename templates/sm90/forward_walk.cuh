// Walk of cuda_sm90a's forward: who takes which tile. The first thread of a block brings tiles, and finds out here which word comes next, a
// tile of the cluster's own share or of another's, or the end of a stretch.
#pragma once

#include "flce/sm90/forward_launch.cuh"
#include "flce/sm90/share_jobs.cuh"
#include "flce/sm90/vocabulary_walk.cuh"

namespace flce {

/// State of the first thread in its job. It lies in shared memory: the producer's registers are few.
struct ForwardWalkState {
    ShareJobs shared;
    ShareJob job;  ///< kNone before the first one
    VocabularyWalk walk;
    int consumer;  ///< consumer that has the tile: always the same one, whichever cluster has the job
    int end;       ///< tile behind the stretch
    /// First rows of the parts, in hidden or in the compact rows. Looked up once for a job: a look takes as long as the ring lasts.
    int begin[2];
    bool neighbours[2];  ///< whether they are
    bool any;            ///< the walk is at a tile, or a segment
    int segment_tile;    ///< next tile of the segment
};

/// `Launch`: ForwardLaunch.
template <class Launch>
struct ForwardWalk {
    using State = ForwardWalkState;

    const Launch& launch;
    TileNumbers<typename Launch::TileT>& jobs;
    State& d;

    __device__ __forceinline__ void start() const {
        // Rows that are gone through again are hardly ever any, and not worth sharing.
        const bool alone = launch.p.shares == nullptr || launch.goes_again();
        const ForwardShare& share = launch.share;
        d.walk = VocabularyWalk(0, share.clusters, share.row_clusters, launch.p.stride,
                                VocabularyWalk::stride_of_rest(share.clusters, dealt()), dealt());
        const int stretches = alone ? 1 : d.walk.stretches();
        d.shared = {stretches == 1 ? nullptr : launch.p.shares, share.clusters, stretches};
        d.job.number = ShareJob::kNone;
        d.any = false;
        d.end = tiles();
    }

    /// The next tile, the end of the stretch that has no tile any more, or that nothing is left.
    __device__ __forceinline__ TileWord go_on() const {
        if constexpr (Launch::kSegment > 0) return go_on_in_segments();
        int first_tile = 0;
        if (!d.any || d.walk.tile >= d.end) {
            if (d.end != tiles() && !d.job.is_others()) {
                d.job.advance();
                d.end = begin_of(d.job.stretch() + 1);
                return tile_or_end();
            }
            if (!start_job()) return TileWord::stop();
            first_tile = begin_of(d.job.stretch());
        }
        do {
            d.consumer ^= 1;
            d.any = next(d.walk);
        } while (d.any && d.walk.tile < first_tile);
        return tile_or_end();
    }

private:
    __device__ __forceinline__ int tiles() const { return Launch::tiles(launch.p); }
    __device__ __forceinline__ int dealt() const { return Launch::dealt(launch.p); }
    __device__ __forceinline__ int begin_of(int stretch) const { return d.walk.begin_of(stretch, d.shared.stretches); }

    /// Does go_on where a segment's sums are its own: a segment ends behind its last tile, and stretches only say which cluster works on
    /// which segments.
    __device__ __forceinline__ TileWord go_on_in_segments() const {
        if (!d.any || d.segment_tile == min((d.walk.tile + 1) * Launch::kSegment, tiles())) {
            if (d.any) {
                d.any = false;
                return TileWord::segment_end(d.walk.tile, d.walk.row_cluster_of(d.walk.part), d.walk.part);
            }
            while (!next_segment()) {
                if (!start_job()) return TileWord::stop();
                if (!d.job.is_others()) d.end = dealt();
            }
            d.any = true;
            d.segment_tile = d.walk.tile * Launch::kSegment;
        }
        const int tile = d.segment_tile++;
        const int part = d.walk.part;
        return TileWord::tile(tile, d.walk.row_cluster_of(part), part, tile % 2, d.neighbours[part]);
    }
    __device__ __forceinline__ bool next_segment() const {
        if (d.job.number == ShareJob::kNone) return false;
        const int first = begin_of(d.job.stretch());
        while (d.walk.next(d.end)) {
            if (d.walk.tile >= first) return true;
        }
        return false;
    }
    __device__ __forceinline__ bool start_job() const {
        const unsigned rank = launch.rank;
        unsigned number = 0;
        if (rank == 0) number = d.job.number == ShareJob::kNone ? d.shared.first(Launch::cluster()) : d.shared.next();
        jobs.hand_out(number, rank);
        d.job.number = jobs.take();
        if (d.job.number == ShareJob::kNone) {
            if (rank == 0) d.shared.leave();
            return false;
        }
        d.walk.begin(d.job.share());
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
            const auto rows = launch.tile_rows(d.walk.row_cluster_of(part));
            d.neighbours[part] = rows.neighbours();
            d.begin[part] = rows.begin();
        }
        d.consumer = 1;
        d.end = begin_of(d.job.stretch() + 1);
        return true;
    }
    __device__ __forceinline__ TileWord tile_or_end() const {
        const VocabularyWalk& walk = d.walk;
        if (!d.any || walk.tile >= d.end) return TileWord::end(d.job, walk.row_cluster_of(0), walk.has_second(), d.end == tiles());
        return TileWord::tile(walk.tile, walk.row_cluster_of(walk.part), walk.part, d.consumer, d.neighbours[walk.part]);
    }

    /// Goes on to the share's next tile.
    __device__ __forceinline__ bool next(VocabularyWalk& walk) const {
        if constexpr (Launch::Problem::retain) {
            if (launch.goes_again()) {
                while (walk.next(ceil_div(launch.p.retained_columns, Launch::TileT::kBlockN))) {
                    if (launch.any_stale_of(walk.row_cluster_of(walk.part))) return true;
                }
                return false;
            }
        }
        return walk.next(tiles());
    }
};

}  // namespace flce

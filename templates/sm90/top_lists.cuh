// The lists of classes to which a tile of forward's logits goes. Every consumer of a share has lists of its own for the share's rows.
#pragma once

#include "flce/common/top_lists.cuh"
#include "flce/sm90/logit_form.cuh"

namespace flce {

/// `Form`: LogitForm, whose accumulators are logits.
template <class Launch, class Form>
struct TopListsSm90 {
    using Problem = typename Launch::Problem;
    using TileT = typename Launch::TileT;
    using Accumulators = typename Form::Accumulators;
    const Launch& launch;
    const PlaceSm90<TileT>& place;

    __device__ __forceinline__ void add(const Accumulators& c, const LogitTile& tile, int row_cluster) const {
        const ForwardShare& share = launch.share;
        const int first_share = row_cluster * share.clusters / share.row_clusters;
        const int writer = TileT::kTurns ? place.consumer : 0;
        const long long list = (Launch::cluster() - first_share) * Launch::kWriters + writer;
        const long long ld = partial_rows_of(share.rows);
#pragma unroll
        for (int i = 0; i < Form::kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = tile.first_row + place.row(i, h);
                add_row(c[i], h, tile, list * ld + min(row, share.rows - 1), row < share.rows);
            }
        }
    }

private:
    /// Adds a row's logits; four lanes share a row, and a warp has eight at a time.
    __device__ __forceinline__ void add_row(const float (&c)[Form::kColumnPieces][4], int h, const LogitTile& tile, long long number,
                                            bool is_row) const {
        TopList<Problem, 4> row;
        row.load(launch.p.top_keys, launch.p.top_states, number, false);
        const int end = forward_columns<Problem>(launch.p);
        row.add(LaneLogits<MmaColumns, Form::kColumnPieces>{c, h, tile.first_column + place.column(0, 0), end}, is_row);
        row.store(launch.p.top_states, number, is_row);
    }
};

}  // namespace flce

// The lists of classes to which a tile of forward's logits goes. Every consumer of a share has lists of its own for the share's rows.
#pragma once

#include "flce/common/top_lists.cuh"
#include "flce/sm90/logit_form.cuh"

namespace flce {

/// `Form`: LogitForm, whose accumulators are logits. A quad of lanes shares a row's list, and a warp has eight at a time. Each lane has the
/// states of its rows' lists in shared memory, of all parts of the share.
///
/// A branch round all rows, of which one way stores the accumulators, makes ptxas serialize the multiplications: so each row branches.
template <class Launch, class Form>
struct TopListsSm90 {
    using Problem = typename Launch::Problem;
    using TileT = typename Launch::TileT;
    using Accumulators = typename Form::Accumulators;
    using List = TopList<Problem, 4>;
    enum : int { kThreads = 128 * TileT::kConsumers };
    enum : int { kRows = 2 * Form::kPieces };  ///< rows of a part
    enum : int { kBytes = Problem::top_k > 0 ? Launch::kParts* kRows * 2 * kThreads * 4 : 0 };
    enum : unsigned { kUnknown = ~0u };  ///< place in lists that nothing has come to in this launch

    const Launch& launch;
    const PlaceSm90<TileT>& place;
    float* const stash;  ///< this thread's first element

    /// Lists of a row in this launch, or where it has none, in launches behind it.
    __device__ __forceinline__ int of_row() const {
        ForwardShare share = launch.share;
        if (launch.p.top_dense != nullptr) share.clusters = launch.p.clusters;
        return share.lists(Launch::kWriters);
    }
    __device__ __forceinline__ void forget() const {
#pragma unroll
        for (int row = 0; row < Launch::kParts * kRows; ++row) save(0, row, 0.f, kUnknown);
    }
    /// Begins a part's lists where they have not begun. Before a tile's accumulators are there.
    __device__ __forceinline__ void begin(int part, int row_cluster) const {
        if (launch.p.top_dense != nullptr || saved(part, 0).place != kUnknown) return;
#pragma unroll 1
        for (int of_part = 0; of_part < kRows; ++of_part) {
            const int row = row_of(row_cluster, of_part);
            float least = infinity();  // nothing is above, in a row that does not exist
            if (row < launch.share.rows) least = launch.p.top_bounds != nullptr ? launch.p.top_bounds[row].least : List::unknown();
            save(part, of_part, least, List::place_of(list_of(row_cluster, min(row, launch.share.rows - 1))));
        }
    }
    __device__ __forceinline__ void add(const Accumulators& c, const LogitTile& tile) const {
        const bool dense = launch.p.top_dense != nullptr;
        const int end = vocab_columns<Problem>(launch.p);
#pragma unroll
        for (int i = 0; i < Form::kPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (dense) {
                    store_row(c[i], i, h, tile);
                    continue;
                }
                List list = saved(tile.part, 2 * i + h);
                list.add(LaneLogits<MmaColumns, Form::kColumnPieces>{c[i], h, tile.first_column + place.column(0, 0), end});
                save(tile.part, 2 * i + h, list.least, list.place);
            }
        }
    }
    /// Writes the states of a part's lists, for top_classes.
    __device__ __forceinline__ void tell(int part, int row_cluster) const {
#pragma unroll 1
        for (int of_part = 0; of_part < kRows; ++of_part) {
            const List list = saved(part, of_part);
            const int row = row_of(row_cluster, of_part);
            if (place.lane % 4 == 0 && row < launch.share.rows && list.place != kUnknown) {
                launch.p.top_states[list_of(row_cluster, row)] = list.state();
            }
        }
    }

private:
    __device__ __forceinline__ float* at(int part, int row) const { return stash + (part * kRows + row) * 2 * kThreads; }
    __device__ __forceinline__ List saved(int part, int row) const {
        const float* const from = at(part, row);
        return {static_cast<TopEntry*>(launch.p.top_keys), from[0], __float_as_uint(from[kThreads])};
    }
    __device__ __forceinline__ void save(int part, int row, float least, unsigned of_next) const {
        float* const to = at(part, row);
        to[0] = least;
        to[kThreads] = __uint_as_float(of_next);
    }
    __device__ __forceinline__ int row_of(int row_cluster, int of_part) const {
        return launch.first_row(row_cluster) + place.row(of_part / 2, of_part % 2);
    }
    __device__ __forceinline__ long long list_of(int row_cluster, int row) const {
        const ForwardShare& share = launch.share;
        const int first_share = row_cluster * share.clusters / share.row_clusters;
        const int writer = TileT::kTurns ? place.consumer : 0;
        const long long list = (Launch::cluster() - first_share) * Launch::kWriters + writer;
        return list * partial_rows_of(share.rows) + row;
    }
    /// Stores all logits of a row, of classes that do not exist too.
    __device__ __forceinline__ void store_row(const float (&c)[Form::kColumnPieces][4], int i, int h, const LogitTile& tile) const {
        const int row = tile.first_row + place.row(i, h);
        float* const to = launch.p.top_dense + static_cast<long long>(row) * kDenseTopColumns + tile.first_column + place.column(0, 0);
        if (row >= launch.share.rows) return;
#pragma unroll
        for (int j = 0; j < Form::kColumnPieces; ++j) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(c[j][2 * h], c[j][2 * h + 1]);
    }
};

}  // namespace flce

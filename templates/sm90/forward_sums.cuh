// Sums that the threads of cuda_sm90a's forward keep of their rows, and partial results that they become.
#pragma once

#include "flce/sm90/forward_launch.cuh"
#include "flce/sm90/share_jobs.cuh"

namespace flce {

/// This thread's sums of its rows, of all parts of its share: registers are few beside the accumulators, so they lie in shared memory.
/// `Form`: how logits are told (logit_form.cuh).
template <class Launch, class Form>
struct ForwardSums {
    using Fields = PartialFields<typename Launch::Problem>;
    using TileT = typename Launch::TileT;
    enum : int { kThreads = 128 * TileT::kConsumers };
    enum : int { kRows = 2 * Form::kPieces };  ///< rows of a part
    static_assert(kRows <= 4, "finish has a row for each of four lanes");
    enum : int { kBytes = Launch::kParts * kRows * Fields::kCount * kThreads * 4 };

    const Launch& launch;
    const PlaceSm90<TileT>& place;
    float* const stash;  ///< this thread's first element

    __device__ __forceinline__ float* at(int part, int row) const { return stash + (part * kRows + row) * Fields::kCount * kThreads; }
    __device__ __forceinline__ RowSums load(int part, int row) const { return Fields::load(at(part, row), kThreads); }
    __device__ __forceinline__ void store(int part, int row, const RowSums& sums) const { Fields::store(at(part, row), kThreads, sums); }
    __device__ __forceinline__ void forget() const {
#pragma unroll
        for (int row = 0; row < Launch::kParts * kRows; ++row) store(0, row, Form::nothing());
    }
    __device__ __forceinline__ void add_weighted(int part, int row, float weighted) const {
        float* const field = at(part, row) + Fields::kWeighted * kThreads;
        float sum = *field + weighted;
        asm volatile("" : "+f"(sum));  // here: put off, it would need a second copy of the accumulators
        *field = sum;
    }

    /// Merges the four lanes that share a row and adds what they have to a partial result: one for each share that has a part of the rows,
    /// or for a segment, whose number is then the job's; by turns one a consumer. Each lane of the four writes a row of its own, and the
    /// code is short: it runs rarely, so that it has to be fetched every time, beside the multiplication that it must not hold up.
    template <class Sink>
    __device__ __forceinline__ void finish(const Form& form, const Sink& sink, const ShareJob& job, int part, int row_cluster) const {
        RowSums mine;
#pragma unroll 1
        for (int row = 0; row < kRows; ++row) {
            const RowSums whole = form.whole(load(part, row), sink, launch.first_row(row_cluster) + place.row(row / 2, row % 2));
            const RowSums all = merge_quad(whole);
            if (place.lane % 4 == row) mine = all;
        }
        if (place.lane % 4 < kRows) write_partial(job, row_cluster, mine);
    }

private:
    static __device__ __forceinline__ RowSums merge_quad(RowSums mine) {
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) mine = merge_with_lane<typename Launch::Problem>(mine, lanes);
        return mine;
    }

    /// Writes partial sums of the one row, of the quad's four, that this lane has.
    __device__ __forceinline__ void write_partial(const ShareJob& job, int row_cluster, const RowSums& sums) const {
        ForwardShare of = launch.share;
        asm volatile(""
                     : "+r"(of.rows), "+r"(of.row_clusters), "+r"(of.clusters),
                       "+r"(of.splits));  // keeps the compiler from working out derived numbers earlier
        const int of_four = place.lane % 4;
        const int row = launch.first_row(row_cluster) + place.row(of_four / 2, of_four % 2);
        if (row >= of.rows) return;
        const long long ld = partial_rows_of(of.rows);
        if constexpr (Launch::kSegment > 0) {
            const int split = static_cast<int>(job.number) * Launch::kWriters + place.consumer;
            return Fields::store(launch.p.partials + split * Fields::kCount * ld + row, ld, sums);
        }
        const int first_share = row_cluster * of.clusters / of.row_clusters;
        const int last_share = ((row_cluster + 1) * of.clusters - 1) / of.row_clusters;
        const int writer = TileT::kTurns ? place.consumer : 0;
        const int split = (job.share() - first_share) * Launch::kWriters + writer;
        float* const to = launch.p.partials + split * Fields::kCount * ld + row;
        if (job.stretch() > 0) {
            Fields::store(to, ld, merge(Fields::load(to, ld), sums));
            return;
        }
        Fields::store(to, ld, sums);
        if (job.share() != last_share) return;
#pragma unroll 1
        for (int rest = Launch::kWriters; rest < of.splits - split; rest += Launch::kWriters) {
            Fields::store(to + rest * Fields::kCount * ld, ld, sums_of_nothing(-infinity(), -infinity()));
        }
    }
};

}  // namespace flce

// Walks over retained pairs of logits: a mixture's sums, and the student's gradients, of a chunk or in the place of pairs.
#pragma once

#include "flce/common/pairs.cuh"
#include "flce/lt/sums.cuh"

namespace flce {

/// Pairs of a warp's rows in a block. A lane has four neighbours of every 128 columns.
struct PairTile {
    enum : int { kPieces = LtPlace::kColumnPieces / 2 };
    uint4 pairs[LtPlace::kRows][kPieces];
    unsigned references[LtPlace::kRows][kPieces];

    /// `column`: of the vocabulary. Rows that do not exist are −∞, and so are groups past the vocabulary, which nobody has written.
    __device__ __forceinline__ void load_pairs(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) load_row(p, place, rows, column, h);
    }
    __device__ __forceinline__ void load_row(const RetainedPairs& p, const LtPlace& place, int rows, int column, int h) {
        constexpr unsigned kNone = 0xfc00fc00u;
        const PairBlock block(p, column);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const auto* const at = reinterpret_cast<const uint4*>(block.pairs_of(place.row(0, h)) + place.column(2 * i, 0));
            pairs[h][i] = has(p, place, rows, column, h, i) ? __ldcs(at) : make_uint4(kNone, kNone, kNone, kNone);
        }
    }
    __device__ __forceinline__ void load_references(const RetainedPairs& p, const LtPlace& place, int rows, int column) {
#pragma unroll
        for (int h = 0; h < LtPlace::kRows; ++h) load_references(p, place, rows, column, h);
    }
    __device__ __forceinline__ void load_references(const RetainedPairs& p, const LtPlace& place, int rows, int column, int h) {
        const PairBlock block(p, column);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const auto* const at = block.references_of(place.row(0, h)) + place.column(2 * i, 0) / kPairGroup;
            references[h][i] = has(p, place, rows, column, h, i) ? *at : 0u;
        }
    }
    static __device__ __forceinline__ bool has(const RetainedPairs& p, const LtPlace& place, int rows, int column, int h, int i) {
        return place.row(0, h) < rows && column + place.column(2 * i, 0) / kPairGroup * kPairGroup < p.columns;
    }
    __device__ __forceinline__ unsigned pair(int h, int i, int e) const {
        const uint4& four = pairs[h][i];
        return e < 2 ? (e == 0 ? four.x : four.y) : (e == 2 ? four.z : four.w);
    }
};

/// Adds kFours times four pairs of a row to a mixture's sums. `of`: the i-th FourPairs.
template <int kFours, class Problem, class Of>
__device__ __forceinline__ void add_fours(LaneMixture<Problem>& of_row, const Of& of) {
    PairMixture all;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
        const FourPairs four = of(i);
        const PairLogs logs(four.references, of_row.lse, of_row.teacher_lse);
#pragma unroll
        for (int e = 0; e < 4; ++e) all.add(logs.of(four.pair(e)), of_row.beta);
    }
    const MixtureTerm term = all.term(of_row.lse, of_row.teacher_lse, of_row.beta);
    of_row.all.student += term.student;
    of_row.all.divergence += term.divergence;
}

/// Gradients of a launch's rows in the place of their pairs, all of which are retained; a block has a row. The gradients of a class lie at
/// or before its pair: warps have tiles of the row side by side, and write when all of them have read.
template <class Problem, class Teacher, class TileT>
struct PairGradients {
    using Params = TemperedOf<Problem, PairRowsParams>;
    enum : int { kSmemBytes = 0 };
    enum : int { kThreads = kLtThreads };
    using Turn = PairTurn<Problem::stores_derivative ? 2 : 4>;  ///< columns, as many as registers have room for
    enum : int { kTurn = kThreads / 32 * Turn::kColumns };

    const Params& p;

    __device__ __forceinline__ explicit PairGradients(const Params& params) : p(params) {}

    __device__ __forceinline__ void run() const {
        wait_for_product();
        const int number = static_cast<int>(blockIdx.x);
        PairRow<Problem> row(p, number);
        if (row.counts) row.set(p.lse[number], p.teacher_lse[number], p.student_divergence[number]);
        const LogitDerivative<Problem> derivative(p.transform, row.temperature);
        const int columns = ceil_div(p.retained.columns, +kPairColumns) * kPairColumns;
        const int lane = LtPlace::lane();
        const int own = LtPlace::warp() * Turn::kColumns;
        const int written = written_columns(p.retained);
        Turn next;
        next.load(row.pairs, own, lane, written);
        unsigned reference = lane_reference(row.references, own / kPairGroup, lane, written);
#pragma unroll 1
        for (int turn = 0; turn < columns; turn += kTurn) {
            uint2 gradients[Turn::kCount];
#pragma unroll
            for (int i = 0; i < Turn::kCount; ++i) {
                gradients[i] = row.gradients_of(next.four(i, reference, 0, lane), derivative, p.beta);
            }
            next.load(row.pairs, turn + kTurn + own, lane, written);
            reference = lane_reference(row.references, (turn + kTurn + own) / kPairGroup, lane, written);
            __syncthreads();  // all warps have read this turn's pairs
            if (turn + own >= columns) continue;
#pragma unroll
            for (int i = 0; i < Turn::kCount; ++i) row.store(turn + own + i * 128 + lane * 4, gradients[i]);
        }
    }
};
template <class Problem, class Teacher, class TileT>
__device__ __forceinline__ void divergence_gradients(const typename PairGradients<Problem, Teacher, TileT>::Params& p) {
    PairGradients<Problem, Teacher, TileT>(p).run();
}

}  // namespace flce

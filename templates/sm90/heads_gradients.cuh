// Gradients of a divergence in the place of its pairs, of rows whose strips are all done, while the tensor cores are at rows behind them.
// The producer's three other warps make them: they have nothing else to do, and so have memory and the ALU.
#pragma once

#include "flce/common/pairs.cuh"
#include "flce/sm90/params.cuh"
#include "flce/sm90/ptx.cuh"

namespace flce {

template <class Problem, class TileT>
struct HeadsGradients {
    using Params = TemperedOf<Problem, HeadsSm90Params>;
    using Turn = PairTurn<2>;
    enum : int { kAhead = 2048 };                    ///< columns that L2 is asked for before they are read
    enum : int { kOfReferences = 32 * kPairGroup };  ///< columns of a warp's references

    const Params& p;

    __device__ __forceinline__ explicit HeadsGradients(const Params& params) : p(params) {}

    /// A consumer warp has written what it has of a strip, for the rows of a tile from `row` on. For a whole warp.
    __device__ __forceinline__ void end_strip(int row, int lane) const {
        if (row >= p.gradient_rows) return;
        __syncwarp();  // all of the warp have written
        if (lane == 0) ptx::red_release_gpu_add(p.done + row / TileT::kBlockM, 1u);
    }

    /// Gradients of rows, each by a warp. `warp`: number among those of the block.
    __device__ __forceinline__ void leave(int warp) const {
        for (int row = static_cast<int>(blockIdx.x) * kHeadsWarpsBeside + warp; row < p.gradient_rows; row += p.gradient_warps) {
            wait_for(row);
            leave_row(row);
        }
    }

private:
    /// Until all strips of the row are done.
    __device__ __forceinline__ void wait_for(int row) const {
        if (threadIdx.x % 32 == 0) {
            const unsigned warps = static_cast<unsigned>(p.jobs.strips * TileT::kConsumers * 4);
            while (ptx::ld_acquire_gpu(p.done + row / TileT::kBlockM) < warps) ptx::nanosleep(2000);
        }
        __syncwarp();
    }
    __device__ __forceinline__ void leave_row(int number) const {
        PairRow<Problem> row(p, number);
        if (row.counts) {
            const DivergenceSums sums = merged_divergence<1>(p.partials + number, p.jobs.strips * TileT::kConsumers,
                                                             kDivergenceFields * p.partial_rows, p.partial_rows);
            const DivergenceRow found = divergence_row(sums, Problem::divergence_form == kReverse);
            row.set(found.lse, found.teacher_lse, found.kl);
        }
        unsigned reference = 0u;
#pragma unroll 1
        for (int first = 0; first < p.retained.columns; first += Turn::kColumns) {
            // Numbers of a lane are worked out anew in each turn: there are 40 registers.
            int lane = static_cast<int>(threadIdx.x) % 32;
            asm volatile("" : "+r"(lane));
            const int written = written_columns(p.retained);
            if (first % kOfReferences == 0) {
                reference = lane_reference(row.references, first / kPairGroup, lane, written);
                const int ahead = first + kOfReferences;
                if (ahead < written) ptx::prefetch_l2(row.references + ahead / kPairGroup);
            }
            if (row.counts) {
                leave_turn(row, first, lane, reference);
            } else {
#pragma unroll
                for (int i = 0; i < Turn::kCount; ++i) row.store(first + i * 128 + lane * 4, make_uint2(0u, 0u));
            }
        }
    }
    __device__ __forceinline__ void leave_turn(const PairRow<Problem>& row, int first, int lane, unsigned reference) const {
        const int ahead = first + kAhead + lane * (Turn::kColumns / 32);
        if (ahead < p.retained.columns) ptx::prefetch_l2(row.pairs + ahead);
        Turn turn;
        turn.load(row.pairs, first, lane, written_columns(p.retained));
        __syncwarp();  // all lanes have read: gradients lie at or before their pairs
        const LogitDerivative<Problem> derivative(p.transform, row.temperature);
#pragma unroll
        for (int i = 0; i < Turn::kCount; ++i) {
            const FourPairs four = turn.four(i, reference, first % kOfReferences / kPairGroup, lane);
            row.store(first + i * 128 + lane * 4, row.gradients_of(four, derivative, p.beta));
        }
    }
};

}  // namespace flce

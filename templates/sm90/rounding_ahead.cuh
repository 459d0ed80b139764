// Rows of a weight that is rounded, made a pair of chunks ahead of the products that read them, in the launch of these products. The
// producer's three other warps make them: they have nothing else to do, and so have memory and the ALU.
#pragma once

#include "flce/common/dequantize_weight.cuh"
#include "flce/sm90/chunk_phases.cuh"
#include "flce/sm90/params.cuh"
#include "flce/sm90/ptx.cuh"

namespace flce {

template <class Problem>
struct RoundingAhead {
    using Element = typename Problem::Element;
    enum : int { kRows = RoundedChunksSm90Params::kRows };
    enum : int { kHidden = Problem::hidden_size };
    enum : int { kAtATime = 2 };  ///< pieces of 256 columns that are on their way together

    const RoundedChunksSm90Params& p;

    /// First row of a pair's place.
    __device__ __forceinline__ int place_of(int pair) const { return pair % 2 * p.pair_width; }

    /// One thread, which brings what other warps have made.
    __device__ __forceinline__ void wait_for(int pair) const {
        const int rows = min(p.pair_width, all_rows() - pair * p.pair_width);
        while (ptx::ld_acquire_gpu(p.rounding + 1 + pair) < static_cast<unsigned>(rows / kRows)) {
        }
    }

    /// A whole warp: some rows at a time, in order. `wait(pair)`: one lane, until nobody reads the pair's place any more.
    template <class Wait>
    __device__ __forceinline__ void run(const Wait& wait) const {
        int before = 1;
        while (true) {
            const int first = take() * kRows;
            if (first >= all_rows()) return;
            const int pair = first / p.pair_width;
            if (pair > before) {
                if (is_first_lane()) wait(pair - 2);
                __syncwarp();
            }
            before = max(before, pair);
#pragma unroll 1
            for (int row = first; row < first + kRows; ++row) round_row(row, place_of(pair) + row - pair * p.pair_width);
            ptx::fence_proxy_async_all();  // the copy engine reads it
            __syncwarp();                  // all lanes have written
            if (is_first_lane()) ptx::red_release_gpu_add(p.rounding + 1 + pair, 1u);
        }
    }

private:
    static __device__ __forceinline__ bool is_first_lane() { return threadIdx.x % 32 == 0; }
    /// Rows that products read: those behind the last class, up to a whole slice of a sum, are zeros.
    __device__ __forceinline__ int all_rows() const { return ceil_div(p.columns, kSumSlice) * kSumSlice; }
    __device__ __forceinline__ int take() const {
        unsigned group = 0u;
        if (is_first_lane()) group = ptx::atom_relaxed_gpu_add(p.rounding, 1u);
        return static_cast<int>(__shfl_sync(0xffffffffu, group, 0));
    }
    __device__ __forceinline__ void round_row(int row, int place) const {
        Element* const to = static_cast<Element*>(p.rounded) + static_cast<long long>(place) * kHidden;
        const bool exists = row < p.columns;
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x) % 32 * 8; first < kHidden; first += kAtATime * 256) {
            unsigned words[kAtATime][4] = {};
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) {
                const int column = first + i * 256;
                if (exists && column < kHidden) round_eight<Problem>(words[i], p.of, p.first_column + row, column);
            }
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) {
                if (first + i * 256 < kHidden) ptx::st_global_v4(to + first + i * 256, words[i]);
            }
        }
    }
};

}  // namespace flce

// grad_bias beside grad_weight: a sum of dz over tokens is one more column of the product dzᵀ · hidden. Tiles of the first hidden states
// multiply their operand dz with eight columns more, which takes about a fifth of such a tile's time and reads nothing of dz again.
#pragma once

#include "flce/sm90/mainloop.cuh"

namespace flce {

/// Factors of dz, contiguous along the tokens. The first column is each token's factor, the second one the rest that rounding has left out
/// of the factor, so that both columns' sums add up to the bias's. Nobody looks at the other columns.
using BiasOperand = SliceSm90<Major::k, 8>;

/// A consumer's tile of dz · factors beside its main product.
template <class T, Major kMajorA, int kPiecesA>
struct BiasSums {
    float (&sums)[kPiecesA][1][4];
    unsigned operand;      ///< operand of the ring's first stage, in shared memory
    unsigned stage_bytes;  ///< distance from one stage's operand to the next; 0: all stages share an operand

    __device__ __forceinline__ void multiply(int piece, unsigned long long a, int stage, int step) const {
        constexpr int kA = kMajorA == Major::mn ? 1 : 0;
        const unsigned long long b = BiasOperand::descriptor(operand + static_cast<unsigned>(stage) * stage_bytes, 0, step);
        if constexpr (kSame<T, Bf16>) {
            ptx::wgmma_m64n8k16_bf16<kA, 0>(sums[piece], a, b);
        } else {
            ptx::wgmma_m64n8k16_f16<kA, 0>(sums[piece], a, b);
        }
    }
};

/// Brings a slice's factors, of which `map` has both rows: what lies below them is 0.
struct BiasFactors {
    const TensorMap& map;
    unsigned operand;
    bool wanted;

    __device__ __forceinline__ unsigned bytes() const { return wanted ? static_cast<unsigned>(BiasOperand::kBytes) : 0u; }
    __device__ __forceinline__ void bring(int stage, int k, unsigned barrier) const {
        if (wanted) ptx::cp_async_bulk_tensor_2d_load(operand + static_cast<unsigned>(stage * BiasOperand::kBytes), &map, k, 0, barrier);
    }
};

/// The operand of a sum that has no factors. All threads, before the block is in step.
template <class T>
__device__ __forceinline__ void fill_with_ones(unsigned operand) {
    constexpr int kWords = BiasOperand::kBytes / 4;
    constexpr int kWordsOfRow = 128 / 4;
    for (int word = static_cast<int>(threadIdx.x); word < kWords; word += static_cast<int>(blockDim.x)) {
        ptx::st_shared_b32(operand + static_cast<unsigned>(word * 4), word < kWordsOfRow ? Numeric<T>::pack(1.f, 1.f) : 0u);
    }
    ptx::fence_proxy_async();
}

/// Adds the columns' bias, of a few columns at a time: what more of them read would not fit beside the accumulators.
template <class Problem, class Place, int kPieces, int kColumnPieces>
__device__ __forceinline__ void add_bias_in_turn(const DlogitsParams& p, const Place& place, int first_column,
                                                 float (&c)[kPieces][kColumnPieces][4]) {
    const int column = first_column + place.column(0, 0);
    const int left = p.columns - column;
    const auto* const from = static_cast<const typename Problem::Element*>(p.bias) + column;
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float bias = j * 8 + e < left ? to_float(from[j * 8 + e]) : 0.f;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                c[i][j][e] += bias;
                c[i][j][2 + e] += bias;
            }
        }
        if (j % 2 == 1) __syncwarp();
    }
}

/// Writes a tile's sums, or adds them to grad_bias, rounded once. `to`: grad_bias from the tile's first column of the vocabulary on,
/// `columns` of which exist. `taken` of a column is less than the sum.
template <class Problem, class Place, int kPiecesA, class Taken>
__device__ __forceinline__ void write_bias(const Place& place, const float (&sums)[kPiecesA][1][4], typename Problem::GradWeight* to,
                                           int columns, float factor, const Taken& taken) {
    // the thread's place, worked out anew: kept from the tile's beginning it would not fit
    Place here = place;
    asm volatile("" : "+r"(here.lane), "+r"(here.warp));
    float totals[kPiecesA][2];
#pragma unroll
    for (int i = 0; i < kPiecesA; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) totals[i][h] = sums[i][0][2 * h] + sums[i][0][2 * h + 1];
#pragma unroll
    for (int i = 0; i < kPiecesA; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = here.row(i, h);
            if (here.lane % 4 == 0 && column < columns) {
                float sum = (totals[i][h] - taken(column)) * factor;
                if constexpr (Problem::accumulate) sum += to_float(to[column]);
                to[column] = Numeric<typename Problem::GradWeight>::from_float(sum);
            }
            __syncwarp();  // one after the other: beside the accumulators there is no room for values that several threads read
        }
    }
}

}  // namespace flce

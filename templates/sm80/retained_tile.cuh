// A tile of forward where exponentials are retained: its rows are added up, and exponentials take the place of logits and leave for memory.
#pragma once

#include "flce/common/row_exponentials.cuh"
#include "flce/sm80/mainloop.cuh"
#include "flce/sm80/params.cuh"

namespace flce {

/// The four lanes that share the rows of accumulators.
struct Quad {
    static __device__ __forceinline__ float largest(float x) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }
    static __device__ __forceinline__ int least(int x) {
        x = min(x, __shfl_xor_sync(0xffffffffu, x, 1));
        return min(x, __shfl_xor_sync(0xffffffffu, x, 2));
    }
    static __device__ __forceinline__ float sum(float x) {
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        return x + __shfl_xor_sync(0xffffffffu, x, 2);
    }
    /// words[i] of lane j and words[j] of lane i change places.
    static __device__ __forceinline__ void transpose(unsigned (&words)[4], int lane) {
#pragma unroll
        for (int apart = 1; apart <= 2; ++apart) {
            const bool upper = (lane & apart) != 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if ((k & apart) != 0) continue;
                const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? words[k] : words[k + apart], apart);
                (upper ? words[k] : words[k + apart]) = other;
            }
        }
    }
};

/// Whether forward tells logits by falls. It does where exponentials are retained, which are stored times falls' quarter slopes.
template <class Problem>
constexpr bool kForwardHasFalls = Problem::retain && Problem::has_falls;

/// `Params`: RetainForwardParams, or what extends them.
template <class Problem, class TileT, class Params>
struct RetainedTile {
    using Element = typename Problem::Element;
    using MainloopT = Mainloop<LogitOperands<Problem>, TileT>;
    using Accumulators = typename MainloopT::Accumulators;
    using Fields = PartialFields<Problem>;
    enum : int { kRowPieces = MainloopT::kPiecesA };
    enum : int { kColumnPieces = MainloopT::kColumnPieces };
    enum : int { kStates = TileT::kWarpsN * TileT::kBlockM };
    static_assert(kColumnPieces % 4 == 0, "four lanes of a row have eight neighbouring columns each");
    static_assert(kRetainedColumns % TileT::kBlockN == 0, "a tile lies in one block");
    using Logits = LogitRows<Problem, kColumnPieces, Quad>;
    using Falls = FallRows<Problem, kColumnPieces>;

    const Params& p;
    const ThreadPlace<TileT>& place;
    float* states;              ///< ForwardBlock's
    const float* references;    ///< [kBlockM]; zeros where nothing is retained
    const float* temperatures;  ///< [kBlockM], where the Problem has temperatures
    const long long first_row;  ///< first row of the tile, among the launch's
    const int first_column;

    /// Adds the tile to the warp's row states, and stores exponentials where they are retained. c: falls, or logits.
    __device__ __forceinline__ void reduce(Accumulators& c, const float (&weighted)[kRowPieces][2]) const {
        const bool stored = first_column < p.retained_columns;
#pragma unroll
        for (int i = 0; i < kRowPieces; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = place.row(i, h);
                float* const state = states + place.warp_n * TileT::kBlockM + row;
                RowSums sums = Fields::load(state, kStates);
                if (place.lane % 4 != 0) sums = sums_beside(sums.max);
                if constexpr (Problem::has_falls) {
                    add_falls(c[i], h, row, stored, sums);
                } else {
                    add_logits(c[i], h, row, stored, sums);
                }
                if constexpr (Problem::label_smoothing) sums.weighted_sum += weighted[i][h];
                join(sums);
                __syncwarp();  // all four lanes have read the old state
                if (place.lane % 4 == 0) Fields::store(state, kStates, sums);
                if (stored) store_row(c[i], h, row);
            }
        }
    }

    /// A row's state when all tiles are done, relative to its largest logit.
    static __device__ __forceinline__ RowSums whole(const Params& p, RowSums sums, float reference) {
        if constexpr (Problem::has_falls) {
            return Falls::whole(sums, Falls::above(p.transform, reference));
        } else {
            if (p.retained_columns > 0) Logits::to_largest(sums, reference);
            return sums;
        }
    }

private:
    /// Sums that a lane begins with where another lane has the row's.
    static __device__ __forceinline__ RowSums sums_beside(float max) {
        RowSums sums = sums_of_nothing(max, -infinity());
        sums.top1 = FLCE_NO_CLASS;
        return sums;
    }

    __device__ __forceinline__ void add_falls(float (&c)[kColumnPieces][4], int h, int row, bool stored, RowSums& sums) const {
        const FallPowersAbove above = Falls::above(p.transform, references[row]);
        if (stored) {
            Falls::template add<true>(c, h, above, sums);
        } else {
            Falls::template add<false>(c, h, above, sums);
        }
    }
    __device__ __forceinline__ void add_logits(float (&c)[kColumnPieces][4], int h, int row, bool stored, RowSums& sums) const {
        const int first_class = first_column + place.column(0, 0);
        if (p.retained_columns == 0) {
            Logits::reduce_row(c, h, first_class, sums);
        } else if (Problem::stores_derivative && !stored) {
            Logits::exponentials_of_row(c, h, references[row], NothingStored{}, first_class, sums);
        } else {
            const float temperature = Problem::stores_derivative && Problem::temperature ? temperatures[row] : 1.f;
            Logits::exponentials_of_row(c, h, references[row], StoredFactor<Problem>{LogitDerivative<Problem>(p.transform, temperature)},
                                        first_class, sums);
        }
    }

    /// Adds up what the four lanes of a row have.
    static __device__ __forceinline__ void join(RowSums& sums) {
        if constexpr (Problem::has_falls) sums.max = __int_as_float(Quad::least(__float_as_int(sums.max)));
        sums.exp_sum = Quad::sum(sums.exp_sum);
        if constexpr (Problem::entropy) sums.exp_z_sum = Quad::sum(sums.exp_z_sum);
        if constexpr (Problem::label_smoothing) sums.weighted_sum = Quad::sum(sums.weighted_sum);
        if constexpr (Problem::square_sum) sums.exp_sq_sum = Quad::sum(sums.exp_sq_sum);
        if constexpr (Problem::top1) sums.top1 = Quad::least(sums.top1);
    }

    /// Stores a row of the warp's columns. The ring has slices of the next tile, so that lanes exchange words among themselves: each then
    /// has eight neighbouring columns of every 32, and an instruction writes 64 bytes of a row.
    __device__ __forceinline__ void store_row(const float (&c)[kColumnPieces][4], int h, int row) const {
        const int lane = place.lane % 4;
        const int column = first_column % kRetainedColumns + place.warp_n * TileT::kWarpN + lane * 8;
        char* const block = static_cast<char*>(p.exponentials) + first_column / kRetainedColumns * p.block_bytes;
        Element* const to = reinterpret_cast<Element*>(block) + (first_row + row) * kRetainedColumns + column;
        const bool exists = first_row + row < p.rows;
#pragma unroll
        for (int first = 0; first < kColumnPieces; first += 4) {
            unsigned words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = Numeric<Element>::pack(c[first + j][2 * h], c[first + j][2 * h + 1]);
            Quad::transpose(words, lane);
            if (exists) ptx::st_global_v4(to + first * 8, words);
        }
    }
};

}  // namespace flce

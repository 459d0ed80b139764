// Codes of the weight, whose classes are rows, or columns where it is hidden_major: rows of D then, whose classes follow each other.
// A weight of codes already goes by given_codes.cuh.
#pragma once

#include "flce/fp8/given_codes.cuh"

namespace flce {

/// A class's numbers.
template <class Problem>
struct ClassNumbers {
    const Bf16* from;

    __device__ __forceinline__ ClassNumbers(const void* weight, long long column)
        : from(static_cast<const Bf16*>(weight) + column * (Problem::hidden_major ? 1 : +Problem::hidden_size)) {}

    /// Eight from hidden dimension `k` on.
    __device__ __forceinline__ void load(int k, unsigned (&words)[4]) const {
        if constexpr (!Problem::hidden_major) {
            ptx::ld_global_v4(words, from + k);
        } else {
            constexpr long long kPitch = Problem::padded_vocab_size;
            const unsigned short* const at = reinterpret_cast<const unsigned short*>(from) + k * kPitch;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned first = __ldg(at + 2 * i * kPitch);
                const unsigned second = __ldg(at + (2 * i + 1) * kPitch);
                words[i] = first | second << 16;
            }
        }
    }
    /// Bits of the largest |number|, for all lanes of a warp.
    __device__ __forceinline__ unsigned largest() const {
        return largest_by<Problem>([this](int k, unsigned(&words)[4]) { load(k, words); });
    }
};

/// Scales of a hidden_major weight's classes. A lane has four classes, and a block's warps take turns with the hidden dimensions.
template <class Problem>
struct ColumnScales {
    enum : int { kWarps = kRowThreads / 32 };
    enum : int { kPairs = kFp8Square / 2 };
    enum : int { kAtATime = 16 };  ///< rows of D that a lane has on their way
    using OfWarps = unsigned[kWarps][kPairs];

    const Fp8CodesParams& p;
    int lane = static_cast<int>(threadIdx.x) % 32;
    int warp = static_cast<int>(threadIdx.x) / 32;
    int column0 = static_cast<int>(blockIdx.x) * kFp8Square;

    __device__ __forceinline__ void run(OfWarps& largest) const {
        const uint2 most = column0 + lane * 4 < p.rows ? largest_of_four() : make_uint2(0u, 0u);
        largest[warp][lane * 2] = most.x;
        largest[warp][lane * 2 + 1] = most.y;
        __syncthreads();  // all warps' are there
        if (threadIdx.x < kFp8Square) finish(largest);
    }

private:
    /// Bits of bf16. Rows have whole groups of eight, so that all four can be read where the first one exists.
    __device__ __forceinline__ uint2 largest_of_four() const {
        const Bf16* const from = static_cast<const Bf16*>(p.from) + column0 + lane * 4;
        uint2 most = make_uint2(0u, 0u);
        for (int first = warp; first < Problem::hidden_size; first += kWarps * kAtATime) {
            uint2 words[kAtATime];
#pragma unroll
            for (int i = 0; i < kAtATime; ++i) {
                const int k = first + i * kWarps;
                words[i] = make_uint2(0u, 0u);
                if (k < Problem::hidden_size) {
                    words[i] = __ldg(reinterpret_cast<const uint2*>(from + k * +Problem::padded_vocab_size));
                }
            }
#pragma unroll
            for (const uint2& of : words) {
                most.x = __vmaxu2(most.x, of.x & 0x7fff7fffu);
                most.y = __vmaxu2(most.y, of.y & 0x7fff7fffu);
            }
        }
        return most;
    }
    /// Bits of a column's largest |number| that is finite, for one thread.
    __device__ __forceinline__ unsigned largest_finite(int column) const {
        const Bf16* const from = static_cast<const Bf16*>(p.from) + column;
        unsigned largest = 0u;
        for (int k = 0; k < Problem::hidden_size; ++k) {
            const unsigned bits = from[k * +Problem::padded_vocab_size].bits & 0x7fffu;
            if (bits < 0x7f80u) largest = max(largest, bits);
        }
        return largest << 16;
    }
    /// A thread has a class.
    __device__ __forceinline__ void finish(const OfWarps& of_warps) const {
        const int within = static_cast<int>(threadIdx.x);
        const int column = column0 + within;
        const bool exists = column < p.rows;
        unsigned bits = 0u;
        for (int other = 0; other < kWarps; ++other) bits = max(bits, of_warps[other][within / 2] >> within % 2 * 16 & 0xffffu);
        const unsigned largest = exists ? bits << 16 : 0u;
        if (p.largest != nullptr) {
            const unsigned finite = __reduce_max_sync(0xffffffffu, largest < 0x7f800000u ? largest : largest_finite(column));
            if (lane == 0 && finite > *static_cast<volatile unsigned*>(p.largest)) atomicMax(p.largest, finite);
        }
        if (!exists) return;
        const RowCodes<Problem> codes(largest, p.given_scale);
        p.scales[column] = codes.scale;
        p.row_factors[column] = codes.factor;
    }
};

/// Squares of a hidden_major weight, as fp8_turn has those of rows. A warp has rows of D, and a lane the classes at four positions that
/// follow each other: two pairs of neighbours. Codes turned over lie as the weight does; those of classes go through the square. kWhole:
/// all of the square is there, as it is in most blocks, whose loads then have nothing between them.
template <class Problem, bool kBoth, bool kWhole>
struct TurnedColumns {
    enum : int { kWarps = kRowThreads / 32 };
    enum : int { kRows = kFp8Square / kWarps };
    enum : int { kPitch = ceil_div(Problem::hidden_size, 16) * 16 };  ///< bytes of a row of codes
    using Square = unsigned[kFp8Square][kFp8Square / 4 + 1];

    const Fp8TurnParams& p;
    int lane = static_cast<int>(threadIdx.x) % 32;
    int warp = static_cast<int>(threadIdx.x) / 32;
    int class0 = static_cast<int>(blockIdx.x) * kFp8Square;
    int d0 = static_cast<int>(blockIdx.y) * kFp8Square;
    float factor;       // factor of codes turned over
    float of_codes[4];  // factors by which the classes' numbers become codes as they lie, or 0
    unsigned in[kRows][2];

    __device__ __forceinline__ explicit TurnedColumns(const Fp8TurnParams& params) : p(params) {
        factor = p.codes != nullptr ? fp8_factor(*p.largest) : 0.f;
        // There is always something to read; what does not exist does not count.
        const Bf16* const from = static_cast<const Bf16*>(p.from);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int d = d0 + warp * kRows + i;
            const Bf16* const row = from + (has(d) ? d : 0) * +Problem::padded_vocab_size;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                in[i][pair] = __ldg(reinterpret_cast<const unsigned*>(row + (exists(2 * pair) ? class_of(2 * pair) : 0)));
            }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) of_codes[e] = kBoth && exists(e) ? p.row_factors[class_of(e)] : 0.f;
    }
    __device__ __forceinline__ int class_of(int e) const { return class_at(class0 + lane * 4 + e); }
    __device__ __forceinline__ bool exists(int e) const { return kWhole || class_of(e) < p.rows; }
    __device__ __forceinline__ bool has(int d) const { return kWhole || d < Problem::hidden_size; }

    /// Four rows from `first` on of this warp's: stores them as they lie, and gives the classes' codes to the square.
    __device__ __forceinline__ void make(int first, Square& square) const {
        using N = Numeric<Bf16>;
        unsigned w[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int d = d0 + warp * kRows + first + r;
            const bool there = has(d);
            const unsigned words[2] = {in[first + r][0], in[first + r][1]};
            float x[4] = {N::first(words[0]), N::second(words[0]), N::first(words[1]), N::second(words[1])};
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = there && exists(e) ? x[e] : 0.f;
            const int position = class0 + lane * 4;
            if ((!kBoth || p.codes != nullptr) && there && (kWhole || position < p.positions)) {
                *reinterpret_cast<unsigned*>(p.codes + d * p.positions + position) =
                    pack_fp8<false>(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
            }
            if constexpr (kBoth) {
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] = of_codes[e] != 0.f ? x[e] * of_codes[e] : 0.f;
                w[r] = pack_codes<Problem>(1.f, x[0], x[1], x[2], x[3]);
            }
        }
        if constexpr (kBoth) {
            turn_4x4(w);
#pragma unroll
            for (int e = 0; e < 4; ++e) square[e * 32 + lane][(warp * kRows + first) / 4] = w[e];
        }
    }
    /// Codes of the classes as they lie, from a square that is complete.
    __device__ __forceinline__ void store_rows(const Square& square) const {
        const int d = d0 + lane * 4;
        if (d >= kPitch) return;
        for (int row = warp; row < kFp8Square; row += kWarps) {
            const int of = class_at(class0 + row % 32 * 4 + row / 32);
            if (of < p.rows) *reinterpret_cast<unsigned*>(p.row_codes + static_cast<long long>(of) * kPitch + d) = square[row][lane];
        }
    }
};

template <class Problem, bool kBoth, bool kWhole>
__device__ __forceinline__ void turn_square(const Fp8TurnParams& p, unsigned (&square)[kFp8Square][kFp8Square / 4 + 1]) {
    using Columns = TurnedColumns<Problem, kBoth, kWhole>;
    const Columns columns(p);
#pragma unroll
    for (int first = 0; first < Columns::kRows; first += 4) columns.make(first, square);
    if constexpr (kBoth) {
        __syncthreads();  // the square is complete
        columns.store_rows(square);
    }
}
template <class Problem, bool kBoth>
__device__ __forceinline__ void turn_columns(const Fp8TurnParams& p) {
    __shared__ unsigned square[kFp8Square][kFp8Square / 4 + 1];
    if (p.unless != nullptr && *p.unless == 0u) return;
    const bool whole = static_cast<int>(blockIdx.x + 1) * kFp8Square <= p.rows;
    const bool deep = static_cast<int>(blockIdx.y + 1) * kFp8Square <= Problem::hidden_size;
    if (whole && deep) {
        turn_square<Problem, kBoth, true>(p, square);
    } else {
        turn_square<Problem, kBoth, false>(p, square);
    }
}

/// Scales of rows without their codes, which fp8_both_codes makes. A warp has a row.
template <class Problem>
__device__ __forceinline__ void scales_of_rows(const Fp8CodesParams& p) {
    const int row = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows) return;
    const Bf16* const from = static_cast<const Bf16*>(p.from) + static_cast<long long>(row) * Problem::hidden_size;
    const unsigned largest = RowNumbers<Problem>(from).largest();
    raise_largest<Problem>(p, from, largest);
    if (threadIdx.x % 32 != 0) return;
    const RowCodes<Problem> codes(largest, p.given_scale);
    p.scales[row] = codes.scale;
    p.row_factors[row] = codes.factor;
}

template <class Problem>
__device__ __forceinline__ void fp8_scales(const Fp8CodesParams& p) {
    if constexpr (Problem::hidden_major) {
        __shared__ typename ColumnScales<Problem>::OfWarps largest;
        if (p.unless != nullptr && *p.unless == 0u) return;
        ColumnScales<Problem>{p}.run(largest);
    } else {
        scales_of_rows<Problem>(p);
    }
}
template <class Problem>
__device__ __forceinline__ void fp8_turn_weight(const Fp8TurnParams& p) {
    if constexpr (has_given_codes<Problem>()) {
        turn_rows<Problem, TurnedCodes<Problem>, false>(p);
    } else if constexpr (Problem::hidden_major) {
        turn_columns<Problem, false>(p);
    } else {
        fp8_turn<Problem, false, false>(p);
    }
}
template <class Problem>
__device__ __forceinline__ void fp8_both_codes(const Fp8TurnParams& p) {
    if constexpr (Problem::hidden_major) {
        turn_columns<Problem, true>(p);
    } else {
        fp8_turn<Problem, false, true>(p);
    }
}

}  // namespace flce

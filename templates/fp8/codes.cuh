// Numbers in 8 bits: codes of rows, and their copies turned over.
#pragma once

#include "flce/common/fp8_codes.cuh"
#include "flce/common/row_outputs.cuh"
#include "flce/fp8/params.cuh"

namespace flce {

/// Four numbers as e4m3 or e5m2, the first in the lowest byte: to the nearest, saturating.
template <bool kE5m2>
__device__ __forceinline__ unsigned pack_fp8(float x0, float x1, float x2, float x3) {
    unsigned r;
    if constexpr (kE5m2) {
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n}\n"
            : "=r"(r)
            : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    } else {
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n}\n"
            : "=r"(r)
            : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    }
    return r;
}
/// Two codes, in the low bytes, as numbers of fp16, which holds all of both formats.
template <bool kE5m2>
__device__ __forceinline__ float2 unpack_fp8(unsigned codes) {
    unsigned pair;
    if constexpr (kE5m2) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;\n" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
    } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
    }
    return make_float2(Numeric<Fp16>::first(pair), Numeric<Fp16>::second(pair));
}
/// Four numbers of at most 127 as int8, the first in the lowest byte: to the nearest, ties to even. Beside 1.5 · 2^23 a number's last bits
/// are its integer; the sum is none that a compiler may fuse with a product before it.
__device__ __forceinline__ unsigned pack_s8(float x0, float x1, float x2, float x3) {
    const auto bits = [](float x) { return __float_as_uint(__fadd_rn(x, 12582912.f)); };
    return __byte_perm(__byte_perm(bits(x0), bits(x1), 0x0040), __byte_perm(bits(x2), bits(x3), 0x0040), 0x5410);
}

/// Bytes of a 4 × 4 block change rows and columns.
__device__ __forceinline__ void turn_4x4(unsigned (&w)[4]) {
    const unsigned a = __byte_perm(w[0], w[1], 0x5140);
    const unsigned b = __byte_perm(w[2], w[3], 0x5140);
    const unsigned c = __byte_perm(w[0], w[1], 0x7362);
    const unsigned d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

/// Positions, in groups of kFp8ClassGroup and kFp8TokenGroup, and what lies at one.
__device__ __forceinline__ int class_position(int column) {
    return column / 64 * 64 + column % 8 / 2 * 16 + column % 64 / 8 * 2 + column % 2;
}
__device__ __forceinline__ int class_at(int position) {
    return position / 64 * 64 + position % 16 / 2 * 8 + position % 64 / 16 * 2 + position % 2;
}
__device__ __forceinline__ int token_position(int row) {
    return row / 128 * 128 + row % 64 / 16 * 32 + row % 8 * 4 + row % 128 / 64 * 2 + row % 16 / 8;
}
__device__ __forceinline__ int token_at(int position) {
    const int byte = position % 4;
    return position / 128 * 128 + byte / 2 * 64 + position % 128 / 32 * 16 + byte % 2 * 8 + position % 32 / 4;
}

/// Whether a row's target, as load_target has it, is a class of the call's weight. In a shard another rank may have it.
template <class Problem>
__device__ __forceinline__ bool has_class(int target) {
    return target >= 0 && !(Problem::shard && target == kElsewhere);
}

/// The power of two that a matrix is multiplied with for e4m3, of its largest number's bits.
__device__ __forceinline__ float fp8_factor(unsigned largest) { return fp8::power_of_two(fp8::e4m3_power(fp8::float_of(largest))); }

/// Codes of four numbers of a row, of its factor. A row's own factor makes its largest number 127, but for a last place.
template <class Problem>
__device__ __forceinline__ unsigned pack_codes(float factor, float x0, float x1, float x2, float x3) {
    if constexpr (Problem::int8_logits) {
        const auto within = [&](float x) { return Problem::given_scales ? fminf(fmaxf(x * factor, -127.f), 127.f) : x * factor; };
        return pack_s8(within(x0), within(x1), within(x2), within(x3));
    }
    return pack_fp8<false>(x0 * factor, x1 * factor, x2 * factor, x3 * factor);
}

/// Scale and factor of a row's codes, of its largest number.
template <class Problem>
struct RowCodes {
    float factor;
    float scale;

    /// `largest`: bits; above every number's where a number is not finite. `given`: every row's scale, where the Problem has given scales.
    __device__ __forceinline__ RowCodes(unsigned largest, float given) {
        const float most = Problem::int8_logits ? fp8::int8_most() : fp8::e4m3_most();
        const fp8::RowScale row =
            Problem::given_scales ? fp8::given_row_scale(fp8::float_of(largest), given) : fp8::row_scale(fp8::float_of(largest), most);
        factor = row.factor;
        scale = row.scale;
    }
    __device__ __forceinline__ unsigned pack(float x0, float x1, float x2, float x3) const {
        return pack_codes<Problem>(factor, x0, x1, x2, x3);
    }
};

/// Largest |number| of eight, as bits of bf16 in both halves.
__device__ __forceinline__ unsigned largest_of(const unsigned (&words)[4]) {
    unsigned largest = 0u;
#pragma unroll
    for (const unsigned word : words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
    return largest;
}
/// Bits of the largest |number| of D, for all lanes of a warp. `load(k, words)`: eight from k on.
template <class Problem, class Load>
__device__ __forceinline__ unsigned largest_by(const Load& load) {
    unsigned largest = 0u;
#pragma unroll 4
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < Problem::hidden_size; k += 256) {
        unsigned words[4];
        load(k, words);
        largest = __vmaxu2(largest, largest_of(words));
    }
    return __reduce_max_sync(0xffffffffu, max(largest >> 16, largest & 0xffffu)) << 16;
}
template <class Problem>
__device__ __forceinline__ unsigned largest_of_row(const void* row) {
    const Bf16* const at = static_cast<const Bf16*>(row);
    return largest_by<Problem>([at](int k, unsigned(&words)[4]) { ptx::ld_global_v4(words, at + k); });
}
/// Bits of the largest |number| that is finite.
template <class Problem>
__device__ __forceinline__ unsigned largest_finite_of_row(const void* row) {
    const Bf16* const at = static_cast<const Bf16*>(row);
    unsigned largest = 0u;
    for (int k = static_cast<int>(threadIdx.x) % 32; k < Problem::hidden_size; k += 32) {
        const unsigned bits = at[k].bits & 0x7fffu;
        if (bits < 0x7f80u) largest = max(largest, bits);
    }
    return __reduce_max_sync(0xffffffffu, largest) << 16;
}

/// Raises p.largest to that of a row, for a whole warp.
template <class Problem>
__device__ __forceinline__ void raise_largest(const Fp8CodesParams& p, const Bf16* row, unsigned largest) {
    if (largest >= 0x7f800000u) largest = largest_finite_of_row<Problem>(row);
    // Most rows are below what others have raised it to.
    if (threadIdx.x % 32 == 0 && largest > *static_cast<volatile unsigned*>(p.largest)) atomicMax(p.largest, largest);
}

/// A row's numbers, 8 a lane and 256 columns, which registers keep between both looks at them where they are not very many.
template <class Problem>
struct RowNumbers {
    enum : int { kParts = ceil_div(Problem::hidden_size, 256) };
    enum : bool { kKept = kParts <= 16 };

    const Bf16* from;  // the lane's first
    unsigned kept[kKept ? kParts : 1][4];

    __device__ __forceinline__ explicit RowNumbers(const Bf16* row) : from(row + static_cast<int>(threadIdx.x) % 32 * 8) {
        if constexpr (kKept) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) read(part, kept[part]);
        }
    }
    __device__ __forceinline__ void get(int part, unsigned (&words)[4]) const {
        if constexpr (kKept) {
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = kept[part][i];
        } else {
            read(part, words);
        }
    }
    /// Bits of the row's largest |number|, in all lanes.
    __device__ __forceinline__ unsigned largest() const {
        unsigned most = 0u;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            unsigned words[4];
            get(part, words);
            most = __vmaxu2(most, largest_of(words));
        }
        return __reduce_max_sync(0xffffffffu, max(most >> 16, most & 0xffffu)) << 16;
    }

private:
    __device__ __forceinline__ void read(int part, unsigned (&words)[4]) const {
        words[0] = words[1] = words[2] = words[3] = 0u;
        if (part * 256 + static_cast<int>(threadIdx.x) % 32 * 8 < Problem::hidden_size) ptx::ld_global_v4(words, from + part * 256);
    }
};

/// A warp has a row.
template <class Problem>
__device__ __forceinline__ void fp8_codes(const Fp8CodesParams& p) {
    using N = Numeric<Bf16>;
    using Numbers = RowNumbers<Problem>;
    if (p.unless != nullptr && *p.unless == 0u) return;
    const int row = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows) return;
    const Bf16* const from = static_cast<const Bf16*>(p.from) + static_cast<long long>(row) * Problem::hidden_size;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const bool there = p.targets.target == nullptr || load_target<Problem>(p.targets, p.temperature, row) >= 0;
    const Numbers numbers(from);
    const unsigned largest = there ? numbers.largest() : 0u;
    const RowCodes<Problem> codes(largest, p.given_scale);
    if (lane == 0) p.scales[row] = codes.scale;
    if (p.largest != nullptr) raise_largest<Problem>(p, from, largest);
    unsigned char* const to = p.codes + row * p.pitch + lane * 8;
#pragma unroll
    for (int part = 0; part < Numbers::kParts; ++part) {
        if (part * 256 + lane * 8 >= static_cast<int>(p.pitch)) return;
        unsigned words[4];
        numbers.get(part, words);
        uint2 packed = make_uint2(0u, 0u);  // a row without a factor may hold anything
        if (codes.factor != 0.f) {
            packed.x = codes.pack(N::first(words[0]), N::second(words[0]), N::first(words[1]), N::second(words[1]));
            packed.y = codes.pack(N::first(words[2]), N::second(words[2]), N::first(words[3]), N::second(words[3]));
        }
        *reinterpret_cast<uint2*>(to + part * 256) = packed;
    }
}

/// Rows of a warp at positions that follow each other. A lane has four columns of each, all of which are on their way at once, and the
/// factors of the row that has its number.
template <class Problem, bool kTokens, bool kBoth>
struct TurnedRows {
    enum : int { kRows = kFp8Square / (kRowThreads / 32) };
    enum : int { kPitch = ceil_div(Problem::hidden_size, 16) * 16 };  ///< bytes of a row of codes
    static_assert(kRows <= 32 && kRows % 4 == 0);

    const Fp8TurnParams& p;
    int column;
    int own;         // the lane's row
    float factor;    // factor of that row; 0 where its numbers do not count, or are none
    float of_codes;  // factor by which its numbers become codes as they lie, or 0
    uint2 in[kRows];

    /// `first`: position of the warp's first row behind row0.
    __device__ __forceinline__ TurnedRows(const Fp8TurnParams& params, int row0, int first, int column_)
        : p(params), column(column_), factor(0.f), of_codes(0.f) {
        const int position = first + static_cast<int>(threadIdx.x) % kRows;
        own = row0 + (kTokens ? token_at(position) : class_at(position));
        const bool exists = own < p.rows;
        if (exists) {
            factor = fp8_factor(*p.largest);
            if constexpr (kTokens) factor *= p.factors[own];
            if constexpr (kBoth) of_codes = p.row_factors[own];
        }
        // There is always something to read; what does not exist does not count.
        const Bf16* const from = static_cast<const Bf16*>(p.from) + (column < Problem::hidden_size ? column : 0);
        const int read = exists ? own : 0;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int of = __shfl_sync(0xffffffffu, read, i);
            // Inputs of the call, which may be read while codes of other rows are written.
            in[i] = __ldg(reinterpret_cast<const uint2*>(from + static_cast<long long>(of) * Problem::hidden_size));
        }
    }
    static __device__ __forceinline__ float of_row(float number, int i) { return __shfl_sync(0xffffffffu, number, i); }

    /// e4m3 of four rows from `first` on, and codes of the rows as they lie.
    __device__ __forceinline__ void make(int first, unsigned (&w)[4]) const {
        using N = Numeric<Bf16>;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float f = of_row(factor, first + r);
            const uint2 words = f != 0.f && column < Problem::hidden_size ? in[first + r] : make_uint2(0u, 0u);
            const float x[4] = {N::first(words.x), N::second(words.x), N::first(words.y), N::second(words.y)};
            w[r] = pack_fp8<false>(x[0] * f, x[1] * f, x[2] * f, x[3] * f);
            if constexpr (kBoth) {
                const float of = of_row(of_codes, first + r);
                const int to = __shfl_sync(0xffffffffu, own, first + r);
                if (to >= p.rows || column >= kPitch) continue;
                const unsigned packed = of != 0.f ? pack_codes<Problem>(of, x[0], x[1], x[2], x[3]) : 0u;
                *reinterpret_cast<unsigned*>(p.row_codes + static_cast<long long>(to) * kPitch + column) = packed;
            }
        }
    }
};

/// Turns rows over. A block has a square of kFp8Square rows and columns. kBoth: the copies turned over may be left out.
template <class Problem, class Rows, bool kBoth>
__device__ __forceinline__ void turn_rows(const Fp8TurnParams& p) {
    __shared__ unsigned square[kFp8Square][kFp8Square / 4 + 1];
    const int row0 = static_cast<int>(blockIdx.y) * kFp8Square;
    const int column0 = static_cast<int>(blockIdx.x) * kFp8Square;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Rows rows(p, row0, warp * Rows::kRows, column0 + lane * 4);
#pragma unroll
    for (int first = 0; first < Rows::kRows; first += 4) {
        unsigned w[4];
        rows.make(first, w);
        turn_4x4(w);
#pragma unroll
        for (int e = 0; e < 4; ++e) square[lane * 4 + e][(warp * Rows::kRows + first) / 4] = w[e];
    }
    if (kBoth && p.codes == nullptr) return;
    __syncthreads();  // the square is complete
    const int position = row0 + lane * 4;
    if (position >= p.positions) return;
    for (int d = warp; d < kFp8Square && column0 + d < Problem::hidden_size; d += kRowThreads / 32) {
        *reinterpret_cast<unsigned*>(p.codes + (column0 + d) * p.positions + position) = square[d][lane];
    }
}
/// kTokens: rows lie at tokens' positions and have factors, else at classes'. kBoth: codes of the rows as they lie are made as well.
template <class Problem, bool kTokens, bool kBoth>
__device__ __forceinline__ void fp8_turn(const Fp8TurnParams& p) {
    turn_rows<Problem, TurnedRows<Problem, kTokens, kBoth>, kBoth>(p);
}
template <class Problem>
__device__ __forceinline__ void fp8_turn_hidden(const Fp8TurnParams& p) {
    fp8_turn<Problem, true, false>(p);
}

}  // namespace flce

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
__device__ __forceinline__ int code_s8(float x) { return max(min(__float2int_rn(x), 127), -127); }
__device__ __forceinline__ unsigned pack_s8(float x0, float x1, float x2, float x3) {
    const auto byte = [](float x) { return static_cast<unsigned>(code_s8(x)) & 0xffu; };
    return byte(x0) | byte(x1) << 8 | byte(x2) << 16 | byte(x3) << 24;
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
        if constexpr (Problem::int8_logits) return pack_s8(x0 * factor, x1 * factor, x2 * factor, x3 * factor);
        return pack_fp8<false>(x0 * factor, x1 * factor, x2 * factor, x3 * factor);
    }
};

/// Largest |number| of eight, as bits of bf16 in both halves.
__device__ __forceinline__ unsigned largest_of(const unsigned (&words)[4]) {
    unsigned largest = 0u;
#pragma unroll
    for (const unsigned word : words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
    return largest;
}
/// Bits of the largest |number| of a row, for all lanes of a warp.
template <class Problem>
__device__ __forceinline__ unsigned largest_of_row(const void* row) {
    const Bf16* const at = static_cast<const Bf16*>(row);
    unsigned largest = 0u;
#pragma unroll 4
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < Problem::hidden_size; k += 256) {
        unsigned words[4];
        ptx::ld_global_v4(words, at + k);
        largest = __vmaxu2(largest, largest_of(words));
    }
    return __reduce_max_sync(0xffffffffu, max(largest >> 16, largest & 0xffffu)) << 16;
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

/// Scales of rows without their codes, which fp8_both_codes makes. A warp has a row.
template <class Problem>
__device__ __forceinline__ void fp8_scales(const Fp8CodesParams& p) {
    const int row = static_cast<int>(blockIdx.x) * (kRowThreads / 32) + static_cast<int>(threadIdx.x) / 32;
    if (row >= p.rows) return;
    const Bf16* const from = static_cast<const Bf16*>(p.from) + static_cast<long long>(row) * Problem::hidden_size;
    const unsigned largest = RowNumbers<Problem>(from).largest();
    raise_largest<Problem>(p, from, largest);
    if (threadIdx.x % 32 != 0) return;
    p.scales[row] = RowCodes<Problem>(largest, p.given_scale).scale;
    p.row_largest[row] = largest;
}

/// A lane's four columns of four rows at a time, the rows at positions that follow each other.
template <class Problem, bool kTokens, bool kBoth>
struct TurnedRows {
    const Fp8TurnParams& p;
    int column;
    float factor;  // factor of every row

    /// `rows`: of the positions. w: e4m3 of a row each.
    __device__ __forceinline__ void make(const int (&rows)[4], unsigned (&w)[4]) const {
        using N = Numeric<Bf16>;
        const Bf16* const from = static_cast<const Bf16*>(p.from) + column;
        uint2 in[4];
        float factors[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const bool there = rows[r] < p.rows && column < Problem::hidden_size;
            factors[r] = !there ? 0.f : kTokens ? p.factors[rows[r]] * factor : factor;
            in[r] = make_uint2(0u, 0u);
            if (factors[r] == 0.f) continue;
            // Inputs of the call, which may be read while codes of other rows are written.
            in[r] = __ldg(reinterpret_cast<const uint2*>(from + static_cast<long long>(rows[r]) * Problem::hidden_size));
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float x[4] = {N::first(in[r].x), N::second(in[r].x), N::first(in[r].y), N::second(in[r].y)};
            w[r] = pack_fp8<false>(x[0] * factors[r], x[1] * factors[r], x[2] * factors[r], x[3] * factors[r]);
            if constexpr (kBoth) {
                if (rows[r] >= p.rows || column >= p.pitch) continue;
                const RowCodes<Problem> codes(p.row_largest[rows[r]], p.given_scale);
                const unsigned packed = codes.factor != 0.f ? codes.pack(x[0], x[1], x[2], x[3]) : 0u;
                *reinterpret_cast<unsigned*>(p.row_codes + rows[r] * p.pitch + column) = packed;
            }
        }
    }
};

/// Turns rows over. A block has a square of kFp8Square rows and columns. kTokens: rows lie at tokens' positions and have factors, else at
/// classes'. kBoth: codes of the rows as they lie are made as well.
template <class Problem, bool kTokens, bool kBoth>
__device__ __forceinline__ void fp8_turn(const Fp8TurnParams& p) {
    __shared__ unsigned square[kFp8Square][kFp8Square / 4 + 1];
    const int row0 = static_cast<int>(blockIdx.y) * kFp8Square;
    const int column0 = static_cast<int>(blockIdx.x) * kFp8Square;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const TurnedRows<Problem, kTokens, kBoth> turned{p, column0 + lane * 4, fp8_factor(*p.largest)};
#pragma unroll
    for (int part = 0; part < kFp8Square / 32; ++part) {
        const int word = warp * (kFp8Square / 32) + part;  // positions 4·word and on
        int rows[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) rows[r] = row0 + (kTokens ? token_at(word * 4 + r) : class_at(word * 4 + r));
        unsigned w[4];
        turned.make(rows, w);
        turn_4x4(w);
#pragma unroll
        for (int e = 0; e < 4; ++e) square[lane * 4 + e][word] = w[e];
    }
    if (kBoth && p.codes == nullptr) return;
    __syncthreads();  // the square is complete
    const int position = row0 + lane * 4;
    if (position >= p.positions) return;
    for (int d = warp; d < kFp8Square && column0 + d < Problem::hidden_size; d += kRowThreads / 32) {
        *reinterpret_cast<unsigned*>(p.codes + (column0 + d) * p.positions + position) = square[d][lane];
    }
}
template <class Problem>
__device__ __forceinline__ void fp8_turn_weight(const Fp8TurnParams& p) {
    fp8_turn<Problem, false, false>(p);
}
template <class Problem>
__device__ __forceinline__ void fp8_turn_hidden(const Fp8TurnParams& p) {
    fp8_turn<Problem, true, false>(p);
}
template <class Problem>
__device__ __forceinline__ void fp8_both_codes(const Fp8TurnParams& p) {
    fp8_turn<Problem, false, true>(p);
}

}  // namespace flce

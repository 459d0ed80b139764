// Element types as storage, their conversions, and the few transcendental functions of the epilogues.
#pragma once

#include "flce/common/ptx.cuh"

namespace flce {

__device__ constexpr float log2_e() { return 1.44269504088896340736f; }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

/// Stands for "no logit here" (a column past V): its exponential is 0.
__device__ __forceinline__ float masked_logit() { return -infinity(); }

/// The largest logit of none: finite, so that differences to it are no NaN where every logit so far is −∞.
__device__ constexpr float lowest_logit() { return -3.402823466e38f; }

struct Bf16 {
    unsigned short bits;
};
struct Fp16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(Bf16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
__device__ __forceinline__ float to_float(Fp16 value) { return ptx::cvt_f32_f16(value.bits); }

/// Conversions of an element type. Pairs are packed with the first element in the low half, as memory has them.
template <class T>
struct Numeric;

template <>
struct Numeric<Bf16> {
    enum : bool { kHalf = true };
    static __device__ __forceinline__ unsigned pack(float first, float second) { return ptx::cvt_rn_bf16x2_f32(second, first); }
    static __device__ __forceinline__ float first(unsigned pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float second(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
    static __device__ __forceinline__ Bf16 from_float(float value) { return {static_cast<unsigned short>(pack(value, 0.f))}; }
};

template <>
struct Numeric<Fp16> {
    enum : bool { kHalf = true };
    static __device__ __forceinline__ unsigned pack(float first, float second) { return ptx::cvt_rn_f16x2_f32(second, first); }
    static __device__ __forceinline__ float first(unsigned pair) { return ptx::cvt_f32_f16(static_cast<unsigned short>(pair)); }
    static __device__ __forceinline__ float second(unsigned pair) { return ptx::cvt_f32_f16(static_cast<unsigned short>(pair >> 16)); }
    static __device__ __forceinline__ Fp16 from_float(float value) { return {static_cast<unsigned short>(pack(value, 0.f))}; }
};

template <>
struct Numeric<float> {
    enum : bool { kHalf = false };
    static __device__ __forceinline__ float from_float(float value) { return value; }
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <bool kFirst, class A, class B>
struct SelectOf {
    using Type = A;
};
template <class A, class B>
struct SelectOf<false, A, B> {
    using Type = B;
};
template <bool kFirst, class A, class B>
using Select = typename SelectOf<kFirst, A, B>::Type;

__device__ constexpr float ln_2() { return 0.69314718055994530942f; }

/// For 16-bit element types.
struct FastMath {
    /// The argument's rounding is made up for, which matters where few logits decide a sum; ex2.approx itself, which cuts its argument off,
    /// makes e^x 0.8·2^-24 too small on average.
    static __device__ __forceinline__ float exp(float x) {
        const float power = x * log2_e();
        const float e = ptx::ex2_approx_ftz(power);
        const float missing = fminf(__fmaf_rn(power, -ln_2(), x), 1.f);  // NaN where x is −∞ (ignored tokens): fminf drops it
        return __fmaf_rn(e, missing, e);
    }
    /// Within 2.5 units in the last place of every x, small ones too, and without a branch: one among a hundred accumulators costs
    /// registers that are not there. x·(1 + x²·p(x²)) near 0 (p is minimax in relative error), 1 − 2/(1 + e^2x) beyond.
    static __device__ __forceinline__ float tanh(float x) {
        const float square = x * x;
        float p = __fmaf_rn(-0.00551516f, square, 0.02046942f);
        p = __fmaf_rn(p, square, -0.05368802f);
        p = __fmaf_rn(p, square, 0.1333083f);
        p = __fmaf_rn(p, square, -0.3333326f);
        const float near = __fmaf_rn(p * square, x, x);
        const float far = __fmaf_rn(-2.f, ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(fabsf(x) * (2.f * log2_e()))), 1.f);
        return fabsf(x) < 0.65f ? near : copysignf(far, x);
    }
};

/// tanh for logits that are long sums: their own rounding is as large as the error of this tanh near 0, a unit of the last place of 1. It
/// takes a third of the instructions.
struct FastLongMath : FastMath {
    static __device__ __forceinline__ float tanh(float x) {
        return __fmaf_rn(-2.f, ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(x * (2.f * log2_e()))), 1.f);
    }
};

/// A logit z = cap·tanh(y) of a long sum, told by its fall: how far z is below the cap in parts of 2·cap, 1 / (1 + e^2y). The logit, the
/// power of its exponential and its slope are one multiply-add of the fall each. A fall is from 0 to 1 for any y, 0 or 1 at the cap.
struct Falls {
    float cap;
    float rate;       ///< 2y·log₂e for each unit of the sum
    float steepness;  ///< 2·cap·log₂e

    __device__ __forceinline__ float of(float sum) const { return ptx::rcp_approx_ftz(1.f + ptx::ex2_approx_ftz(sum * rate)); }
    __device__ __forceinline__ float logit(float fall) const { return __fmaf_rn(fall, -2.f * cap, cap); }
    /// A quarter of dz/dy/cap = 1 − tanh²y. 0 for the fall of no class.
    static __device__ __forceinline__ float quarter_slope(float fall) { return __saturatef(__fmaf_rn(-fall, fall, fall)); }
};

/// e^(z − reference) for many z of a row, up to a factor that they share: powers of two at one multiply-add each.
struct PowersAbove {
    /// Beyond this the factor is far from 1, and in the end out of range.
    enum : int { kMostReference = 1 << 16 };
    static __device__ __forceinline__ bool takes(float reference) { return fabsf(reference) <= kMostReference; }

    float shift;
    __device__ __forceinline__ explicit PowersAbove(float reference) : shift(reference * log2_e()) {}
    /// The power is rounded: relative error |z − reference|·2^-24.
    __device__ __forceinline__ float exp(float z) const { return ptx::ex2_approx_ftz(__fmaf_rn(z, log2_e(), -shift)); }
    /// Factor that makes up for the rounding of `shift`.
    __device__ __forceinline__ float factor(float reference) const { return ptx::ex2_approx_ftz(-__fmaf_rn(reference, log2_e(), -shift)); }
};

/// PowersAbove for a logit that its fall tells.
struct FallPowersAbove {
    Falls falls;
    float base;
    __device__ __forceinline__ FallPowersAbove(const Falls& falls_, float reference)
        : falls(falls_), base((falls.cap - reference) * log2_e()) {}
    __device__ __forceinline__ float exp(float fall) const { return ptx::ex2_approx_ftz(__fmaf_rn(fall, -falls.steepness, base)); }
    __device__ __forceinline__ float factor(float reference) const {
        return ptx::ex2_approx_ftz(__fmaf_rn(falls.cap - reference, log2_e(), -base));
    }
};
/// DifferencesAbove for a logit that its fall tells.
template <class Math>
struct FallDifferencesAbove {
    Falls falls;
    float reference;
    __device__ __forceinline__ FallDifferencesAbove(const Falls& falls_, float reference_) : falls(falls_), reference(reference_) {}
    __device__ __forceinline__ float exp(float fall) const { return Math::exp(falls.logit(fall) - reference); }
    __device__ __forceinline__ float factor(float /*reference*/) const { return 1.f; }
};

/// Exponentials above a reference from rounded differences, with Math's own exp.
template <class Math>
struct DifferencesAbove {
    static __device__ __forceinline__ bool takes(float /*reference*/) { return true; }

    float reference;
    __device__ __forceinline__ explicit DifferencesAbove(float reference_) : reference(reference_) {}
    __device__ __forceinline__ float exp(float z) const { return Math::exp(z - reference); }
    __device__ __forceinline__ float factor(float /*reference*/) const { return 1.f; }
};

/// For fp32.
struct PreciseMath {
    static __device__ __forceinline__ float exp(float x) { return ::expf(x); }
    static __device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
};

/// Sets a thread's sums of a tile to 0. Before every tile, even where the first multiplication could ignore what `c` holds: the compiler
/// would keep the last tile's values for it.
template <class Sum, int kRows, int kColumns>
__device__ __forceinline__ void clear_sums(Sum (&c)[kRows][kColumns][4]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[i][j][e] = Sum(0);
}

}  // namespace flce

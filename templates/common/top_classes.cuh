// Order of a token's classes by their logits. Plain C++, as row_math.cuh.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/row_math.cuh"
#else
#include <bit>

#include "templates/common/row_math.cuh"
#endif

namespace flce {

/// A class as one number: the larger the logit the larger the number, and of equal logits (0 and −0 too) the smaller class is the larger
/// number. NaN comes behind −infinity.
using ClassKey = unsigned long long;

FLCE_HOST_DEVICE unsigned bits_of(float value) {
#if defined(__CUDACC__)
    return __float_as_uint(value);
#else
    return std::bit_cast<unsigned>(value);
#endif
}
FLCE_HOST_DEVICE float float_of(unsigned bits) {
#if defined(__CUDACC__)
    return __uint_as_float(bits);
#else
    return std::bit_cast<float>(bits);
#endif
}

/// A logit as a number that is the larger the larger the logit; 0 and −0 are one, and NaN is 0.
FLCE_HOST_DEVICE unsigned order_of(float logit) {
    const unsigned bits = logit == logit ? bits_of(logit + 0.f) : 0xffffffffu;
    return bits ^ ((bits & 0x80000000u) != 0u ? 0xffffffffu : 0x80000000u);
}
FLCE_HOST_DEVICE float logit_of_order(unsigned order) {
    return float_of(order ^ ((order & 0x80000000u) != 0u ? 0x80000000u : 0xffffffffu));
}

FLCE_HOST_DEVICE ClassKey class_key(float logit, int id) {
    return static_cast<ClassKey>(order_of(logit)) << 32 | static_cast<unsigned>(~id);
}
FLCE_HOST_DEVICE float logit_of(ClassKey key) { return logit_of_order(static_cast<unsigned>(key >> 32)); }
FLCE_HOST_DEVICE int id_of(ClassKey key) { return static_cast<int>(~static_cast<unsigned>(key)); }

/// The key behind all classes: NaN of no class.
FLCE_HOST_DEVICE ClassKey no_class_key() { return class_key(float_of(0x7fffffffu), FLCE_NO_CLASS); }

}  // namespace flce

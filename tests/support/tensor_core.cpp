#include "tests/support/tensor_core.hpp"

#include <algorithm>
#include <bit>
#include <vector>

#include "runtime/error_bounds.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kLanes = 32;  // accumulators that a step works on side by side, for the compiler to vectorise

// The power of two below |value|; 0 for 0.
[[gnu::always_inline]] inline double power_of_two(double value) {
    return std::bit_cast<double>(std::bit_cast<std::uint64_t>(value) & 0x7ff0'0000'0000'0000U);
}

// acc[lane] = step(acc[lane], a[0..depth), b[0..depth)[lane]); b's rows are `stride` numbers apart.
[[gnu::always_inline]] inline void step_body(const float* a, const float* b, std::int64_t stride, std::int64_t depth, double* acc) {
    double largest[kLanes];
    double sum[kLanes];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) largest[lane] = power_of_two(acc[lane]);
    for (std::int64_t d = 0; d < depth; ++d) {
        const double size = power_of_two(a[d]);
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
            largest[lane] = std::max(largest[lane], size * power_of_two(b[d * stride + lane]));
        }
    }
    // Terms in units of the last bit that is kept: below 2^27, so that a 32-bit integer holds each addend.
    constexpr double kUnits = std::int64_t{1} << kTensorCoreBits;
    double unit[kLanes];
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        unit[lane] = largest[lane] > 0 ? kUnits / largest[lane] : 0;
        sum[lane] = static_cast<std::int32_t>(acc[lane] * unit[lane]);
    }
    for (std::int64_t d = 0; d < depth; ++d) {
        const double factor = a[d];
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
            sum[lane] += static_cast<std::int32_t>(factor * b[d * stride + lane] * unit[lane]);
        }
    }
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        acc[lane] = unit[lane] > 0 ? truncated_to_fp32(sum[lane] / unit[lane]) : 0;
    }
}

#if defined(__x86_64__)
[[gnu::target("avx512f,avx512dq,fma")]] void step_512(const float* a, const float* b, std::int64_t stride, std::int64_t depth,
                                                      double* acc) {
    step_body(a, b, stride, depth, acc);
}
const bool kWide = __builtin_cpu_supports("avx512dq") != 0;
#endif

void step(const float* a, const float* b, std::int64_t stride, std::int64_t depth, double* acc) {
#if defined(__x86_64__)
    if (kWide) return step_512(a, b, stride, depth, acc);
#endif
    step_body(a, b, stride, depth, acc);
}

// Adds a[m, k]·b to the columns j0 … j0 + width of c[m, n]. `load(k0, depth, packed)` puts that part of b where steps read it, padded
// with zeros.
template <class Load>
void add_columns(const float* a, float* c, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t j0, const Load& load) {
    const std::int64_t width = std::min(kLanes, n - j0);
    std::vector<double> sums(static_cast<std::size_t>(m * kLanes));
    for (std::int64_t i = 0; i < m; ++i) std::copy_n(&c[i * n + j0], width, &sums[i * kLanes]);
    float packed[kTensorCoreStep * kLanes] = {};
    for (std::int64_t k0 = 0; k0 < k; k0 += kTensorCoreStep) {
        const std::int64_t depth = std::min(kTensorCoreStep, k - k0);
        load(k0, depth, width, packed);
        for (std::int64_t i = 0; i < m; ++i) step(&a[i * k + k0], packed, kLanes, depth, &sums[i * kLanes]);
    }
    for (std::int64_t i = 0; i < m; ++i) std::copy_n(&sums[i * kLanes], width, &c[i * n + j0]);
}

}  // namespace

void tensor_core_transposed(const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k) {
    std::fill_n(c, m * n, 0.0F);
    for (std::int64_t j0 = 0; j0 < n; j0 += kLanes) {
        add_columns(a, c, m, n, k, j0, [&](std::int64_t k0, std::int64_t depth, std::int64_t width, float* packed) {
            for (std::int64_t lane = 0; lane < width; ++lane) {
                for (std::int64_t d = 0; d < depth; ++d) packed[d * kLanes + lane] = b[(j0 + lane) * k + k0 + d];
            }
        });
    }
}

void tensor_core_add(const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k) {
    for (std::int64_t j0 = 0; j0 < n; j0 += kLanes) {
        add_columns(a, c, m, n, k, j0, [&](std::int64_t k0, std::int64_t depth, std::int64_t width, float* packed) {
            for (std::int64_t d = 0; d < depth; ++d) std::copy_n(&b[(k0 + d) * n + j0], width, &packed[d * kLanes]);
        });
    }
}

}  // namespace flce::test

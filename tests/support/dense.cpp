#include "tests/support/dense.hpp"

#include <algorithm>
#include <vector>

#include "tests/support/tensor_core.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kLanes = 32;

// acc[lane] += Σ_d a[d] · packed[d][lane]
template <class Acc>
[[gnu::always_inline]] inline void chain(const Acc* a, const Acc* packed, std::int64_t depth, Acc* out) {
    Acc acc[kLanes] = {};
    for (std::int64_t d = 0; d < depth; ++d) {
        for (std::int64_t lane = 0; lane < kLanes; ++lane) acc[lane] += a[d] * packed[d * kLanes + lane];
    }
    for (std::int64_t lane = 0; lane < kLanes; ++lane) out[lane] += acc[lane];
}

template <class Acc, class T>
[[gnu::always_inline]] inline void transposed_body(const T* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k,
                                                   std::int64_t k_block) {
    k_block = std::min(k, k_block);
    std::vector<Acc> packed(static_cast<std::size_t>(k_block * kLanes));
    std::vector<Acc> row(static_cast<std::size_t>(k_block));
    std::vector<Acc> sums(static_cast<std::size_t>(m * kLanes));
    for (std::int64_t j0 = 0; j0 < n; j0 += kLanes) {
        const std::int64_t width = std::min(kLanes, n - j0);
        std::fill(sums.begin(), sums.end(), Acc(0));
        for (std::int64_t k0 = 0; k0 < k; k0 += k_block) {
            const std::int64_t depth = std::min(k_block, k - k0);
            for (std::int64_t lane = 0; lane < kLanes; ++lane) {
                for (std::int64_t d = 0; d < depth; ++d)
                    packed[d * kLanes + lane] = lane < width ? Acc(b[(j0 + lane) * k + k0 + d]) : Acc(0);
            }
            for (std::int64_t i = 0; i < m; ++i) {
                for (std::int64_t d = 0; d < depth; ++d) row[d] = Acc(a[i * k + k0 + d]);
                chain(row.data(), packed.data(), depth, &sums[i * kLanes]);
            }
        }
        for (std::int64_t i = 0; i < m; ++i) std::copy_n(&sums[i * kLanes], width, &c[i * n + j0]);
    }
}

template <class Acc, class T>
[[gnu::always_inline]] inline void add_body(const Acc* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k,
                                            std::int64_t k_block) {
    constexpr std::int64_t kColumns = 512;  // columns of c at a time, so that their accumulators stay in the first-level cache
    std::vector<Acc> acc(static_cast<std::size_t>(m * kColumns));
    for (std::int64_t n0 = 0; n0 < n; n0 += kColumns) {
        const std::int64_t width = std::min(kColumns, n - n0);
        for (std::int64_t k0 = 0; k0 < k; k0 += k_block) {
            std::fill(acc.begin(), acc.end(), Acc(0));
            for (std::int64_t kk = k0; kk < std::min(k, k0 + k_block); ++kk) {
                const T* source = b + kk * n + n0;
                for (std::int64_t i = 0; i < m; ++i) {
                    const Acc factor = a[i * k + kk];
                    Acc* target = &acc[i * kColumns];
                    for (std::int64_t j = 0; j < width; ++j) target[j] += factor * Acc(source[j]);
                }
            }
            for (std::int64_t i = 0; i < m; ++i) {
                for (std::int64_t j = 0; j < width; ++j) c[i * n + n0 + j] += acc[i * kColumns + j];
            }
        }
    }
}

#if defined(__x86_64__)
template <class Acc, class T>
[[gnu::target("avx512f,fma")]] void transposed_512(const T* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k,
                                                   std::int64_t kb) {
    transposed_body(a, b, c, m, n, k, kb);
}
template <class Acc, class T>
[[gnu::target("avx512f,fma")]] void add_512(const Acc* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k,
                                            std::int64_t kb) {
    add_body(a, b, c, m, n, k, kb);
}
const bool kWide = __builtin_cpu_supports("avx512f") != 0;
#endif

}  // namespace

template <class Acc, class T>
void multiply_transposed(const T* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t k_block) {
#if defined(__x86_64__)
    if (kWide) return transposed_512(a, b, c, m, n, k, k_block);
#endif
    transposed_body(a, b, c, m, n, k, k_block);
}

template <class Acc, class T>
void multiply_add(const Acc* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t k_block) {
#if defined(__x86_64__)
    if (kWide) return add_512(a, b, c, m, n, k, k_block);
#endif
    add_body(a, b, c, m, n, k, k_block);
}

void multiply_transposed(Summation summation, const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k) {
    if (summation == Summation::rounding) return multiply_transposed(a, b, c, m, n, k, kSlice);
    tensor_core_transposed(a, b, c, m, n, k);
}

void multiply_add(Summation summation, const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k) {
    if (summation == Summation::rounding) return multiply_add(a, b, c, m, n, k, kSlice);
    tensor_core_add(a, b, c, m, n, k);
}

template void multiply_transposed(const float*, const float*, float*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template void multiply_transposed(const float*, const float*, double*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template void multiply_transposed(const double*, const double*, double*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template void multiply_add(const float*, const float*, float*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template void multiply_add(const double*, const float*, double*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);
template void multiply_add(const double*, const double*, double*, std::int64_t, std::int64_t, std::int64_t, std::int64_t);

}  // namespace flce::test

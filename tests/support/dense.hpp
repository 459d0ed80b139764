// Plain matrix products for oracle and reference: one thread, vectorised by the compiler only, every sum in a stated order.
#pragma once

#include <cstdint>

#include "runtime/error_bounds.hpp"

namespace flce::test {

/// c[m, n] = a[m, k] · b[n, k]ᵀ. Each element is one chain of fused or unfused multiply-adds over slices of k_block terms, the slices'
/// sums added in order: how a blocked GEMM adds. Acc is float or double, T what the operands are stored in.
template <class Acc, class T>
void multiply_transposed(const T* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t k_block);

/// c[m, n] += a[m, k] · b[k, n], the k terms in slices of k_block as above.
template <class Acc, class T>
void multiply_add(const Acc* a, const T* b, Acc* c, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t k_block);

/// fp32 products as a framework's library computes them: rounded sums in slices of kSlice terms, or as tensor cores add (tensor_core.hpp).
inline constexpr std::int64_t kSlice = 256;
void multiply_transposed(Summation summation, const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k);
void multiply_add(Summation summation, const float* a, const float* b, float* c, std::int64_t m, std::int64_t n, std::int64_t k);

/// A sum in slices, like the products'.
class Sum {
public:
    void add(float value) {
        slice_ += value;
        if (++count_ % kSlice == 0) flush();
    }
    float total() {
        flush();
        return total_;
    }

private:
    void flush() {
        total_ += slice_;
        slice_ = 0;
    }
    float total_ = 0;
    float slice_ = 0;
    std::int64_t count_ = 0;
};

}  // namespace flce::test

// The floor that a bench holds kernels against: the three bare GEMMs of an output layer by the vendor's library, found at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "flce/flce.hpp"

namespace flce {

class GemmLibrary {
public:
    virtual ~GemmLibrary() = default;
    GemmLibrary(const GemmLibrary&) = delete;
    GemmLibrary& operator=(const GemmLibrary&) = delete;

    /// "cuBLAS 13.0.2 (libcublas.so.13), bf16 inputs, fp32 accumulation".
    [[nodiscard]] virtual std::string description() const = 0;
    /// Element type of A, B and C; the spec's, or fp32 where the library has nothing narrower.
    [[nodiscard]] virtual ScalarType dtype() const = 0;
    /// C[m,n] = op(A)[m,k] · op(B)[k,n], column-major, sizes below 2^31. On a GPU submitted to the legacy default stream.
    virtual void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, const void* a, std::int64_t lda,
                      const void* b, std::int64_t ldb, void* c, std::int64_t ldc) const = 0;
    /// Copies in the device's memory, submitted as the GEMMs are.
    virtual void copy(void* to, const void* from, std::size_t bytes) const = 0;

protected:
    GemmLibrary() = default;
};

/// cuBLAS for a CUDA device, a CBLAS for the CPU. nullptr where none is found, with the reason in `why`.
[[nodiscard]] std::unique_ptr<GemmLibrary> load_gemm_library(DeviceRef device, DType dtype, int threads, std::string* why);

/// Operands of the three GEMMs. logits is [N, V'] in the library's dtype, V' = vocab_size here.
struct FloorOperands {
    std::int64_t num_tokens = 0;
    std::int64_t hidden_size = 0;
    std::int64_t vocab_size = 0;     ///< rows that the GEMMs run over
    std::int64_t weight_stride = 0;  ///< padded vocabulary of the weight in memory
    WeightLayout layout = WeightLayout::vocab_major;
    const void* hidden = nullptr;
    const void* weight = nullptr;
    void* logits = nullptr;
    void* grad_hidden = nullptr;
    void* grad_weight = nullptr;
};
void floor_forward(const GemmLibrary& library, const FloorOperands& o);
void floor_backward(const GemmLibrary& library, const FloorOperands& o);

}  // namespace flce

// Operands of every path's GEMMs: how they lie in memory, and where a tile of the result goes.
#pragma once

namespace flce {

/// Dimension of a GEMM operand that is contiguous in memory: the one that is summed over, or the one of the result.
enum class Major { k, mn };

/// How far apart the chunks of an operand's rows start and end.
enum class Access {
    chunks,    ///< 16-byte chunks, each of which exists or does not
    partial,   ///< 16-byte chunks, the last of which may exist in part
    elements,  ///< rows are not 16-byte aligned
};

/// The operands of a GEMM C[m, n] = Σ_k A[m, k]·B[n, k]. `kExactProducts_` (fp32 only): products with next to no error, for a K so short
/// that a framework's sums would be more exact than three TF32 products.
template <class Element_, Major kMajorA_, Access kAccessA_, Major kMajorB_, Access kAccessB_, bool kExactProducts_ = false>
struct Operands {
    using Element = Element_;
    static __device__ constexpr Major major_a() { return kMajorA_; }
    static __device__ constexpr Major major_b() { return kMajorB_; }
    static __device__ constexpr Access access_a() { return kAccessA_; }
    static __device__ constexpr Access access_b() { return kAccessB_; }
    enum : bool { kExactProducts = kExactProducts_ };
};

/// Target of a tile in a row-major matrix, and how much of the tile exists.
template <class T>
struct TileTarget {
    T* origin;
    long long ld;  // elements
    int rows;      // valid ones from the origin
    int columns;
};

}  // namespace flce

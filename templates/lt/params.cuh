// Parameter blocks of cuda_lt's kernels. Plain C++, as common/params.cuh.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/heads_params.cuh"
#include "flce/common/params.cuh"
#else
#include "templates/common/heads_params.cuh"
#include "templates/common/params.cuh"
#endif

namespace flce {

enum : int { kLtThreads = 256 };
enum : int { kLtTileColumns = 512 };       ///< columns that a warp has at a time
enum : int { kLtBlockRows = 64 };          ///< rows of a block of dlogits
enum : int { kLtRetainedColumns = 8192 };  ///< columns of a block of retained exponentials

/// Sums of hidden · weightᵀ of a stretch of columns, as the library's product left them. Without `hidden` and `weight`.
struct LtForwardParams : ForwardParams {
    const float* sums;  ///< [rows, ld]
    long long ld;
    void* exponentials;       ///< blocks of [tokens, kLtRetainedColumns], from the launch's first row on
    const float* references;  ///< [rows]
    long long block_bytes;    ///< from one block to the next
    int retained_columns;     ///< retained columns of the vocabulary, from its start; 0: nothing is retained
    int first_column;         ///< first column of the stretch in the vocabulary, a multiple of kLtTileColumns
    int columns;              ///< columns of the stretch
    int first;                ///< first stretch: nothing has been added to the rows' partial sums
    void* top_keys;           ///< with a top_k: [splits][partial_rows] lists of ClassKey, and their states
    TopState* top_states;
};

/// Sums as LtForwardParams has them; dlogits are of the same rows and columns. `bias_partials`: [⌈rows / kLtBlockRows⌉][ld].
struct LtDlogitsParams : DlogitsParams {
    const float* sums;
    long long sums_ld;
    float* factors;  ///< Gemm::factors of grad_weight, written here; null: nobody reads them
};

/// Both heads' sums of the same rows and columns, one `ld`. Of LtForwardParams nothing that belongs to exponentials.
struct LtDivergenceParams : LtForwardParams {
    RetainedPairs retained;
    const float* teacher_sums;
    const void* teacher_bias;
    const float* lse;  ///< [rows], of a mixture's second walk, and so is teacher_lse
    const float* teacher_lse;
    float teacher_transform[kMaxTransformParameters];
    float beta;
    int unused;
};
struct LtDivergenceDlogitsParams : LtDlogitsParams {
    RetainedPairs retained;  ///< logits for a launch that reads no sums
    const float* teacher_sums;
    const void* teacher_bias;  ///< bias of the launch's columns
    const float* teacher_lse;  ///< [rows], and so is student_divergence
    const float* student_divergence;
    float teacher_transform[kMaxTransformParameters];
    float beta;
    float derivative;  ///< d logit / d (hidden · weightᵀ) at a temperature of 1, but for a softcap's
};
static_assert(+kLtTileColumns == +kPairColumns, "a warp has a block of pairs at a time");

/// Rows of pairs, all of the vocabulary's, that become gradients in their place: of each loss by the student's logits, at an upstream
/// gradient of 1 and before the temperature and the logits' scale. A token's 16-bit gradients lie side by side in the first half of its
/// pairs.
struct PairRowsParams : ForwardParams {
    RetainedPairs retained;
    const float* lse;  ///< [rows], and so are the next two
    const float* teacher_lse;
    const float* student_divergence;
    float beta;
    int unused;
};

/// Scales of the rows of such gradients.
struct DivergenceScalesParams {
    const void* hidden;               ///< [rows, D]
    void* scaled;                     ///< [rows, D], hidden states times their rows' scales; null: nobody reads them
    const float* student_divergence;  ///< [rows]
    const void* coefficients;
    const void* row_targets;
    const PassScalars* scalars;
    float* row_scales;  ///< [rows]
    float* factors;     ///< Gemm::factors of grad_weight, written here
    int rows;
    float derivative;  ///< d logit / d (hidden · weightᵀ) at a temperature of 1, but for a softcap's
};

/// Exponentials of rows whose reference turned out to be far below their logits.
struct LtStaleParams : ForwardParams {
    void* exponentials;
    const float* references;
    const unsigned* stale;  ///< stale of SplitSumsParams
    float* own_sums;        ///< [splits][2][partial_rows]: the largest logit and the sum of exponentials, by stale_sums
    long long block_bytes;
    int retained_columns;
    int unused;
};

/// Sums of grad_hidden: rows of exponentials are multiplied by their scales, and the result is written.
struct LtFinishHiddenParams {
    float* sums;              ///< [rows, D]
    void* grad_hidden;        ///< [rows, D]; null: sums stay sums
    const float* row_scales;  ///< [rows], of exponentials; null: sums of dlogits
    const PassScalars* scalars;
    long long rows;
};

/// Sums of a chunk's grad_weight over row blocks: the result is written.
struct LtFinishWeightParams {
    const float* sums;  ///< [columns, D] or [D, ld]
    void* grad_weight;  ///< at the chunk's first row or column
    const PassScalars* scalars;
    long long ld;
    int columns;
    int unused;
};

/// Hidden states times their rows' scales.
struct LtScaledHiddenParams {
    const void* hidden;       ///< [rows, D]
    void* scaled;             ///< [rows, D]
    const float* row_scales;  ///< [rows]
    const PassScalars* scalars;
    float* factors;  ///< factors of LtDlogitsParams
    int rows;
    int unused;
};

}  // namespace flce

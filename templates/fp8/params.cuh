// Parameter blocks of the kernels of cuda_fp8 and cuda_fp8_sm89. Plain C++, as common/params.cuh.
//
// Codes of a matrix are 8 bits each. Those of hidden and of a stretch of the weight lie [rows, pitch], pitch being D rounded up to 16.
// Turned copies, which sums over rows read, lie [D, positions]: of 64 classes, number 8·j + 2·q + e lies at position 16·q + 2·j + e
// (class_position), of 128 tokens, number 64·i + 16·w + 8·h + l at 32·w + 4·l + 2·i + h (token_position). Exponentials lie both ways:
// [rows, pitch] in the positions of classes, and [classes, positions of tokens].
#pragma once

#if defined(__CUDACC__)
#include "flce/common/params.cuh"
#else
#include "templates/common/params.cuh"
#endif

namespace flce {

enum : int {
    kFp8Quantum = 384,  ///< columns that stretches, chunks and the retained part are whole multiples of: tiles of logits, and groups of
                        ///< classes' positions
    kFp8FirstClasses = 1536,  ///< classes whose logits are looked at for a row's power, a multiple of a tile's
    kFp8ClusterRows = 256,    ///< rows of a cluster of tiles
    kFp8TokenGroup = 128,     ///< tokens of a group of positions
    kFp8ClassGroup = 64,
    kFp8Square = 128,  ///< side of the squares that codes are turned over in
};

/// Numbers of a pass that only the device knows. `weight_largest` may lie in retained memory. Bits of floats that are not negative.
struct Fp8Largest {
    unsigned weight;  ///< largest |W|, of numbers that are finite
    unsigned hidden;  ///< largest |r_i|·|h_id|, of numbers that are finite
    unsigned again;   ///< not 0: a row is written again
    unsigned unused;
};

/// Codes and scales of rows. A hidden_major weight's are columns.
struct Fp8CodesParams {
    const void* from;        ///< [rows, D]
    unsigned char* codes;    ///< [rows, pitch]
    float* scales;           ///< [rows]: a code's number is code · scale; NaN where the row holds a number that is not finite
    float* row_factors;      ///< [rows], of fp8_scales: by which a row's numbers become codes; 0 where they are 0
    unsigned* largest;       ///< raised to the largest |number| that is finite; null: nobody asks
    const unsigned* unless;  ///< a word: 0 where the launch does nothing; null: it does its work
    TargetParams
        targets;  ///< labels of hidden, whose rows have codes and a scale of 0 where tokens are ignored; target null: of the weight
    const float* temperature;
    long long pitch;
    int rows;
    float given_scale;  ///< scale of every row, where the Problem has given scales
};

/// Scales of a weight of codes.
struct Fp8GivenScalesParams {
    const void* from;    ///< codes [rows, D]
    const float* given;  ///< [rows]
    float* scales;       ///< [rows]: copies
    unsigned* largest;   ///< largest of Fp8CodesParams
    int rows;
    int unused;
};

/// With a weight of codes: hidden is in no sum.
struct SmoothingSumsOfCodesParams : SmoothingSumsParams {
    const float* class_scales;  ///< [columns]
};

/// Codes of rows times their factors, turned over. A hidden_major weight's rows are columns, and its codes turned over lie as it does.
struct Fp8TurnParams {
    const void* from;         ///< [rows, D]
    unsigned char* codes;     ///< [D, positions]
    const unsigned* largest;  ///< bits of the number whose power of two is every row's factor (fp8_factor)
    const float* factors;     ///< [rows]: factors beside; a row with 0 may hold anything. null: 1. Of a weight of codes: their scales
    // Codes of the rows as they lie, where they are made as well; `codes` may be null then.
    unsigned char* row_codes;  ///< [rows, D rounded up to 16]
    const float* row_factors;  ///< [rows], row_factors of Fp8CodesParams
    long long positions;
    int rows;
    int unused;
    const unsigned* unless;  ///< Fp8CodesParams', of a hidden_major weight
};

/// A matrix that kernels without tensor maps read or write: rows of elements that follow each other.
struct PlainMatrix {
    void* at;         ///< aligned to 16 bytes, and so is every row of codes
    long long pitch;  ///< elements from one row to the next
    int rows;
    int columns;  ///< elements of a row; what lies behind the last is read as 0
};

/// Logits of a launch's rows and columns. Fields of ForwardParams are the call's; partials are those of the launch's tiles. Where operands
/// are in e4m3 the kernel writes target_logits of the targets among its columns: no other instruction rounds sums as tensor cores do.
/// Matrix: TensorMap or PlainMatrix.
template <class Matrix>
struct Fp8LogitsOf : ForwardParams {
    Matrix hidden_map;
    Matrix weight_map;  ///< codes of the launch's columns
    Matrix turned_map;  ///< to store: exponentials [stored columns, positions of tokens], from the launch's first column on
    const float* row_scales;
    const float* column_scales;   ///< at the launch's first column
    const float* powers;          ///< [rows]: integers k, E = 2^(z·log₂e − k)
    unsigned char* exponentials;  ///< [rows, pitch] at the launch's first column
    const unsigned* again;        ///< [clusters of rows]: 0 where nothing is done; null: everything is
    const unsigned* unless;       ///< Fp8CodesParams'
    long long pitch;
    int first_column;
    int columns;
    int stored;               ///< columns of the launch whose exponentials are stored, the first ones
    int sums;                 ///< whether partial sums are written
    const float* row_shares;  ///< row_shares of Fp8RowsParams, or null
};
using Fp8LogitsParams = Fp8LogitsOf<TensorMap>;
using Fp8LogitsMmaParams = Fp8LogitsOf<PlainMatrix>;

/// grad_hidden and grad_weight: result = factor · Σ a·b. A hidden_major grad_weight has its operands changed over.
template <class Matrix>
struct Fp8GradientOf {
    enum : bool { kSmoothed = false };
    Matrix a_map;
    Matrix b_map;
    Matrix result_map;
    const float* row_factors;  ///< [m]; null: 1
    const unsigned* largest;   ///< every product is divided by the power of two that b's codes were multiplied with
    int m;
    int n;
    int k;     ///< codes of a sum
    int adds;  ///< whether the result is added to what is there
};
using Fp8GradientParams = Fp8GradientOf<TensorMap>;
using Fp8GradientMmaParams = Fp8GradientOf<PlainMatrix>;

/// With label smoothing, grad_weight's classes are less by their weight times a sum over all tokens (smoothing_sums).
template <class Matrix>
struct SmoothedFp8GradientOf : Fp8GradientOf<Matrix> {
    enum : bool { kSmoothed = true };
    const float* hidden_sum;    ///< [D]
    const float* class_weight;  ///< at the launch's first class, where the Problem has class weights
};
/// A result that threads add to by themselves, because its rows, of a hidden_major weight, may end where the copy engine's pieces do not.
template <class Params>
struct WithResult : Params {
    void* result;
};
using SmoothedFp8GradientParams = SmoothedFp8GradientOf<TensorMap>;
using SmoothedFp8GradientMmaParams = SmoothedFp8GradientOf<PlainMatrix>;

/// Logits of rows' targets from codes of single rows, as the products have them.
struct Fp8TargetsParams {
    const void* hidden;
    const void* weight;
    const void* bias;
    const float* class_offset;
    TargetParams targets;
    const float* temperature;
    float* target_logits;  ///< [rows]
    float transform[kMaxTransformParameters];
    int rows;
    float hidden_scale;  ///< given_scale of Fp8CodesParams, and so is the next one
    float weight_scale;
    int unused;
};

/// With a weight of codes.
struct Fp8TargetsOfCodesParams : Fp8TargetsParams {
    const float* class_scales;  ///< [columns]
};

/// Powers of rows from the partial sums of their first classes.
struct Fp8PowersParams {
    const float* partials;
    const float* target_logits;
    float* powers;
    TargetParams targets;
    const float* temperature;
    long long partial_rows;
    int rows;
    int splits;
};

/// Adds a launch's partial sums to the sums of columns before.
struct Fp8MergeParams {
    const float* partials;
    float* running;
    long long partial_rows;
    int rows;
    int splits;
    int first;  ///< nothing before it
    int unused;
};

/// Finds rows whose exponentials are out of range, and gives them another power. Backward is left the targets' logits.
struct Fp8StaleParams {
    const float* running;
    const float* target_logits;     ///< [rows]
    float* retained_target_logits;  ///< [rows]
    float* powers;
    unsigned* again;  ///< [clusters of rows]
    unsigned* any;
    long long partial_rows;
    int rows;
    float most;  ///< most powers of two above a row's own
};

/// Backward's numbers of rows: dz_ij = factor·E_ij.
struct Fp8RowsParams {
    const void* hidden;
    const void* coefficients;
    const void* row_targets;
    // Numbers that forward has left, in memory that a gradient may be written over later.
    const float* retained_powers;         ///< [rows]; null: forward has left nothing, and powers follow from lse
    const float* retained_target_logits;  ///< [rows]
    const Fp8Largest* retained_largest;   ///< only the weight's counts
    float* target_logits;                 ///< [rows]
    float* powers;                        ///< [rows]
    float* factors;                       ///< [rows]
    Fp8Largest* largest;
    int rows;
    float derivative;      ///< d logit / d (hidden · weightᵀ) at a temperature of 1, but for a softcap's
    float* row_smoothing;  ///< [rows], with label smoothing: times a class's weight, what dz is less by
    float* row_shares;     ///< [rows, 2], with the entropy: x and y, a logit's exponential is multiplied by x + y·z (RowShares)
};

/// The target's dz, of its hidden · weightᵀ.
struct Fp8TargetDzParams {
    const void* coefficients;
    const void* row_targets;
    const float* row_temperatures;
    const float* target_logits;  ///< [rows]
    float* target_dz;            ///< [rows]
    float transform[kMaxTransformParameters];
    int rows;
    float derivative;  ///< derivative of Fp8RowsParams
};

/// grad_hidden from its sum and the targets' rows of the weight.
struct Fp8FinishParams {
    const float* sum;  ///< [rows, D]
    const void* weight;
    const void* row_targets;
    const float* target_dz;
    void* grad_hidden;
    int rows;
    int unused;
    const unsigned* largest;     ///< bits of the weight's largest number
    const float* row_smoothing;  ///< row_smoothing of Fp8RowsParams
    const float* weight_sum;     ///< [D], with label smoothing
};

/// With a weight of codes.
struct Fp8FinishOfCodesParams : Fp8FinishParams {
    const float* class_scales;  ///< [columns]
};

/// Rows in the order of their targets, ignored ones last.
struct Fp8OrderParams {
    const void* row_targets;
    int* order;  ///< [rows]
    int rows;
    int unused;
};

/// Adds rows of hidden to grad_weight's rows of their targets, and to grad_bias.
struct Fp8TargetRowsParams {
    const void* hidden;
    const void* row_targets;
    const float* target_dz;
    const int* order;
    void* grad_weight;  ///< or null
    void* grad_bias;    ///< or null
    int rows;
    int unused;
};

/// grad_bias of a chunk's columns, but for the targets' elements.
struct Fp8BiasParams {
    const unsigned char* turned;  ///< [columns, positions]
    const float* factors;         ///< [rows]
    void* grad_bias;              ///< at the first column
    long long positions;
    int columns;
    int rows;
    const float* smoothing_total;  ///< Σ row_smoothing, with label smoothing
    const float* class_weight;     ///< at the first column, with label smoothing, where the Problem has class weights
};

}  // namespace flce

// The CPU backend's machine code: which functions an object holds, how they are called, and their emission. Functions depend on the
// structure of the Spec (dtypes, layout, which options exist), on the register block and on the instruction set; shapes and option values
// are arguments, so one object serves every shape of that structure.
//
// Operands of a GEMM are packed in panels: `width` rows (of A) or columns (of B) side by side, for each unit of depth. A unit is one fp32
// number, or two bf16 numbers (depths 2u and 2u + 1) where bf16 pairs are multiplied; both take 4 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "flce/plan.hpp"
#include "generator/cpu/function_builder.hpp"
#include "templates/common/row_math.cuh"

namespace flce {

/// One token in backward.
struct GradRow {
    static constexpr std::int32_t kElsewhere = -1;
    static constexpr std::int32_t kIgnored = -2;  ///< gradients of 0; rows that only fill up register blocks have it too
    float lse;
    RowCoefficients coefficients;
    float temperature;
    std::int32_t target;  ///< column of the label within the vocabulary chunk, or one of the above
    std::int32_t group;   ///< group whose columns are ruled out, but for the target; -1: none
    float exponent;       ///< with fp8: k of its exponentials (templates/common/fp8_codes.cuh)
    float at_lse;         ///< with fp8: RowShares', and so is the next one
    float slope;
};

/// One token in backward, where the spec has fp8.
struct Fp8Row {
    float factor;           ///< r, times which its exponentials are gradients of its logits
    std::int32_t target;    ///< GradRow's, or kElsewhere
    float target_gradient;  ///< gradient of the label's logit, in the step whose chunk has it
    float smoothing;        ///< with label smoothing: times a class's weight, what gradients of its logits are less by
};

/// One token in forward, where the spec has class_groups.
struct GroupRow {
    std::int32_t target;  ///< column of the label within the tile, or GradRow::kElsewhere
    std::int32_t group;   ///< group of GradRow
};
inline constexpr std::int32_t kNoClassGroup = -2;  ///< group of a column that belongs to none, which no row has

/// C[micro_m, micro_n] = A·B, or += A·B when `accumulate` is not 0, over `units` of depth. Meanwhile it asks for the cache lines from
/// `prefetch` on, kPrefetchBytes for each unit.
using MicroKernel = void (*)(std::int64_t units, const void* a, const void* b, float* c, std::int64_t ldc, std::int64_t accumulate,
                             const void* prefetch);
inline constexpr std::int64_t kPrefetchBytes = 16;
/// One panel: `valid` ≤ width lines of `depth` elements; the rest is zero-filled. `ld` counts elements between lines (where depth is
/// contiguous) or between depths (where lines are).
using PackPanel = void (*)(const void* source, std::int64_t ld, void* panel, std::int64_t valid, std::int64_t depth);
/// Transforms the logits z [rows, cols] in place (columns past cols, up to the next full vector, become −infinity) and writes each row's
/// sums; target_logit and top1 are left alone. `temperatures`: the rows', read where the spec has temperature, as `class_offset` is;
/// `group_rows` and the columns' `class_groups` where it has class_groups.
using ForwardTile = void (*)(float* z, std::int64_t ldz, std::int64_t rows, std::int64_t cols, const float* bias, const float* class_weight,
                             const float* parameters, const float* temperatures, RowSums* sums, const float* class_offset,
                             const GroupRow* group_rows, const std::int32_t* class_groups);
/// Turns z [rows, cols] into the gradient of hidden · weightᵀ + bias, in place; columns cols … width − 1 become 0. Column 0 is the
/// chunk's `first_column`. With fp8 a row's other classes than the target become exponentials 2^(z·log2 e − k), times the softcap's slope;
/// where the spec has the entropy also times at_lse + slope·(z − lse).
using BackwardTile = void (*)(float* z, std::int64_t ldz, std::int64_t rows, std::int64_t cols, std::int64_t width, const float* bias,
                              const float* class_weight, const float* parameters, const GradRow* grad_rows, std::int64_t first_column,
                              const float* class_offset, const std::int32_t* class_groups);
/// out[c] = Σ_r x[r, c], in order of r.
using ColumnSums = void (*)(const float* x, std::int64_t ldx, std::int64_t rows, std::int64_t cols, float* out);
/// Converts x [rows, cols] into the destination's dtype, writing or accumulating as the function's name says.
using StoreTile = void (*)(const float* x, std::int64_t ldx, void* destination, std::int64_t ldd, std::int64_t rows, std::int64_t cols);
/// count elements of the spec's dtype as fp32.
using ToFloat = void (*)(const void* source, float* destination, std::int64_t count);

namespace cpu_symbol {
inline constexpr const char* kMicroKernel = "flce_micro_kernel";
inline constexpr const char* kPackHidden = "flce_pack_hidden";                   // A of the logits: M tokens, K hidden
inline constexpr const char* kPackWeightLogits = "flce_pack_weight_logits";      // B of the logits: N vocabulary, K hidden
inline constexpr const char* kPackWeightGrad = "flce_pack_weight_grad";          // B of grad_hidden: N hidden, K vocabulary
inline constexpr const char* kPackHiddenGrad = "flce_pack_hidden_grad";          // B of grad_weight: N hidden, K tokens
inline constexpr const char* kPackDlogitsRows = "flce_pack_dlogits_rows";        // A of grad_hidden: M tokens, K vocabulary
inline constexpr const char* kPackDlogitsColumns = "flce_pack_dlogits_columns";  // A of grad_weight: M vocabulary, K tokens
inline constexpr const char* kForwardTile = "flce_forward_tile";
inline constexpr const char* kBackwardTile = "flce_backward_tile";
inline constexpr const char* kColumnSums = "flce_column_sums";
inline constexpr const char* kWriteFloat = "flce_write_float";
inline constexpr const char* kAddFloat = "flce_add_float";
inline constexpr const char* kStoreHidden = "flce_store_hidden";  // spec dtype, write
inline constexpr const char* kStoreWeight = "flce_store_weight";  // [vocabulary, hidden] into grad_weight's layout, dtype and mode
inline constexpr const char* kStoreBias = "flce_store_bias";      // grad_weight's dtype and mode
inline constexpr const char* kToFloat = "flce_to_float";
}  // namespace cpu_symbol

[[nodiscard]] VectorTarget vector_target(const CpuProperties& cpu, const CpuPlan& plan);

/// Emits every function above into `module`.
void emit_cpu_code(llvm::Module& module, const Spec& spec, const CpuProperties& cpu, const CpuPlan& plan);

/// Text of all that emit_cpu_code's result depends on: the Spec's structure, register block, instruction set, and a digest of the
/// generator's sources. The Spec's values are replaced by stand-ins, so that they cannot matter. With the digest no version has to be
/// bumped by hand.
[[nodiscard]] std::string cpu_code_identity(const Spec& spec, const CpuProperties& cpu, const CpuPlan& plan);

// The parts of emit_cpu_code.
struct PackOptions {
    DType source = DType::fp32;
    DType rounded = DType::fp32;    ///< a 16-bit dtype: numbers read from an fp32 source are rounded to it
    bool depth_contiguous = false;  ///< depth is the contiguous dimension of the source, so that packing transposes
    int width = 0;
    bool bf16_pairs = false;
};
void emit_micro_kernel(llvm::Module& module, const VectorTarget& target, const std::string& symbol, int micro_m, int micro_n,
                       bool bf16_pairs);
void emit_pack(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const PackOptions& options);
void emit_forward_tile(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const Spec& spec);
void emit_backward_tile(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const Spec& spec);
void emit_column_sums(llvm::Module& module, const VectorTarget& target, const std::string& symbol);
struct StoreOptions {
    DType destination = DType::fp32;
    GradMode mode = GradMode::write;
    bool transposed = false;  ///< destination[c · ldd + r] instead of destination[r · ldd + c]
};
void emit_store(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const StoreOptions& options);
void emit_to_float(llvm::Module& module, const VectorTarget& target, const std::string& symbol, DType source);

/// Transposes lanes × lanes floats held in `rows`; a null row stands for lanes nobody reads.
[[nodiscard]] FunctionBuilder::Values emit_transpose(FunctionBuilder& builder, FunctionBuilder::Values rows);

}  // namespace flce

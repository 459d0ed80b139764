// Products of cuda_lt as launch programs name them.
#pragma once

#include <string>
#include <utility>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/launch_program.hpp"

namespace flce::lt {

/// A matrix in memory: its address, and elements from one of its rows to the next.
struct Matrix {
    Expr address;
    Expr ld;
};

/// Columns of the vocabulary of the weight, or of its gradient, from `address` on.
[[nodiscard]] inline Matrix weight_matrix(const Spec& spec, bool hidden_major, const Expr& address) {
    return {address, hidden_major ? Expr(spec.padded_vocab_size) : Expr(spec.hidden_size)};
}

/// sums[rows, columns] = hidden · weightᵀ.
[[nodiscard]] inline Statement logits_gemm(const Spec& spec, const Plan& plan, const Expr& rows, const Expr& columns, const Expr& hidden,
                                           const Matrix& weight, bool hidden_major, const Matrix& sums, const Expr& workspace) {
    return {Gemm{.kind = {"logits", false, !hidden_major, spec.dtype, DType::fp32, plan.cuda.library.logits},
                 .m = rows,
                 .n = columns,
                 .k = spec.hidden_size,
                 .a = hidden,
                 .lda = spec.hidden_size,
                 .b = weight.address,
                 .ldb = weight.ld,
                 .result = sums.address,
                 .ld = sums.ld,
                 .workspace = workspace}};
}

/// A part of a matrix' rows or columns.
struct Part {
    Expr first;
    Expr count;
};

/// sums[rows, columns] = hidden · weightᵀ of the teacher's head.
[[nodiscard]] inline Statement teacher_gemm(const Spec& spec, const Plan& plan, const Part& rows, const Part& columns, const Matrix& sums,
                                            const Expr& workspace) {
    const Spec teacher = teacher_head(spec);
    const auto element = static_cast<std::int64_t>(element_bytes(spec.dtype));
    const bool hidden_major = spec.layout == WeightLayout::hidden_major;
    const std::int64_t step = element * (hidden_major ? 1 : teacher.hidden_size);
    return logits_gemm(teacher, plan, rows.count, columns.count, slot(Slot::teacher_hidden) + rows.first * (element * teacher.hidden_size),
                       weight_matrix(teacher, hidden_major, slot(Slot::teacher_weight) + columns.first * step), hidden_major, sums,
                       workspace);
}

/// sums[rows, D] (+)= dlogits · weight.
[[nodiscard]] inline Statement grad_hidden_gemm(const Spec& spec, const Plan& plan, const Expr& rows, const Expr& columns,
                                                const Matrix& dlogits, const Matrix& weight, bool hidden_major, const Expr& sums,
                                                const Expr& adds, const Expr& workspace) {
    return {Gemm{.kind = {"grad_hidden", false, hidden_major, spec.dtype, DType::fp32, plan.cuda.library.grad_hidden},
                 .m = rows,
                 .n = spec.hidden_size,
                 .k = columns,
                 .a = dlogits.address,
                 .lda = dlogits.ld,
                 .b = weight.address,
                 .ldb = weight.ld,
                 .result = sums,
                 .ld = spec.hidden_size,
                 .adds = adds,
                 .workspace = workspace}};
}

/// result (+)= dlogitsᵀ · hidden [columns, D], or its transpose where the gradient is hidden_major. `factors`: as of Gemm.
[[nodiscard]] inline Statement grad_weight_gemm(const Spec& spec, const Plan& plan, const Expr& rows, const Expr& columns,
                                                const Matrix& dlogits, const Expr& hidden, DType dtype, const Matrix& result,
                                                const Expr& adds, const Expr& factors, const Expr& workspace) {
    const GemmKind kind{"grad_weight", true, false, spec.dtype, dtype, plan.cuda.library.grad_weight};
    const Matrix of_hidden{hidden, spec.hidden_size};
    const bool hidden_major = spec.layout == WeightLayout::hidden_major;
    const Matrix& a = hidden_major ? of_hidden : dlogits;
    const Matrix& b = hidden_major ? dlogits : of_hidden;
    return {Gemm{.kind = kind,
                 .m = hidden_major ? Expr(spec.hidden_size) : columns,
                 .n = hidden_major ? columns : Expr(spec.hidden_size),
                 .k = rows,
                 .a = a.address,
                 .lda = a.ld,
                 .b = b.address,
                 .ldb = b.ld,
                 .result = result.address,
                 .ld = result.ld,
                 .adds = adds,
                 .factors = factors,
                 .workspace = workspace}};
}

}  // namespace flce::lt

// Numbers of 8 bits in the reference of an FP8 head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "flce/spec.hpp"

namespace flce {

struct ReferenceProblem;

/// Operands of an FP8 head's three products as they are rounded, and everything else in Real. Codes are those of
/// templates/common/fp8_codes.cuh; the tests' truth has its own.
template <class Real>
class ReferenceFp8 {
public:
    /// Nothing where the spec has no fp8. `hidden`: [N, D].
    ReferenceFp8(const ReferenceProblem& problem, std::span<const Real> hidden);

    /// Rows of hidden [N, D] as operands of the logits.
    [[nodiscard]] const Real* hidden() const { return hidden_.data(); }
    /// A row of the weight becomes an operand of the logits.
    void to_logit_operand(std::span<Real> row) const { to_logit_operand(row, spec_.fp8_weight_scale); }
    /// Numbers of the weight become operands of grad_hidden.
    void to_gradient_operand(std::span<Real> numbers) const;
    /// The exponential of a logit, times the softcap's slope and the row's share, rounded, as its part of a gradient: times the common
    /// slope · factor(token) it is the gradient.
    [[nodiscard]] Real exponential(Real z, Real share, Real lse) const;
    /// r of a token, whose probabilities are multiplied by `a`.
    [[nodiscard]] Real factor(Real a, Real lse) const;
    /// Makes the operands of grad_weight from every token's r, 0 for ignored ones.
    void set_factors(std::span<const Real> factors, std::span<const Real> hidden);
    /// Row `token` of e4m3(h · r · 2^q) · 2^−q.
    [[nodiscard]] const Real* gradient_hidden(std::int64_t token) const { return gradient_hidden_.data() + token * spec_.hidden_size; }

private:
    /// `given`: the spec's scale of the operand, or 0.
    void to_logit_operand(std::span<Real> row, double given) const;
    /// Largest |number| of the weight that is finite.
    [[nodiscard]] float largest_of_weight(const ReferenceProblem& problem) const;
    [[nodiscard]] float largest_of_codes(const ReferenceProblem& problem) const;
    [[nodiscard]] float exponent(Real lse) const;

    Spec spec_;
    std::vector<Real> hidden_;
    std::vector<Real> gradient_hidden_;
    int weight_power_ = 0;
};

}  // namespace flce

#include "autotune/judge.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/error_bounds.hpp"

namespace flce {
namespace {

/// A bound holds where the inputs allow it: not where the error to expect of them is larger. No bound lets everything pass, if 2 ·
/// yardstick does not.
Verdict without_cap(Verdict verdict, double expected, double cap) {
    verdict.bound = std::max(verdict.bound, std::min(expected, 0.5));
    if (expected > cap) verdict.bound = std::max(verdict.bound, 2 * verdict.yardstick);
    return verdict;
}

}  // namespace

Judge::Judge(DType dtype, double product_norm)
    // A rounding's root mean square is 0.4 units; partial sums are √½ of the whole on average.
    : dtype_(dtype), logit_error_(0.4 * unit_roundoff(DType::fp32) * std::sqrt(0.5) * product_norm) {}

Verdict Judge::output(const NormPair& norms, const LogitGradientSizes* sizes) const {
    return output(norms, sizes, output_error_cap(dtype_));
}

Verdict Judge::loss(const NormPair& norms, const Spec& spec) const { return output(norms, nullptr, loss_error_cap(spec)); }

Verdict Judge::output(const NormPair& norms, const LogitGradientSizes* sizes, double cap) const {
    const double size = std::sqrt(norms.kernel.reference2 / static_cast<double>(std::max<std::size_t>(norms.count, 1)));
    const Verdict verdict = judged(norms, 8 * unit_roundoff(DType::fp32) + (size > 0 ? 2 * logit_error_ / size : 0), cap);
    return sizes == nullptr || size == 0 ? verdict : without_cap(verdict, probability_error(*sizes) / size, cap);
}

Verdict Judge::gradient(const NormPair& norms, const LogitGradientSizes* sizes) const {
    // The logits' gradient and the result are rounded; a logit's error reaches a probability through the logit and through lse.
    const double rounding = 0.4 * unit_roundoff(dtype_);
    const double logits = 2 * std::sqrt(2.0) * logit_error_;
    const double cap = gradient_error_cap(dtype_);
    const Verdict verdict = judged(norms, std::sqrt(2 * rounding * rounding + 2 * logits * logits) + 8 * unit_roundoff(DType::fp32), cap);
    if (sizes == nullptr || sizes->gradients == 0) return verdict;
    return without_cap(verdict, probability_error(*sizes) * sizes->probabilities / sizes->gradients, cap);
}

Verdict Judge::retained_grad_weight(const NormPair& norms, std::int64_t num_tokens) const {
    const double rounding = 0.4 * unit_roundoff(dtype_);
    const double logits = 2 * std::sqrt(2.0) * logit_error_;
    const double expected = std::sqrt(3 * rounding * rounding + 2 * logits * logits) + 8 * unit_roundoff(DType::fp32);
    return judged(norms, expected * chance_factor(num_tokens), gradient_error_cap(dtype_) * std::sqrt(2.0), std::sqrt(2.0));
}

Verdict Judge::grad_weight(const NormPair& norms, const LogitGradientSizes& sizes) const {
    constexpr std::int64_t kLongestSum = 384;  // most terms that are added one after the other, in any plan
    const Verdict verdict = gradient(norms, &sizes);
    if (sizes.grad_weight_terms == 0 || norms.kernel.reference2 == 0 || sizes.gradients == 0) return verdict;
    // The common part of tokens' errors does not cancel where terms cancel, as the terms of a calibrated model do.
    const double cancelled = std::sqrt(static_cast<double>(sizes.num_terms) / norms.kernel.reference2) * sizes.grad_weight_terms;
    const double common = probability_error(sizes) * sizes.probabilities / sizes.gradients * std::max(1.0, cancelled);
    // 1 for terms all alike, 1/N for independent ones. Alike terms are rounded alike while the sum stays in a binade: u/√3 of it in root
    // mean square, half the terms at three quarters of the sum.
    const double alike =
        norms.kernel.reference2 / (sizes.grad_weight_terms * sizes.grad_weight_terms * static_cast<double>(sizes.num_terms));
    const auto length = static_cast<double>(std::min(sizes.num_terms, kLongestSum));
    return without_cap(verdict, std::max(common, 0.2 * unit_roundoff(DType::fp32) * length * alike), gradient_error_cap(dtype_));
}

Verdict Judge::grad_hidden(const NormPair& norms, const LogitGradientSizes& sizes) const {
    const Verdict verdict = gradient(norms, &sizes);
    if (norms.kernel.reference2 == 0) return verdict;
    // An error of lse is common to a row of logits: it adds up over the vocabulary.
    return without_cap(verdict, probability_error(sizes) * sizes.hidden_terms / std::sqrt(norms.kernel.reference2),
                       gradient_error_cap(dtype_));
}

double Judge::probability_error(const LogitGradientSizes& sizes) const {
    // Tokens may be alike, and then their errors are: none averages out.
    return 4 * logit_error_ + unit_roundoff(DType::fp32) * (sizes.largest_lse + 3);
}

Verdict Judge::judged(const NormPair& norms, double floor, double cap, double roundings) {
    const double yardstick = norms.yardstick.relative();
    return {norms.kernel.relative(), yardstick, error_bound(yardstick * roundings, std::min(floor, cap), cap)};
}

double ErrorNorm::relative() const {
    if (std::isnan(difference2)) return difference2;
    if (difference2 == 0) return 0;
    if (reference2 == 0) return std::numeric_limits<double>::infinity();
    return std::sqrt(difference2 / reference2);
}

}  // namespace flce

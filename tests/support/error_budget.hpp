// Largest and expected errors of right outputs, from the sizes of the numbers that outputs are computed from (docs/numerics.md derives
// every term). Each has two sizes. `floor` is the expected error: every rounding has its mean square, independent errors add in quadrature.
// `limit` is an error that only a fault passes: roundings at their largest, sums off by λ·√length of them, everything added up. Bounds of
// whole outputs use the floor, checks of single rows the limit.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "flce/spec.hpp"
#include "runtime/error_bounds.hpp"

namespace flce::test {

struct Budget {
    double floor = 0;
    double limit = 0;
    double alike = 0;  ///< part of the floor, with its sign, that is off alike in every token, so that it adds up where tokens do
};

/// Absolute errors for a Selection, in its order. For gradients: errors of a row's Euclidean norm (of the number itself for a bias).
struct Budgets {
    std::vector<Budget> loss, z_loss, lse, logprobs, entropy, log_sum_sq_probs;  ///< [tokens]
    std::vector<Budget> logit;                                                   ///< [tokens], for any logit of a token
    std::vector<Budget> teacher_logprobs;                                        ///< [tokens]
    std::vector<Budget> grad_hidden;                                             ///< [tokens]
    std::vector<Budget> grad_weight, grad_bias;                                  ///< [vocab]
    // further errors of gradients made of retained exponentials, with label smoothing; else empty
    std::vector<Budget> retained_hidden;                 ///< [tokens]
    std::vector<Budget> retained_weight, retained_bias;  ///< [vocab]
};

inline constexpr double kU32 = 0x1p-24;

/// Floor or limit: how errors arise and how they combine.
struct ErrorModel {
    bool expected;                              ///< floor
    Summation summation = Summation::rounding;  ///< summation of products

    /// Relative error of one rounding to a format of unit roundoff u: its root mean square over a binade's mantissas, or u.
    [[nodiscard]] double rounding(double u) const { return expected ? 0.4 * u : u; }
    /// Error of an fp32 sum of `length` products, relative to the product of their factors' norms. Partial sums of a random walk reach √½
    /// of that on average; λ = 3 of probabilistic rounding analysis otherwise. Truncation is up to 2u a step, always towards 0: losses of
    /// the steps add up. Products below the largest of their step lose as much again.
    [[nodiscard]] double products(std::int64_t length) const {
        const double n = static_cast<double>(length);
        if (expected) return rounding(kU32) * std::sqrt(0.5);
        return kU32 * (8 + (summation == Summation::rounding ? 3 * std::sqrt(n) : 4 * std::ceil(n / kTensorCoreStep)));
    }
    /// Loss of a sum of `length` products of random factors by truncation on average, towards 0, relative to the product of their norms. A
    /// step cuts half a unit of 25 bits off a partial sum that has grown to √(t/length) of the whole, and both mostly have one sign.
    [[nodiscard]] double truncated(std::int64_t length) const {
        if (!expected || summation != Summation::truncating) return 0;
        return kU32 * 0.19 / kTensorCoreStep * std::sqrt(static_cast<double>(length));
    }
    /// Expected difference between the logit of a class that a teacher names, a sum of `length` products of its own in fp32, and the logits
    /// in lse, relative to their size. Where the largest product comes first each step of tensor cores cuts half a unit of the whole sum's
    /// last place off, always towards 0. A lane has every 32nd product, and five additions join the lanes.
    [[nodiscard]] double apart(std::int64_t length) const {
        if (!expected || summation != Summation::truncating) return 0;
        const double n = static_cast<double>(length);
        return kU32 * std::hypot(0.75 * std::ceil(n / kTensorCoreStep), 0.4 * std::sqrt(n / 32 + 5));
    }
    /// Largest error of `length` terms added to an fp32 accumulator one after the other, relative to the sum of their sizes. Terms may all
    /// be alike (a smoothing term in a row with one label), and then their roundings are alike too.
    [[nodiscard]] static double accumulating(std::int64_t length) { return kU32 * (8 + static_cast<double>(length)); }
    /// Error of an fp32 sum of `length` numbers of one sign, relative to the sum.
    [[nodiscard]] double sum(std::int64_t length) const {
        return expected ? 3 * rounding(kU32) : kU32 * (8 + 3 * std::sqrt(static_cast<double>(length)));
    }
};
inline constexpr ErrorModel kExpected{true};
inline constexpr ErrorModel kLargest{false};

/// Adds errors as a model says.
class ErrorSum {
public:
    explicit ErrorSum(const ErrorModel& model) : expected_(model.expected) {}
    ErrorSum& add(double error) {
        total_ += expected_ ? error * error : std::fabs(error);
        return *this;
    }
    [[nodiscard]] double value() const { return expected_ ? std::sqrt(total_) : total_; }

private:
    bool expected_;
    double total_ = 0;
};

/// A Budget of errors that add up.
class BudgetSum {
public:
    BudgetSum(const ErrorModel& expected, const ErrorModel& largest) : floor_(expected), limit_(largest) {}
    BudgetSum& add(double floor, double limit) {
        floor_.add(floor);
        limit_.add(limit);
        return *this;
    }
    [[nodiscard]] Budget value() const { return {floor_.value(), limit_.value()}; }

private:
    ErrorSum floor_;
    ErrorSum limit_;
};

/// A token's part of the error of its logits' gradient: sizes of the terms of a + b·z, t and s, and the error of its lse.
struct TokenSizes {
    double hidden_norm = 0;
    double lse = 0;
    double entropy = 0;
    double slope = 0;       ///< Σ |terms| that multiply p_j
    double slope_z = 0;     ///< |factor of p_j·(log p_j + entropy)|
    double hit = 0;         ///< |term subtracted from the label's logit|
    double spread = 0;      ///< |term subtracted from every logit, times c_j|
    double loss_slope = 0;  ///< |the part of slope that the loss has|
    double teacher = 0;     ///< |term subtracted from the logit of a class with a teacher's probability of 1|
    double temperature = 1;
    Budget lse_error;
    Budget factor_error;  ///< relative error of the loss's factor
    [[nodiscard]] double factor_error_of(const ErrorModel& model) const { return model.expected ? factor_error.floor : factor_error.limit; }
    [[nodiscard]] double lse_error_of(const ErrorModel& model) const { return model.expected ? lse_error.floor : lse_error.limit; }
};

/// One logit's sizes.
struct LogitSizes {
    double z = 0;
    double offset = 0;  ///< |the class's offset|, which z has in it
    double p = 0;
    double gain = 0;            ///< |∂z / ∂(h·w + b)|
    double product = 0;         ///< ‖h‖·‖w‖ + |b|
    double logit_gradient = 0;  ///< |gradient with respect to z|
    double gradient = 0;        ///< |gradient with respect to h·w + b|
    double class_weight = 1;
    bool is_label = false;
    double named = 0;     ///< |term that the teacher subtracts|, before gain
    int times_named = 0;  ///< number of equal ids in `named`
};

/// Error of a logit: its product summed in fp32, then bias, scale and softcap.
[[nodiscard]] inline double logit_error(const Spec& spec, const LogitSizes& e, const ErrorModel& model) {
    const double roundings = (spec.softcap > 0 ? 4 : 0) + (spec.logit_scale != 1 ? 1 : 0) + (spec.bias ? 1 : 0) +
                             (spec.temperature ? 1 : 0) + (spec.class_offset ? 1 : 0) + 1;
    return ErrorSum(model)
        .add(model.products(spec.hidden_size) * e.gain * e.product)
        .add(model.truncated(spec.hidden_size) * e.gain * e.product)
        .add(roundings * model.rounding(kU32) * (std::fabs(e.z) + e.offset))
        .value();
}

/// Error of a retained exponential where label smoothing is subtracted from its product: the exponential is rounded before.
[[nodiscard]] inline double retained_error(const Spec& spec, const TokenSizes& t, const LogitSizes& e, const ErrorModel& model) {
    return (e.p * t.slope + (e.is_label ? t.hit : 0) + e.named) * model.rounding(unit_roundoff(spec.dtype)) * e.gain;
}

/// Error of the gradient with respect to h·w + b from the difference between lse and the logit of a class that a teacher names. The error
/// has one sign in all such classes. The target's logit is made like the logits in lse.
[[nodiscard]] inline double apart_error(const Spec& spec, const TokenSizes& t, const LogitSizes& e, const ErrorModel& model) {
    if (e.times_named == 0 || e.is_label) return 0;
    return e.p * t.slope * std::expm1(model.apart(spec.hidden_size) * std::fabs(t.lse)) * e.gain;
}

/// Error of the gradient with respect to h·w + b, as stored for the backward products.
[[nodiscard]] inline double gradient_error(const Spec& spec, const TokenSizes& t, const LogitSizes& e, const ErrorModel& model) {
    if (spec.support && e.times_named == 0) return 0;  // exactly, whatever the token's sizes
    const double u = model.rounding(kU32);
    const double dz = logit_error(spec, e, model);
    const double lse = t.lse_error_of(model);
    ErrorSum sum(model);
    // p has the relative error of exp(z − lse); a + b·z is a difference of numbers as large as lse and z.
    sum.add(e.p * t.slope * ErrorSum(model).add(dz).add(lse).add(3 * u).value() * e.gain);
    if (t.slope_z > 0) {
        const double log_p = std::fabs(e.z - t.lse);
        sum.add(e.p * t.slope_z * (1 + log_p + t.entropy) * ErrorSum(model).add(dz).add(lse).add(3 * u).value() * e.gain);
        sum.add(e.p * t.slope_z * u * (std::fabs(t.lse) + t.entropy + std::fabs(e.z)) * e.gain);
    }
    sum.add(2 * u * ((e.is_label ? t.hit : 0) + t.spread * e.class_weight) * e.gain);
    if (t.teacher > 0) {
        sum.add(2 * u * e.times_named * e.named * e.gain);
        sum.add(e.p * t.slope * model.sum(spec.teacher_top_k) * e.gain);  // the probabilities' sum
        if (spec.softcap > 0 && !spec.offset_gradient && e.times_named > 0) {
            // The slope of a softcap is taken from log p + lse, which are rounded to their own sizes; it is 0 as near to the cap as that.
            const double sizes = ((2 * std::fabs(e.z) + 3 * std::fabs(t.lse)) * t.temperature + 3 * e.offset) / spec.softcap;
            const double slope = (model.expected ? 2 * (3 + sizes) : 4 * (7 + sizes)) * kU32;
            sum.add((e.named + e.logit_gradient) * std::fabs(spec.logit_scale) / t.temperature * slope);
        }
    }
    sum.add(e.gradient * (spec.temperature ? 5 : 4) * u);
    sum.add((e.p * t.loss_slope + (e.is_label ? t.hit : 0) + t.spread * e.class_weight) * t.factor_error_of(model) * e.gain);
    sum.add(e.gradient * model.rounding(unit_roundoff(spec.dtype)));
    if (spec.softcap > 0 &&
        !spec.offset_gradient) {  // 1 − tanh²: tanh's two roundings twice, its argument's error, and never exact where it should be 0
        const double scale = std::fabs(spec.logit_scale);
        sum.add(e.logit_gradient * 4 * kU32 * scale);
        sum.add(e.gradient * 2 * model.products(spec.hidden_size) * scale * e.product / spec.softcap);
    }
    if (spec.dtype == DType::fp16) sum.add((t.slope + t.hit) * 0x1p-38);  // below fp16's range once the largest is scaled to its top
    return sum.value();
}

}  // namespace flce::test

#include "autotune/reference_fp8.hpp"

#include <algorithm>
#include <cmath>

#include "autotune/reference.hpp"
#include "runtime/layer/number_formats.hpp"
#include "templates/common/fp8_codes.cuh"

namespace flce {
namespace {

template <class Real>
float largest_finite(std::span<const Real> numbers) {
    float largest = 0;
    for (const Real number : numbers) {
        const float size = std::abs(static_cast<float>(number));
        if (std::isfinite(size)) largest = std::max(largest, size);
    }
    return largest;
}

/// NaN where there is one.
template <class Real>
float largest_of(std::span<const Real> row) {
    float largest = 0;
    for (const Real number : row) {
        const float size = std::abs(static_cast<float>(number));
        if (!(size <= largest)) largest = size;
        if (std::isnan(size)) break;
    }
    return largest;
}

template <class Real>
void to_e4m3(std::span<Real> numbers, int power) {
    for (Real& number : numbers) {
        const auto scaled = static_cast<float>(std::ldexp(number, power));
        number = std::ldexp(Real{fp8::rounded_to_e4m3(scaled)}, -power);
    }
}

}  // namespace

template <class Real>
ReferenceFp8<Real>::ReferenceFp8(const ReferenceProblem& problem, std::span<const Real> hidden) : spec_(problem.spec) {
    if (!is_fp8(spec_)) return;
    const auto d = static_cast<std::size_t>(spec_.hidden_size);
    hidden_.assign(hidden.begin(), hidden.end());
    for (std::size_t first = 0; first < hidden_.size(); first += d) to_logit_operand({hidden_.data() + first, d}, spec_.fp8_hidden_scale);
    weight_power_ = fp8::e4m3_power(is_quantized(spec_) ? largest_of_codes(problem) : largest_of_weight(problem));
}

template <class Real>
float ReferenceFp8<Real>::largest_of_codes(const ReferenceProblem& problem) const {
    float largest = 0;
    for (std::int64_t row = 0; row < spec_.vocab_size; ++row) {
        for (std::int64_t column = 0; column < spec_.hidden_size; ++column) {
            const float size = std::abs(problem.dequantized(row, column));
            if (std::isfinite(size)) largest = std::max(largest, size);
        }
    }
    return largest;
}

template <class Real>
float ReferenceFp8<Real>::largest_of_weight(const ReferenceProblem& problem) const {
    const auto d = static_cast<std::size_t>(spec_.hidden_size);
    const bool by_rows = spec_.layout == WeightLayout::vocab_major;
    const auto rows = static_cast<std::size_t>(by_rows ? spec_.vocab_size : spec_.hidden_size);
    const auto pitch = static_cast<std::size_t>(by_rows ? spec_.hidden_size : spec_.padded_vocab_size);
    float largest = 0;
    std::vector<float> row(by_rows ? d : static_cast<std::size_t>(spec_.vocab_size));
    for (std::size_t i = 0; i < rows; ++i) {
        to_real(problem.weight + i * pitch * element_bytes(spec_.dtype), spec_.dtype, row.data(), row.size());
        largest = std::max(largest, largest_finite(std::span<const float>(row)));
    }
    return largest;
}

template <class Real>
void ReferenceFp8<Real>::to_logit_operand(std::span<Real> row, double given) const {
    const bool int8 = spec_.fp8 == Fp8Operands::int8;
    const float largest = largest_of(std::span<const Real>(row));
    const fp8::RowScale scale = given != 0.0 ? fp8::given_row_scale(largest, static_cast<float>(given))
                                             : fp8::row_scale(largest, int8 ? fp8::int8_most() : fp8::e4m3_most());
    for (Real& number : row) {
        const float scaled = static_cast<float>(number) * scale.factor;
        number = Real{int8 ? fp8::rounded_to_int8(scaled) : fp8::rounded_to_e4m3(scaled)} * Real{scale.scale};
    }
}

template <class Real>
void ReferenceFp8<Real>::to_gradient_operand(std::span<Real> numbers) const {
    to_e4m3(numbers, weight_power_);
}

template <class Real>
float ReferenceFp8<Real>::exponent(Real lse) const {
    return fp8::exponent_of_sum(static_cast<float>(lse), spec_.fp8_dlogits == Fp8Dlogits::e4m3);
}

template <class Real>
Real ReferenceFp8<Real>::exponential(Real z, Real share, Real lse) const {
    const auto above = std::exp2(z * Real{fp8::log2_e()} - Real{exponent(lse)});
    const auto power = above == 0 ? Real{0} : above * share;  // a logit may be −inf, of which no share is taken
    return Real{spec_.fp8_dlogits == Fp8Dlogits::e5m2 ? fp8::rounded_to_e5m2(static_cast<float>(power))
                                                      : fp8::rounded_to_e4m3(static_cast<float>(power))};
}

template <class Real>
Real ReferenceFp8<Real>::factor(Real a, Real lse) const {
    return a * std::exp2(Real{exponent(lse)} - lse * Real{fp8::log2_e()});
}

template <class Real>
void ReferenceFp8<Real>::set_factors(std::span<const Real> factors, std::span<const Real> hidden) {
    const auto d = static_cast<std::size_t>(spec_.hidden_size);
    gradient_hidden_.assign(hidden.begin(), hidden.end());
    float largest = 0;
    for (std::size_t i = 0; i < factors.size(); ++i) {
        const float mine = std::abs(static_cast<float>(factors[i])) * largest_finite(hidden.subspan(i * d, d));
        if (std::isfinite(mine)) largest = std::max(largest, mine);
        for (std::size_t k = 0; k < d; ++k) gradient_hidden_[i * d + k] *= factors[i];
    }
    to_e4m3(std::span<Real>(gradient_hidden_), fp8::e4m3_power(largest));
}

template <class Real>
void BasicReference<Real>::set_fp8_factors() {
    std::vector<Real> factors(lse_.size());
    for (std::size_t i = 0; i < factors.size(); ++i) {
        const auto token = static_cast<std::int64_t>(i);
        if (!ignored(token)) factors[i] = fp8_factor(token);
    }
    fp8_.set_factors(factors, hidden_);
}

template <class Real>
Real BasicReference<Real>::common_slope(std::int64_t token) const {
    const Spec& spec = problem_.spec;
    const Real scale = spec.offset_gradient ? Real(1) : static_cast<Real>(spec.logit_scale);
    return spec.temperature ? scale / problem_.temperature[static_cast<std::size_t>(token)] : scale;
}

template <class Real>
typename BasicReference<Real>::Fp8Shares BasicReference<Real>::fp8_shares(std::int64_t token) const {
    const auto i = static_cast<std::size_t>(token);
    const std::int64_t target = problem_.target[i];
    const Real a = unrounded_gradient(token, target, {}, Real(1), Real(0)) - unrounded_gradient(token, target, {}, Real(0), Real(0));
    const Real b = problem_.grad_entropy.empty() ? Real(0) : -Real{problem_.grad_entropy[i]};
    if (b == 0) return {a, Real(1), Real(0)};
    const Real at_lse = a + b * lse_[i];
    const Real scale = std::max(std::abs(at_lse), std::abs(b));
    return {scale, at_lse / scale, b / scale};
}

template <class Real>
Real BasicReference<Real>::fp8_factor(std::int64_t token) const {
    return fp8_.factor(fp8_shares(token).scale * common_slope(token), lse_[static_cast<std::size_t>(token)]);
}

template <class Real>
Real BasicReference<Real>::fp8_smoothing(std::int64_t token, std::int64_t row) const {
    if (problem_.spec.label_smoothing == 0) return 0;
    return -unrounded_gradient(token, row, {}, Real(0), Real(0)) * common_slope(token);
}

template <class Real>
void BasicReference<Real>::add_smoothing_terms(std::int64_t token, Range rows, const std::vector<Real>& exact,
                                               const std::vector<Real>& rounded, std::span<Real> sum) const {
    const std::size_t width = sum.size();
    const auto add = [&](Real factor, const std::vector<Real>& block, std::int64_t row) {
        const Real* const from = block.data() + static_cast<std::size_t>(row - rows.begin) * width;
        for (std::size_t k = 0; k < width; ++k) sum[k] += factor * from[k];
    };
    for (std::int64_t j = rows.begin; j < rows.end; ++j) {
        const Real smoothing = fp8_smoothing(token, j);
        add(-smoothing, exact, j);
        if (j == problem_.target[static_cast<std::size_t>(token)]) add(smoothing, rounded, j);
    }
}

template <class Real>
Real BasicReference<Real>::fp8_exponential(std::int64_t token, const Logit& z) const {
    const Real lse = lse_[static_cast<std::size_t>(token)];
    const Fp8Shares shares = fp8_shares(token);
    const Real share = shares.at_lse + (shares.slope == 0 ? Real(0) : shares.slope * (z.value - lse));
    return fp8_.exponential(z.value, z.derivative / common_slope(token) * share, lse);
}

template <class Real>
void BasicReference<Real>::load_logit_weight(Range rows, Real* out) const {
    const std::int64_t d = problem_.spec.hidden_size;
    load_weight(rows, {0, d}, out);
    if (!is_fp8(problem_.spec)) return;
    if (is_quantized(problem_.spec)) return;  // codes times their scales are what the logits are products of
    for (std::int64_t j = 0; j < rows.end - rows.begin; ++j) fp8_.to_logit_operand({out + j * d, static_cast<std::size_t>(d)});
}

template class ReferenceFp8<double>;
template class ReferenceFp8<float>;
template void BasicReference<double>::set_fp8_factors();
template void BasicReference<float>::set_fp8_factors();
template BasicReference<double>::Fp8Shares BasicReference<double>::fp8_shares(std::int64_t) const;
template BasicReference<float>::Fp8Shares BasicReference<float>::fp8_shares(std::int64_t) const;
template double BasicReference<double>::fp8_factor(std::int64_t) const;
template float BasicReference<float>::fp8_factor(std::int64_t) const;
template double BasicReference<double>::fp8_smoothing(std::int64_t, std::int64_t) const;
template float BasicReference<float>::fp8_smoothing(std::int64_t, std::int64_t) const;
template void BasicReference<double>::add_smoothing_terms(std::int64_t, Range, const std::vector<double>&, const std::vector<double>&,
                                                          std::span<double>) const;
template void BasicReference<float>::add_smoothing_terms(std::int64_t, Range, const std::vector<float>&, const std::vector<float>&,
                                                         std::span<float>) const;
template double BasicReference<double>::fp8_exponential(std::int64_t, const Logit&) const;
template float BasicReference<float>::fp8_exponential(std::int64_t, const Logit&) const;
template void BasicReference<double>::load_logit_weight(Range, double*) const;
template void BasicReference<float>::load_logit_weight(Range, float*) const;

}  // namespace flce

// The transforms between hidden · weightᵀ + bias and the logits, each written once with its derivative, generic over what a number is:
// traced with text it becomes CUDA source, with LLVM values host code, with double a reference.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "flce/spec.hpp"
#include "templates/common/row_math.cuh"

namespace flce {

/// A logit and its derivative with respect to hidden · weightᵀ + bias.
template <class E>
struct TransformedLogit {
    E logit;
    E derivative;
};

// A transform: evaluate(x, p) gives y and dy/dx, with `p` its parameters (parameter_count of them, in the order that parameters() gives).
// E has +, −, ·, construction from float, and tanh(E) by argument-dependent lookup. Operands of one expression that are traced
// themselves get names first: C++ leaves their order open, and the text is part of a key.

struct ScaleTransform {
    static constexpr std::size_t parameter_count = 1;
    static bool active(const Spec& spec) { return spec.logit_scale != 1.0; }
    static std::vector<double> parameters(const Spec& spec) { return {spec.logit_scale}; }
    template <class E>
    static TransformedLogit<E> evaluate(const E& x, std::span<const E> p) {
        return {x * p[0], p[0]};
    }
};

struct SoftcapTransform {
    static constexpr std::size_t parameter_count = 3;
    static bool active(const Spec& spec) { return spec.softcap != 0.0; }
    // The reciprocal comes in two parts: rounded to one float, cap · (1 / cap) is off by up to a unit of the last place, and by an equal
    // factor in every logit, which no sum over the vocabulary averages out. The number is the reciprocal of the cap as the kernels hold it,
    // so that the two cancel. Both parts are positive, so that an x that has overflowed still meets the cap: ∞·high + ∞·low is neither ∞ −
    // ∞ nor ∞·0.
    static std::vector<double> parameters(const Spec& spec) {
        const double reciprocal = 1.0 / static_cast<double>(static_cast<float>(spec.softcap));
        const double high = std::nextafter(static_cast<float>(reciprocal * (1 - 0x1p-25)), 0.0F);
        return {spec.softcap, high, reciprocal - high};
    }
    template <class E>
    static TransformedLogit<E> evaluate(const E& x, std::span<const E> p) {
        using std::tanh;
        // The derivative comes from t, not from y: y · (1 / softcap) is not 1 where t is, and a saturated logit's gradient must be 0.
        const E most = x * p[1];
        const E rest = x * p[2];
        const E t = tanh(most + rest);
        return {p[0] * t, E(1.0F) - t * t};
    }
    /// The derivative from y alone, which is cap · t rounded: y / cap is 1 where t is, since the reciprocal has two parts.
    template <class E>
    static E derivative_at(const E& y, std::span<const E> p) {
        const E most = y * p[1];
        const E rest = y * p[2];
        const E t = most + rest;
        return E(1.0F) - t * t;
    }
};

/// Values of every active transform's parameters, in the order in which transform_logit consumes them.
[[nodiscard]] inline std::vector<double> transform_parameters(const Spec& spec) {
    std::vector<double> values;
    auto append = [&](const auto& transform) {
        if (!transform.active(spec)) return;
        for (double p : transform.parameters(spec)) values.push_back(p);
    };
    append(ScaleTransform{});
    append(SoftcapTransform{});
    return values;
}

/// Applies the active transforms in order. `parameters` stands for transform_parameters(spec), whatever E makes of them (a literal, a field
/// of a parameter block, a broadcast vector): which transforms are active is structure, their values are not.
template <class E>
[[nodiscard]] TransformedLogit<E> transform_logit(const Spec& spec, const E& x, std::span<const E> parameters) {
    TransformedLogit<E> result{x, E(1.0F)};
    bool first = true;
    auto step = [&](const auto& transform) {
        if (!transform.active(spec)) return;
        const auto p = parameters.first(transform.parameter_count);
        parameters = parameters.subspan(transform.parameter_count);
        const TransformedLogit<E> next = transform.template evaluate<E>(result.logit, p);
        result = {next.logit, first ? next.derivative : result.derivative * next.derivative};
        first = false;
    };
    step(ScaleTransform{});
    step(SoftcapTransform{});
    if (spec.offset_gradient) result.derivative = E(1.0F);
    return result;
}

/// The derivative of a logit from the logit itself, without logit_scale, which is equal for all logits: the softcap's part.
template <class E>
[[nodiscard]] E derivative_at_logit(const Spec& spec, const E& z, std::span<const E> parameters) {
    if (ScaleTransform::active(spec)) parameters = parameters.subspan(ScaleTransform::parameter_count);
    if (!SoftcapTransform::active(spec) || spec.offset_gradient) return E(1.0F);
    return SoftcapTransform::derivative_at<E>(z, parameters.first(SoftcapTransform::parameter_count));
}

/// Derivative of all transforms as a function of the logit, for callers that have no hidden · weightᵀ + bias at hand.
[[nodiscard]] inline LogitSlope logit_slope(const Spec& spec) {
    if (spec.offset_gradient) return {1.0F, 0.0F};
    const float inverse = spec.softcap == 0.0 ? 0.F : static_cast<float>(1.0 / static_cast<double>(static_cast<float>(spec.softcap)));
    return {static_cast<float>(spec.logit_scale), inverse};
}

}  // namespace flce

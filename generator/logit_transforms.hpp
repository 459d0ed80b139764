// The transforms between hidden · weightᵀ + bias and the logits, each written once with its derivative, generic over what a number is: traced with
// text it becomes CUDA source, with LLVM values host code, with double a reference.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "flce/spec.hpp"

namespace flce {

// A transform: y = apply(x, p), dy/dx = derivative(x, y, p), with `p` its parameters (parameter_count of them, in the order that
// parameters() gives). E has +, −, ·, construction from float, and tanh(E) by argument-dependent lookup.

struct ScaleTransform {
    static constexpr std::size_t parameter_count = 1;
    static bool active(const Spec& spec) { return spec.logit_scale != 1.0; }
    static std::vector<double> parameters(const Spec& spec) { return {spec.logit_scale}; }
    template <class E>
    static E apply(const E& x, std::span<const E> p) {
        return x * p[0];
    }
    template <class E>
    static E derivative(const E&, const E&, std::span<const E> p) {
        return p[0];
    }
};

struct SoftcapTransform {
    static constexpr std::size_t parameter_count = 2;
    static bool active(const Spec& spec) { return spec.softcap != 0.0; }
    static std::vector<double> parameters(const Spec& spec) { return {spec.softcap, 1.0 / spec.softcap}; }
    template <class E>
    static E apply(const E& x, std::span<const E> p) {
        using std::tanh;
        return p[0] * tanh(x * p[1]);
    }
    template <class E>
    static E derivative(const E&, const E& y, std::span<const E> p) {
        const E t = y * p[1];  // tanh of the capped argument
        return E(1.0F) - t * t;
    }
};

/// A logit and its derivative with respect to hidden · weightᵀ + bias.
template <class E>
struct TransformedLogit {
    E logit;
    E derivative;
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

/// Applies the active transforms in order. `parameters` stands for transform_parameters(spec), whatever E makes of them (a literal, a field of
/// a parameter block, a broadcast vector): which transforms are active is structure, their values are not.
template <class E>
[[nodiscard]] TransformedLogit<E> transform_logit(const Spec& spec, const E& x, std::span<const E> parameters) {
    TransformedLogit<E> result{x, E(1.0F)};
    bool first = true;
    auto step = [&](const auto& transform) {
        if (!transform.active(spec)) return;
        const auto p = parameters.first(transform.parameter_count);
        parameters = parameters.subspan(transform.parameter_count);
        const E y = transform.template apply<E>(result.logit, p);
        const E dy = transform.template derivative<E>(result.logit, y, p);
        result = {y, first ? dy : result.derivative * dy};
        first = false;
    };
    step(ScaleTransform{});
    step(SoftcapTransform{});
    return result;
}

}  // namespace flce

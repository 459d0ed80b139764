// A number whose arithmetic emits code: what the logit transforms are traced with to become host code.
#pragma once

#include "generator/cpu/function_builder.hpp"

namespace flce {

/// A constant, or a vector (or scalar) of floats in a function being emitted. Products that feed a sum are fused where the target fuses.
class IrFloat {
public:
    IrFloat(float constant) : constant_(constant) {}  // NOLINT(google-explicit-constructor): the transforms write E(1.0F)
    IrFloat(FunctionBuilder& builder, llvm::Value* value, int lanes) : builder_(&builder), value_(value), lanes_(lanes) {}

    [[nodiscard]] bool is_constant() const noexcept { return builder_ == nullptr; }
    /// The value in `builder`, a constant as `lanes` copies.
    [[nodiscard]] llvm::Value* value(FunctionBuilder& builder, int lanes) const;

    friend IrFloat operator+(const IrFloat& a, const IrFloat& b);
    friend IrFloat operator-(const IrFloat& a, const IrFloat& b);
    friend IrFloat operator*(const IrFloat& a, const IrFloat& b);
    friend IrFloat tanh(const IrFloat& x);
    friend IrFloat exp(const IrFloat& x);
    /// a·b + c
    friend IrFloat multiply_add(const IrFloat& a, const IrFloat& b, const IrFloat& c);

private:
    friend struct IrFloatOps;
    FunctionBuilder* builder_ = nullptr;
    llvm::Value* value_ = nullptr;
    int lanes_ = 0;
    float constant_ = 0.F;
};

/// exp within 1.5 ulp of fp32's range of normal numbers; 0 below, +inf above, NaN for NaN.
[[nodiscard]] llvm::Value* emit_exp(FunctionBuilder& builder, llvm::Value* x, int lanes);
/// 2^x, as emit_exp.
[[nodiscard]] llvm::Value* emit_exp2(FunctionBuilder& builder, llvm::Value* x, int lanes);
/// tanh within 2 ulp; ±1 for large arguments, ±infinity included.
[[nodiscard]] llvm::Value* emit_tanh(FunctionBuilder& builder, llvm::Value* x, int lanes);

}  // namespace flce

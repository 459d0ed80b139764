#include "generator/cpu/ir_float.hpp"

#include <cmath>

#include "llvm/IR/IRBuilder.h"

namespace flce {

using llvm::Value;

struct IrFloatOps {
    template <class Fold, class Emit>
    static IrFloat binary(const IrFloat& a, const IrFloat& b, Fold fold, Emit emit) {
        if (a.is_constant() && b.is_constant()) return IrFloat(fold(a.constant_, b.constant_));
        const IrFloat& known = a.is_constant() ? b : a;
        FunctionBuilder& f = *known.builder_;
        return {f, emit(f, a.value(f, known.lanes_), b.value(f, known.lanes_)), known.lanes_};
    }
    template <class Fold, class Emit>
    static IrFloat unary(const IrFloat& x, Fold fold, Emit emit) {
        if (x.is_constant()) return IrFloat(fold(x.constant_));
        return {*x.builder_, emit(*x.builder_, x.value_, x.lanes_), x.lanes_};
    }
};

Value* IrFloat::value(FunctionBuilder& builder, int lanes) const { return is_constant() ? builder.float_splat(constant_, lanes) : value_; }

IrFloat operator+(const IrFloat& a, const IrFloat& b) {
    return IrFloatOps::binary(
        a, b, [](float x, float y) { return x + y; }, [](FunctionBuilder& f, Value* x, Value* y) { return f.ir().CreateFAdd(x, y); });
}
IrFloat operator-(const IrFloat& a, const IrFloat& b) {
    return IrFloatOps::binary(
        a, b, [](float x, float y) { return x - y; }, [](FunctionBuilder& f, Value* x, Value* y) { return f.ir().CreateFSub(x, y); });
}
IrFloat operator*(const IrFloat& a, const IrFloat& b) {
    return IrFloatOps::binary(
        a, b, [](float x, float y) { return x * y; }, [](FunctionBuilder& f, Value* x, Value* y) { return f.ir().CreateFMul(x, y); });
}
IrFloat multiply_add(const IrFloat& a, const IrFloat& b, const IrFloat& c) {
    const IrFloat* known = !a.is_constant() ? &a : !b.is_constant() ? &b : &c;
    if (known->is_constant()) return IrFloat(a.constant_ * b.constant_ + c.constant_);
    FunctionBuilder& f = *known->builder_;
    const int lanes = known->lanes_;
    return {f, f.multiply_add(a.value(f, lanes), b.value(f, lanes), c.value(f, lanes)), lanes};
}
IrFloat tanh(const IrFloat& x) {
    return IrFloatOps::unary(x, [](float v) { return std::tanh(v); }, emit_tanh);
}
IrFloat exp(const IrFloat& x) {
    return IrFloatOps::unary(x, [](float v) { return std::exp(v); }, emit_exp);
}

namespace {

/// Horner's scheme, highest coefficient first.
Value* polynomial(FunctionBuilder& f, Value* x, int lanes, std::initializer_list<float> coefficients) {
    Value* sum = nullptr;
    for (const float c : coefficients) {
        Value* constant = f.float_splat(c, lanes);
        sum = sum == nullptr ? constant : f.multiply_add(sum, x, constant);
    }
    return sum;
}

/// 2^n for −126 ≤ n ≤ 127.
Value* power_of_two(FunctionBuilder& f, Value* n, int lanes) {
    auto& ir = f.ir();
    return ir.CreateBitCast(ir.CreateShl(ir.CreateAdd(n, f.i32_splat(127, lanes)), f.i32_splat(23, lanes)), f.float_type(lanes));
}

}  // namespace

namespace {

constexpr float kShift = 12582912.F;  // 1.5·2²³: adding it leaves the nearest integer in the low bits, without an instruction SSE2 lacks

/// exp(r)·2ⁿ for r in [−ln 2 / 2, ln 2 / 2]; `shifted` is n + kShift.
Value* emit_scaled_exp(FunctionBuilder& f, Value* r, Value* shifted, int lanes) {
    auto& ir = f.ir();
    Value* n = ir.CreateSub(ir.CreateBitCast(shifted, f.int_type(32, lanes)), f.i32_splat(0x4b400000, lanes));
    // exp(r) = 1 + r + r²·P(r) (coefficients: Cephes).
    Value* p = polynomial(f, r, lanes,
                          {1.9875691500e-4F, 1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F});
    Value* y = ir.CreateFAdd(f.multiply_add(p, ir.CreateFMul(r, r), r), f.float_splat(1.F, lanes));
    // 2ⁿ in two factors: n runs from −150 to 128.
    Value* half = ir.CreateAShr(n, f.i32_splat(1, lanes));
    y = ir.CreateFMul(y, power_of_two(f, half, lanes));
    return ir.CreateFMul(y, power_of_two(f, ir.CreateSub(n, half), lanes));
}

}  // namespace

Value* emit_exp(FunctionBuilder& f, Value* x, int lanes) {
    auto& ir = f.ir();
    const auto c = [&](float value) { return f.float_splat(value, lanes); };
    // Beyond these exp is 0 or infinite anyway. Compares keep NaN.
    x = ir.CreateSelect(ir.CreateFCmpOLT(x, c(-104.F)), c(-104.F), x);
    x = ir.CreateSelect(ir.CreateFCmpOGT(x, c(89.F)), c(89.F), x);
    Value* shifted = f.multiply_add(x, c(1.44269504F), c(kShift));
    Value* n_float = ir.CreateFSub(shifted, c(kShift));
    // x − n·ln 2 in two steps: the first constant has 9 bits, so its product with n is exact.
    Value* r = f.multiply_add(n_float, c(-0.693359375F), x);
    r = f.multiply_add(n_float, c(2.12194440e-4F), r);
    return emit_scaled_exp(f, r, shifted, lanes);
}

Value* emit_exp2(FunctionBuilder& f, Value* x, int lanes) {
    auto& ir = f.ir();
    const auto c = [&](float value) { return f.float_splat(value, lanes); };
    x = ir.CreateSelect(ir.CreateFCmpOLT(x, c(-150.F)), c(-150.F), x);
    x = ir.CreateSelect(ir.CreateFCmpOGT(x, c(128.F)), c(128.F), x);
    Value* shifted = ir.CreateFAdd(x, c(kShift));
    Value* r = ir.CreateFMul(ir.CreateFSub(x, ir.CreateFSub(shifted, c(kShift))), c(0.693147181F));
    return emit_scaled_exp(f, r, shifted, lanes);
}

Value* emit_tanh(FunctionBuilder& f, Value* x, int lanes) {
    auto& ir = f.ir();
    Value* bits = ir.CreateBitCast(x, f.int_type(32, lanes));
    Value* sign = ir.CreateAnd(bits, f.i32_splat(static_cast<std::int32_t>(0x80000000U), lanes));
    Value* magnitude = ir.CreateBitCast(ir.CreateAnd(bits, f.i32_splat(0x7fffffff, lanes)), f.float_type(lanes));
    // Small: x + x³·P(x²) (coefficients: Cephes), as 1 − 2/(e²ˣ + 1) would cancel.
    Value* square = ir.CreateFMul(x, x);
    Value* p =
        polynomial(f, square, lanes, {-5.70498872745e-3F, 2.06390887954e-2F, -5.37397155531e-2F, 1.33314422036e-1F, -3.33332819422e-1F});
    Value* small = f.multiply_add(ir.CreateFMul(p, square), x, x);
    Value* e = emit_exp(f, ir.CreateFAdd(magnitude, magnitude), lanes);
    Value* big =
        ir.CreateFSub(f.float_splat(1.F, lanes), ir.CreateFDiv(f.float_splat(2.F, lanes), ir.CreateFAdd(e, f.float_splat(1.F, lanes))));
    big = ir.CreateBitCast(ir.CreateOr(ir.CreateBitCast(big, f.int_type(32, lanes)), sign), f.float_type(lanes));
    return ir.CreateSelect(ir.CreateFCmpOLT(magnitude, f.float_splat(0.625F, lanes)), small, big);
}

}  // namespace flce

// Emits the work on a tile of logits between the GEMMs, and the way of results out of fp32.
#include <limits>

#include "generator/cpu/code.hpp"
#include "generator/cpu/ir_float.hpp"
#include "generator/logit_transforms.hpp"
#include "llvm/IR/IRBuilder.h"

namespace flce {
namespace {

using llvm::Value;
using Arg = FunctionBuilder::Arg;
using Values = FunctionBuilder::Values;

/// Walks columns [0, cols) of a row in vectors; the body learns the mask of the last, partial one (null for full ones).
Values for_columns(FunctionBuilder& f, Value* cols, const Values& carried,
                   const std::function<Values(Value* column, Value* mask, const Values& carried)>& body) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    Value* full = ir.CreateAnd(cols, f.i64(~std::int64_t{lanes - 1}));
    Values result = f.loop(f.i64(0), full, lanes, carried, [&](Value* column, const Values& c) { return body(column, nullptr, c); });
    return f.branch_carried(ir.CreateICmpSLT(full, cols), result,
                            [&](const Values& c) { return body(full, f.lanes_below(full, cols, lanes), c); });
}

/// A logit, and the slope that its exponential is multiplied by, where the spec has fp8: the softcap's.
struct TracedLogit {
    IrFloat logit;
    IrFloat derivative;
    IrFloat softcap_slope;
};

/// The traced transforms of one vector of hidden · weightᵀ.
struct LogitTracer {
    FunctionBuilder& f;
    const Spec& spec;
    Value* bias;
    Value* offset;
    std::vector<IrFloat> parameters;

    LogitTracer(FunctionBuilder& builder, const Spec& s, Value* bias_pointer, Value* parameter_pointer, Value* offset_pointer)
        : f(builder), spec(s), bias(bias_pointer), offset(offset_pointer) {
        const int lanes = f.target().lanes();
        const auto count = static_cast<int>(transform_parameters(spec).size());
        for (int i = 0; i < count; ++i) {
            parameters.emplace_back(f, f.splat(f.load_float(f.at(parameter_pointer, i, 4), DType::fp32, 0), lanes), lanes);
        }
    }
    /// `temperature`: the row's, in every lane, where the spec has it.
    [[nodiscard]] TracedLogit at(Value* row, Value* column, Value* temperature) const {
        const int lanes = f.target().lanes();
        Value* x = f.load_float(f.at(row, column, 4), DType::fp32, lanes);
        if (spec.bias) x = f.ir().CreateFAdd(x, f.load_float(f.at(bias, column, 4), DType::fp32, lanes));
        const auto transformed = transform_logit<IrFloat>(spec, IrFloat(f, x, lanes), parameters);
        TracedLogit traced{transformed.logit, transformed.derivative, IrFloat(1.F)};
        if (is_fp8(spec)) traced.softcap_slope = derivative_at_logit<IrFloat>(spec, traced.logit, parameters);
        if (spec.class_offset) {
            Value* added = f.load_float(f.at(offset, column, 4), DType::fp32, lanes);
            traced.logit = IrFloat(f, f.ir().CreateFAdd(traced.logit.value(f, lanes), added), lanes);
        }
        if (!spec.temperature) return traced;
        const auto divided = [&](const IrFloat& by_one) {
            return IrFloat(f, f.ir().CreateFDiv(by_one.value(f, lanes), temperature), lanes);
        };
        return {divided(traced.logit), divided(traced.derivative), traced.softcap_slope};
    }
};

/// The group and the target's column of a row, each in every lane; null where the spec has no class_groups.
struct RowGroup {
    Value* group = nullptr;
    Value* target = nullptr;
};

/// Whether columns from `column` on are ruled out of the row's softmax, by lane. `first_column`: what a target's column is counted from.
Value* ruled_out(FunctionBuilder& f, const RowGroup& row, Value* class_groups, Value* column, Value* first_column) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    Value* ids = ir.CreateAdd(f.splat(ir.CreateTrunc(ir.CreateAdd(column, first_column), ir.getInt32Ty()), lanes),
                              ir.CreateStepVector(f.int_type(32, lanes)));
    Value* same = ir.CreateICmpEQ(f.load_bits(f.at(class_groups, column, 4), 32, lanes), row.group);
    return ir.CreateAnd(same, ir.CreateICmpNE(ids, row.target));
}

/// First pass over a row: transformed logits in place; returns {largest, Σ c·z} by lane. The largest is never below the lowest finite
/// number: differences to it are no NaN where every logit is −infinity.
Values transform_row(FunctionBuilder& f, const LogitTracer& tracer, Value* row, Value* cols, Value* class_weight, Value* temperature,
                     const RowGroup& group) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    const float infinity = std::numeric_limits<float>::infinity();
    Value* zero = f.float_splat(0.F, lanes);
    Value* lowest = f.float_splat(std::numeric_limits<float>::lowest(), lanes);
    return for_columns(f, cols, {lowest, zero}, [&](Value* column, Value* mask, const Values& carried) {
        Value* z = tracer.at(row, column, temperature).logit.value(f, lanes);
        if (group.group != nullptr) {
            z = ir.CreateSelect(ruled_out(f, group, f.arg(11), column, f.i64(0)), f.float_splat(-infinity, lanes), z);
        }
        Value* weighted = carried[1];
        if (tracer.spec.label_smoothing > 0) {
            Value* summand = mask != nullptr ? ir.CreateSelect(mask, z, zero) : z;
            Value* c =
                tracer.spec.class_weight ? f.load_float(f.at(class_weight, column, 4), DType::fp32, lanes) : f.float_splat(1.F, lanes);
            weighted = f.multiply_add(c, summand, weighted);
        }
        if (mask != nullptr) z = ir.CreateSelect(mask, z, f.float_splat(-infinity, lanes));
        f.store_float(z, f.at(row, column, 4), DType::fp32, lanes);
        return Values{f.max(z, carried[0]), weighted};
    });
}

/// The GroupRow of row r.
RowGroup row_group(FunctionBuilder& f, Value* rows, Value* r) {
    Value* row = f.byte_offset(rows, f.ir().CreateMul(r, f.i64(sizeof(GroupRow))));
    const auto field = [&](std::size_t offset) {
        return f.splat(f.load_bits(f.byte_offset(row, f.i64(static_cast<std::int64_t>(offset))), 32, 0), f.target().lanes());
    };
    return {field(offsetof(GroupRow, group)), field(offsetof(GroupRow, target))};
}

/// Makes of −infinity, or nearly, a number that times an exponential of 0 is 0. NaN stays.
Value* not_below(FunctionBuilder& f, Value* x) {
    Value* least = f.float_splat(farthest_below(), f.target().lanes());
    return f.ir().CreateSelect(f.ir().CreateFCmpOLT(x, least), least, x);
}

/// Second pass: {Σ exp(z − m), Σ exp(z − m)·(z − m), Σ exp(z − m)²} by lane.
Values sum_row(FunctionBuilder& f, const Spec& spec, Value* row, Value* cols, Value* largest) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    Value* zero = f.float_splat(0.F, lanes);
    return for_columns(f, cols, {zero, zero, zero}, [&](Value* column, Value* /*mask*/, const Values& carried) {
        Value* d = ir.CreateFSub(f.load_float(f.at(row, column, 4), DType::fp32, lanes), largest);
        Value* e = emit_exp(f, d, lanes);  // 0 for −infinity, which columns that do not exist hold
        Value* entropy_sum = spec.outputs.entropy ? f.multiply_add(e, not_below(f, d), carried[1]) : carried[1];
        Value* square_sum = spec.outputs.log_sum_sq_probs ? f.multiply_add(e, e, carried[2]) : carried[2];
        return Values{ir.CreateFAdd(carried[0], e), entropy_sum, square_sum};
    });
}

}  // namespace

void emit_forward_tile(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const Spec& spec) {
    FunctionBuilder f(module, target, symbol,
                      {Arg::pointer, Arg::i64, Arg::i64, Arg::i64, Arg::pointer, Arg::pointer, Arg::pointer, Arg::pointer, Arg::pointer,
                       Arg::pointer, Arg::pointer, Arg::pointer});
    auto& ir = f.ir();
    const int lanes = target.lanes();
    const LogitTracer tracer(f, spec, f.arg(4), f.arg(6), f.arg(9));
    f.loop(f.i64(0), f.arg(2), 1, [&](Value* r) {
        Value* row = f.at(f.arg(0), ir.CreateMul(r, f.arg(1)), 4);
        Value* temperature = spec.temperature ? f.splat(f.load_float(f.at(f.arg(7), r, 4), DType::fp32, 0), lanes) : nullptr;
        const RowGroup group = spec.class_groups ? row_group(f, f.arg(10), r) : RowGroup{};
        const Values first = transform_row(f, tracer, row, f.arg(3), f.arg(5), temperature, group);
        Value* largest = f.reduce_max(first[0], lanes);
        const Values second = sum_row(f, spec, row, f.arg(3), f.splat(largest, lanes));
        Value* sums = f.byte_offset(f.arg(8), ir.CreateMul(r, f.i64(sizeof(RowSums))));
        const auto store = [&](Value* value, std::size_t offset) {
            f.store_float(value, f.byte_offset(sums, f.i64(static_cast<std::int64_t>(offset))), DType::fp32, 0);
        };
        store(largest, offsetof(RowSums, max));
        store(f.reduce_add(second[0], lanes), offsetof(RowSums, exp_sum));
        store(f.reduce_add(second[1], lanes), offsetof(RowSums, exp_z_sum));
        store(f.reduce_add(first[1], lanes), offsetof(RowSums, weighted_sum));
        store(f.reduce_add(second[2], lanes), offsetof(RowSums, exp_sq_sum));
    });
    f.finish();
}

namespace {

/// The GradRow of row r, each field in every lane.
struct GradRowValues {
    Value* lse;
    Value* a;
    Value* b;
    Value* t;
    Value* s;
    Value* temperature;
    Value* target;
    Value* group;
    Value* exponent;
    Value* at_lse;
    Value* slope;

    GradRowValues(FunctionBuilder& f, Value* rows, Value* r) {
        auto& ir = f.ir();
        const int lanes = f.target().lanes();
        Value* row = f.byte_offset(rows, ir.CreateMul(r, f.i64(sizeof(GradRow))));
        const auto field = [&](std::size_t offset) {
            Value* pointer = f.byte_offset(row, f.i64(static_cast<std::int64_t>(offset)));
            return f.splat(f.load_float(pointer, DType::fp32, 0), lanes);
        };
        constexpr std::size_t kCoefficients = offsetof(GradRow, coefficients);
        lse = field(offsetof(GradRow, lse));
        a = field(kCoefficients + offsetof(RowCoefficients, a));
        b = field(kCoefficients + offsetof(RowCoefficients, b));
        t = field(kCoefficients + offsetof(RowCoefficients, t));
        s = field(kCoefficients + offsetof(RowCoefficients, s));
        temperature = field(offsetof(GradRow, temperature));
        exponent = field(offsetof(GradRow, exponent));
        at_lse = field(offsetof(GradRow, at_lse));
        slope = field(offsetof(GradRow, slope));
        target = f.splat(f.load_bits(f.byte_offset(row, f.i64(offsetof(GradRow, target))), 32, 0), lanes);
        group = f.splat(f.load_bits(f.byte_offset(row, f.i64(offsetof(GradRow, group))), 32, 0), lanes);
    }
};

Value* is_ignored(FunctionBuilder& f, Value* rows, Value* r) {
    auto& ir = f.ir();
    Value* row = f.byte_offset(rows, ir.CreateMul(r, f.i64(sizeof(GradRow))));
    Value* target = f.load_bits(f.byte_offset(row, f.i64(offsetof(GradRow, target))), 32, 0);
    return ir.CreateICmpEQ(target, f.i32_splat(GradRow::kIgnored, 0));
}

/// 2^(z·log2 e − k) · the softcap's slope, and with the entropy · (at_lse + slope·(z − lse)).
Value* exponential(FunctionBuilder& f, const Spec& spec, const TracedLogit& traced, const GradRowValues& g) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    Value* z = traced.logit.value(f, lanes);
    Value* e = emit_exp2(f, f.multiply_add(z, f.float_splat(1.44269504F, lanes), ir.CreateFNeg(g.exponent)), lanes);
    if (spec.outputs.entropy) {
        // A logit whose exponential is 0 may be −inf.
        Value* zero = f.float_splat(0.F, lanes);
        Value* share = f.multiply_add(g.slope, ir.CreateFSub(z, g.lse), g.at_lse);
        e = ir.CreateSelect(ir.CreateFCmpUNE(e, zero), ir.CreateFMul(e, share), zero);
    }
    return traced.softcap_slope.is_constant() ? e : ir.CreateFMul(e, traced.softcap_slope.value(f, lanes));
}

/// dz_j = (p_j·(a + b·z_j) − s·c_j − t·[j = y]) · d logit / d (hidden · weightᵀ + bias). With fp8 gradients get s·c_j as a product.
Value* logit_gradient(FunctionBuilder& f, const LogitTracer& tracer, const GradRowValues& g, Value* row, Value* column) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    const auto traced = tracer.at(row, column, g.temperature);
    Value* z = traced.logit.value(f, lanes);
    Value* p = emit_exp(f, ir.CreateFSub(z, g.lse), lanes);
    // A logit whose probability is 0 may be −inf, of which no share is taken.
    Value* zero = f.float_splat(0.F, lanes);
    Value* shared = ir.CreateSelect(ir.CreateFCmpUNE(p, zero), z, zero);
    Value* scale = tracer.spec.outputs.entropy ? f.multiply_add(g.b, shared, g.a) : g.a;
    Value* dz = ir.CreateFMul(p, scale);
    if (tracer.spec.label_smoothing > 0 && !is_fp8(tracer.spec)) {
        Value* c = tracer.spec.class_weight ? f.load_float(f.at(f.arg(6), column, 4), DType::fp32, lanes) : f.float_splat(1.F, lanes);
        dz = ir.CreateFSub(dz, ir.CreateFMul(g.s, c));
    }
    Value* ids = ir.CreateAdd(f.splat(ir.CreateTrunc(ir.CreateAdd(column, f.arg(9)), ir.getInt32Ty()), lanes),
                              ir.CreateStepVector(f.int_type(32, lanes)));
    dz = ir.CreateFSub(dz, ir.CreateSelect(ir.CreateICmpEQ(ids, g.target), g.t, zero));
    if (!traced.derivative.is_constant()) dz = ir.CreateFMul(dz, traced.derivative.value(f, lanes));
    if (is_fp8(tracer.spec)) dz = ir.CreateSelect(ir.CreateICmpEQ(ids, g.target), dz, exponential(f, tracer.spec, traced, g));
    if (tracer.spec.class_groups) dz = ir.CreateSelect(ruled_out(f, {g.group, g.target}, f.arg(11), column, f.arg(9)), zero, dz);
    return dz;
}

}  // namespace

void emit_backward_tile(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const Spec& spec) {
    FunctionBuilder f(module, target, symbol,
                      {Arg::pointer, Arg::i64, Arg::i64, Arg::i64, Arg::i64, Arg::pointer, Arg::pointer, Arg::pointer, Arg::pointer,
                       Arg::i64, Arg::pointer, Arg::pointer});
    auto& ir = f.ir();
    const int lanes = target.lanes();
    const LogitTracer tracer(f, spec, f.arg(5), f.arg(7), f.arg(10));
    Value* zero = f.float_splat(0.F, lanes);
    Value* cols = f.arg(3);
    Value* covered = ir.CreateAnd(ir.CreateAdd(cols, f.i64(lanes - 1)), f.i64(~std::int64_t{lanes - 1}));
    f.loop(f.i64(0), f.arg(2), 1, [&](Value* r) {
        Value* row = f.at(f.arg(0), ir.CreateMul(r, f.arg(1)), 4);
        const auto zero_from = [&](Value* first) {
            f.loop(first, f.arg(4), lanes, [&](Value* column) { f.store_float(zero, f.at(row, column, 4), DType::fp32, lanes); });
        };
        const auto differentiate = [&] {
            const GradRowValues g(f, f.arg(8), r);
            for_columns(f, cols, {}, [&](Value* column, Value* mask, const Values&) {
                Value* dz = logit_gradient(f, tracer, g, row, column);
                if (mask != nullptr) dz = ir.CreateSelect(mask, dz, zero);
                f.store_float(dz, f.at(row, column, 4), DType::fp32, lanes);
                return Values{};
            });
            zero_from(covered);
        };
        // Whatever an ignored row's logits are: 0·NaN is no 0.
        f.branch(is_ignored(f, f.arg(8), r), [&] { zero_from(f.i64(0)); }, differentiate);
    });
    f.finish();
}

void emit_column_sums(llvm::Module& module, const VectorTarget& target, const std::string& symbol) {
    FunctionBuilder f(module, target, symbol, {Arg::pointer, Arg::i64, Arg::i64, Arg::i64, Arg::pointer});
    auto& ir = f.ir();
    const int lanes = target.lanes();
    const auto sum = [&](Value* column, int width) {
        const Values total = f.loop(f.i64(0), f.arg(2), 1, {f.float_splat(0.F, width)}, [&](Value* r, const Values& carried) {
            Value* x = f.load_float(f.at(f.arg(0), ir.CreateAdd(ir.CreateMul(r, f.arg(1)), column), 4), DType::fp32, width);
            return Values{ir.CreateFAdd(carried[0], x)};
        });
        f.store_float(total[0], f.at(f.arg(4), column, 4), DType::fp32, width);
    };
    Value* full = ir.CreateAnd(f.arg(3), f.i64(~std::int64_t{lanes - 1}));
    f.loop(f.i64(0), full, lanes, [&](Value* column) { sum(column, lanes); });
    f.loop(full, f.arg(3), 1, [&](Value* column) { sum(column, 0); });
    f.finish();
}

namespace {

void store_value(FunctionBuilder& f, Value* value, Value* where, const StoreOptions& options, int lanes) {
    if (options.mode == GradMode::accumulate) value = f.ir().CreateFAdd(f.load_float(where, options.destination, lanes), value);
    f.store_float(value, where, options.destination, lanes);
}

}  // namespace

void emit_store(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const StoreOptions& options) {
    FunctionBuilder f(module, target, symbol, {Arg::pointer, Arg::i64, Arg::pointer, Arg::i64, Arg::i64, Arg::i64});
    auto& ir = f.ir();
    const int lanes = target.lanes();
    const auto bytes = static_cast<std::int64_t>(options.destination == DType::fp32 ? 4 : 2);
    Value* rows = f.arg(4);
    Value* cols = f.arg(5);
    const auto source = [&](Value* r, Value* c) { return f.at(f.arg(0), ir.CreateAdd(ir.CreateMul(r, f.arg(1)), c), 4); };
    const auto destination = [&](Value* r, Value* c) {
        Value* index = options.transposed ? ir.CreateAdd(ir.CreateMul(c, f.arg(3)), r) : ir.CreateAdd(ir.CreateMul(r, f.arg(3)), c);
        return f.at(f.arg(2), index, bytes);
    };
    const auto one = [&](Value* r, Value* c) { store_value(f, f.load_float(source(r, c), DType::fp32, 0), destination(r, c), options, 0); };
    Value* full_cols = ir.CreateAnd(cols, f.i64(~std::int64_t{lanes - 1}));
    Value* full_rows = options.transposed ? ir.CreateAnd(rows, f.i64(~std::int64_t{lanes - 1})) : rows;
    f.loop(f.i64(0), full_rows, options.transposed ? lanes : 1, [&](Value* r) {
        f.loop(f.i64(0), full_cols, lanes, [&](Value* c) {
            if (!options.transposed) {
                store_value(f, f.load_float(source(r, c), DType::fp32, lanes), destination(r, c), options, lanes);
                return;
            }
            Values square;
            for (int i = 0; i < lanes; ++i) square.push_back(f.load_float(source(ir.CreateAdd(r, f.i64(i)), c), DType::fp32, lanes));
            square = emit_transpose(f, square);
            for (int i = 0; i < lanes; ++i) {
                store_value(f, square[static_cast<std::size_t>(i)], destination(r, ir.CreateAdd(c, f.i64(i))), options, lanes);
            }
        });
        f.loop(full_cols, cols, 1, [&](Value* c) {
            if (!options.transposed) return one(r, c);
            for (int i = 0; i < lanes; ++i) one(ir.CreateAdd(r, f.i64(i)), c);
        });
    });
    f.loop(full_rows, rows, 1, [&](Value* r) { f.loop(f.i64(0), cols, 1, [&](Value* c) { one(r, c); }); });
    f.finish();
}

void emit_to_float(llvm::Module& module, const VectorTarget& target, const std::string& symbol, DType source) {
    FunctionBuilder f(module, target, symbol, {Arg::pointer, Arg::pointer, Arg::i64});
    const int lanes = target.lanes();
    const auto bytes = static_cast<std::int64_t>(source == DType::fp32 ? 4 : 2);
    const auto copy = [&](Value* i, int width) {
        f.store_float(f.load_float(f.at(f.arg(0), i, bytes), source, width), f.at(f.arg(1), i, 4), DType::fp32, width);
    };
    Value* full = f.ir().CreateAnd(f.arg(2), f.i64(~std::int64_t{lanes - 1}));
    f.loop(f.i64(0), full, lanes, [&](Value* i) { copy(i, lanes); });
    f.loop(full, f.arg(2), 1, [&](Value* i) { copy(i, 0); });
    f.finish();
}

}  // namespace flce

// The micro-kernel and the packing of its panels.
#include <bit>
#include <numeric>

#include "generator/cpu/code.hpp"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/IntrinsicsX86.h"

namespace flce {
namespace {

using llvm::Value;
using Arg = FunctionBuilder::Arg;
using Values = FunctionBuilder::Values;

constexpr int kUnitBytes = 4;
constexpr int kUnroll = 4;  // units, and so kPrefetchBytes, for one cache line

/// acc + a·b for one unit: fp32 numbers, or both numbers of a bf16 pair.
Value* multiply_accumulate(FunctionBuilder& f, Value* a, Value* b, Value* acc, bool bf16_pairs) {
    if (!bf16_pairs) return f.multiply_add(a, b, acc);
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    if (f.target().bf16_dot && f.target().vector_bits == 512) {
        auto* type = llvm::FixedVectorType::get(ir.getBFloatTy(), 32);
        return ir.CreateIntrinsic(llvm::Intrinsic::x86_avx512bf16_dpbf16ps_512, {},
                                  {acc, ir.CreateBitCast(a, type), ir.CreateBitCast(b, type)});
    }
    const auto low = [&](Value* x) {
        return ir.CreateBitCast(ir.CreateShl(ir.CreateBitCast(x, f.int_type(32, lanes)), f.i32_splat(16, lanes)), f.float_type(lanes));
    };
    const auto high = [&](Value* x) {
        Value* mask = f.i32_splat(static_cast<std::int32_t>(0xffff0000U), lanes);
        return ir.CreateBitCast(ir.CreateAnd(ir.CreateBitCast(x, f.int_type(32, lanes)), mask), f.float_type(lanes));
    };
    return f.multiply_add(high(a), high(b), f.multiply_add(low(a), low(b), acc));
}

/// Number of the sum of a row and a vector among those of a register block.
std::size_t sum_index(int row, int vector, int vectors) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(vectors) + static_cast<std::size_t>(vector);
}

/// One unit of depth: every row of A, broadcast, against every vector of B's row.
Values micro_step(FunctionBuilder& f, Value* a, Value* b, const Values& accumulators, int micro_m, int vectors, bool bf16_pairs) {
    const int lanes = f.target().lanes();
    Values columns;
    for (int j = 0; j < vectors; ++j) columns.push_back(f.load_float(f.at(b, std::int64_t{j} * lanes, kUnitBytes), DType::fp32, lanes));
    Values next = accumulators;
    for (int i = 0; i < micro_m; ++i) {
        Value* row = f.splat(f.load_float(f.at(a, i, kUnitBytes), DType::fp32, 0), lanes);
        for (int j = 0; j < vectors; ++j) {
            Value*& acc = next[sum_index(i, j, vectors)];
            acc = multiply_accumulate(f, row, columns[static_cast<std::size_t>(j)], acc, bf16_pairs);
        }
    }
    return next;
}

}  // namespace

void emit_micro_kernel(llvm::Module& module, const VectorTarget& target, const std::string& symbol, int micro_m, int micro_n,
                       bool bf16_pairs) {
    FunctionBuilder f(module, target, symbol, {Arg::i64, Arg::pointer, Arg::pointer, Arg::pointer, Arg::i64, Arg::i64, Arg::pointer});
    auto& ir = f.ir();
    const int lanes = target.lanes();
    const int vectors = micro_n / lanes;
    Value* units = f.arg(0);
    Value* a = f.arg(1);
    Value* b = f.arg(2);
    const auto prefetch = [&](Value* line, bool for_write, int locality) {
        ir.CreateIntrinsic(llvm::Intrinsic::prefetch, {line->getType()},
                           {line, ir.getInt32(for_write ? 1 : 0), ir.getInt32(static_cast<unsigned>(locality)), ir.getInt32(1)});
    };
    Values rows;
    for (int i = 0; i < micro_m; ++i) {
        rows.push_back(f.at(f.arg(3), ir.CreateMul(f.arg(4), f.i64(i)), kUnitBytes));
        for (int byte = 0; byte < micro_n * kUnitBytes; byte += 64) prefetch(f.at(rows.back(), byte, 1), true, 3);
    }
    const auto step = [&](Value* unit, const Values& accumulators, int offset) {
        Value* a_unit = f.at(a, ir.CreateMul(ir.CreateAdd(unit, f.i64(offset)), f.i64(micro_m)), kUnitBytes);
        Value* b_unit = f.at(b, ir.CreateMul(ir.CreateAdd(unit, f.i64(offset)), f.i64(micro_n)), kUnitBytes);
        return micro_step(f, a_unit, b_unit, accumulators, micro_m, vectors, bf16_pairs);
    };
    Values sums(static_cast<std::size_t>(micro_m * vectors), f.float_splat(0.F, lanes));
    Value* unrolled = ir.CreateAnd(units, f.i64(~std::int64_t{kUnroll - 1}));
    sums = f.loop(f.i64(0), unrolled, kUnroll, sums, [&](Value* unit, const Values& carried) {
        Values next = carried;
        prefetch(f.at(f.arg(6), unit, kPrefetchBytes), false, 2);  // one line for four units; second-level cache
        for (int u = 0; u < kUnroll; ++u) next = step(unit, next, u);
        return next;
    });
    sums = f.loop(unrolled, units, 1, sums, [&](Value* unit, const Values& carried) { return step(unit, carried, 0); });

    const auto finish = [&](bool accumulate) {
        for (int i = 0; i < micro_m; ++i) {
            for (int j = 0; j < vectors; ++j) {
                Value* where = f.at(rows[static_cast<std::size_t>(i)], std::int64_t{j} * lanes, kUnitBytes);
                Value* sum = sums[sum_index(i, j, vectors)];
                if (accumulate) sum = ir.CreateFAdd(f.load_float(where, DType::fp32, lanes), sum);
                f.store_float(sum, where, DType::fp32, lanes);
            }
        }
    };
    f.branch(ir.CreateICmpNE(f.arg(5), f.i64(0)), [&] { finish(true); }, [&] { finish(false); });
    f.finish();
}

namespace {

/// Reads units of a pack's source. `element` addresses are in elements of the source's dtype.
struct UnitReader {
    FunctionBuilder& f;
    const PackOptions& options;

    [[nodiscard]] std::int64_t bytes() const { return static_cast<std::int64_t>(options.source == DType::fp32 ? 4 : 2); }
    [[nodiscard]] int depth_per_unit() const { return options.bf16_pairs ? 2 : 1; }

    /// Elements as the GEMM is to see them.
    [[nodiscard]] Value* value(Value* pointer, int lanes) const {
        Value* read = f.load_float(pointer, options.source, lanes);
        return options.rounded == DType::fp32 ? read : f.round_to(read, options.rounded, lanes);
    }
    [[nodiscard]] Value* bf16(Value* pointer, int lanes) const {
        if (options.source == DType::bf16) return f.load_bits(pointer, 16, lanes);
        return f.bf16_bits(f.load_float(pointer, options.source, lanes), lanes);
    }
    /// The pair (low, high) of i16 values as float bits.
    [[nodiscard]] Value* pair(Value* low, Value* high, int lanes) const {
        auto& ir = f.ir();
        Value* wide = ir.CreateZExt(low, f.int_type(32, lanes));
        if (high != nullptr) {
            wide = ir.CreateOr(wide, ir.CreateShl(ir.CreateZExt(high, f.int_type(32, lanes)), f.i32_splat(16, lanes)));
        }
        return ir.CreateBitCast(wide, f.float_type(lanes));
    }
    /// `lanes` consecutive units along a contiguous depth.
    [[nodiscard]] Value* along_depth(Value* pointer, int lanes) const {
        if (!options.bf16_pairs) return value(pointer, lanes);
        return f.ir().CreateBitCast(bf16(pointer, 2 * lanes), f.float_type(lanes));
    }
    /// One unit at depth `pointer` (element stride `ld` to the next depth) for `lanes` contiguous lines; `whole`: both halves of a pair
    /// exist.
    [[nodiscard]] Value* across(Value* pointer, Value* ld, int lanes, bool whole) const {
        if (!options.bf16_pairs) return value(pointer, lanes);
        Value* high = whole ? bf16(f.at(pointer, ld, bytes()), lanes) : nullptr;
        return pair(bf16(pointer, lanes), high, lanes);
    }
};

/// Offsets of vectors of `piece` lanes that cover `width`, overlapping rather than running past the end.
struct Pieces {
    int piece = 0;
    std::vector<int> offsets;
};
Pieces cover(int width, int lanes) {
    Pieces result;
    result.piece = std::min(lanes, static_cast<int>(std::bit_floor(static_cast<unsigned>(width))));
    for (int offset = 0; offset + result.piece <= width; offset += result.piece) result.offsets.push_back(offset);
    if (width % result.piece != 0) result.offsets.push_back(width - result.piece);
    return result;
}

/// Parts that every way of packing a panel shares.
struct PanelPacker {
    FunctionBuilder& f;
    const PackOptions& options;
    UnitReader reader;
    Value* source;
    Value* ld;
    Value* panel;
    Value* valid;
    Value* whole_units;  ///< units whose every depth exists
    Value* odd;          ///< i1: one more unit, half of it past the end

    [[nodiscard]] Value* element(Value* line, Value* unit) const {
        auto& ir = f.ir();
        Value* depth = ir.CreateMul(unit, f.i64(reader.depth_per_unit()));
        Value* index = options.depth_contiguous ? ir.CreateAdd(ir.CreateMul(line, ld), depth) : ir.CreateAdd(ir.CreateMul(depth, ld), line);
        return f.at(source, index, reader.bytes());
    }
    [[nodiscard]] Value* slot(Value* unit, Value* line) const {
        return f.at(panel, f.ir().CreateAdd(f.ir().CreateMul(unit, f.i64(options.width)), line), kUnitBytes);
    }
    void copy_unit(Value* line, Value* unit, bool whole) const {
        Value* stride = options.depth_contiguous ? f.i64(1) : ld;
        f.store_float(reader.across(element(line, unit), stride, 0, whole), slot(unit, line), DType::fp32, 0);
    }
    /// Packs all units of lines [0, lines) from `first` on, one at a time.
    void copy_slowly(Value* lines, Value* first) const {
        f.loop(first, whole_units, 1, [&](Value* unit) { f.loop(f.i64(0), lines, 1, [&](Value* line) { copy_unit(line, unit, true); }); });
        if (!options.bf16_pairs) return;
        f.branch(odd, [&] { f.loop(f.i64(0), lines, 1, [&](Value* line) { copy_unit(line, whole_units, false); }); });
    }
    void zero(Value* first_line) const {
        Value* units = f.ir().CreateAdd(whole_units, f.ir().CreateZExt(odd, f.ir().getInt64Ty()));
        f.loop(f.i64(0), units, 1, [&](Value* unit) {
            f.loop(first_line, f.i64(options.width), 1,
                   [&](Value* line) { f.store_float(f.float_splat(0.F, 0), slot(unit, line), DType::fp32, 0); });
        });
    }
    void copy_across() const {
        const Pieces pieces = cover(options.width, f.target().lanes());
        const auto copy = [&](Value* unit, bool whole) {
            for (const int offset : pieces.offsets) {
                Value* units = reader.across(element(f.i64(offset), unit), ld, pieces.piece, whole);
                f.store_float(units, slot(unit, f.i64(offset)), DType::fp32, pieces.piece);
            }
        };
        f.loop(f.i64(0), whole_units, 1, [&](Value* unit) { copy(unit, true); });
        if (options.bf16_pairs) f.branch(odd, [&] { copy(whole_units, false); });
    }
    void store_transposed(Value* unit, int line, const Value* column_vector, int lines) const {
        auto& ir = f.ir();
        auto* column = const_cast<Value*>(column_vector);
        const int lanes = f.target().lanes();
        if (lines == lanes) {
            f.store_float(column, slot(unit, f.i64(line)), DType::fp32, lanes);
            return;
        }
        const Pieces pieces = cover(lines, lanes);
        for (const int offset : pieces.offsets) {
            std::vector<int> mask(static_cast<std::size_t>(pieces.piece));
            std::iota(mask.begin(), mask.end(), offset);
            f.store_float(ir.CreateShuffleVector(column, mask), slot(unit, f.i64(line + offset)), DType::fp32, pieces.piece);
        }
    }
    void copy_along_depth() const {
        auto& ir = f.ir();
        const int lanes = f.target().lanes();
        Value* vectorised = ir.CreateAnd(whole_units, f.i64(~std::int64_t{lanes - 1}));
        f.loop(f.i64(0), vectorised, lanes, [&](Value* unit) {
            for (int line = 0; line < options.width; line += lanes) {
                const int lines = std::min(lanes, options.width - line);
                Values rows(static_cast<std::size_t>(lanes), nullptr);
                for (int i = 0; i < lines; ++i)
                    rows[static_cast<std::size_t>(i)] = reader.along_depth(element(f.i64(line + i), unit), lanes);
                rows = emit_transpose(f, rows);
                for (int k = 0; k < lanes; ++k)
                    store_transposed(ir.CreateAdd(unit, f.i64(k)), line, rows[static_cast<std::size_t>(k)], lines);
            }
        });
        copy_slowly(f.i64(options.width), vectorised);
    }
};

}  // namespace

Values emit_transpose(FunctionBuilder& f, Values rows) {
    auto& ir = f.ir();
    const int lanes = f.target().lanes();
    for (Value*& row : rows) {
        if (row == nullptr) row = llvm::PoisonValue::get(f.float_type(lanes));
    }
    // Swap the off-diagonal quarters of ever larger squares.
    for (int distance = 1; distance < lanes; distance *= 2) {
        std::vector<int> upper;
        std::vector<int> lower;
        for (int lane = 0; lane < lanes; ++lane) {
            const bool right = (lane & distance) != 0;
            upper.push_back(right ? lanes + lane - distance : lane);
            lower.push_back(right ? lanes + lane : lane + distance);
        }
        for (int i = 0; i < lanes; ++i) {
            if ((i & distance) != 0) continue;
            Value*& a = rows[static_cast<std::size_t>(i)];
            Value*& b = rows[static_cast<std::size_t>(i) + static_cast<std::size_t>(distance)];
            Value* first = ir.CreateShuffleVector(a, b, upper);
            Value* second = ir.CreateShuffleVector(a, b, lower);
            a = first;
            b = second;
        }
    }
    return rows;
}

void emit_pack(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const PackOptions& options) {
    FunctionBuilder f(module, target, symbol, {Arg::pointer, Arg::i64, Arg::pointer, Arg::i64, Arg::i64});
    auto& ir = f.ir();
    const UnitReader reader{f, options};
    Value* depth = f.arg(4);
    const int shift = reader.depth_per_unit() - 1;
    const PanelPacker packer{f,
                             options,
                             reader,
                             f.arg(0),
                             f.arg(1),
                             f.arg(2),
                             f.arg(3),
                             ir.CreateLShr(depth, f.i64(shift)),
                             ir.CreateICmpNE(ir.CreateAnd(depth, f.i64(shift)), f.i64(0))};
    f.branch(
        ir.CreateICmpEQ(packer.valid, f.i64(options.width)),
        [&] { options.depth_contiguous ? packer.copy_along_depth() : packer.copy_across(); },
        [&] {
            packer.copy_slowly(packer.valid, f.i64(0));
            packer.zero(packer.valid);
        });
    f.finish();
}

}  // namespace flce

#include "generator/cpu/function_builder.hpp"

#include <numeric>

#include "llvm/IR/Constants.h"
#include "llvm/IR/DerivedTypes.h"
#include "llvm/IR/Function.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/Module.h"

namespace flce {

using llvm::BasicBlock;
using llvm::Type;
using llvm::Value;

struct FunctionBuilder::State {
    explicit State(llvm::LLVMContext& context) : context(context), ir(context) {}
    llvm::LLVMContext& context;
    llvm::IRBuilder<> ir;
    llvm::Function* function = nullptr;
};

FunctionBuilder::FunctionBuilder(llvm::Module& module, const VectorTarget& target, const std::string& symbol, const std::vector<Arg>& args)
    : module_(module), target_(target), state_(std::make_unique<State>(module.getContext())) {
    auto& context = state_->context;
    std::vector<Type*> types;
    for (const Arg arg : args) {
        types.push_back(arg == Arg::pointer ? static_cast<Type*>(llvm::PointerType::get(context, 0)) : Type::getInt64Ty(context));
    }
    auto* type = llvm::FunctionType::get(Type::getVoidTy(context), types, /*isVarArg=*/false);
    state_->function = llvm::Function::Create(type, llvm::Function::ExternalLinkage, symbol, module);
    state_->function->addFnAttr(llvm::Attribute::NoUnwind);
    state_->ir.SetInsertPoint(BasicBlock::Create(context, "entry", state_->function));
}

FunctionBuilder::~FunctionBuilder() = default;

Value* FunctionBuilder::arg(int index) { return state_->function->getArg(static_cast<unsigned>(index)); }
llvm::IRBuilderBase& FunctionBuilder::ir() noexcept { return state_->ir; }
void FunctionBuilder::finish() { state_->ir.CreateRetVoid(); }

void FunctionBuilder::call_external(const std::string& symbol) {
    auto* type = llvm::FunctionType::get(Type::getVoidTy(state_->context), /*isVarArg=*/false);
    state_->ir.CreateCall(module_.getOrInsertFunction(symbol, type));
}

namespace {
Type* with_lanes(Type* scalar, int lanes) { return lanes == 0 ? scalar : llvm::FixedVectorType::get(scalar, static_cast<unsigned>(lanes)); }
}  // namespace

Type* FunctionBuilder::float_type(int lanes) { return with_lanes(Type::getFloatTy(state_->context), lanes); }
Type* FunctionBuilder::int_type(int bits, int lanes) {
    return with_lanes(Type::getIntNTy(state_->context, static_cast<unsigned>(bits)), lanes);
}
Value* FunctionBuilder::i64(std::int64_t value) { return state_->ir.getInt64(static_cast<std::uint64_t>(value)); }
Value* FunctionBuilder::i32_splat(std::int32_t value, int lanes) {
    return llvm::ConstantInt::get(int_type(32, lanes), static_cast<std::uint64_t>(static_cast<std::uint32_t>(value)));
}
Value* FunctionBuilder::float_splat(float value, int lanes) { return llvm::ConstantFP::get(float_type(lanes), llvm::APFloat(value)); }
Value* FunctionBuilder::splat(Value* scalar, int lanes) {
    return lanes == 0 ? scalar : state_->ir.CreateVectorSplat(static_cast<unsigned>(lanes), scalar);
}

FunctionBuilder::Values FunctionBuilder::loop(Value* begin, Value* end, std::int64_t step, const Values& carried,
                                              const std::function<Values(Value*, const Values&)>& body) {
    auto& ir = state_->ir;
    BasicBlock* before = ir.GetInsertBlock();
    BasicBlock* head = BasicBlock::Create(state_->context, "loop", state_->function);
    BasicBlock* exit = BasicBlock::Create(state_->context, "done", state_->function);
    ir.CreateCondBr(ir.CreateICmpSLT(begin, end), head, exit);

    ir.SetInsertPoint(head);
    auto* index = ir.CreatePHI(ir.getInt64Ty(), 2);
    index->addIncoming(begin, before);
    Values inside;
    for (Value* value : carried) {
        auto* phi = ir.CreatePHI(value->getType(), 2);
        phi->addIncoming(value, before);
        inside.push_back(phi);
    }
    const Values next = body(index, inside);
    BasicBlock* latch = ir.GetInsertBlock();
    Value* next_index = ir.CreateNSWAdd(index, i64(step));
    index->addIncoming(next_index, latch);
    for (std::size_t i = 0; i < carried.size(); ++i) llvm::cast<llvm::PHINode>(inside[i])->addIncoming(next[i], latch);
    ir.CreateCondBr(ir.CreateICmpSLT(next_index, end), head, exit);

    ir.SetInsertPoint(exit);
    Values result;
    for (std::size_t i = 0; i < carried.size(); ++i) {
        auto* phi = ir.CreatePHI(carried[i]->getType(), 2);
        phi->addIncoming(carried[i], before);
        phi->addIncoming(next[i], latch);
        result.push_back(phi);
    }
    return result;
}

void FunctionBuilder::loop(Value* begin, Value* end, std::int64_t step, const std::function<void(Value*)>& body) {
    loop(begin, end, step, {}, [&](Value* index, const Values&) {
        body(index);
        return Values{};
    });
}

void FunctionBuilder::branch(Value* condition, const std::function<void()>& then, const std::function<void()>& otherwise) {
    auto& ir = state_->ir;
    BasicBlock* yes = BasicBlock::Create(state_->context, "then", state_->function);
    BasicBlock* no = otherwise ? BasicBlock::Create(state_->context, "else", state_->function) : nullptr;
    BasicBlock* join = BasicBlock::Create(state_->context, "join", state_->function);
    ir.CreateCondBr(condition, yes, otherwise ? no : join);
    ir.SetInsertPoint(yes);
    then();
    ir.CreateBr(join);
    if (otherwise) {
        ir.SetInsertPoint(no);
        otherwise();
        ir.CreateBr(join);
    }
    ir.SetInsertPoint(join);
}

FunctionBuilder::Values FunctionBuilder::branch_carried(Value* condition, const Values& carried,
                                                        const std::function<Values(const Values&)>& then) {
    auto& ir = state_->ir;
    BasicBlock* before = ir.GetInsertBlock();
    BasicBlock* yes = BasicBlock::Create(state_->context, "then", state_->function);
    BasicBlock* join = BasicBlock::Create(state_->context, "join", state_->function);
    ir.CreateCondBr(condition, yes, join);
    ir.SetInsertPoint(yes);
    const Values changed = then(carried);
    BasicBlock* last = ir.GetInsertBlock();
    ir.CreateBr(join);
    ir.SetInsertPoint(join);
    Values result;
    for (std::size_t i = 0; i < carried.size(); ++i) {
        auto* phi = ir.CreatePHI(carried[i]->getType(), 2);
        phi->addIncoming(carried[i], before);
        phi->addIncoming(changed[i], last);
        result.push_back(phi);
    }
    return result;
}

Value* FunctionBuilder::byte_offset(Value* pointer, Value* bytes) { return state_->ir.CreateGEP(state_->ir.getInt8Ty(), pointer, bytes); }
Value* FunctionBuilder::at(Value* pointer, Value* index, std::int64_t element_bytes) {
    return state_->ir.CreateGEP(int_type(static_cast<int>(8 * element_bytes), 0), pointer, index);
}
Value* FunctionBuilder::at(Value* pointer, std::int64_t index, std::int64_t element_bytes) {
    return byte_offset(pointer, i64(index * element_bytes));
}

Value* FunctionBuilder::load_bits(Value* pointer, int bits, int lanes) {
    return state_->ir.CreateAlignedLoad(int_type(bits, lanes), pointer, llvm::Align(static_cast<std::uint64_t>(bits / 8)));
}

void FunctionBuilder::store_bits(Value* value, Value* pointer, int bits) {
    state_->ir.CreateAlignedStore(value, pointer, llvm::Align(static_cast<std::uint64_t>(bits / 8)));
}

Value* FunctionBuilder::load_float(Value* pointer, DType dtype, int lanes) {
    auto& ir = state_->ir;
    if (dtype == DType::fp32) return ir.CreateAlignedLoad(float_type(lanes), pointer, llvm::Align(4));
    return bits_to_float(load_bits(pointer, 16, lanes), dtype, lanes);
}

Value* FunctionBuilder::bits_to_float(Value* bits, DType dtype, int lanes) {
    if (dtype == DType::fp16) return half_to_float(bits, lanes);
    auto& ir = state_->ir;
    Value* wide = ir.CreateShl(ir.CreateZExt(bits, int_type(32, lanes)), i32_splat(16, lanes));
    return ir.CreateBitCast(wide, float_type(lanes));
}

Value* FunctionBuilder::round_to(Value* value, DType dtype, int lanes) {
    return bits_to_float(dtype == DType::bf16 ? bf16_bits(value, lanes) : float_to_half_bits(value, lanes), dtype, lanes);
}

void FunctionBuilder::store_float(Value* value, Value* pointer, DType dtype, int lanes) {
    if (dtype == DType::fp32) {
        state_->ir.CreateAlignedStore(value, pointer, llvm::Align(4));
    } else {
        store_bits(dtype == DType::bf16 ? bf16_bits(value, lanes) : float_to_half_bits(value, lanes), pointer, 16);
    }
}

Value* FunctionBuilder::bf16_bits(Value* value, int lanes) {
    auto& ir = state_->ir;
    Value* bits = ir.CreateBitCast(value, int_type(32, lanes));
    Value* odd = ir.CreateAnd(ir.CreateLShr(bits, i32_splat(16, lanes)), i32_splat(1, lanes));
    Value* rounded = ir.CreateAdd(ir.CreateAdd(bits, i32_splat(0x7fff, lanes)), odd);
    Value* quiet = ir.CreateOr(bits, i32_splat(0x00400000, lanes));
    Value* chosen = ir.CreateSelect(ir.CreateFCmpUNO(value, value), quiet, rounded);
    return ir.CreateTrunc(ir.CreateLShr(chosen, i32_splat(16, lanes)), int_type(16, lanes));
}

// Without F16C, LLVM would call into compiler-rt. These conversions use only arithmetic on normal numbers, so flushing denormals does not
// change them.
Value* FunctionBuilder::half_to_float(Value* bits, int lanes) {
    auto& ir = state_->ir;
    if (target_.fma) return ir.CreateFPExt(ir.CreateBitCast(bits, with_lanes(ir.getHalfTy(), lanes)), float_type(lanes));
    const auto c = [&](std::int32_t value) { return i32_splat(value, lanes); };
    Value* wide = ir.CreateZExt(bits, int_type(32, lanes));
    Value* sign = ir.CreateShl(ir.CreateAnd(wide, c(0x8000)), c(16));
    Value* magnitude = ir.CreateShl(ir.CreateAnd(wide, c(0x7fff)), c(13));
    Value* exponent = ir.CreateAnd(magnitude, c(0x0f800000));
    Value* normal = ir.CreateAdd(magnitude, c(112 << 23));
    Value* special = ir.CreateOr(magnitude, c(0x7f800000));
    Value* subnormal = ir.CreateBitCast(
        ir.CreateFSub(ir.CreateBitCast(ir.CreateAdd(magnitude, c(113 << 23)), float_type(lanes)), float_splat(0x1p-14F, lanes)),
        int_type(32, lanes));
    Value* result = ir.CreateSelect(ir.CreateICmpEQ(exponent, c(0x0f800000)), special, normal);
    result = ir.CreateSelect(ir.CreateICmpEQ(exponent, c(0)), subnormal, result);
    return ir.CreateBitCast(ir.CreateOr(result, sign), float_type(lanes));
}

Value* FunctionBuilder::float_to_half_bits(Value* value, int lanes) {
    auto& ir = state_->ir;
    if (target_.fma) return ir.CreateBitCast(ir.CreateFPTrunc(value, with_lanes(ir.getHalfTy(), lanes)), int_type(16, lanes));
    const auto c = [&](std::int32_t v) { return i32_splat(v, lanes); };
    Value* bits = ir.CreateBitCast(value, int_type(32, lanes));
    Value* sign = ir.CreateAnd(ir.CreateLShr(bits, c(16)), c(0x8000));
    Value* magnitude = ir.CreateAnd(bits, c(0x7fffffff));
    Value* odd = ir.CreateAnd(ir.CreateLShr(magnitude, c(13)), c(1));
    Value* normal = ir.CreateLShr(ir.CreateAdd(ir.CreateAdd(magnitude, c(static_cast<std::int32_t>(0xc8000fffU))), odd), c(13));
    // Adding 0.5 aligns the bits that a subnormal half keeps with the end of the fraction, rounding to nearest even on the way.
    Value* subnormal = ir.CreateSub(
        ir.CreateBitCast(ir.CreateFAdd(ir.CreateBitCast(magnitude, float_type(lanes)), float_splat(0.5F, lanes)), int_type(32, lanes)),
        c(0x3f000000));
    Value* nan_or_infinity = ir.CreateSelect(ir.CreateICmpSGT(magnitude, c(0x7f800000)), c(0x7e00), c(0x7c00));
    Value* result = ir.CreateSelect(ir.CreateICmpSLT(magnitude, c(113 << 23)), subnormal, normal);
    result = ir.CreateSelect(ir.CreateICmpSGE(magnitude, c(0x47800000)), nan_or_infinity, result);
    return ir.CreateTrunc(ir.CreateOr(result, sign), int_type(16, lanes));
}

Value* FunctionBuilder::multiply_add(Value* a, Value* b, Value* c) {
    auto& ir = state_->ir;
    if (!target_.fma) return ir.CreateFAdd(ir.CreateFMul(a, b), c);
    return ir.CreateIntrinsic(llvm::Intrinsic::fma, {a->getType()}, {a, b, c});
}

Value* FunctionBuilder::max(Value* a, Value* b) { return state_->ir.CreateSelect(state_->ir.CreateFCmpOGT(a, b), a, b); }

Value* FunctionBuilder::reduce(Value* vector, int lanes, const std::function<Value*(Value*, Value*)>& combine) {
    auto& ir = state_->ir;
    for (int width = lanes / 2; width >= 1; width /= 2) {
        std::vector<int> low(static_cast<std::size_t>(width));
        std::vector<int> high(static_cast<std::size_t>(width));
        std::iota(low.begin(), low.end(), 0);
        std::iota(high.begin(), high.end(), width);
        vector = combine(ir.CreateShuffleVector(vector, low), ir.CreateShuffleVector(vector, high));
    }
    return ir.CreateExtractElement(vector, std::uint64_t{0});
}

Value* FunctionBuilder::reduce_max(Value* vector, int lanes) {
    return reduce(vector, lanes, [&](Value* a, Value* b) { return max(a, b); });
}

Value* FunctionBuilder::reduce_add(Value* vector, int lanes) {
    return reduce(vector, lanes, [&](Value* a, Value* b) { return state_->ir.CreateFAdd(a, b); });
}

Value* FunctionBuilder::lanes_below(Value* first, Value* end, int lanes) {
    auto& ir = state_->ir;
    llvm::SmallVector<llvm::Constant*, 16> ids;
    for (int lane = 0; lane < lanes; ++lane) ids.push_back(ir.getInt32(static_cast<std::uint32_t>(lane)));
    Value* left = ir.CreateTrunc(ir.CreateSub(end, first), ir.getInt32Ty());
    return ir.CreateICmpSLT(llvm::ConstantVector::get(ids), splat(left, lanes));
}

}  // namespace flce

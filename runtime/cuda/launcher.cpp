#include "runtime/cuda/launcher.hpp"

#include <cuda.h>
#include <fmt/format.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/Intrinsics.h>
#include <llvm/IR/Module.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>

#include "flce/error.hpp"
#include "runtime/host/host_code.hpp"

namespace flce {
namespace {

using llvm::BasicBlock;
using llvm::Value;
using Op = Expr::Op;

constexpr std::uint64_t kParamAlignment = 64;  // alignment of a CUtensorMap

std::uint32_t largest_param_block(const std::vector<Statement>& body) {
    std::uint32_t largest = 0;
    for (const Statement& statement : body) {
        if (const auto* launch = std::get_if<Launch>(&statement.value)) largest = std::max(largest, launch->param_bytes);
        if (const auto* loop = std::get_if<Loop>(&statement.value)) largest = std::max(largest, largest_param_block(loop->body));
        if (const auto* branch = std::get_if<If>(&statement.value)) largest = std::max(largest, largest_param_block(branch->then));
    }
    return largest;
}

/// Emits one pass: LauncherFunction.
class PassEmitter {
public:
    PassEmitter(llvm::Module& module, const char* symbol, const LaunchProgram& program, const std::vector<KernelEntry>& kernels)
        : module_(module), builder_(module.getContext()), kernels_(kernels) {
        pointer_ = builder_.getPtrTy();
        i64_ = builder_.getInt64Ty();
        i32_ = builder_.getInt32Ty();
        auto* type = llvm::FunctionType::get(i64_, {pointer_, pointer_, pointer_}, false);
        function_ = llvm::Function::Create(type, llvm::Function::ExternalLinkage, symbol, module_);
        function_->setDoesNotThrow();
        builder_.SetInsertPoint(BasicBlock::Create(module.getContext(), "entry", function_));
        context_ = function_->getArg(0);
        slots_ = function_->getArg(1);
        stream_ = function_->getArg(2);
        emit_prologue(largest_param_block(program.body));
        variables_.resize(static_cast<std::size_t>(program.variable_count), nullptr);
        emit_body(program.body);
        builder_.CreateRet(builder_.getInt64(0));
    }

private:
    BasicBlock* block(const char* name) { return BasicBlock::Create(module_.getContext(), name, function_); }

    Value* load_field(std::size_t offset) {
        return builder_.CreateLoad(pointer_, builder_.CreateConstInBoundsGEP1_64(builder_.getInt8Ty(), context_, offset));
    }

    void emit_prologue(std::uint32_t param_bytes) {
        launch_kernel_ = load_field(offsetof(LauncherContext, launch_kernel));
        memset_async_ = load_field(offsetof(LauncherContext, memset_async));
        functions_ = load_field(offsetof(LauncherContext, functions));
        launch_overlapping_ = load_field(offsetof(LauncherContext, launch_overlapping));
        encode_map_ = load_field(offsetof(LauncherContext, encode_map));
        params_ = builder_.CreateAlloca(llvm::ArrayType::get(builder_.getInt8Ty(), std::max<std::uint32_t>(param_bytes, 1)));
        params_->setAlignment(llvm::Align(kParamAlignment));
        kernel_params_ = builder_.CreateAlloca(pointer_);  // every kernel has one parameter
        builder_.CreateStore(params_, kernel_params_);
        gemm_call_ = builder_.CreateAlloca(llvm::ArrayType::get(i64_, sizeof(GemmCall) / sizeof(std::int64_t)));
        scopes_.emplace_back();
    }

    // ---- Expressions. A value computed in a block is reused in it and in the blocks nested in it, which it dominates.

    Value* emit(const Expr& e) {
        const Expr::Node* node = &e.node();
        for (const auto& scope : scopes_) {
            if (const auto found = scope.find(node); found != scope.end()) return found->second;
        }
        Value* value = emit_node(*node);
        scopes_.back().emplace(node, value);
        return value;
    }

    Value* emit_node(const Expr::Node& node) {
        switch (node.op) {
            case Op::constant: return builder_.getInt64(static_cast<std::uint64_t>(node.value));
            case Op::slot:
                return builder_.CreateLoad(i64_, builder_.CreateConstInBoundsGEP1_64(i64_, slots_, static_cast<std::uint64_t>(node.value)));
            case Op::variable: {
                Value* value = variables_.at(static_cast<std::size_t>(node.value));
                if (value == nullptr) throw InternalError(fmt::format("launch program uses i{} outside its loop", node.value));
                return value;
            }
            case Op::select: return builder_.CreateSelect(is_not_zero(emit(node.args[0])), emit(node.args[1]), emit(node.args[2]));
            default: return emit_binary(node.op, emit(node.args[0]), emit(node.args[1]));
        }
    }

    Value* emit_binary(Op op, Value* a, Value* b) {
        switch (op) {
            case Op::add: return builder_.CreateAdd(a, b);
            case Op::sub: return builder_.CreateSub(a, b);
            case Op::mul: return builder_.CreateMul(a, b);
            // A division by zero has no value, and must not trap in the branch that a select leaves out.
            case Op::div: return builder_.CreateSDiv(a, builder_.CreateSelect(is_not_zero(b), b, builder_.getInt64(1)));
            case Op::min: return builder_.CreateSelect(builder_.CreateICmpSLT(b, a), b, a);
            case Op::max: return builder_.CreateSelect(builder_.CreateICmpSLT(a, b), b, a);
            case Op::equal: return builder_.CreateZExt(builder_.CreateICmpEQ(a, b), i64_);
            case Op::less: return builder_.CreateZExt(builder_.CreateICmpSLT(a, b), i64_);
            default: throw InternalError("launch program: not a binary operation");
        }
    }

    Value* is_not_zero(Value* value) { return builder_.CreateICmpNE(value, builder_.getInt64(0)); }

    // ---- Statements.

    void emit_body(const std::vector<Statement>& body) {
        for (const Statement& statement : body) {
            const std::int64_t index = next_statement_++;
            std::visit([&](const auto& s) { emit_statement(s, index); }, statement.value);
        }
    }

    /// Runs `inside` in a block entered if `condition` holds.
    template <typename Inside>
    void emit_guarded(Value* condition, const Inside& inside) {
        BasicBlock* then = block("then");
        BasicBlock* next = block("next");
        builder_.CreateCondBr(condition, then, next);
        builder_.SetInsertPoint(then);
        scopes_.emplace_back();
        inside();
        scopes_.pop_back();
        builder_.CreateBr(next);
        builder_.SetInsertPoint(next);
    }

    void emit_statement(const If& branch, std::int64_t /*index*/) {
        emit_guarded(is_not_zero(emit(branch.condition)), [&] { emit_body(branch.then); });
    }

    void emit_statement(const Loop& loop, std::int64_t /*index*/) {
        Value* count = emit(loop.count);
        BasicBlock* before = builder_.GetInsertBlock();
        BasicBlock* header = block("loop");
        BasicBlock* body = block("body");
        BasicBlock* end = block("end");
        builder_.CreateBr(header);
        builder_.SetInsertPoint(header);
        llvm::PHINode* variable = builder_.CreatePHI(i64_, 2);
        variable->addIncoming(builder_.getInt64(0), before);
        builder_.CreateCondBr(builder_.CreateICmpSLT(variable, count), body, end);
        builder_.SetInsertPoint(body);
        Value*& slot = variables_.at(static_cast<std::size_t>(loop.variable));
        if (slot != nullptr) throw InternalError(fmt::format("launch program nests two loops over i{}", loop.variable));
        slot = variable;
        scopes_.emplace_back();
        emit_body(loop.body);
        scopes_.pop_back();
        slot = nullptr;
        variable->addIncoming(builder_.CreateAdd(variable, builder_.getInt64(1)), builder_.GetInsertBlock());
        builder_.CreateBr(header);
        builder_.SetInsertPoint(end);
    }

    void emit_statement(const MemsetZero& memset, std::int64_t index) {
        Value* bytes = emit(memset.bytes);
        emit_guarded(builder_.CreateICmpSGT(bytes, builder_.getInt64(0)), [&] {
            auto* type = llvm::FunctionType::get(i32_, {i64_, builder_.getInt8Ty(), i64_, pointer_}, false);
            llvm::CallInst* call = builder_.CreateCall(type, memset_async_, {emit(memset.address), builder_.getInt8(0), bytes, stream_});
            call->addParamAttr(1, llvm::Attribute::ZExt);
            emit_check(call, index);
        });
    }

    void emit_statement(const Gemm& gemm, std::int64_t index) {
        Value* m = emit(gemm.m);
        Value* n = emit(gemm.n);
        Value* zero = builder_.getInt64(0);
        emit_guarded(builder_.CreateAnd(builder_.CreateICmpSGT(m, zero), builder_.CreateICmpSGT(n, zero)), [&] {
            const GemmKind& kind = gemm.kind;
            std::vector<Value*> values;
            for (const int fact : {int{kind.transpose_a}, int{kind.transpose_b}, static_cast<int>(kind.operands),
                                   static_cast<int>(kind.result), kind.algorithm}) {
                values.push_back(builder_.getInt64(static_cast<std::uint64_t>(fact)));
            }
            values.insert(values.end(), {m, n});
            for (const Expr* e :
                 {&gemm.k, &gemm.a, &gemm.lda, &gemm.b, &gemm.ldb, &gemm.result, &gemm.ld, &gemm.adds, &gemm.factors, &gemm.workspace}) {
                values.push_back(emit(*e));
            }
            static_assert(sizeof(GemmCall) == 17 * sizeof(std::int64_t));
            for (std::size_t i = 0; i < values.size(); ++i) {
                builder_.CreateStore(values[i], builder_.CreateConstInBoundsGEP1_64(i64_, gemm_call_, i));
            }
            auto* type = llvm::FunctionType::get(i32_, {pointer_, pointer_, pointer_}, false);
            Value* callee = load_field(offsetof(LauncherContext, gemm));
            emit_check(builder_.CreateCall(type, callee, {context_, gemm_call_, stream_}), index);
        });
    }

    void emit_statement(const Launch& launch, std::int64_t index) {
        const auto kernel = static_cast<std::size_t>(launch.kernel);
        if (launch.kernel < 0 || kernel >= kernels_.size()) {
            throw InternalError(fmt::format("launch program names kernel {} of {}", launch.kernel, kernels_.size()));
        }
        std::array<Value*, 3> grid{};
        Value* any = nullptr;
        for (std::size_t i = 0; i < 3; ++i) {
            grid[i] = emit(launch.grid[i]);
            Value* positive = builder_.CreateICmpSGT(grid[i], builder_.getInt64(0));
            any = any == nullptr ? positive : builder_.CreateAnd(any, positive);
        }
        emit_guarded(any, [&] {
            emit_params(launch);
            for (const TensorMapField& map : launch.maps) emit_map(map, index);
            Value* callee = builder_.CreateLoad(pointer_, builder_.CreateConstInBoundsGEP1_64(pointer_, functions_, kernel));
            emit_check(emit_launch(kernels_[kernel], callee, grid), index);
        });
    }

    Value* emit_launch(const KernelEntry& entry, Value* function, const std::array<Value*, 3>& grid) {
        std::vector<Value*> arguments{function};
        for (Value* dimension : grid) arguments.push_back(narrow(dimension));
        if (entry.overlaps_previous) {
            arguments.insert(arguments.begin(), context_);
            for (const std::uint32_t value : {entry.block_threads, entry.dynamic_smem_bytes}) arguments.push_back(builder_.getInt32(value));
            arguments.insert(arguments.end(), {stream_, kernel_params_});
            auto* type = llvm::FunctionType::get(i32_, {pointer_, pointer_, i32_, i32_, i32_, i32_, i32_, pointer_, pointer_}, false);
            return builder_.CreateCall(type, launch_overlapping_, arguments);
        }
        for (const std::uint32_t value : {entry.block_threads, 1U, 1U, entry.dynamic_smem_bytes})
            arguments.push_back(builder_.getInt32(value));
        Value* null = llvm::ConstantPointerNull::get(pointer_);
        arguments.insert(arguments.end(), {stream_, kernel_params_, null});
        auto* type =
            llvm::FunctionType::get(i32_, {pointer_, i32_, i32_, i32_, i32_, i32_, i32_, i32_, pointer_, pointer_, pointer_}, false);
        return builder_.CreateCall(type, launch_kernel_, arguments);
    }

    /// A grid dimension as unsigned; one that does not fit becomes the largest unsigned, which the driver refuses, instead of wrapping.
    Value* narrow(Value* dimension) {
        Value* most = builder_.getInt64(std::numeric_limits<std::uint32_t>::max());
        return builder_.CreateTrunc(builder_.CreateSelect(builder_.CreateICmpSLT(dimension, most), dimension, most), i32_);
    }

    void emit_params(const Launch& launch) {
        std::uint64_t named = 0;
        for (const ParamField& field : launch.params) named += field.bytes;
        if (named < launch.param_bytes) {
            builder_.CreateMemSet(params_, builder_.getInt8(0), launch.param_bytes, llvm::Align(kParamAlignment));
        }
        check_fields(launch);
        for (const ParamField& field : launch.params) {
            Value* value = emit(field.value);
            if (field.bytes == 4) value = builder_.CreateTrunc(value, i32_);
            Value* address = builder_.CreateConstInBoundsGEP1_64(builder_.getInt8Ty(), params_, field.offset);
            builder_.CreateAlignedStore(value, address, llvm::Align(1));
        }
    }

    void emit_map(const TensorMapField& map, std::int64_t index) {
        Value* at = builder_.CreateConstInBoundsGEP1_64(builder_.getInt8Ty(), params_, map.offset);
        auto* type = llvm::FunctionType::get(i32_, {pointer_, pointer_, i64_, i64_, i64_, i64_, i64_, i64_, i32_, i32_}, false);
        emit_check(builder_.CreateCall(
                       type, encode_map_,
                       {context_, at, emit(map.address), emit(map.columns), emit(map.rows), emit(map.row_bytes), emit(map.blocks),
                        emit(map.block_bytes), builder_.CreateTrunc(emit(map.box_rows), i32_), builder_.getInt32(map.element_bytes)}),
                   index, kMapFailed);
    }

    /// Returns from the pass where `result` is an error.
    void emit_check(Value* result, std::int64_t index, std::uint64_t flags = 0) {
        BasicBlock* failed = block("failed");
        BasicBlock* ok = block("ok");
        builder_.CreateCondBr(builder_.CreateICmpEQ(result, builder_.getInt32(0)), ok, failed);
        builder_.SetInsertPoint(failed);
        builder_.CreateRet(
            builder_.CreateOr(builder_.CreateZExt(result, i64_), builder_.getInt64(static_cast<std::uint64_t>(index) << 32 | flags)));
        builder_.SetInsertPoint(ok);
    }

    llvm::Module& module_;
    llvm::IRBuilder<> builder_;
    const std::vector<KernelEntry>& kernels_;
    llvm::PointerType* pointer_ = nullptr;
    llvm::IntegerType* i64_ = nullptr;
    llvm::IntegerType* i32_ = nullptr;
    llvm::Function* function_ = nullptr;
    Value* context_ = nullptr;
    Value* slots_ = nullptr;
    Value* stream_ = nullptr;
    Value* launch_kernel_ = nullptr;
    Value* memset_async_ = nullptr;
    Value* functions_ = nullptr;
    llvm::AllocaInst* params_ = nullptr;
    Value* encode_map_ = nullptr;
    Value* launch_overlapping_ = nullptr;
    llvm::AllocaInst* kernel_params_ = nullptr;
    llvm::AllocaInst* gemm_call_ = nullptr;
    std::vector<Value*> variables_;
    std::vector<std::map<const Expr::Node*, Value*>> scopes_;
    std::int64_t next_statement_ = 0;
};

}  // namespace

int launch_overlapping(const LauncherContext* context, void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                       unsigned smem_bytes, void* stream, void** params) {
    CUlaunchAttribute overlapping{};
    overlapping.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlapping.value.programmaticStreamSerializationAllowed = 1;
    const CUlaunchConfig config{grid_x, grid_y, grid_z, block_x, 1, 1, smem_bytes, static_cast<CUstream>(stream), &overlapping, 1};
    return reinterpret_cast<decltype(&cuLaunchKernelEx)>(context->launch_kernel_ex)(&config, static_cast<CUfunction>(function), params,
                                                                                    nullptr);
}

int encode_map(const LauncherContext* context, void* map, std::int64_t address, std::int64_t columns, std::int64_t rows,
               std::int64_t row_bytes, std::int64_t blocks, std::int64_t block_bytes, unsigned box_rows, unsigned element_bytes) {
    const cuuint64_t extents[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(blocks)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(block_bytes)};
    const cuuint32_t box[3] = {TensorMapField::kBoxBytes / element_bytes, box_rows, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    // Elements of 8 and 16 bits are only moved, fp32 may be added.
    const CUtensorMapDataType type = element_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(context->tensor_map_encode)(
        static_cast<CUtensorMap*>(map), type, blocks == 0 ? 2 : 3, reinterpret_cast<void*>(address), extents, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

std::optional<LauncherFailure> launcher_failure(std::int64_t returned) noexcept {
    if (returned == 0) return std::nullopt;
    const auto word = static_cast<std::uint64_t>(returned);
    return LauncherFailure{
        .statement = word >> 32, .tensor_map = (word & kMapFailed) != 0, .result = static_cast<int>(word & (kMapFailed - 1))};
}

const char* failed_call(const LaunchProgram& program, const std::vector<KernelEntry>& kernels, const LauncherFailure& failure) {
    if (failure.tensor_map) return "cuTensorMapEncodeTiled";
    const Statement& statement = numbered_statement(program, failure.statement);
    if (std::holds_alternative<MemsetZero>(statement.value)) return "cuMemsetD8Async";
    if (std::holds_alternative<Gemm>(statement.value)) return "cublasLtMatmul";
    const auto* launch = std::get_if<Launch>(&statement.value);
    if (launch == nullptr) throw InternalError(fmt::format("statement {} of a launch program calls nothing", failure.statement));
    return kernels.at(static_cast<std::size_t>(launch->kernel)).overlaps_previous ? "cuLaunchKernelEx" : "cuLaunchKernel";
}

CpuProperties launcher_target(const std::string& host_triple) {
    CpuProperties target;
    target.triple = host_triple;
    target.cpu = host_triple.starts_with("x86_64") ? "x86-64" : "generic";
    return target;
}

std::vector<std::byte> compile_launchers(const CudaProgram& program, const CpuProperties& host) {
    return compile_host_object(host, "flce launchers", [&](llvm::Module& module) {
        const PassEmitter forward(module, kForwardLauncherSymbol, program.forward, program.kernels);
        const PassEmitter merge(module, kMergeLauncherSymbol, program.merge, program.kernels);
        const PassEmitter backward(module, kBackwardLauncherSymbol, program.backward, program.kernels);
    });
}

std::string_view launcher_generator() noexcept { return FLCE_LAUNCHER_DIGEST; }

CacheKey launchers_key(const CudaProgram& program, const CpuProperties& target, std::string_view generator) {
    KeyBuilder key("object");
    key.add("generator", generator).add("llvm", llvm_version());
    key.add("triple", target.triple).add("cpu", target.cpu).add("features", target.features);
    for (const KernelEntry& kernel : program.kernels) {
        key.add("kernel",
                fmt::format("{} {} {} {}", kernel.name, kernel.block_threads, kernel.dynamic_smem_bytes, kernel.overlaps_previous));
    }
    key.add("forward", program_identity(program.forward))
        .add("merge", program_identity(program.merge))
        .add("backward", program_identity(program.backward));
    return key.finish();
}

}  // namespace flce

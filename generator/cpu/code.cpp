#include "generator/cpu/code.hpp"

#include <fmt/format.h>

namespace flce {
namespace {

/// `spec` with every shape and value replaced by a stand-in that keeps the structure.
Spec structure_of(const Spec& spec) {
    Spec structure;
    structure.hidden_size = 8;
    structure.vocab_size = structure.padded_vocab_size = 2;
    structure.dtype = spec.dtype;
    if (rounds_weight(spec)) structure.weight_dtype = weight_dtype(spec);  // a quantised one reaches the code as fp32
    structure.layout = spec.layout;
    structure.grad_weight_dtype = spec.grad_weight_dtype;
    structure.grad_weight_mode = spec.grad_weight_mode;
    structure.bias = spec.bias;
    structure.class_weight = spec.class_weight;
    structure.class_offset = spec.class_offset;
    structure.class_groups = spec.class_groups;
    structure.offset_gradient = spec.offset_gradient;
    structure.temperature = spec.temperature;
    structure.logit_scale = spec.logit_scale == 1.0 ? 1.0 : 2.0;
    structure.softcap = spec.softcap == 0.0 ? 0.0 : 1.0;
    structure.label_smoothing = spec.label_smoothing > 0.0 ? 1.0 : 0.0;
    if (is_fp8(spec)) structure.fp8 = Fp8Operands::int8;  // codes of all formats reach the code as fp32
    structure.outputs.entropy = spec.outputs.entropy;
    structure.outputs.log_sum_sq_probs = spec.outputs.log_sum_sq_probs;
    return structure;
}

}  // namespace

VectorTarget vector_target(const CpuProperties& cpu, const CpuPlan& plan) {
    return {.vector_bits = plan.vector_bits, .fma = cpu.fma, .bf16_dot = cpu.bf16_dot && plan.bf16_dot};
}

void emit_cpu_code(llvm::Module& module, const Spec& concrete, const CpuProperties& cpu, const CpuPlan& plan) {
    const Spec spec = structure_of(concrete);
    const VectorTarget target = vector_target(cpu, plan);
    const bool vocab_major = spec.layout == WeightLayout::vocab_major;
    const DType rounded = rounds_weight(spec) ? spec.dtype : DType::fp32;
    const auto pack_rounded = [&](const char* symbol, DType source, DType to, bool depth_contiguous, int width) {
        emit_pack(module, target, symbol,
                  {.source = source, .rounded = to, .depth_contiguous = depth_contiguous, .width = width, .bf16_pairs = plan.bf16_dot});
    };
    const auto pack = [&](const char* symbol, DType source, bool depth_contiguous, int width) {
        pack_rounded(symbol, source, DType::fp32, depth_contiguous, width);
    };
    const DType hidden = is_fp8(spec) ? DType::fp32 : spec.dtype;
    const DType weight = is_fp8(spec) ? DType::fp32 : weight_dtype(spec);
    emit_micro_kernel(module, target, cpu_symbol::kMicroKernel, plan.micro_m, plan.micro_n, plan.bf16_dot);
    pack(cpu_symbol::kPackHidden, hidden, true, plan.micro_m);
    pack_rounded(cpu_symbol::kPackWeightLogits, weight, rounded, vocab_major, plan.micro_n);
    pack_rounded(cpu_symbol::kPackWeightGrad, weight, rounded, !vocab_major, plan.micro_n);
    pack(cpu_symbol::kPackHiddenGrad, hidden, false, plan.micro_n);
    pack(cpu_symbol::kPackDlogitsRows, DType::fp32, true, plan.micro_m);
    pack(cpu_symbol::kPackDlogitsColumns, DType::fp32, false, plan.micro_m);
    emit_forward_tile(module, target, cpu_symbol::kForwardTile, spec);
    emit_backward_tile(module, target, cpu_symbol::kBackwardTile, spec);
    emit_column_sums(module, target, cpu_symbol::kColumnSums);
    const DType grad_dtype = spec.grad_weight_dtype;
    const GradMode mode = spec.grad_weight_mode;
    emit_store(module, target, cpu_symbol::kWriteFloat, {.destination = DType::fp32, .mode = GradMode::write});
    emit_store(module, target, cpu_symbol::kAddFloat, {.destination = DType::fp32, .mode = GradMode::accumulate});
    emit_store(module, target, cpu_symbol::kStoreHidden, {.destination = spec.dtype, .mode = GradMode::write});
    emit_store(module, target, cpu_symbol::kStoreWeight, {.destination = grad_dtype, .mode = mode, .transposed = !vocab_major});
    emit_store(module, target, cpu_symbol::kStoreBias, {.destination = grad_dtype, .mode = mode});
    emit_to_float(module, target, cpu_symbol::kToFloat, spec.dtype);
}

std::string cpu_code_identity(const Spec& spec, const CpuProperties& cpu, const CpuPlan& plan) {
    const VectorTarget target = vector_target(cpu, plan);
    return fmt::format("{};vector={},fma={:d},bf16_dot={:d},bf16_pairs={:d},micro={}x{};generator={}", structure_of(spec).text(),
                       target.vector_bits, target.fma, target.bf16_dot, plan.bf16_dot, plan.micro_m, plan.micro_n,
                       FLCE_HOST_GENERATOR_DIGEST);
}

}  // namespace flce

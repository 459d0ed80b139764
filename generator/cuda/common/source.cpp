#include "generator/cuda/common/source.hpp"

#include <fmt/format.h>

#include "flce/error.hpp"
#include "generator/cuda/common/falls.hpp"
#include "generator/cuda/common/transform_source.hpp"
#include "generator/logit_transforms.hpp"
#include "templates/common/divergence_math.cuh"

namespace flce {
namespace {

std::string_view element_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return "flce::Bf16";
        case DType::fp16: return "flce::Fp16";
        case DType::fp32: return "float";
    }
    throw InternalError("element_type: unknown dtype");
}

/// Transforms that a Problem has.
std::string transform_functions(const Spec& spec, const Plan& plan, const std::string& math, bool falls) {
    const std::size_t cap = ScaleTransform::active(spec) ? ScaleTransform::parameter_count : 0;
    std::string text;
    if (falls) {
        text += "    enum : bool { has_falls = true };\n";
        text += "    static __device__ __forceinline__ flce::Falls falls(const float* p) {\n";
        text += fmt::format("        return {{p[{}], p[flce::kFallRate], p[flce::kFallSteepness]}};\n    }}\n", cap);
        text += "    static __device__ __forceinline__ float logit_scale(const float* p) {\n";
        text += fmt::format("        return {};\n    }}\n", cap > 0 ? "p[0]" : "1.f");
    }
    text += "    static __device__ __forceinline__ flce::Logit transform(float x, const float* p) {\n";
    if (falls) {
        text += "        const float fall = falls(p).of(x);\n";
        text += "        return {falls(p).logit(fall), 4.f * flce::Falls::quarter_slope(fall) * logit_scale(p)};\n";
    } else {
        text += transform_source(spec, math, "        ");
    }
    text += "    }\n";
    if ((plan.strategy == Strategy::retain || is_fp8(spec)) && spec.softcap != 0.0) {
        text += "    enum : bool { stores_derivative = true };\n";
        text += "    static __device__ __forceinline__ float derivative_at(float z, const float* p) {\n";
        text += derivative_source(spec, "        ");
        text += "    }\n    static __device__ __forceinline__ float softcap(const float* p) {\n";
        text += fmt::format("        return p[{}];\n    }}\n", cap);
    }
    return text;
}

std::string problem_struct(const Spec& spec, const Plan& plan, const KernelFamily& family, std::string_view name = "Problem") {
    const bool long_sums = spec.hidden_size >= kLongSum;
    const std::string math = spec.dtype == DType::fp32 ? "flce::PreciseMath" : long_sums ? "flce::FastLongMath" : "flce::FastMath";
    std::string text = fmt::format("struct {} : flce::PlainProblem {{\n", name);
    text += fmt::format("    using Element = {};\n", element_type(spec.dtype));
    text += fmt::format("    using GradWeight = {};\n", element_type(spec.grad_weight_dtype));
    text += fmt::format("    using Math = {};\n", math);
    text += fmt::format("    enum : int {{ hidden_size = {} }};\n", spec.hidden_size);
    text += fmt::format("    enum : int {{ vocab_size = {} }};\n", spec.vocab_size);
    text += fmt::format("    enum : long long {{ padded_vocab_size = {} }};\n", spec.padded_vocab_size);
    text += fmt::format("    enum : bool {{ hidden_major = {} }};\n", spec.layout == WeightLayout::hidden_major);
    text += fmt::format("    enum : bool {{ bias = {} }};\n", spec.bias);
    text += fmt::format("    enum : bool {{ class_weight = {} }};\n", spec.class_weight);
    if (spec.class_offset) text += "    enum : bool { class_offset = true };\n";
    text += fmt::format("    enum : bool {{ label_smoothing = {} }};\n", spec.label_smoothing > 0);
    text += fmt::format("    enum : bool {{ entropy = {} }};\n", spec.outputs.entropy);
    text += fmt::format("    enum : bool {{ accumulate = {} }};\n", spec.grad_weight_mode == GradMode::accumulate);
    text += fmt::format("    enum : bool {{ retain = {} }};\n", plan.strategy == Strategy::retain);
    text += fmt::format("    enum : bool {{ lists_rows = {} }};\n", family.lists_rows);
    text += fmt::format("    enum : bool {{ rounds_weight = {} }};\n", rounds_weight(spec));
    if (is_quantized(spec)) {
        static_assert(kWeightE4m3 == static_cast<int>(WeightFormat::e4m3) && kWeightNvfp4 == static_cast<int>(WeightFormat::nvfp4));
        text += fmt::format("    enum : int {{ weight_format = {} }};\n", static_cast<int>(spec.weight_format));
        if (spec.weight_block != 0) text += fmt::format("    enum : int {{ weight_block = {} }};\n", spec.weight_block);
    }
    text += fmt::format("    enum : int {{ raster = {} }};\n", plan.cuda.raster);
    if (spec.batch_invariant) text += fmt::format("    enum : int {{ segment_tiles = {} }};\n", family.segment_tiles);
    if (family.retained_columns != kRetainedColumns)
        text += fmt::format("    enum : int {{ retained_columns = {} }};\n", family.retained_columns);
    if (spec.outputs.top1) text += "    enum : bool { top1 = true };\n";
    if (spec.top_k > 0) text += fmt::format("    enum : int {{ top_k = {} }};\n", spec.top_k);
    if (family.stretches) text += "    enum : bool { stretches = true };\n";
    if (spec.outputs.log_sum_sq_probs) text += "    enum : bool { square_sum = true };\n";
    if (spec.class_groups) text += "    enum : bool { class_groups = true };\n";
    if (spec.temperature) text += "    enum : bool { temperature = true };\n";
    if (spec.support) text += "    enum : bool { support = true };\n";
    if (is_fp8(spec)) {
        text += fmt::format("    enum : bool {{ int8_logits = {} }};\n", spec.fp8 == Fp8Operands::int8);
        text += fmt::format("    enum : bool {{ e5m2_dlogits = {} }};\n", spec.fp8_dlogits == Fp8Dlogits::e5m2);
        if (has_fp8_scales(spec)) text += "    enum : bool { given_scales = true };\n";
        if (!turns_exponentials(spec)) text += "    enum : bool { turns_exponentials = false };\n";
    }
    if (has_teacher_head(spec)) {
        text += "    enum : bool { divergence = true };\n";
        text += fmt::format("    enum : int {{ divergence_form = {} }};\n", static_cast<int>(divergence_form(spec.divergence_beta)));
    }
    if (is_shard(spec)) {
        text += "    enum : bool { shard = true };\n";
        text += fmt::format("    enum : int {{ whole_vocab_size = {} }};\n", spec.whole_vocab_size);
        if (grad_hidden_dtype(spec) == DType::fp32) text += "    enum : bool { float_grad_hidden = true };\n";
    }
    text += transform_functions(spec, plan, math, family.tells_falls && has_falls(spec));
    text += "};\n\n";
    return text;
}

bool sees_logits(KernelRole role) {
    return role == KernelRole::forward || role == KernelRole::forward_few || role == KernelRole::dlogits ||
           role == KernelRole::backward_chunks || role == KernelRole::hidden_chunks || role == KernelRole::stale_sums ||
           role == KernelRole::stale_rows || role == KernelRole::divergence_sums || role == KernelRole::divergence_mixture ||
           role == KernelRole::divergence_retained || role == KernelRole::divergence_pairs || role == KernelRole::heads_sums ||
           role == KernelRole::heads_mixture || role == KernelRole::heads_dlogits || role == KernelRole::divergence_gradients;
}

}  // namespace

bool turns_exponentials(const Spec& spec) { return !is_quantized(spec) || spec.bias; }

bool zeroes_columns(const Spec& spec) {
    const bool may_have_some = is_shard(spec) || spec.padded_vocab_size > spec.vocab_size;
    return spec.layout == WeightLayout::hidden_major && may_have_some && spec.grad_weight_mode == GradMode::write;
}

int CudaSource::kernel(KernelRole role) const {
    const int number = numbers_.at(static_cast<std::size_t>(role));
    if (number == 0) throw InternalError(fmt::format("no kernel {} in the program", to_string(role)));
    return number - 1;
}

void CudaSource::add(KernelRole role, const KernelEntry& entry) {
    kernels.push_back(entry);
    numbers_.at(static_cast<std::size_t>(role)) = static_cast<int>(kernels.size());
}

KernelWriter::KernelWriter(const Spec& spec, const Device& device, const Plan& plan, const KernelFamily& family)
    : spec_(spec),
      configuration_(fmt::format("#include \"flce/{}\"\n\n", family.header) + problem_struct(spec, plan, family)),
      // Kernels over tiles are those of a spec without a teacher, but for those of a forward that picks.
      problem_of_rows_(spec.teacher_top_k == 0 ? "Problem"
                       : family.picks_named    ? "flce::TaughtByTiles<Problem>"
                                               : "flce::Taught<Problem>"),
      overlaps_(family.overlaps) {
    if (has_teacher_head(spec)) configuration_ += problem_struct(teacher_head(spec), plan, family, "Teacher");
    source_.options = {"--gpu-architecture=" + device.gpu.arch, "--std=c++17"};
    source_.units = {{configuration_, {}}};
    if (family.picks_named) source_.named_threads = kRowThreads;
}

void KernelWriter::gemm(const GemmKernel& kernel) {
    CudaUnit unit{configuration_, {}};
    if (!kernel.header.empty()) unit.source += fmt::format("#include \"flce/{}\"\n\n", kernel.header);
    const std::string arguments = fmt::format("<{}, flce::{}>", kernel.problem, kernel.tile);
    std::string params = kernel.params;
    if (spec_.class_groups && sees_logits(kernel.role)) params = fmt::format("Grouped<flce::{}>", params);
    if (spec_.temperature && sees_logits(kernel.role)) params = fmt::format("Tempered<flce::{}>", params);
    add(unit, kernel.role, params, fmt::format("flce::{}{}(p)", kernel.function, arguments), kernel.block);
    if (kernel.overlaps_previous) unit.kernels.back().overlaps_previous = source_.kernels.back().overlaps_previous = true;
    unit.source += fmt::format("static_assert({0}::kSmemBytes == {1} && {0}::kThreads == {2}, \"as the host has it\");\n",
                               fmt::format("flce::{}{}", kernel.stated, arguments), kernel.block.smem_bytes, kernel.block.threads);
    source_.units.push_back(std::move(unit));
}

void KernelWriter::row_kernels() {
    if (has_teacher_head(spec_)) {
        rows(KernelRole::divergence_outputs, "DivergenceOutputsParams", kOutputThreads);
        if (is_shard(spec_)) rows(KernelRole::divergence_shard_sums, "DivergenceShardSumsParams", kOutputThreads);
    } else if (is_shard(spec_)) {
        rows(KernelRole::shard_sums, "ShardSumsParams", kOutputThreads, Waits::before_it_calls);
        rows(KernelRole::merge_shards, "MergeShardsParams", kOutputThreads, Waits::before_it_calls);
    } else {
        rows(KernelRole::row_outputs, "RowOutputsParams", kOutputThreads, Waits::before, "row_outputs_kernel");
    }
    rows(KernelRole::reduce_loss, "ReduceLossParams", kReduceThreads);
    rows(KernelRole::prepare, "PrepareParams", kReduceThreads, Waits::before_it_calls);
    const char* coefficients = spec_.class_groups ? "GroupedRowCoefficientsParams" : "RowCoefficientsParams";
    rows(KernelRole::row_coefficients, coefficients, kRowThreads, Waits::before_it_calls, "row_coefficients_kernel");
}

void KernelWriter::option_kernels() {
    if (rounds_weight(spec_)) {
        if (is_quantized(spec_)) {
            rows(KernelRole::round_weight, "DequantizeWeightParams", kRowThreads, Waits::before, "dequantize_weight");
        } else {
            rows(KernelRole::round_weight, "RoundWeightParams");
        }
        rows(KernelRole::merge_stretch, "MergeStretchParams");
    }
    if (spec_.teacher_top_k > 0) {
        rows(KernelRole::teacher_logits, "TeacherLogitsParams");
        rows(KernelRole::teacher_dlogits, "TeacherRowsParams");
        if (spec_.bias) rows(KernelRole::teacher_bias, "TeacherRowsParams", kReduceThreads);
    }
    if (spec_.bias) rows(KernelRole::grad_bias, "GradBiasParams");
    if (zeroes_columns(spec_)) rows(KernelRole::zero_columns, "ZeroColumnsParams");
}

void KernelWriter::top_classes(Waits waits) {
    if (spec_.top_k > 0) rows(KernelRole::top_classes, "TopClassesParams", kTopThreads, waits, {}, spec_.top_k <= 64 ? 8 : 1);
}

void KernelWriter::rows(KernelRole role, std::string_view params, int threads, Waits waits, std::string_view function, int per_sm) {
    std::string begin;
    if (overlaps_ && waits != Waits::itself) begin += "flce::ptx::griddepcontrol_wait();\n    ";
    if (overlaps_ && waits == Waits::before_it_calls) begin += "flce::ptx::griddepcontrol_launch_dependents();\n    ";
    if (function.empty()) function = to_string(role);
    add(source_.units.front(), role, params, fmt::format("{}flce::{}<{}>(p)", begin, function, problem_of_rows_),
        {.threads = threads, .per_sm = per_sm});
    source_.units.front().kernels.back().overlaps_previous = overlaps_;
    source_.kernels.back().overlaps_previous = overlaps_;
}

void KernelWriter::add(CudaUnit& unit, KernelRole role, std::string_view params, const std::string& body, const KernelBlock& block) {
    const std::string symbol = fmt::format("flce_{}", to_string(role));
    const std::string cluster = block.cluster > 1 ? fmt::format(" __cluster_dims__({}, 1, 1)", block.cluster) : "";
    unit.source +=
        fmt::format("extern \"C\" __global__ void __launch_bounds__({}, {}){} {}(const __grid_constant__ flce::{} p) {{\n    {};\n}}\n",
                    block.threads, block.per_sm, cluster, symbol, params, body);
    unit.kernels.push_back(
        {symbol, static_cast<std::uint32_t>(block.threads), static_cast<std::uint32_t>(block.smem_bytes), block.cluster > 1});
    source_.add(role, unit.kernels.back());
}

}  // namespace flce

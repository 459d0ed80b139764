#include <bit>
#include <cmath>
#include <cstring>

#include "autotune/reference.hpp"
#include "flce/error.hpp"
#include "runtime/layer/layer.hpp"
#include "runtime/layer/number_formats.hpp"

namespace flce {

ReferenceProblem reference_problem(const Spec& spec, const RandomLayer& layer) {
    if (has_teacher_head(spec)) throw SpecError("teacher_hidden_size: a divergence has no fp64 reference here, for check and tune");
    if (spec.support) throw SpecError("support: a softmax over a token's ids has no fp64 reference here, for check and tune");
    if (spec.top_k > 0) throw SpecError("top_k: the classes of the largest logits have no fp64 reference here, for check and tune");
    return {.spec = spec,
            .num_tokens = layer.num_tokens,
            .hidden = layer.hidden.data(),
            .weight = layer.weight.data(),
            .weight_scale = layer.weight_scale.data(),
            .weight_tensor_scale = layer.weight_tensor_scale,
            .bias = layer.bias.data(),
            .class_weight = layer.class_weight,
            .class_offset = layer.class_offset,
            .class_group = layer.class_group,
            .row_group = layer.row_group,
            .target = layer.target,
            .temperature = layer.temperature,
            .token_weight = layer.token_weight,
            .teacher_ids = layer.teacher_ids,
            .teacher_probs = layer.teacher_probs,
            .grad_loss = layer.grad_loss,
            .grad_lse = layer.grad_lse,
            .grad_logprobs = layer.grad_logprobs,
            .grad_entropy = layer.grad_entropy};
}

float ReferenceProblem::dequantized(std::int64_t row, std::int64_t column) const {
    const auto code = [](const std::byte* codes, std::int64_t at) { return std::to_integer<std::uint8_t>(codes[at]); };
    const std::int64_t at = row * spec.hidden_size + column;
    if (spec.weight_format == WeightFormat::nvfp4) {
        const auto two = static_cast<unsigned>(code(weight, at / 2));
        const float scale = e4m3_to_float(code(weight_scale, at / kNvfp4Group)) * weight_tensor_scale;
        return e2m1_to_float(static_cast<std::uint8_t>(column % 2 == 0 ? two & 15U : two >> 4U)) * scale;
    }
    const std::int64_t block = spec.weight_block;
    const std::int64_t which = block == 0 ? row : row / block * ((spec.hidden_size + block - 1) / block) + column / block;
    float scale = 0;
    std::memcpy(&scale, weight_scale + which * static_cast<std::int64_t>(sizeof(float)), sizeof(float));
    return e4m3_to_float(code(weight, at)) * scale;
}

float rounded_mantissa(float value, DType dtype) {
    if (dtype == DType::fp32 || !std::isfinite(value)) return value;
    const std::uint32_t dropped = dtype == DType::bf16 ? 16 : 13;
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t half = (1U << (dropped - 1)) - 1 + ((bits >> dropped) & 1U);
    return std::bit_cast<float>((bits + half) >> dropped << dropped);
}

float stored_value(float value, DType dtype) {
    constexpr float kSmallestNormal = 0x1p-14F, kSmallest = 0x1p-24F;
    if (dtype == DType::fp16 && std::abs(value) < kSmallestNormal) return std::nearbyint(value / kSmallest) * kSmallest;
    return rounded_mantissa(value, dtype);
}

}  // namespace flce

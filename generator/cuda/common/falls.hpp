// Falls: a softcap in the kernels of a GPU.
#pragma once

#include <array>
#include <numbers>

#include "flce/spec.hpp"
#include "templates/common/params.cuh"

namespace flce {

/// Whether kernels of a GPU tell a capped logit by its fall (Falls). Falls need long sums and a cap so low that every logit is near enough
/// to any reference for forward's exponentials, and no output or option that adds up logits or divides them.
[[nodiscard]] inline bool has_falls(const Spec& spec) {
    constexpr double kMostCap = 30.0;  // half of kMostAboveReference
    return spec.softcap != 0.0 && spec.softcap <= kMostCap && spec.dtype != DType::fp32 && spec.hidden_size >= kLongSum &&
           !spec.temperature && !spec.class_offset && !spec.class_groups && !(spec.label_smoothing > 0) && !spec.outputs.entropy &&
           !spec.outputs.top1 && !spec.outputs.log_sum_sq_probs;
}
/// Falls' rate and steepness, of the cap as kernels have it.
[[nodiscard]] inline std::array<double, 2> fall_parameters(const Spec& spec) {
    const double cap = static_cast<float>(spec.softcap);
    return {2.0 * std::numbers::log2e * spec.logit_scale / cap, 2.0 * std::numbers::log2e * cap};
}

}  // namespace flce

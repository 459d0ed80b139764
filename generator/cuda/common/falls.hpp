// What the kernels of a GPU make of a softcap: Falls.
#pragma once

#include <array>
#include <numbers>

#include "flce/spec.hpp"
#include "templates/common/params.cuh"

namespace flce {

/// Whether kernels of a GPU tell a capped logit by its fall (Falls): sums are long, logits are as near to each other as forward's
/// exponentials have to be to what they are relative to, whatever that is, and nothing is asked for that adds up logits or divides them.
[[nodiscard]] inline bool has_falls(const Spec& spec) {
    constexpr double kMostCap = 30.0;  // half of kMostAboveReference
    return spec.softcap != 0.0 && spec.softcap <= kMostCap && spec.dtype != DType::fp32 && spec.hidden_size >= kLongSum &&
           !spec.temperature && !(spec.label_smoothing > 0) && !spec.outputs.entropy && !spec.outputs.top1 &&
           !spec.outputs.log_sum_sq_probs;
}
/// Falls' rate and steepness, of the cap as kernels have it.
[[nodiscard]] inline std::array<double, 2> fall_parameters(const Spec& spec) {
    const double cap = static_cast<float>(spec.softcap);
    return {2.0 * std::numbers::log2e * spec.logit_scale / cap, 2.0 * std::numbers::log2e * cap};
}

}  // namespace flce

// A shard's partial sums, as a spec has them.
#pragma once

#include "flce/spec.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/common/shard_fields.cuh"

namespace flce {

/// A divergence's are the numbers of DivergenceSums; those of its second walk, the numbers of MixtureTerm, are the first of as many fields.
[[nodiscard]] inline ShardFields shard_fields(const Spec& spec) {
    if (has_teacher_head(spec)) return {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, sizeof(DivergenceSums) / sizeof(float)};
    return shard_fields(ShardContents{.entropy = spec.outputs.entropy,
                                      .label_smoothing = spec.label_smoothing > 0,
                                      .square_sum = spec.outputs.log_sum_sq_probs,
                                      .top1 = spec.outputs.top1,
                                      .class_weight = spec.class_weight,
                                      .teacher_top_k = spec.teacher_top_k,
                                      .top_k = spec.top_k});
}

}  // namespace flce

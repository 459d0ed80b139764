// A shard's partial sums, as a spec has them.
#pragma once

#include "flce/spec.hpp"
#include "templates/common/shard_fields.cuh"

namespace flce {

[[nodiscard]] inline ShardFields shard_fields(const Spec& spec) {
    return shard_fields(ShardContents{.entropy = spec.outputs.entropy,
                                      .label_smoothing = spec.label_smoothing > 0,
                                      .square_sum = spec.outputs.log_sum_sq_probs,
                                      .top1 = spec.outputs.top1,
                                      .class_weight = spec.class_weight,
                                      .teacher_top_k = spec.teacher_top_k});
}

}  // namespace flce

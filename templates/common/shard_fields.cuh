// The fields of a shard's partial sums: what forward leaves of each token for merge, and where. Plain C++ that host and kernels include.
#pragma once

#if defined(__CUDACC__)
#include "flce/common/host_device.cuh"
#else
#include "templates/common/host_device.cuh"
#endif

namespace flce {

/// Fields of [num_tokens] numbers each, one after the other. A field that a spec has no use for is not there: −1.
struct ShardFields {
    int max;                  ///< m, the largest logit; −inf where there is none
    int exp_sum;              ///< Σ exp(z_j − m)
    int exp_z_sum;            ///< Σ exp(z_j − m)·(z_j − m). Up to top1 the order is that of forward's own partial sums
    int weighted_sum;         ///< Σ c_j·z_j
    int exp_sq_sum;           ///< Σ exp(z_j − m)²
    int top1;                 ///< bits of an int: the label of the first class whose logit is m, or FLCE_NO_CLASS
    int target_logit;         ///< z_y; −inf where another shard has the target
    int target_class_weight;  ///< c_y; 0 where another shard has the target
    int class_weight_total;   ///< Σ c_j over the shard, the same for each token
    int teacher_logits;       ///< the first of top_k fields: the logit of each id; −inf where another shard has it, or none
    int top_logits;           ///< the first of K fields, K the spec's top_k: the shard's largest logits, the largest first
    int top_labels;           ///< the first of K fields, bits of an int: their labels; FLCE_NO_CLASS where the shard has fewer classes
    int count;
};

/// Fields that a spec's partial sums may have beside the first two and target_logit.
struct ShardContents {
    bool entropy;
    bool label_smoothing;
    bool square_sum;
    bool top1;
    bool class_weight;
    int teacher_top_k;
    int top_k;
};

FLCE_HOST_DEVICE constexpr ShardFields shard_fields(const ShardContents& has) {
    ShardFields f{0, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2};
    if (has.entropy) f.exp_z_sum = f.count++;
    if (has.label_smoothing) f.weighted_sum = f.count++;
    if (has.square_sum) f.exp_sq_sum = f.count++;
    if (has.top1) f.top1 = f.count++;
    f.target_logit = f.count++;
    if (has.class_weight) f.target_class_weight = f.count++;
    if (has.class_weight && has.label_smoothing) f.class_weight_total = f.count++;
    if (has.teacher_top_k > 0) {
        f.teacher_logits = f.count;
        f.count += has.teacher_top_k;
    }
    if (has.top_k > 0) {
        f.top_logits = f.count;
        f.top_labels = f.count + has.top_k;
        f.count += 2 * has.top_k;
    }
    return f;
}

}  // namespace flce

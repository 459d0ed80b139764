// What happens to one token once its logits have been reduced: losses and outputs going forward, four coefficients going backward.
// Plain C++ on purpose: NVRTC compiles it into the row kernels, the host compiler into the CPU backend, so both mean the same.
#pragma once

#if defined(__CUDACC__)
#define FLCE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#include <math.h>
#define FLCE_HOST_DEVICE inline
#endif

namespace flce {

/// As far below the largest logit as a difference is taken to be: finite, so that times an exponential of 0 it is 0, and so it is times a
/// sum of them. Logits of −inf and of a float's lowest number stand for classes that do not take part, and there are whole tiles of them.
FLCE_HOST_DEVICE float farthest_below() { return -1e30f; }

/// Per-token reductions over the vocabulary. With m the largest logit z_j:
struct RowSums {
    float max;           ///< m; the lowest finite number, or −inf, where every logit is −inf
    float exp_sum;       ///< Σ exp(z_j − m)
    float exp_z_sum;     ///< Σ exp(z_j − m)·(z_j − m); only where entropy is asked for
    float weighted_sum;  ///< Σ c_j·z_j, c_j = 1 without class weights; only with label smoothing
    float target_logit;  ///< z_y
};

/// Two disjoint parts of the vocabulary as one; exact in the order of its arguments, so a fixed order gives fixed bits.
/// `a` and `b` hold exp_sum = 0 where nothing was seen, or nothing but −inf, whatever their max. target_logit: at most one part has it,
/// the other holds −inf.
FLCE_HOST_DEVICE RowSums merge(const RowSums& a, const RowSums& b) {
    const float m = a.max > b.max ? a.max : b.max;
    const float da = a.exp_sum > 0.f ? fmaxf(a.max - m, farthest_below()) : 0.f;
    const float db = b.exp_sum > 0.f ? fmaxf(b.max - m, farthest_below()) : 0.f;
    const float ea = expf(da);
    const float eb = expf(db);
    RowSums r;
    r.max = m;
    r.exp_sum = ea * a.exp_sum + eb * b.exp_sum;
    r.exp_z_sum = ea * (a.exp_z_sum + da * a.exp_sum) + eb * (b.exp_z_sum + db * b.exp_sum);
    r.weighted_sum = a.weighted_sum + b.weighted_sum;
    r.target_logit = a.target_logit > b.target_logit ? a.target_logit : b.target_logit;
    return r;
}

/// Loss options as numbers; the defaults mean plain cross entropy.
struct LossOptions {
    float label_smoothing;      ///< ε
    float smoothing_per_class;  ///< ε / V
    float class_weight_total;   ///< Σ c_j; V without class weights
    float z_loss;               ///< ω
};

struct RowOutputs {
    float lse;
    float cross_entropy;  ///< label smoothing and class weights included, not divided by anything
    float z_loss;         ///< ω·lse²
    float logprob;        ///< z_y − lse
    float entropy;        ///< nats
};

/// Differences to m are taken before anything is added to m, so that large logits cost no precision in the loss.
/// `c_y` is the target's class weight (1 without).
FLCE_HOST_DEVICE RowOutputs row_outputs(const RowSums& sums, float c_y, const LossOptions& o) {
    const float log_sum = logf(sums.exp_sum);
    RowOutputs r;
    r.lse = sums.max + log_sum;
    r.logprob = (sums.target_logit - sums.max) - log_sum;
    r.cross_entropy = -(1.f - o.label_smoothing) * c_y * r.logprob;
    if (o.label_smoothing > 0.f) {
        r.cross_entropy += o.smoothing_per_class * (o.class_weight_total * r.lse - sums.weighted_sum);
    }
    r.z_loss = o.z_loss * r.lse * r.lse;
    r.entropy = log_sum - sums.exp_z_sum / sums.exp_sum;
    return r;
}

/// dz_j = p_j·(a + b·z_j) − t·[j = y] − s·c_j: every option and every differentiable output in four numbers a token.
struct RowCoefficients {
    float a;
    float b;
    float t;
    float s;
};

/// Gradients that reach one token from above.
struct RowUpstream {
    float cross_entropy;  ///< of its cross entropy: grad_loss over what the reduction divides by
    float z_loss;         ///< of its z-loss: the same, but never divided by class weights
    float lse;
    float logprob;
    float entropy;
};

FLCE_HOST_DEVICE RowCoefficients row_coefficients(const RowUpstream& g, float lse, float entropy, float c_y, const LossOptions& o) {
    const float hard = g.cross_entropy * (1.f - o.label_smoothing) * c_y;
    RowCoefficients r;
    r.s = g.cross_entropy * o.smoothing_per_class;
    r.a = hard + r.s * o.class_weight_total + g.z_loss * 2.f * o.z_loss * lse + g.lse - g.logprob + g.entropy * (lse - entropy);
    r.b = -g.entropy;
    r.t = hard - g.logprob;
    return r;
}

}  // namespace flce

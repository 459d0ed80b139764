// Arithmetic of one token once its logits have been reduced: losses and outputs going forward, four coefficients going backward. Plain C++
// on purpose: NVRTC compiles it into the row kernels, the host compiler into the CPU backend, so both mean the same.
#pragma once

#if defined(__CUDACC__)
#define FLCE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#include <math.h>
#define FLCE_HOST_DEVICE inline
#endif

namespace flce {

/// Lowest difference to the largest logit that is taken. It is finite, so that times an exponential of 0, or a sum of such exponentials, it
/// is 0. Logits of −inf and of a float's lowest number stand for classes that do not take part, and there are whole tiles of them.
FLCE_HOST_DEVICE float farthest_below() { return -1e30f; }

/// A class number above every other: no class.
#define FLCE_NO_CLASS 0x7fffffff

/// Per-token reductions over the vocabulary. With m the largest logit z_j:
struct RowSums {
    float max;           ///< m; the lowest finite number, or −inf, where every logit is −inf
    float exp_sum;       ///< Σ exp(z_j − m)
    float exp_z_sum;     ///< Σ exp(z_j − m)·(z_j − m); only where entropy is asked for
    float weighted_sum;  ///< Σ c_j·z_j, c_j = 1 without class weights; only with label smoothing
    float target_logit;  ///< z_y
    float exp_sq_sum;    ///< Σ exp(z_j − m)²; only where log_sum_sq_probs is asked for
    int top1;            ///< the first class whose logit is m, or FLCE_NO_CLASS; only where top1 is asked for
};

/// Sums of no class. `max`: any number, the lowest or −inf.
FLCE_HOST_DEVICE RowSums sums_of_nothing(float max, float target_logit) { return {max, 0.f, 0.f, 0.f, target_logit, 0.f, FLCE_NO_CLASS}; }

/// Sums of the classes that a token names, where they alone are its softmax: a token that names none has an lse and an entropy of 0. Its
/// `max` is −inf, and not below the lowest finite number where a class is named, whatever its logit.
FLCE_HOST_DEVICE RowSums of_support(RowSums sums) {
    if (sums.max >= -3.402823466e38f) return sums;
    sums.max = 0.f;
    sums.exp_sum = 1.f;
    sums.exp_z_sum = 0.f;
    return sums;
}

/// Whether logits can be divided by t: neither t nor its reciprocal is near the end of fp32's range.
FLCE_HOST_DEVICE bool is_temperature(float t) { return t >= 0x1p-100f && t <= 0x1p100f; }

/// Chooses of two classes the one with the larger logit, and of equal logits the first class.
FLCE_HOST_DEVICE int first_of_largest(float logit_a, int class_a, float logit_b, int class_b) {
    if (logit_a != logit_b) return logit_a > logit_b ? class_a : class_b;
    return class_a < class_b ? class_a : class_b;
}

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
    r.exp_sq_sum = ea * ea * a.exp_sq_sum + eb * eb * b.exp_sq_sum;
    r.top1 = first_of_largest(a.max, a.top1, b.max, b.top1);
    return r;
}

/// Loss options as numbers; the defaults mean plain cross entropy.
struct LossOptions {
    float label_smoothing;      ///< ε
    float smoothing_per_class;  ///< ε / V
    float class_weight_total;   ///< Σ c_j; V without class weights
    float z_loss;               ///< ω
    bool dft;                   ///< a token's loss is multiplied by its target's probability
    float hard_weight;          ///< share of the target's cross entropy, where there is a teacher, whose share is the rest; 1 without
};

struct RowOutputs {
    float lse;
    float cross_entropy;  ///< label smoothing, class weights and token weights included, not divided by anything
    float z_loss;         ///< ω·lse², token weights included
    float logprob;        ///< z_y − lse
    float entropy;        ///< nats
    float log_sum_sq_probs;
};

/// Factor of a token's whole loss. `token_weight`: the call's, 1 without.
FLCE_HOST_DEVICE float loss_factor(float token_weight, float logprob, const LossOptions& o) {
    return o.dft ? token_weight * expf(logprob) : token_weight;
}

/// Differences to m are taken before anything is added to m, so that large logits cost no precision in the loss.
/// `c_y` is the target's class weight (1 without), `teacher_cross_entropy` the sum of a row's teacher_term (0 without).
FLCE_HOST_DEVICE RowOutputs row_outputs(const RowSums& sums, float c_y, float token_weight, float teacher_cross_entropy,
                                        const LossOptions& o) {
    const float log_sum = logf(sums.exp_sum);
    RowOutputs r;
    r.lse = sums.max + log_sum;
    r.logprob = (sums.target_logit - sums.max) - log_sum;
    r.cross_entropy = -(1.f - o.label_smoothing) * c_y * r.logprob;
    if (o.label_smoothing > 0.f) {
        r.cross_entropy += o.smoothing_per_class * (o.class_weight_total * r.lse - sums.weighted_sum);
    }
    if (o.hard_weight < 1.f) {
        // Any class stands for a target that does not count, also one whose probability is 0.
        const float hard = o.hard_weight > 0.f ? o.hard_weight * r.cross_entropy : 0.f;
        r.cross_entropy = hard + (1.f - o.hard_weight) * teacher_cross_entropy;
    }
    r.z_loss = o.z_loss * r.lse * r.lse;
    const float factor = loss_factor(token_weight, r.logprob, o);
    r.cross_entropy *= factor;
    r.z_loss *= factor;
    r.entropy = log_sum - sums.exp_z_sum / sums.exp_sum;
    r.log_sum_sq_probs = logf(sums.exp_sq_sum) - 2.f * log_sum;
    return r;
}

/// The log-probability of a class from its logit.
FLCE_HOST_DEVICE float log_probability(float logit, const RowSums& sums) { return (logit - sums.max) - logf(sums.exp_sum); }

/// One class's part of a teacher's cross entropy. A class to which the teacher gives nothing adds nothing, whatever its logit is.
FLCE_HOST_DEVICE float teacher_term(float probability, float logprob) { return probability != 0.f ? -probability * logprob : 0.f; }

/// How a logit follows hidden · weightᵀ + bias, told by the logit itself.
struct LogitSlope {
    float scale;
    float inverse_softcap;  ///< 0: no softcap
};

/// Slope of the logit with this log-probability, before the logit is divided by the row's temperature. The slope is 0 where the logit
/// reaches the softcap, or comes as close as the log-probability and lse, which are rounded to their own sizes, can be off. `offset`: what
/// is added to the class's logit behind the softcap.
FLCE_HOST_DEVICE float slope_of_class(const LogitSlope& s, float logprob, float lse, float temperature, float offset) {
    if (s.inverse_softcap == 0.f) return s.scale;  // also where the logit is infinite
    const float to_cap = temperature * s.inverse_softcap;
    const float of_offset = offset * s.inverse_softcap;
    const float t = (logprob + lse) * to_cap - of_offset;
    const float lost = 0x1p-24f * ((2.f * fabsf(logprob) + fabsf(lse)) * to_cap + 2.f * fabsf(of_offset) + 8.f);
    return fabsf(t) + lost < 1.f ? (1.f - t * t) * s.scale : 0.f;
}

/// Logit by which a probability's gradient is multiplied where entropies are differentiated. It does not matter where the probability is 0,
/// and may be −inf there.
FLCE_HOST_DEVICE float logit_of_share(float probability, float logit) { return probability != 0.f ? logit : 0.f; }

/// dz_j = p_j·(a + b·z_j) − t·[j = y] − s·c_j: every option and every differentiable output in four numbers a token. A
/// teacher takes teacher_weight times a class's probabilities off at the classes that it names.
struct RowCoefficients {
    float a;
    float b;
    float t;
    float s;
};

/// Gradients that reach one token from above.
struct RowUpstream {
    float cross_entropy;  ///< gradient of the token's cross entropy: grad_loss over the reduction's divisor, times the token's loss_factor
    float z_loss;         ///< gradient of the token's z-loss: like cross_entropy, but never divided by class weights
    float lse;
    float logprob;
    float entropy;
};

FLCE_HOST_DEVICE float teacher_weight(const RowUpstream& g, const LossOptions& o) { return g.cross_entropy * (1.f - o.hard_weight); }

/// `teacher_sum`: sum of the probabilities that the teacher gives in this row (0 without).
FLCE_HOST_DEVICE RowCoefficients row_coefficients(const RowUpstream& g, float lse, float entropy, float c_y, float teacher_sum,
                                                  const LossOptions& o) {
    const float of_target = g.cross_entropy * o.hard_weight;
    const float hard = of_target * (1.f - o.label_smoothing) * c_y;
    RowCoefficients r;
    r.s = of_target * o.smoothing_per_class;
    r.a = hard + r.s * o.class_weight_total + g.z_loss * 2.f * o.z_loss * lse + g.lse - g.logprob + g.entropy * (lse - entropy);
    if (o.hard_weight < 1.f) r.a += teacher_weight(g, o) * teacher_sum;
    r.b = -g.entropy;
    r.t = hard - g.logprob;
    return r;
}

}  // namespace flce

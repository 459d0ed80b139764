// Arithmetic of one token's divergence from a teacher, once the logits of both heads have been reduced, and of one class's part. Plain C++,
// as row_math.cuh. With student probabilities p, a teacher's q and the mixture m = (1 − β)·p + β·q the divergence is KL(q ‖ p) at β = 0,
// KL(p ‖ q) at β = 1, and (1 − β)·KL(p ‖ m) + β·KL(q ‖ m) between them, as TRL's chunked divergence has it (Agarwal et al., arXiv
// 2306.13649, with the roles of β that TRL gives them).
#pragma once

#if defined(__CUDACC__)
#include "flce/common/row_math.cuh"
#else
#include "templates/common/row_math.cuh"
#endif

namespace flce {

/// One of the three. It is structure of a kernel, not a value.
enum DivergenceForm : int { kForward = 0, kReverse = 1, kMixture = 2 };
FLCE_HOST_DEVICE DivergenceForm divergence_form(double beta) { return beta == 0. ? kForward : beta == 1. ? kReverse : kMixture; }

/// Sums of one head over the vocabulary, relative to its largest logit.
struct HeadSums {
    float max;        ///< the largest logit; the lowest finite number where there was none
    float exp_sum;    ///< Σ e, e = exp(logit − max)
    float exp_z_sum;  ///< Σ e·(logit − max)
    float gap_sum;    ///< Σ e·((teacher's logit − teacher's max) − (student's logit − student's max))
};

/// Sums of both heads of one token.
struct DivergenceSums {
    HeadSums student;
    HeadSums teacher;
};

FLCE_HOST_DEVICE DivergenceSums divergence_of_nothing() {
    const HeadSums none{-3.402823466e38f, 0.f, 0.f, 0.f};
    return {none, none};
}

/// Makes a head's sums relative to `max`. `shift`: how far they move; `of_gap`: how far gaps do.
FLCE_HOST_DEVICE void move_head(HeadSums& sums, float max, float shift, float of_gap) {
    sums.max = max;
    if (!(sums.exp_sum > 0.f)) return;
    const float factor = expf(shift);
    sums.exp_z_sum = factor * (sums.exp_z_sum + shift * sums.exp_sum);
    sums.gap_sum = factor * (sums.gap_sum + of_gap * sums.exp_sum);
    sums.exp_sum *= factor;
}

/// Makes sums relative to other numbers, no smaller than their largest logits.
FLCE_HOST_DEVICE void move_to(DivergenceSums& sums, float student_max, float teacher_max) {
    const float student = fmaxf(sums.student.max - student_max, farthest_below());
    const float teacher = fmaxf(sums.teacher.max - teacher_max, farthest_below());
    move_head(sums.student, student_max, student, teacher - student);
    move_head(sums.teacher, teacher_max, teacher, teacher - student);
}

FLCE_HOST_DEVICE void add_head(HeadSums& all, const HeadSums& part) {
    all.exp_sum += part.exp_sum;
    all.exp_z_sum += part.exp_z_sum;
    all.gap_sum += part.gap_sum;
}

/// Sums of two disjoint parts of the vocabulary; exact in the order of its arguments.
FLCE_HOST_DEVICE DivergenceSums merge(DivergenceSums a, DivergenceSums b) {
    const float student_max = fmaxf(a.student.max, b.student.max);
    const float teacher_max = fmaxf(a.teacher.max, b.teacher.max);
    move_to(a, student_max, teacher_max);
    move_to(b, student_max, teacher_max);
    add_head(a.student, b.student);
    add_head(a.teacher, b.teacher);
    return a;
}

/// Adds one class. Neither head's largest logit moves: both logits are at most as large.
FLCE_HOST_DEVICE void add_class(HeadSums& head, float exponential, float below, float gap) {
    if (exponential == 0.f) return;  // a gap may be infinite, or none
    head.exp_sum += exponential;
    head.exp_z_sum += exponential * below;
    head.gap_sum += exponential * gap;
}

/// A token's numbers that follow from the sums of both heads. `kl`: KL(q ‖ p) or KL(p ‖ q), by form.
struct DivergenceRow {
    float lse;
    float teacher_lse;
    float entropy;
    float teacher_entropy;
    float kl;
};

FLCE_HOST_DEVICE DivergenceRow divergence_row(const DivergenceSums& sums, bool reverse) {
    const float student = logf(sums.student.exp_sum);
    const float teacher = logf(sums.teacher.exp_sum);
    DivergenceRow r;
    r.lse = sums.student.max + student;
    r.teacher_lse = sums.teacher.max + teacher;
    r.entropy = student - sums.student.exp_z_sum / sums.student.exp_sum;
    r.teacher_entropy = teacher - sums.teacher.exp_z_sum / sums.teacher.exp_sum;
    // log q − log p of a class is its gap, less log Σ e of the teacher, and that of the student more.
    r.kl = reverse ? -(sums.student.gap_sum / sums.student.exp_sum) + (teacher - student)
                   : sums.teacher.gap_sum / sums.teacher.exp_sum - (teacher - student);
    return r;
}

/// Functions of one class's numbers, exact to a unit of the last place or two. Others have the same names.
struct ExactDivergence {
    FLCE_HOST_DEVICE static float exp(float x) { return expf(x); }
    /// log(m / p) of one class from log(q / p): log((1 − β) + β·q/p).
    FLCE_HOST_DEVICE static float log_mixture(float ratio, float beta) {
        // Whichever exponential is below 1.
        if (ratio <= 0.f) return log1pf(beta * expm1f(ratio));
        return ratio + log1pf((1.f - beta) * expm1f(-ratio));
    }
};

/// One class's part of a mixture's divergences.
struct MixtureTerm {
    float divergence;  ///< (1 − β)·p·log(p / m) + β·q·log(q / m)
    float student;     ///< p·log(p / m)
};
template <class Math>
FLCE_HOST_DEVICE MixtureTerm mixture_term(float log_p, float log_q, float beta) {
    const float p = Math::exp(log_p);
    const float q = Math::exp(log_q);
    // A class that one head rules out: m is the other's share.
    if (p == 0.f) return {q == 0.f ? 0.f : -beta * q * logf(beta), 0.f};
    if (q == 0.f) return {-(1.f - beta) * p * log1pf(-beta), -p * log1pf(-beta)};
    const float above_p = Math::log_mixture(log_q - log_p, beta);
    const float student = -p * above_p;
    return {(1.f - beta) * student + beta * q * (log_q - log_p - above_p), student};
}

/// Derivative of the divergence by the student's logit of one class. `of_row`: student_divergence of the token.
template <class Math>
FLCE_HOST_DEVICE float divergence_slope(int form, float log_p, float log_q, float of_row, float beta) {
    const float p = Math::exp(log_p);
    if (form == kForward) return p - Math::exp(log_q);
    if (p == 0.f) return 0.f;
    if (form == kReverse) return p * (log_p - log_q - of_row);
    return (1.f - beta) * p * (-Math::log_mixture(log_q - log_p, beta) - of_row);
}

}  // namespace flce

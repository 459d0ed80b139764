#include "runtime/cpu/teacher.hpp"

#include <algorithm>
#include <limits>

namespace flce {

void CpuTeacher::clear_shard() const {
    for (std::int64_t k = 0; k < count_; ++k) {
        std::fill_n(&partial_sums_.teacher_logit(0, k), call_.num_tokens(), -std::numeric_limits<float>::infinity());
    }
}

void CpuTeacher::keep_logits(std::int64_t token, const float* logits, std::int64_t first, std::int64_t columns) const {
    for (std::int64_t k = 0; k < count_; ++k) {
        const std::int64_t column = call_.column_of(call_.teacher_id(token, k)) - first;
        if (column < 0 || column >= columns) continue;
        keep_logit(token, k, logits[column]);
    }
}

void CpuTeacher::keep_logit(std::int64_t token, std::int64_t k, float logit) const {
    (call_.has(Slot::partial_sums) ? partial_sums_.teacher_logit(token, k) : logprobs_[at(token, k)]) = logit;
}

float CpuTeacher::finish(std::int64_t token, const RowSums& sums) const {
    float cross_entropy = 0;
    for (std::int64_t k = 0; k < count_; ++k) {
        float& logprob = logprobs_[at(token, k)];
        const bool named = call_.teacher_id(token, k) >= 0;
        logprob = named ? log_probability(logprob, sums) : 0.F;
        if (named) cross_entropy += teacher_term(probabilities_[at(token, k)], logprob);
    }
    return cross_entropy;
}

void CpuTeacher::clear(std::int64_t token) const {
    for (std::int64_t k = 0; k < count_; ++k) logprobs_[at(token, k)] = 0;
}

float CpuTeacher::sum(std::int64_t token) const {
    float sum = 0;
    for (std::int64_t k = 0; k < count_; ++k) {
        if (call_.teacher_id(token, k) >= 0) sum += probabilities_[at(token, k)];
    }
    return sum;
}

void CpuTeacher::subtract(std::int64_t token, float weight, float* gradients, std::int64_t first, std::int64_t columns) const {
    const float temperature = call_.temperature(token);
    const float lse = call_.pointer<const float>(Slot::lse)[token];
    for (std::int64_t k = 0; k < count_; ++k) {
        const std::int64_t column = call_.column_of(call_.teacher_id(token, k)) - first;
        if (column < 0 || column >= columns) continue;
        const float slope = slope_of_class(slope_, logprobs_[at(token, k)], lse, temperature, call_.class_offset(first + column));
        gradients[column] -= weight * probabilities_[at(token, k)] * (slope / temperature);
    }
}

}  // namespace flce

// The teacher of a distillation on the CPU: the few classes that it names for a token, in both passes.
#pragma once

#include "generator/logit_transforms.hpp"
#include "runtime/cpu/cpu_call.hpp"

namespace flce {

/// A call without a teacher has one that names no class.
class CpuTeacher {
public:
    explicit CpuTeacher(const CpuCall& call)
        : call_(call),
          count_(call.spec().teacher_top_k),
          slope_(logit_slope(call.spec())),
          probabilities_(call.pointer<const float>(Slot::teacher_probs)),
          logprobs_(call.pointer<float>(Slot::teacher_logprobs)) {}

    [[nodiscard]] bool present() const { return count_ > 0; }

    /// Forward, for tokens that are not ignored: keeps those of the named classes' logits that lie in the vocabulary's columns `first` to
    /// `first + columns`. Every class's logit passes once, on any thread.
    void keep_logits(std::int64_t token, const float* logits, std::int64_t first, std::int64_t columns) const;
    /// What was kept becomes log-probabilities; returns the teacher's cross entropy.
    [[nodiscard]] float finish(std::int64_t token, const RowSums& sums) const;
    /// The log-probabilities of an ignored token: 0.
    void clear(std::int64_t token) const;

    /// Backward: what a token's probabilities at classes add up to.
    [[nodiscard]] float sum(std::int64_t token) const;
    /// Takes `weight` times the probabilities off the gradients of such columns' hidden · weightᵀ + bias.
    void subtract(std::int64_t token, float weight, float* gradients, std::int64_t first, std::int64_t columns) const;

private:
    [[nodiscard]] std::int64_t at(std::int64_t token, std::int64_t k) const { return token * count_ + k; }

    const CpuCall& call_;
    std::int64_t count_;
    LogitSlope slope_;
    const float* probabilities_;
    float* logprobs_;  // backward reads them
};

}  // namespace flce

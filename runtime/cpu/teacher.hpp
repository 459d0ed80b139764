// The teacher of a distillation on the CPU: the few classes that it names for a token, in both passes.
#pragma once

#include "generator/logit_transforms.hpp"
#include "runtime/cpu/cpu_call.hpp"
#include "runtime/cpu/shard_sums.hpp"

namespace flce {

/// A call without a teacher has one that names no class.
class CpuTeacher {
public:
    explicit CpuTeacher(const CpuCall& call)
        : call_(call),
          count_(call.spec().teacher_top_k),
          slope_(logit_slope(call.spec())),
          probabilities_(call.pointer<const float>(Slot::teacher_probs)),
          logprobs_(call.pointer<float>(Slot::teacher_logprobs)),
          partial_sums_(call.spec(), call.pointer<float>(Slot::partial_sums), call.num_tokens()) {}

    [[nodiscard]] bool present() const { return count_ > 0; }

    /// Forward of a shard, before any logit: −inf, which is what a class has that another shard has.
    void clear_shard() const;
    /// Forward, for tokens that are not ignored: keeps those of the named classes' logits that lie in the vocabulary's columns `first` to
    /// `first + columns`. Every class's logit passes once, on any thread.
    void keep_logits(std::int64_t token, const float* logits, std::int64_t first, std::int64_t columns) const;
    /// Forward with support, or a token's k-th class alone: keeps its logit.
    void keep_logit(std::int64_t token, std::int64_t k, float logit) const;
    /// Merge: the logit of the k-th class.
    void set_logit(std::int64_t token, std::int64_t k, float logit) const { logprobs_[at(token, k)] = logit; }
    /// Makes log-probabilities of the kept logits; returns the teacher's cross entropy.
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
    float* logprobs_;                // backward reads them
    ShardSums<float> partial_sums_;  // sums in which a shard's forward keeps logits
};

}  // namespace flce

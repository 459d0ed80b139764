// Results of a token's reduced logits on the CPU: its outputs and its part of the loss. Forward and merge end with them.
#pragma once

#include "runtime/cpu/cpu_call.hpp"

namespace flce {

/// Outputs of a call's tokens, and their losses reduced. Tokens are added in order.
class CpuRowResults {
public:
    explicit CpuRowResults(const CpuCall& call) : call_(call), options_(call.loss_options()) {}

    /// Writes what the caller wants of a token that is not ignored; on any thread. `class_weight`: its target's.
    RowOutputs write(std::int64_t token, const RowSums& sums, float class_weight, float teacher_cross_entropy) const;
    /// Writes outputs that another way than row_outputs has made.
    void write(std::int64_t token, const RowOutputs& outputs) const { write_outputs(token, outputs, -1); }
    /// Writes an ignored token's outputs: zeros.
    void write_ignored(std::int64_t token) const;

    /// Takes a token's losses into the sums, in the order of tokens.
    void add(float cross_entropy, float z_loss) {
        cross_entropy_ += cross_entropy;
        z_loss_ += z_loss;
    }
    /// The scalar losses, of the tokens that were added.
    void write_reduced(const MeanDivisors& divisors) const;

private:
    void write_outputs(std::int64_t token, const RowOutputs& outputs, std::int64_t top1) const;

    const CpuCall& call_;
    LossOptions options_;
    double cross_entropy_ = 0;
    double z_loss_ = 0;
};

}  // namespace flce

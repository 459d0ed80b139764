// Whether a kernel's errors are within the bounds of docs/numerics.md.
#pragma once

#include <cstddef>

#include "autotune/reference.hpp"

namespace flce {

/// Sums for relative errors in the Frobenius norm.
struct ErrorNorm {
    double difference2 = 0;
    double reference2 = 0;

    void add(double value, double reference) {
        difference2 += (value - reference) * (value - reference);
        reference2 += reference * reference;
    }
    void add(const ErrorNorm& other) {
        difference2 += other.difference2;
        reference2 += other.reference2;
    }
    /// ‖value − reference‖ / ‖reference‖; 0 where both are 0, infinity where only the reference is, NaN stays NaN.
    [[nodiscard]] double relative() const;
};

/// Error norms of a kernel's output and of the yardstick's.
struct NormPair {
    ErrorNorm kernel;
    ErrorNorm yardstick;
    std::size_t count = 0;

    void add(double value, double yardstick_value, double reference) {
        kernel.add(value, reference);
        yardstick.add(yardstick_value, reference);
        ++count;
    }
    void add(const NormPair& other) {
        kernel.add(other.kernel);
        yardstick.add(other.yardstick);
        count += other.count;
    }
};

struct Verdict {
    double error = 0;
    double yardstick = 0;  ///< error of the same computation by a framework's arithmetic
    double bound = 0;
    [[nodiscard]] bool passed() const { return error <= bound; }  // NaN does not pass
};

/// Judges outputs by docs/numerics.md: twice the yardstick's error, but no less than what one rounding of each intermediate costs, and no
/// more than the document's caps.
class Judge {
public:
    /// `product_norm`: |logit_scale| · ‖hidden row‖ · ‖weight row‖, typically; this size decides how exact an fp32 sum of hidden_size
    /// products, and so a logit, can be.
    Judge(DType dtype, double product_norm);
    /// `sizes`, where they are given, tell tokens so confident that rounding lse shows: a loss near 0, gradients in which p_y is cancelled.
    [[nodiscard]] Verdict output(const NormPair& norms, const LogitGradientSizes* sizes = nullptr) const;
    [[nodiscard]] Verdict loss(const NormPair& norms, const Spec& spec) const;
    [[nodiscard]] Verdict gradient(const NormPair& norms, const LogitGradientSizes* sizes = nullptr) const;
    /// grad_weight of exponentials that a GPU's forward retained: both factors of its products are rounded, and not only the logits'
    /// gradient. `num_tokens` of them may all be alike to chance.
    [[nodiscard]] Verdict retained_grad_weight(const NormPair& norms, std::int64_t num_tokens) const;
    /// A gradient that sums over the vocabulary, and rows of the weight may have a direction in common.
    [[nodiscard]] Verdict grad_hidden(const NormPair& norms, const LogitGradientSizes& sizes) const;
    /// A gradient that sums over tokens, and these may be alike.
    [[nodiscard]] Verdict grad_weight(const NormPair& norms, const LogitGradientSizes& sizes) const;

private:
    [[nodiscard]] Verdict output(const NormPair& norms, const LogitGradientSizes* sizes, double cap) const;
    [[nodiscard]] static Verdict judged(const NormPair& norms, double floor, double cap, double roundings = 1);
    /// Relative error of a probability, and the absolute one of its logarithm, in any arithmetic that stores lse in fp32.
    [[nodiscard]] double probability_error(const LogitGradientSizes& sizes) const;

    DType dtype_;
    double logit_error_;
};

}  // namespace flce

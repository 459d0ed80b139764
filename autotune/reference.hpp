// The output layer written to be read: in fp64, with which results of kernels are compared, and as a framework would compute it, which
// decides how wrong a kernel may be. This code shares nothing with the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "autotune/reference_fp8.hpp"
#include "flce/flce.hpp"
#include "runtime/error_bounds.hpp"

namespace flce {

/// The layer's inputs on the host. Spans are empty where the spec has no such input.
struct ReferenceProblem {
    Spec spec;
    std::int64_t num_tokens = 0;
    const std::byte* hidden = nullptr;  ///< [N, D], spec dtype
    const std::byte* weight = nullptr;  ///< [P, D] or [D, P], spec dtype; a quantised weight's codes, with scales as a call has them
    const std::byte* weight_scale = nullptr;
    float weight_tensor_scale = 1;
    const std::byte* bias = nullptr;  ///< [V], spec dtype
    std::span<const float> class_weight, class_offset;
    std::span<const std::int32_t> class_group, row_group;
    std::span<const std::int64_t> target;
    std::span<const float> temperature, token_weight;  ///< [N]
    std::span<const std::int64_t> teacher_ids;         ///< [N, K], and so are teacher_probs
    std::span<const float> teacher_probs;
    std::int64_t ignore_index = -100;
    Reduction reduction = Reduction::mean;
    std::span<const float> grad_loss, grad_lse, grad_logprobs,
        grad_entropy;                           ///< [N]; empty: 1 for the loss if the spec has it, 0 for the rest
    Summation summation = Summation::rounding;  ///< summation of the yardstick's logits
    std::function<void()> between_blocks{};     ///< called by every thread now and then; an exception ends the work

    /// Whether the class belongs to the token's group and is not its target.
    [[nodiscard]] bool is_ruled_out(std::int64_t token, std::int64_t row) const {
        if (!spec.class_groups) return false;
        const std::int32_t group = row_group[static_cast<std::size_t>(token)];
        return group >= 0 && group == class_group[static_cast<std::size_t>(row)] && target[static_cast<std::size_t>(token)] != row;
    }
    /// A number of a quantised weight, before it is rounded to the dtype.
    [[nodiscard]] float dequantized(std::int64_t row, std::int64_t column) const;
    /// The share of the target in the cross entropy.
    [[nodiscard]] double hard_weight() const { return spec.teacher_top_k > 0 ? spec.hard_weight : 1.0; }
    /// Calls `visit` with every class that the token's teacher names, its place among them and its probability.
    template <class Visit>
    void for_each_named(std::int64_t token, const Visit& visit) const {
        for (std::int64_t k = 0; k < spec.teacher_top_k; ++k) {
            const auto at = static_cast<std::size_t>(token * spec.teacher_top_k + k);
            if (teacher_ids[at] >= 0) visit(teacher_ids[at], static_cast<std::size_t>(k), teacher_probs[at]);
        }
    }
};

struct RandomLayer;
/// The problem of a layer's tensors, which must outlive it; a mean over tokens.
[[nodiscard]] ReferenceProblem reference_problem(const Spec& spec, const RandomLayer& layer);

/// Per-token results of one token.
struct ReferenceToken {
    double loss = 0;  ///< z_loss included, not divided by anything
    double z_loss = 0;
    double lse = 0;
    double logprob = 0;
    double entropy = 0;
    double log_sum_sq_probs = 0;
    std::int64_t top1 = -1;
    double largest_logit = 0;
    std::vector<double> teacher_logprobs{};  ///< [K], 0 at no class
};

/// Sizes of the terms in the gradients of all logits, as Euclidean norms. A confident token's gradients are differences, p_y − 1, far
/// smaller than p.
struct LogitGradientSizes {
    double probabilities = 0;  ///< each probability times its factor
    double gradients = 0;
    double largest_lse = 0;
    double hidden_terms = 0;  ///< each probability times its factor and its row of the weight: an error of lse adds up over these terms
    double grad_weight_terms = 0;  ///< each token's gradients times its hidden state: the terms of grad_weight
    std::int64_t num_terms = 0;
};

/// Real = double: exact for our purposes. Real = float: a framework's arithmetic in the spec's dtype with fp32 logits: fp32 sums and
/// softmax, the logits' gradient rounded to the dtype, gradients of hidden rounded to it.
template <class Real>
class BasicReference {
public:
    /// Computes everything for `tokens` (indices, ascending). Where that is not all of them, gradients of the weight need every other
    /// token's lse and entropy from elsewhere (set_other).
    BasicReference(const ReferenceProblem& problem, std::vector<std::int64_t> tokens);

    [[nodiscard]] const std::vector<std::int64_t>& tokens() const { return tokens_; }
    [[nodiscard]] const ReferenceToken& token(std::size_t index) const { return results_[index]; }
    /// dL/dhidden of token number `index` of tokens(): D numbers.
    [[nodiscard]] std::span<const Real> grad_hidden(std::size_t index) const;
    /// Divisors of a mean's cross entropies and z-losses; 1 for the other reductions.
    [[nodiscard]] double loss_divisor() const { return loss_divisor_; }
    [[nodiscard]] double z_loss_divisor() const { return z_loss_divisor_; }
    [[nodiscard]] bool ignored(std::int64_t token) const;
    /// Sizes over tokens().
    [[nodiscard]] LogitGradientSizes logit_gradient_sizes() const;

    /// lse, entropy and logprobs ([N]; entropy may be empty, logprobs without dft) for the tokens that were not computed here.
    void set_other(std::span<const float> lse, std::span<const float> entropy, std::span<const float> logprobs);
    /// How far class `row`'s logit is below the largest one of token number `index` of tokens(), and how far that is known in fp32.
    struct LogitGap {
        double gap = 0;
        double known_to = 0;
    };
    [[nodiscard]] LogitGap gap_to_largest(std::size_t index, std::int64_t row) const;
    /// dL/dweight of vocabulary row `row`: D numbers into `out`; returns dL/dbias of that row. Thread-safe.
    Real grad_weight_row(std::int64_t row, std::span<Real> out) const;

    /// Multiply-adds that `tokens` tokens and `rows` vocabulary rows cost.
    [[nodiscard]] static double operations(const Spec& spec, std::int64_t num_tokens, std::int64_t tokens, std::int64_t rows);

private:
    struct Logit {
        Real value;
        Real derivative;  ///< with respect to hidden · weightᵀ + bias
    };
    struct Range {
        std::int64_t begin;
        std::int64_t end;
    };
    [[nodiscard]] Logit logit(std::int64_t token, const Real* weight, std::int64_t row) const;
    /// Factor of the token's whole loss.
    [[nodiscard]] Real loss_factor(std::int64_t token) const;
    [[nodiscard]] Real class_weight(std::int64_t row) const;
    /// dL/d(hidden · weightᵀ + bias), rounded as the backward products read it.
    [[nodiscard]] Real grad_logit(std::int64_t token, std::int64_t row, const Logit& z) const;
    /// dL/dlogit of a class with probability p, before it is rounded. hit: 1 for the target, else 0.
    [[nodiscard]] Real unrounded_gradient(std::int64_t token, std::int64_t row, const Logit& z, Real p, Real hit) const;
    /// Slope that all logits of a token have: without the softcap's.
    [[nodiscard]] Real common_slope(std::int64_t token) const;
    /// With fp8: r of a token.
    [[nodiscard]] Real fp8_factor(std::int64_t token) const;
    /// With fp8: RowShares (templates/common/fp8_codes.cuh) of a token.
    struct Fp8Shares {
        Real scale, at_lse, slope;
    };
    [[nodiscard]] Fp8Shares fp8_shares(std::int64_t token) const;
    /// With fp8: the rounded exponential of a class that is not the token's target.
    [[nodiscard]] Real fp8_exponential(std::int64_t token, const Logit& z) const;
    /// With fp8: what label smoothing takes off the gradient of a class's logit.
    [[nodiscard]] Real fp8_smoothing(std::int64_t token, std::int64_t row) const;
    /// With fp8: adds label smoothing's terms, which have rows of the weight as they are, `exact`, to a token's sum over `rounded` ones.
    /// The target's is in its gradient, whose row is rounded.
    void add_smoothing_terms(std::int64_t token, Range rows, const std::vector<Real>& exact, const std::vector<Real>& rounded,
                             std::span<Real> sum) const;
    /// With fp8, once every token's lse is known.
    void set_fp8_factors();
    /// Loads whole rows of the weight as operands of the logits.
    void load_logit_weight(Range rows, Real* out) const;
    /// Sizes of the factors of a token's probabilities in its gradient, added up; entropy's part, which cancels in its own way, is left
    /// out.
    [[nodiscard]] double slope(std::int64_t token) const;
    /// Loads at most kWeightBlock rows of the vocabulary, these columns of each, one after the other.
    void load_weight(Range rows, Range columns, Real* out) const;
    void compute_tokens(std::size_t begin, std::size_t end);
    void compute_logits(std::size_t begin, std::size_t end, std::span<Logit> logits, std::span<double> lengths) const;
    void reduce_token(std::size_t index, std::span<const Logit> logits);
    /// Gradients of one token's logits, and their sizes.
    void compute_gradients(std::size_t index, std::span<const Logit> logits, std::span<const double> lengths, std::span<Real> gradients);
    void add_grad_hidden(std::size_t begin, std::size_t end, std::span<const Real> gradients);

    ReferenceProblem problem_;
    std::vector<std::int64_t> tokens_;
    std::vector<Real> hidden_;  // [N, D]
    std::vector<Real> bias_;
    double class_weight_total_ = 0;
    double loss_divisor_ = 1;
    double z_loss_divisor_ = 1;
    std::vector<ReferenceToken> results_;
    std::vector<Real> grad_hidden_;                    // [tokens, D]
    std::vector<double> probabilities2_, gradients2_;  // [tokens], squares added up
    std::vector<double> hidden_terms_;                 // [tokens], of LogitGradientSizes
    std::vector<Real> lse_, entropy_, logprob_;        // [N]
    ReferenceFp8<Real> fp8_{problem_, {}};
};

using Reference = BasicReference<double>;
using Yardstick = BasicReference<float>;

/// `value` with its mantissa rounded to the mantissa of `dtype`, to nearest even; its exponent is not limited (kernels and frameworks
/// scale).
[[nodiscard]] float rounded_mantissa(float value, DType dtype);
/// `value` as a tensor of `dtype` holds it: where fp16 is subnormal (a mean over many tokens makes such gradients) it has fewer bits.
[[nodiscard]] float stored_value(float value, DType dtype);

}  // namespace flce

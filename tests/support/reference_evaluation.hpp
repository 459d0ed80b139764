// Reference arithmetic over a problem: the numbers that it keeps of a token, and the steps, whose budgets have a file of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/support/reference.hpp"

namespace flce::test {

/// A token's numbers that the backward pass needs.
struct ReferenceToken {
    bool valid = false;
    std::int64_t label = 0;
    float top = 0;  // log p_j = (z_j − top) − log_sum
    float log_sum = 0;
    float entropy = 0;
    float logprob = 0;
    TokenSizes sizes;
};

/// Upstream gradients of a token, in fp32 like everything.
struct TokenUpstream {
    float cross_entropy = 0;
    float z_loss = 0;
    float lse = 0;
    float logprob = 0;
    float entropy = 0;
};

/// Logits of a block of tokens, and their derivatives with respect to h·w + b.
struct BlockLogits {
    std::vector<float> z;
    std::vector<float> gain;
};

/// Evaluates one problem, once.
class Evaluation {
public:
    Evaluation(const Problem& problem, const Selection& selection, const KnownTokens& known, Summation summation)
        : summation_(summation),
          problem_(problem),
          selection_(selection),
          known_(known),
          layer_(layer_of(problem)),
          hidden_(hidden_of_valid(layer_)),
          spec_(problem.spec),
          divide_(divisors(layer_)) {
        layer_.hidden = hidden_.data();
        for (std::int64_t j = 0; j < spec_.vocab_size; ++j) class_sum_ += float(layer_.class_weight_of(j));
        weight_norm_.resize(static_cast<std::size_t>(spec_.vocab_size));
        for (std::int64_t j = 0; j < spec_.vocab_size; ++j) {
            weight_norm_[j] = norm(layer_.weight + j * spec_.hidden_size);
            largest_weight_norm_ = std::max(largest_weight_norm_, weight_norm_[j]);
        }
    }

    Reference run();

private:
    double norm(const float* row) const {
        double sum = 0;
        for (std::int64_t k = 0; k < spec_.hidden_size; ++k) sum += double(row[k]) * double(row[k]);
        return std::sqrt(sum);
    }
    float class_weight(std::int64_t j) const { return layer_.class_weight != nullptr ? layer_.class_weight[j] : 1.0F; }
    // Turns h·w into the logit, and returns the derivative.
    float transform(float& x, std::int64_t i, std::int64_t j) const {
        const float slope = transform(x, j);
        const float gain = spec_.offset_gradient ? 1.0F : slope;
        x += static_cast<float>(layer_.offset_of(i, j));
        if (layer_.temperature == nullptr) return gain;
        x /= layer_.temperature[i];
        return gain / layer_.temperature[i];
    }
    float transform(float& x, std::int64_t j) const {
        if (layer_.bias != nullptr) x += layer_.bias[j];
        const auto scale = static_cast<float>(spec_.logit_scale);
        x *= scale;
        if (spec_.softcap <= 0) return scale;
        const auto cap = static_cast<float>(spec_.softcap);
        const float t = std::tanh(x / cap);
        x = cap * t;
        return scale * (1.0F - t * t);
    }
    // Factor of the token's whole loss.
    float loss_factor(std::int64_t i, const ReferenceToken& token) const {
        return static_cast<float>(layer_.token_weight_of(i)) * (spec_.dft ? std::exp(token.logprob) : 1.0F);
    }
    TokenUpstream upstream(std::int64_t i, const ReferenceToken& token) const {
        const auto at = [i](const float* values, float absent) { return values != nullptr ? values[i] : absent; };
        TokenUpstream g;
        float loss = spec_.outputs.loss ? 1.0F : 0.0F;
        if (layer_.grad_loss != nullptr) loss = layer_.grad_loss[layer_.reduction == Reduction::none ? i : 0];
        loss *= loss_factor(i, token);
        g.cross_entropy = loss / float(divide_.cross_entropy);
        g.z_loss = loss / float(divide_.z_loss);
        g.lse = at(layer_.grad_lse, 0);
        g.logprob = at(layer_.grad_logprobs, 0);
        g.entropy = at(layer_.grad_entropy, 0);
        return g;
    }

    void prepare();
    BlockLogits logits(std::int64_t first, std::int64_t last) const;
    void forward_block(std::int64_t first, std::int64_t last);
    void grad_hidden_block(std::int64_t first, std::int64_t last);
    void token_outputs(std::int64_t at, ReferenceToken& token, const float* z);
    void token_budgets(std::int64_t at, ReferenceToken& token, const float* z, const float* gain);
    void token_gradient(std::int64_t at, const ReferenceToken& token, float* z, const float* gain);
    void vocab_block(std::int64_t first, std::int64_t last);
    float logit_gradient(std::int64_t i, const ReferenceToken& token, const TokenUpstream& g, std::int64_t j, float z) const;
    void set_sizes(std::int64_t i, ReferenceToken& token) const;
    LogitSizes logit_sizes(std::int64_t i, const ReferenceToken& token, std::int64_t j, float z, float gain, float logit_gradient) const;
    void round_gradients(float scale, float* values, std::int64_t count) const;
    float gradient_scale() const;
    void complete_tokens();
    void reduce();
    void store_weight_rows();

    Summation summation_;
    ErrorModel expected_{true, summation_};
    ErrorModel largest_{false, summation_};
    const Problem& problem_;
    const Selection& selection_;
    KnownTokens known_;
    Layer<float> layer_;
    std::vector<float> hidden_;
    const Spec& spec_;
    Divisors divide_;
    float class_sum_ = 0;
    std::vector<double> weight_norm_;
    double largest_weight_norm_ = 0;
    std::vector<ReferenceToken> tokens_;      // the selected ones
    std::vector<ReferenceToken> all_tokens_;  // in token order; tokens that are not selected and not known are not valid
    std::vector<float> grad_hidden_, grad_weight_, grad_bias_;
    float scale_ = 1;  // scale of the logits' gradient while it is stored in fp16, a power of two
    Reference out_;
};

}  // namespace flce::test

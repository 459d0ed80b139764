// Sizes of what a token's outputs and gradients are made of, and how far off they may be.
#include <limits>

#include "tests/support/reference_evaluation.hpp"

namespace flce::test {

void Evaluation::set_sizes(std::int64_t i, ReferenceToken& token) const {
    const TokenUpstream g = upstream(i, token);
    const double eps = spec_.label_smoothing;
    const double hard = layer_.hard_weight();
    TokenSizes& s = token.sizes;
    s.temperature = layer_.temperature_of(i);
    s.teacher = (1 - hard) * std::fabs(g.cross_entropy);
    double probabilities = 0;
    layer_.for_each_named(i, [&](std::int64_t, std::int64_t, double q) { probabilities += std::fabs(q); });
    s.hidden_norm = norm(layer_.hidden + i * spec_.hidden_size);
    s.lse = double(token.top) + double(token.log_sum);
    s.entropy = std::fabs(token.entropy);
    s.hit = std::fabs(g.cross_entropy) * hard * (1 - eps) * class_weight(token.label) + std::fabs(g.logprob);
    s.spread = std::fabs(g.cross_entropy) * hard * eps / double(spec_.vocab_size);
    s.slope = s.hit + s.spread * class_sum_ + s.teacher * probabilities + std::fabs(g.z_loss * 2 * spec_.z_loss * s.lse) + std::fabs(g.lse);
    s.slope_z = std::fabs(g.entropy);
    s.loss_slope = std::fabs(g.cross_entropy) * ((1 - eps) * class_weight(token.label) + eps / double(spec_.vocab_size) * class_sum_) +
                   std::fabs(g.z_loss * 2 * spec_.z_loss * s.lse);
}

LogitSizes Evaluation::logit_sizes(std::int64_t i, const ReferenceToken& token, std::int64_t j, float z, float gain,
                                   float logit_gradient) const {
    LogitSizes e;
    const double bias = layer_.bias != nullptr ? std::fabs(layer_.bias[j]) : 0;
    const bool absent = z == -std::numeric_limits<float>::infinity();  // exactly
    e.z = absent ? 0 : z;
    e.p = layer_.times(i, j) * std::exp(std::min(0.0, double((z - token.top) - token.log_sum)));
    e.offset = absent ? 0 : std::fabs(layer_.offset_of(i, j));
    e.gain = std::fabs(gain);
    e.product = absent ? 0 : token.sizes.hidden_norm * weight_norm_[j] + (std::isinf(bias) ? 0 : bias);
    e.logit_gradient = std::fabs(logit_gradient);
    e.gradient = e.logit_gradient * e.gain;
    e.class_weight = class_weight(j);
    e.is_label = j == token.label;
    layer_.for_each_named(i, [&](std::int64_t id, std::int64_t, double q) {
        if (id != j) return;
        e.named += token.sizes.teacher * std::fabs(q);
        ++e.times_named;
    });
    return e;
}

void Evaluation::token_budgets(std::int64_t at, ReferenceToken& token, const float* z, const float* gain) {
    const TokenSizes& s = token.sizes;
    const double eps = spec_.label_smoothing;
    const double per_class = eps / double(spec_.vocab_size);
    const double to_label = std::fabs(z[token.label] - token.top);
    const double factor = std::fabs(loss_factor(selection_.tokens[at], token));
    const double log_squares = out_.result.log_sum_sq_probs[at];
    const auto set = [&](const ErrorModel& model, double Budget::* kind) {
        const double u = model.rounding(kU32);
        const double summing = model.sum(spec_.vocab_size);
        ErrorSum log_sum(model), entropy(model), smooth(model), squares(model);
        double logit = 0;
        double label = 0;
        // From every logit, towards 0: unlike roundings it does not average out.
        double cut = 0;        // lse's loss
        double label_cut = 0;  // loss of the label's logit
        double smooth_cut = 0;
        for (std::int64_t j = 0; j < spec_.vocab_size; ++j) {
            const LogitSizes e = logit_sizes(selection_.tokens[at], token, j, z[j], gain[j], 0);
            const double dz = logit_error(spec_, e, model);
            log_sum.add(e.p * dz);
            const double of_logit = std::copysign(model.truncated(spec_.hidden_size) * e.gain * e.product, e.z);
            cut += e.p * of_logit;
            smooth_cut += e.class_weight * of_logit;
            entropy.add(e.p * (1 + std::fabs(e.z - s.lse) + s.entropy) * (dz + u));
            smooth.add(e.class_weight * (dz + u * std::fabs(e.z)));
            squares.add(2 * std::exp(2 * std::log(std::max(e.p, 1e-300)) - log_squares) * (dz + u));
            logit = std::max(logit, dz);
            if (!e.is_label) continue;
            label = dz;
            label_cut = of_logit;
        }
        log_sum.add(cut).add(summing).add(u * std::fabs(token.log_sum));
        // lse is rounded to its own size; a log-probability is a difference of differences and is not.
        const double lse = ErrorSum(model).add(log_sum.value()).add(u * std::fabs(s.lse)).value();
        const double logprob = ErrorSum(model).add(log_sum.value()).add(label).add(u * (to_label + std::fabs(token.log_sum))).value();
        squares.add(2 * log_sum.value()).add(summing).add(u * (std::fabs(log_squares) + 2 * std::fabs(token.log_sum)));
        const double factor_error = spec_.dft ? logprob + 2 * u : 0;
        const double of_lse = factor * spec_.z_loss * std::fabs(s.lse) * ErrorSum(model).add(2 * lse).add(2 * u * std::fabs(s.lse)).value();
        const double z_loss = ErrorSum(model).add(of_lse).add((factor_error + u) * std::fabs(out_.result.z_loss[at])).value();
        entropy.add(summing * (s.entropy + std::fabs(token.log_sum))).add(u * (s.entropy + std::fabs(token.log_sum)));
        smooth.add(class_sum_ * lse).add(class_sum_ * summing * (std::fabs(s.lse) + 1));
        token.sizes.lse_error.*kind = lse;
        token.sizes.factor_error.*kind = factor_error;
        out_.budgets.log_sum_sq_probs[at].*kind = squares.value();
        out_.budgets.logit[at].*kind = logit;
        out_.budgets.lse[at].*kind = lse;
        out_.budgets.logprobs[at].*kind = logprob;
        out_.budgets.entropy[at].*kind = entropy.value();
        out_.budgets.z_loss[at].*kind = z_loss;
        if (kind == &Budget::floor) out_.budgets.z_loss[at].alike = factor * spec_.z_loss * 2 * s.lse * cut;
        ErrorSum loss(model);
        loss.add(factor * layer_.hard_weight() * (1 - eps) * class_weight(token.label) * logprob)
            .add(z_loss)
            .add(4 * u * std::fabs(out_.result.loss[at]));
        loss.add(factor_error * std::fabs(out_.result.loss[at]));
        if (eps > 0) loss.add(factor * layer_.hard_weight() * per_class * smooth.value());
        double squares_of_named = 0;
        double together = 0;  // part of the loss's error by lse, which is off in all of these terms
        layer_.for_each_named(selection_.tokens[at], [&](std::int64_t id, std::int64_t, double q) {
            if (z[id] == -std::numeric_limits<float>::infinity()) return;  // exactly
            const double dz = logit_error(spec_, logit_sizes(selection_.tokens[at], token, id, z[id], gain[id], 0), model);
            const double to_id = std::fabs(z[id] - token.top) + std::fabs(token.log_sum);
            const double apart = id == token.label ? 0 : model.apart(spec_.hidden_size) * std::fabs(s.lse);
            const double error = ErrorSum(model).add(log_sum.value()).add(dz).add(u * to_id).value();
            squares_of_named += error * error + apart * apart;
            const double part = factor * (1 - layer_.hard_weight()) * std::fabs(q);
            loss.add(part * error).add(part * to_id * model.sum(spec_.teacher_top_k));
            together += part * apart;
        });
        loss.add(together);
        out_.budgets.teacher_logprobs[at].*kind = std::sqrt(squares_of_named);
        out_.budgets.loss[at].*kind = loss.value();
        if (kind == &Budget::floor) {
            const double hard = (1 - eps) * class_weight(token.label) * (cut - label_cut) + per_class * (class_sum_ * cut - smooth_cut);
            out_.budgets.loss[at].alike = factor * layer_.hard_weight() * hard + out_.budgets.z_loss[at].alike;
        }
    };
    set(expected_, &Budget::floor);
    set(largest_, &Budget::limit);
}

// From the selected tokens to all of them, in token order.
void Evaluation::complete_tokens() {
    all_tokens_.resize(static_cast<std::size_t>(layer_.num_tokens));
    const bool all_selected = std::ssize(selection_.tokens) == layer_.num_tokens;
    for (std::int64_t i = 0; i < layer_.num_tokens && !all_selected && known_.lse != nullptr; ++i) {
        ReferenceToken& token = all_tokens_[i];
        token.valid = layer_.valid(i);
        token.label = layer_.target[i];
        if (!token.valid) continue;
        token.top = known_.lse[i];
        token.entropy = known_.entropy != nullptr ? known_.entropy[i] : 0;
        token.logprob = known_.logprobs != nullptr ? known_.logprobs[i] : 0;
        set_sizes(i, token);
        const double product = std::fabs(spec_.logit_scale) / layer_.temperature_of(i) * token.sizes.hidden_norm * largest_weight_norm_;
        const double lse = std::fabs(token.sizes.lse);
        const auto error = [&](const ErrorModel& model) {
            return 5 * model.rounding(kU32) * lse + model.products(spec_.hidden_size) * product;
        };
        token.sizes.lse_error = {error(expected_), error(largest_)};
        if (spec_.dft) token.sizes.factor_error = {2 * error(expected_), 2 * error(largest_)};  // errors of lse and of the label's logit
    }
    for (std::size_t s = 0; s < selection_.tokens.size(); ++s) all_tokens_[selection_.tokens[s]] = tokens_[s];
}
}  // namespace flce::test

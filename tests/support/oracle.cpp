#include "tests/support/oracle.hpp"

#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "tests/support/dense.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kDepth = 1 << 20;  // slices of a sum: in fp64 any will do
constexpr std::int64_t kTokenBlock = 8;   // selected tokens of one task
constexpr std::int64_t kVocabBlock = 32;  // selected vocabulary rows of one task

struct Token {
    std::int64_t index = 0;
    std::int64_t label = 0;
    double lse = 0;
    double entropy = 0;
    double logprob = 0;
};

double logit_derivative(const Spec& spec, double product_and_bias, double temperature) {
    if (spec.offset_gradient) return 1 / temperature;
    if (spec.softcap <= 0) return spec.logit_scale / temperature;
    const double t = std::tanh(spec.logit_scale * product_and_bias / spec.softcap);
    return spec.logit_scale * (1 - t * t) / temperature;
}

// Factor of a token's whole loss.
template <class T>
double loss_factor(const Layer<T>& layer, const Token& token) {
    return layer.token_weight_of(token.index) * (layer.spec.dft ? std::exp(token.logprob) : 1);
}

template <class T>
double class_weight_sum(const Layer<T>& layer) {
    double sum = 0;
    for (std::int64_t j = 0; j < layer.spec.vocab_size; ++j) sum += layer.class_weight_of(j);
    return sum;
}

// Gradient with respect to logit j of everything that depends on token's logits, one output after the other.
template <class T>
class LogitGradient {
public:
    LogitGradient(const Layer<T>& layer, const Divisors& divide) : layer_(layer), divide_(divide), class_sum_(class_weight_sum(layer)) {}

    double operator()(const Token& token, std::int64_t j, double z) const {
        const Spec& spec = layer_.spec;
        const double eps = spec.label_smoothing;
        const double times = layer_.times(token.index, j);
        if (times == 0) return 0;
        const double p = times * std::exp(z - token.lse);
        const double hit = j == token.label ? 1 : 0;
        const double g = loss_factor(layer_, token) *
                         upstream(layer_.grad_loss, layer_.reduction == Reduction::none ? token.index : 0, spec.outputs.loss ? 1 : 0);
        const double hard = layer_.hard_weight();
        double sum = 0;
        // (1−ε)·c_y·(−log p_y): ∂(−log p_y)/∂z_j = p_j − [j=y]
        sum += g / divide_.cross_entropy * hard * (1 - eps) * layer_.class_weight_of(token.label) * (p - hit);
        // ε/V·Σ_k c_k·(−log p_k): Σ_k c_k·(p_j − [j=k])
        if (eps > 0) sum += g / divide_.cross_entropy * hard * eps / double(spec.vocab_size) * (class_sum_ * p - layer_.class_weight_of(j));
        // Σ_k q_k·(−log p_k) over the teacher's classes: Σ_k q_k·(p_j − [j=k])
        layer_.for_each_named(token.index, [&](std::int64_t id, std::int64_t, double q) {
            sum += g / divide_.cross_entropy * (1 - hard) * q * (p - (j == id ? 1 : 0));
        });
        // ω·lse²: 2·ω·lse·∂lse/∂z_j, and ∂lse/∂z_j = p_j
        sum += g / divide_.z_loss * spec.z_loss * 2 * token.lse * p;
        sum += upstream(layer_.grad_lse, token.index, 0) * p;
        // log p_y
        sum += upstream(layer_.grad_logprobs, token.index, 0) * (hit - p);
        // −Σ_k p_k log p_k: −p_j·(log p_j + entropy)
        if (p != 0) sum += upstream(layer_.grad_entropy, token.index, 0) * -p * ((z - token.lse) + token.entropy);
        return sum;
    }

private:
    static double upstream(const float* values, std::int64_t index, double absent) {
        return values != nullptr ? double(values[index]) : absent;
    }

    const Layer<T>& layer_;
    Divisors divide_;
    double class_sum_;
};

// Outputs of one token from its V logits, each by its definition.
template <class T>
void token_outputs(const Layer<T>& layer, Token& token, const double* z, std::int64_t at, Result& result) {
    const std::int64_t v = layer.spec.vocab_size;
    std::vector<double> times(static_cast<std::size_t>(v));
    double top = -std::numeric_limits<double>::infinity();
    bool names_any = false;
    for (std::int64_t j = 0; j < v; ++j) {
        times[j] = layer.times(token.index, j);
        if (times[j] > 0) top = std::isnan(z[j]) ? z[j] : std::max(top, z[j]);
        names_any = names_any || times[j] > 0;
    }
    double exp_sum = 0;
    for (std::int64_t j = 0; j < v; ++j) exp_sum += times[j] > 0 ? times[j] * std::exp(z[j] - top) : 0;
    if (!names_any) top = 0, exp_sum = 1;  // nothing is named: lse and entropy are 0
    const double log_sum = std::log(exp_sum);
    const auto log_p = [&](std::int64_t j) { return (z[j] - top) - log_sum; };
    // No class takes part: Σ exp is 0. A loss is NaN then.
    token.lse = top == -std::numeric_limits<double>::infinity() ? top : top + log_sum;
    const double eps = layer.spec.label_smoothing;
    double smooth = 0;
    for (std::int64_t j = 0; j < v; ++j) {
        if (eps > 0) smooth -= layer.class_weight_of(j) * log_p(j);
        const double p = times[j] > 0 ? times[j] * std::exp(log_p(j)) : 0;
        if (p != 0) token.entropy -= p * log_p(j);
    }
    const double hard = -layer.class_weight_of(token.label) * log_p(token.label);
    token.logprob = log_p(token.label);
    double cross_entropy = layer.hard_weight() > 0 ? layer.hard_weight() * ((1 - eps) * hard + eps / double(v) * smooth) : 0;
    layer.for_each_named(token.index, [&](std::int64_t id, std::int64_t k, double q) {
        result.teacher_logprobs[at * layer.spec.teacher_top_k + k] = log_p(id);
        if (q != 0) cross_entropy -= (1 - layer.hard_weight()) * q * log_p(id);
    });
    const double factor = loss_factor(layer, token);
    result.z_loss[at] = factor * layer.spec.z_loss * token.lse * token.lse;
    result.loss[at] = factor * cross_entropy + result.z_loss[at];
    result.lse[at] = token.lse;
    result.logprobs[at] = token.logprob;
    result.entropy[at] = token.entropy;
    double squares = 0;
    for (std::int64_t j = 0; j < v; ++j) squares += std::exp(2 * log_p(j));
    result.log_sum_sq_probs[at] = std::log(squares);
    result.top1[at] = static_cast<double>(std::max_element(z, z + v) - z);
    result.largest_logit[at] = top;
}

// Rows of a matrix [*, D], one after the other.
template <class T>
std::vector<T> gathered(const T* matrix, const std::int64_t* rows, std::int64_t count, std::int64_t d) {
    std::vector<T> out(static_cast<std::size_t>(count * d));
    for (std::int64_t i = 0; i < count; ++i) std::copy_n(matrix + rows[i] * d, d, &out[i * d]);
    return out;
}

// Outputs and grad_hidden of the selected tokens first … last−1.
template <class T>
void token_block(const Layer<T>& layer, const Selection& selection, const LogitGradient<T>& gradient, std::int64_t first, std::int64_t last,
                 Result& result, std::vector<Token>& tokens) {
    const std::int64_t v = layer.spec.vocab_size;
    const std::int64_t d = layer.spec.hidden_size;
    const std::int64_t count = last - first;
    const std::vector<T> hidden = gathered(layer.hidden, &selection.tokens[first], count, d);
    std::vector<double> x(static_cast<std::size_t>(count * v));
    std::vector<double> z(static_cast<std::size_t>(v));
    multiply_transposed(hidden.data(), layer.weight, x.data(), count, v, d, kDepth);
    for (std::int64_t i = 0; i < count; ++i) {
        Token& token = tokens[first + i];
        double* row = &x[i * v];
        token.index = selection.tokens[first + i];
        token.label = layer.target[token.index];
        if (!layer.valid(token.index)) {
            std::fill_n(row, v, 0.0);
            continue;
        }
        for (std::int64_t j = 0; j < v; ++j) {
            if (layer.bias != nullptr) row[j] += double(layer.bias[j]);
            z[j] = logit_of(layer.spec, row[j], layer.offset_of(token.index, j), layer.temperature_of(token.index));
        }
        token_outputs(layer, token, z.data(), first + i, result);
        for (std::int64_t j = 0; j < v; ++j) {
            row[j] = gradient(token, j, z[j]) * logit_derivative(layer.spec, row[j], layer.temperature_of(token.index));
        }
    }
    multiply_add(x.data(), layer.weight, &result.grad_hidden[first * d], count, d, v, kDepth);
}

// grad_weight and grad_bias of the selected vocabulary rows first … last−1, from all tokens.
template <class T>
void vocab_block(const Layer<T>& layer, const Selection& selection, const LogitGradient<T>& gradient, std::int64_t first, std::int64_t last,
                 const std::vector<Token>& tokens, Result& result) {
    const std::int64_t d = layer.spec.hidden_size;
    const auto n = static_cast<std::int64_t>(tokens.size());
    const std::int64_t count = last - first;
    const std::vector<T> weight = gathered(layer.weight, &selection.vocab[first], count, d);
    std::vector<double> x(static_cast<std::size_t>(n * count));
    std::vector<double> dx(static_cast<std::size_t>(count * n));
    multiply_transposed(layer.hidden, weight.data(), x.data(), n, count, d, kDepth);
    for (std::int64_t s = 0; s < count; ++s) {
        const std::int64_t j = selection.vocab[first + s];
        for (std::int64_t i = 0; i < n; ++i) {
            if (!layer.valid(i)) continue;
            const double u = x[i * count + s] + (layer.bias != nullptr ? double(layer.bias[j]) : 0);
            const double t = layer.temperature_of(i);
            const double z = logit_of(layer.spec, u, layer.offset_of(i, j), t);
            dx[s * n + i] = gradient(tokens[i], j, z) * logit_derivative(layer.spec, u, t);
            if (layer.bias != nullptr) result.grad_bias[first + s] += dx[s * n + i];
        }
    }
    multiply_add(dx.data(), layer.hidden, &result.grad_weight[first * d], count, d, n, kDepth);
}

template <class T>
std::vector<Token> every_token(const Layer<T>& layer, const Selection& selection, const KnownTokens& known,
                               const std::vector<Token>& selected) {
    if (std::ssize(selection.tokens) == layer.num_tokens) return selected;
    if (known.lse == nullptr) throw std::logic_error("oracle: the lse of unselected tokens is needed");
    std::vector<Token> tokens(static_cast<std::size_t>(layer.num_tokens));
    for (std::int64_t i = 0; i < layer.num_tokens; ++i) {
        tokens[i] = {i, layer.target[i], double(known.lse[i]), known.entropy != nullptr ? double(known.entropy[i]) : 0,
                     known.logprobs != nullptr ? double(known.logprobs[i]) : 0};
    }
    for (const Token& token : selected) tokens[token.index] = token;
    return tokens;
}

}  // namespace

// logits = (softcap(logit_scale · (h·w + b)) + offset) / temperature
double logit_of(const Spec& spec, double x, double offset, double temperature) {
    const double scaled = spec.logit_scale * x;
    return ((spec.softcap > 0 ? spec.softcap * std::tanh(scaled / spec.softcap) : scaled) + offset) / temperature;
}

template <class T>
Divisors divisors(const Layer<T>& layer) {
    const bool weighted = layer.reduction == Reduction::weighted_mean;
    if (layer.reduction != Reduction::mean && !weighted) return {};
    if (layer.num_valid) return {*layer.num_valid, *layer.num_valid};
    Divisors divide{0, 0};
    for (std::int64_t i = 0; i < layer.num_tokens; ++i) {
        if (!layer.valid(i)) continue;
        const double token = weighted ? layer.token_weight_of(i) : 1;
        divide.z_loss += token;
        divide.cross_entropy += token * layer.class_weight_of(layer.target[i]);
    }
    return divide;
}

template <class T>
Result oracle(const Layer<T>& given, const Selection& selection, const KnownTokens& known) {
    const std::vector<T> hidden = hidden_of_valid(given);
    Layer<T> layer = given;
    layer.hidden = hidden.data();
    const auto rows = static_cast<std::int64_t>(selection.tokens.size());
    const auto columns = static_cast<std::int64_t>(selection.vocab.size());
    const auto d = layer.spec.hidden_size;
    Result result;
    for (auto* values :
         {&result.loss, &result.z_loss, &result.lse, &result.logprobs, &result.entropy, &result.log_sum_sq_probs, &result.largest_logit}) {
        values->assign(rows, 0.0);
    }
    result.top1.assign(rows, -1.0);
    result.teacher_logprobs.assign(rows * layer.spec.teacher_top_k, 0.0);
    result.grad_hidden.assign(rows * d, 0.0);
    result.grad_weight.assign(columns * d, 0.0);
    if (layer.bias != nullptr) result.grad_bias.assign(columns, 0.0);
    const Divisors divide = divisors(layer);
    const LogitGradient<T> gradient(layer, divide);
    std::vector<Token> selected(static_cast<std::size_t>(rows));
    tbb::parallel_for(
        tbb::blocked_range<std::int64_t>(0, rows, kTokenBlock),
        [&](const auto& r) { token_block(layer, selection, gradient, r.begin(), r.end(), result, selected); }, tbb::simple_partitioner{});
    if (columns > 0) {
        const std::vector<Token> tokens = every_token(layer, selection, known, selected);
        tbb::parallel_for(
            tbb::blocked_range<std::int64_t>(0, columns, kVocabBlock),
            [&](const auto& r) { vocab_block(layer, selection, gradient, r.begin(), r.end(), tokens, result); }, tbb::simple_partitioner{});
    }
    for (std::int64_t s = 0; s < rows; ++s) {
        if (!layer.valid(selection.tokens[s])) continue;
        result.reduced_loss += (result.loss[s] - result.z_loss[s]) / divide.cross_entropy + result.z_loss[s] / divide.z_loss;
        result.reduced_z_loss += result.z_loss[s] / divide.z_loss;
    }
    return result;
}

template Divisors divisors(const Layer<float>&);
template Divisors divisors(const Layer<double>&);
template Result oracle(const Layer<float>&, const Selection&, const KnownTokens&);
template Result oracle(const Layer<double>&, const Selection&, const KnownTokens&);

}  // namespace flce::test

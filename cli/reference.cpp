#include "cli/reference.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/interrupt.hpp"
#include "cli/number_formats.hpp"
#include "cli/parallel.hpp"

namespace flce::cli {
namespace {

constexpr std::int64_t kWeightBlock = 32;  // vocabulary rows converted to fp64 at a time

/// Eight partial sums let the compiler use vectors without reordering anything behind our back.
double dot(const double* a, const double* b, std::int64_t count) {
    double sums[8] = {};
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int k = 0; k < 8; ++k) sums[k] += a[i + k] * b[i + k];
    }
    for (; i < count; ++i) sums[0] += a[i] * b[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

void add_scaled(double* to, double factor, const double* from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

}  // namespace

double ErrorNorm::relative() const {
    if (std::isnan(difference2)) return difference2;
    if (difference2 == 0) return 0;
    if (reference2 == 0) return std::numeric_limits<double>::infinity();
    return std::sqrt(difference2 / reference2);
}

Reference::Reference(const ReferenceProblem& problem, std::vector<std::int64_t> tokens) : problem_(problem), tokens_(std::move(tokens)) {
    const Spec& spec = problem_.spec;
    const auto n = static_cast<std::size_t>(problem_.num_tokens);
    const auto d = static_cast<std::size_t>(spec.hidden_size);
    hidden_.resize(n * d);
    to_real(problem_.hidden, spec.dtype, hidden_.data(), hidden_.size());
    if (spec.bias) {
        bias_.resize(static_cast<std::size_t>(spec.vocab_size));
        to_real(problem_.bias, spec.dtype, bias_.data(), bias_.size());
    }
    class_weight_total_ = static_cast<double>(spec.vocab_size);
    if (spec.class_weight) {
        class_weight_total_ = 0;
        for (const float weight : problem_.class_weight) class_weight_total_ += weight;
    }
    if (problem_.reduction == Reduction::mean) {
        double weights = 0;
        double valid = 0;
        for (std::int64_t i = 0; i < problem_.num_tokens; ++i) {
            if (ignored(i)) continue;
            weights += class_weight(problem_.target[static_cast<std::size_t>(i)]);
            valid += 1;
        }
        loss_divisor_ = weights > 0 ? weights : 1;
        z_loss_divisor_ = valid > 0 ? valid : 1;
    }
    results_.resize(tokens_.size());
    grad_hidden_.resize(tokens_.size() * d);
    lse_.resize(n);
    entropy_.resize(n);
    const auto count = static_cast<std::int64_t>(tokens_.size());
    const std::int64_t block = std::clamp<std::int64_t>((count + hardware_threads() - 1) / hardware_threads(), 1, 16);
    parallel_blocks(count, block, [&](std::int64_t begin, std::int64_t end) {
        compute_tokens(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
    });
}

std::span<const double> Reference::grad_hidden(std::size_t index) const {
    const auto d = static_cast<std::size_t>(problem_.spec.hidden_size);
    return {grad_hidden_.data() + index * d, d};
}

bool Reference::ignored(std::int64_t token) const {
    const std::int64_t target = problem_.target[static_cast<std::size_t>(token)];
    return target == problem_.ignore_index || target < 0 || target >= problem_.spec.vocab_size;
}

void Reference::set_other(std::span<const float> lse, std::span<const float> entropy) {
    std::vector<bool> computed(lse_.size());
    for (const std::int64_t token : tokens_) computed[static_cast<std::size_t>(token)] = true;
    for (std::size_t i = 0; i < lse_.size(); ++i) {
        if (computed[i]) continue;
        lse_[i] = lse[i];
        if (!entropy.empty()) entropy_[i] = entropy[i];
    }
}

Reference::Logit Reference::logit(double dot_product, std::int64_t row) const {
    const Spec& spec = problem_.spec;
    const double biased = dot_product + (spec.bias ? bias_[static_cast<std::size_t>(row)] : 0.0);
    Logit result{spec.logit_scale * biased, spec.logit_scale};
    if (spec.softcap != 0) {
        const double t = std::tanh(result.value / spec.softcap);
        result.value = spec.softcap * t;
        result.derivative *= 1 - t * t;
    }
    return result;
}

double Reference::class_weight(std::int64_t row) const {
    return problem_.spec.class_weight ? problem_.class_weight[static_cast<std::size_t>(row)] : 1.0;
}

double Reference::grad_logit(std::int64_t token, std::int64_t row, double z, double lse, double entropy) const {
    const Spec& spec = problem_.spec;
    const auto i = static_cast<std::size_t>(token);
    const double p = std::exp(z - lse);
    const double hit = problem_.target[i] == row ? 1.0 : 0.0;
    const double upstream = problem_.grad_loss.empty() ? 1.0 : problem_.grad_loss[i];
    const double g = upstream / loss_divisor_;
    double gradient = g * (1 - spec.label_smoothing) * class_weight(problem_.target[i]) * (p - hit);
    if (spec.label_smoothing > 0) {
        gradient += g * spec.label_smoothing / static_cast<double>(spec.vocab_size) * (class_weight_total_ * p - class_weight(row));
    }
    gradient += upstream / z_loss_divisor_ * 2 * spec.z_loss * lse * p;
    if (!problem_.grad_lse.empty()) gradient += problem_.grad_lse[i] * p;
    if (!problem_.grad_logprob.empty()) gradient += problem_.grad_logprob[i] * (hit - p);
    if (!problem_.grad_entropy.empty()) gradient += problem_.grad_entropy[i] * -p * (z - lse + entropy);
    return gradient;
}

void Reference::load_weight_rows(std::int64_t begin, std::int64_t end, double* out) const {
    const Spec& spec = problem_.spec;
    const auto d = static_cast<std::size_t>(spec.hidden_size);
    const std::size_t element = element_bytes(spec.dtype);
    const auto rows = static_cast<std::size_t>(end - begin);
    if (spec.layout == WeightLayout::vocab_major) {
        to_real(problem_.weight + static_cast<std::size_t>(begin) * d * element, spec.dtype, out, rows * d);
        return;
    }
    double column[kWeightBlock];
    const auto stride = static_cast<std::size_t>(spec.padded_vocab_size);
    for (std::size_t k = 0; k < d; ++k) {
        to_real(problem_.weight + (k * stride + static_cast<std::size_t>(begin)) * element, spec.dtype, column, rows);
        for (std::size_t r = 0; r < rows; ++r) out[r * d + k] = column[r];
    }
}

void Reference::compute_tokens(std::size_t begin, std::size_t end) {
    const std::int64_t v = problem_.spec.vocab_size;
    const std::int64_t d = problem_.spec.hidden_size;
    const auto row_length = static_cast<std::size_t>(v);
    std::vector<double> weight(static_cast<std::size_t>(kWeightBlock * d));
    std::vector<double> logits((end - begin) * row_length);
    std::vector<double> derivatives(logits.size());
    for (std::int64_t j0 = 0; j0 < v; j0 += kWeightBlock) {
        stop_if_interrupted();
        const std::int64_t j1 = std::min(v, j0 + kWeightBlock);
        load_weight_rows(j0, j1, weight.data());
        for (std::size_t r = begin; r < end; ++r) {
            const double* hidden = hidden_.data() + tokens_[r] * d;
            for (std::int64_t j = j0; j < j1; ++j) {
                const Logit z = logit(dot(hidden, weight.data() + (j - j0) * d, d), j);
                logits[(r - begin) * row_length + static_cast<std::size_t>(j)] = z.value;
                derivatives[(r - begin) * row_length + static_cast<std::size_t>(j)] = z.derivative;
            }
        }
    }
    for (std::size_t r = begin; r < end; ++r) {
        if (!ignored(tokens_[r])) reduce_token(r, {logits.data() + (r - begin) * row_length, row_length});
    }
    add_grad_hidden(begin, end, logits, derivatives);
}

void Reference::reduce_token(std::size_t index, std::span<const double> logits) {
    const Spec& spec = problem_.spec;
    const std::int64_t token = tokens_[index];
    const std::int64_t target = problem_.target[static_cast<std::size_t>(token)];
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double z : logits) sum += std::exp(z - max);
    ReferenceToken& result = results_[index];
    result.lse = max + std::log(sum);
    result.logprob = logits[static_cast<std::size_t>(target)] - result.lse;
    double smooth = 0;
    for (std::size_t j = 0; j < logits.size(); ++j) {
        const double log_p = logits[j] - result.lse;
        const double p = std::exp(log_p);
        if (p > 0) result.entropy -= p * log_p;
        smooth -= class_weight(static_cast<std::int64_t>(j)) * log_p;
    }
    const double smoothing = spec.label_smoothing;
    result.z_loss = spec.z_loss * result.lse * result.lse;
    result.loss = -(1 - smoothing) * class_weight(target) * result.logprob;
    result.loss += smoothing / static_cast<double>(spec.vocab_size) * smooth + result.z_loss;
    lse_[static_cast<std::size_t>(token)] = result.lse;
    entropy_[static_cast<std::size_t>(token)] = result.entropy;
}

void Reference::add_grad_hidden(std::size_t begin, std::size_t end, const std::vector<double>& logits,
                                const std::vector<double>& derivatives) {
    const std::int64_t v = problem_.spec.vocab_size;
    const std::int64_t d = problem_.spec.hidden_size;
    std::vector<double> weight(static_cast<std::size_t>(kWeightBlock * d));
    for (std::int64_t j0 = 0; j0 < v; j0 += kWeightBlock) {
        stop_if_interrupted();
        const std::int64_t j1 = std::min(v, j0 + kWeightBlock);
        load_weight_rows(j0, j1, weight.data());
        for (std::size_t r = begin; r < end; ++r) {
            const std::int64_t token = tokens_[r];
            if (ignored(token)) continue;
            for (std::int64_t j = j0; j < j1; ++j) {
                const std::size_t at = (r - begin) * static_cast<std::size_t>(v) + static_cast<std::size_t>(j);
                const double dz = grad_logit(token, j, logits[at], results_[r].lse, results_[r].entropy) * derivatives[at];
                add_scaled(grad_hidden_.data() + static_cast<std::int64_t>(r) * d, dz, weight.data() + (j - j0) * d, d);
            }
        }
    }
}

double Reference::grad_weight_row(std::int64_t row, std::span<double> out) const {
    const std::int64_t d = problem_.spec.hidden_size;
    std::vector<double> weight(static_cast<std::size_t>(d));
    load_weight_rows(row, row + 1, weight.data());
    std::fill(out.begin(), out.end(), 0.0);
    double bias = 0;
    for (std::int64_t i = 0; i < problem_.num_tokens; ++i) {
        if (ignored(i)) continue;
        const double* hidden = hidden_.data() + i * d;
        const Logit z = logit(dot(hidden, weight.data(), d), row);
        const auto at = static_cast<std::size_t>(i);
        const double dz = grad_logit(i, row, z.value, lse_[at], entropy_[at]) * z.derivative;
        add_scaled(out.data(), dz, hidden, d);
        bias += dz;
    }
    return bias;
}

double Reference::operations(const Spec& spec, std::int64_t num_tokens, std::int64_t tokens, std::int64_t rows) {
    const auto d = static_cast<double>(spec.hidden_size);
    return 2 * d * (static_cast<double>(tokens) * static_cast<double>(spec.vocab_size) + static_cast<double>(num_tokens) * static_cast<double>(rows));
}

}  // namespace flce::cli

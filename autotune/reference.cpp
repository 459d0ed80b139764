#include "autotune/reference.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>

#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/parallel_blocks.hpp"

namespace flce {
namespace {

constexpr std::int64_t kWeightBlock = 32;                   // vocabulary rows converted to fp64 at a time
constexpr std::size_t kMostLogits = 1 << 22;                // logits of tokens that are computed together
constexpr std::size_t kLeastLogits = std::size_t{1} << 14;  // logits that are worth a thread

/// Eight partial sums let the compiler use vectors without reordering anything behind our back.
template <class Real>
Real dot(const Real* a, const Real* b, std::int64_t count) {
    Real sums[8] = {};
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int k = 0; k < 8; ++k) sums[k] += a[i + k] * b[i + k];
    }
    for (; i < count; ++i) sums[0] += a[i] * b[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// Adds like tensor cores.
float truncating_dot(const float* a, const float* b, std::int64_t count) {
    double sum = 0;
    for (std::int64_t begin = 0; begin < count; begin += kTensorCoreStep) {
        double step = 0;
        for (std::int64_t i = begin; i < std::min(count, begin + kTensorCoreStep); ++i) step += static_cast<double>(a[i]) * b[i];
        sum = truncated_to_fp32(sum + step);
    }
    return static_cast<float>(sum);
}

template <class Real>
void add_scaled(Real* to, Real factor, const Real* from, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

/// Sum of term(0) … term(count − 1) in slices, as vectorised and blocked code sums.
template <class Real, class Term>
Real sum_of(std::size_t count, const Term& term) {
    constexpr std::size_t kSlice = 256;
    Real total = 0;
    for (std::size_t begin = 0; begin < count; begin += kSlice) {
        Real slice = 0;
        for (std::size_t i = begin; i < std::min(count, begin + kSlice); ++i) slice += term(i);
        total += slice;
    }
    return total;
}

/// Rounds where a framework would; exact arithmetic does not.
template <class Real>
Real rounded(Real value, DType dtype) {
    if constexpr (std::is_same_v<Real, float>) return rounded_mantissa(value, dtype);
    return value;
}
template <class Real>
Real stored(Real value, DType dtype) {
    if constexpr (std::is_same_v<Real, float>) return stored_value(value, dtype);
    return value;
}

/// A token's number out of [N], 1 where the spec has no such input.
float of_token(std::span<const float> values, std::int64_t token) {
    return values.empty() ? 1.0F : values[static_cast<std::size_t>(token)];
}

}  // namespace

template <class Real>
BasicReference<Real>::BasicReference(const ReferenceProblem& problem, std::vector<std::int64_t> tokens)
    : problem_(problem), tokens_(std::move(tokens)) {
    const Spec& spec = problem_.spec;
    const auto n = static_cast<std::size_t>(problem_.num_tokens);
    const auto d = static_cast<std::size_t>(spec.hidden_size);
    hidden_.resize(n * d);
    to_real(problem_.hidden, spec.dtype, hidden_.data(), hidden_.size());
    if (spec.bias) {
        bias_.resize(static_cast<std::size_t>(spec.vocab_size));
        to_real(problem_.bias, spec.dtype, bias_.data(), bias_.size());
    }
    class_weight_total_ = static_cast<double>(whole_vocab_size(spec));
    if (spec.class_weight) {
        class_weight_total_ = 0;
        for (const float weight : problem_.class_weight) class_weight_total_ += weight;
    }
    if (problem_.reduction == Reduction::mean || problem_.reduction == Reduction::weighted_mean) {
        double weights = 0;
        double valid = 0;
        for (std::int64_t i = 0; i < problem_.num_tokens; ++i) {
            if (ignored(i)) continue;
            const double token = problem_.reduction == Reduction::weighted_mean ? of_token(problem_.token_weight, i) : 1;
            weights += token * class_weight(problem_.target[static_cast<std::size_t>(i)]);
            valid += token;
        }
        loss_divisor_ = weights != 0 ? weights : 1;
        z_loss_divisor_ = valid != 0 ? valid : 1;
    }
    if (is_fp8(spec)) fp8_ = ReferenceFp8<Real>(problem_, hidden_);
    results_.resize(tokens_.size());
    grad_hidden_.resize(tokens_.size() * d);
    probabilities2_.resize(tokens_.size());
    gradients2_.resize(tokens_.size());
    hidden_terms_.resize(tokens_.size());
    lse_.resize(n);
    entropy_.resize(n);
    logprob_.resize(n);
    const std::size_t block = std::max<std::size_t>(kMostLogits / static_cast<std::size_t>(spec.vocab_size), 1);
    for (std::size_t begin = 0; begin < tokens_.size(); begin += block) compute_tokens(begin, std::min(tokens_.size(), begin + block));
    if (is_fp8(spec)) set_fp8_factors();
}

template <class Real>
std::span<const Real> BasicReference<Real>::grad_hidden(std::size_t index) const {
    const auto d = static_cast<std::size_t>(problem_.spec.hidden_size);
    return {grad_hidden_.data() + index * d, d};
}

template <class Real>
bool BasicReference<Real>::ignored(std::int64_t token) const {
    const std::int64_t target = problem_.target[static_cast<std::size_t>(token)];
    return target == problem_.ignore_index || target < 0 || target >= problem_.spec.vocab_size;
}

template <class Real>
LogitGradientSizes BasicReference<Real>::logit_gradient_sizes() const {
    LogitGradientSizes sizes;
    for (const ReferenceToken& token : results_) sizes.largest_lse = std::max(sizes.largest_lse, std::fabs(token.lse));
    sizes.probabilities = std::sqrt(std::accumulate(probabilities2_.begin(), probabilities2_.end(), 0.0));
    sizes.gradients = std::sqrt(std::accumulate(gradients2_.begin(), gradients2_.end(), 0.0));
    sizes.hidden_terms = std::sqrt(std::inner_product(hidden_terms_.begin(), hidden_terms_.end(), hidden_terms_.begin(), 0.0));
    const std::int64_t d = problem_.spec.hidden_size;
    for (std::size_t r = 0; r < tokens_.size(); ++r) {
        const Real* hidden = hidden_.data() + tokens_[r] * d;
        sizes.grad_weight_terms += gradients2_[r] * static_cast<double>(dot<Real>(hidden, hidden, d));
        sizes.num_terms += ignored(tokens_[r]) ? 0 : 1;
    }
    sizes.grad_weight_terms = std::sqrt(sizes.grad_weight_terms);
    return sizes;
}

template <class Real>
void BasicReference<Real>::set_other(std::span<const float> lse, std::span<const float> entropy, std::span<const float> logprobs) {
    std::vector<bool> computed(lse_.size());
    for (const std::int64_t token : tokens_) computed[static_cast<std::size_t>(token)] = true;
    for (std::size_t i = 0; i < lse_.size(); ++i) {
        if (computed[i]) continue;
        lse_[i] = lse[i];
        if (!entropy.empty()) entropy_[i] = entropy[i];
        if (!logprobs.empty()) logprob_[i] = logprobs[i];
    }
    if (is_fp8(problem_.spec)) set_fp8_factors();
}

template <class Real>
typename BasicReference<Real>::LogitGap BasicReference<Real>::gap_to_largest(std::size_t index, std::int64_t row) const {
    const std::int64_t d = problem_.spec.hidden_size;
    std::vector<Real> weight(static_cast<std::size_t>(d));
    load_logit_weight({row, row + 1}, weight.data());
    const Real* hidden = hidden_.data() + tokens_[index] * d;
    const Logit z = logit(tokens_[index], weight.data(), row);
    const double norms =
        std::sqrt(static_cast<double>(dot<Real>(hidden, hidden, d)) * static_cast<double>(dot<Real>(weight.data(), weight.data(), d)));
    const double steps = 8 + static_cast<double>(d) / kTensorCoreStep * 4;
    return {.gap = results_[index].largest_logit - static_cast<double>(z.value),
            .known_to = 2 * 0x1p-24 *
                        (steps * norms * std::fabs(static_cast<double>(z.derivative)) + 8 * std::fabs(results_[index].largest_logit))};
}

template <class Real>
Real BasicReference<Real>::loss_factor(std::int64_t token) const {
    const Real weight = of_token(problem_.token_weight, token);
    return problem_.spec.dft ? weight * std::exp(logprob_[static_cast<std::size_t>(token)]) : weight;
}

template <class Real>
typename BasicReference<Real>::Logit BasicReference<Real>::logit(std::int64_t token, const Real* weight, std::int64_t row) const {
    const Spec& spec = problem_.spec;
    const Real* hidden = (is_fp8(spec) ? fp8_.hidden() : hidden_.data()) + token * spec.hidden_size;
    Real product = 0;
    if constexpr (std::is_same_v<Real, float>) {
        product = problem_.summation == Summation::truncating ? truncating_dot(hidden, weight, spec.hidden_size)
                                                              : dot<Real>(hidden, weight, spec.hidden_size);
    } else {
        product = dot<Real>(hidden, weight, spec.hidden_size);
    }
    const Real biased = product + (spec.bias ? bias_[static_cast<std::size_t>(row)] : Real(0));
    const auto scale = static_cast<Real>(spec.logit_scale);
    Logit result{scale * biased, spec.offset_gradient ? Real(1) : scale};
    if (spec.softcap != 0) {
        const auto cap = static_cast<Real>(spec.softcap);
        const Real t = std::tanh(result.value / cap);
        result.value = cap * t;
        if (!spec.offset_gradient) result.derivative *= 1 - t * t;
    }
    if (spec.class_offset) result.value += problem_.class_offset[static_cast<std::size_t>(row)];
    if (spec.temperature) {
        const Real temperature = of_token(problem_.temperature, token);
        result.value /= temperature;
        result.derivative /= temperature;
    }
    if (problem_.is_ruled_out(token, row)) return {-std::numeric_limits<Real>::infinity(), Real(0)};
    return result;
}

template <class Real>
Real BasicReference<Real>::class_weight(std::int64_t row) const {
    return problem_.spec.class_weight ? problem_.class_weight[static_cast<std::size_t>(row)] : Real(1);
}

template <class Real>
Real BasicReference<Real>::grad_logit(std::int64_t token, std::int64_t row, const Logit& z) const {
    if (problem_.is_ruled_out(token, row)) return 0;
    const auto i = static_cast<std::size_t>(token);
    const bool is_target = problem_.target[i] == row;
    if (is_fp8(problem_.spec) && !is_target) {
        return fp8_factor(token) * fp8_exponential(token, z);
    }
    const Real p = std::exp(z.value - lse_[i]);
    const Real gradient = unrounded_gradient(token, row, z, p, is_target ? Real(1) : Real(0)) * z.derivative;
    return is_fp8(problem_.spec) ? gradient : rounded(gradient, problem_.spec.dtype);
}

template <class Real>
Real BasicReference<Real>::unrounded_gradient(std::int64_t token, std::int64_t row, const Logit& z, Real p, Real hit) const {
    const Spec& spec = problem_.spec;
    const auto i = static_cast<std::size_t>(token);
    const Real lse = lse_[i];
    const Real upstream =
        loss_factor(token) * (problem_.grad_loss.empty() ? Real(problem_.spec.outputs.loss ? 1 : 0) : problem_.grad_loss[i]);
    const Real g = upstream / static_cast<Real>(loss_divisor_);
    const auto smoothing = static_cast<Real>(spec.label_smoothing);
    const auto share = static_cast<Real>(problem_.hard_weight());
    Real gradient = g * share * (1 - smoothing) * class_weight(problem_.target[i]) * (p - hit);
    problem_.for_each_named(token, [&](std::int64_t id, std::size_t, float q) {
        gradient += g * (1 - share) * Real{q} * (p - (id == row ? Real{1} : Real{0}));
    });
    if (smoothing > 0) {
        gradient += g * share * smoothing / static_cast<Real>(whole_vocab_size(spec)) *
                    (static_cast<Real>(class_weight_total_) * p - class_weight(row));
    }
    gradient += upstream / static_cast<Real>(z_loss_divisor_) * 2 * static_cast<Real>(spec.z_loss) * lse * p;
    if (!problem_.grad_lse.empty()) gradient += problem_.grad_lse[i] * p;
    if (!problem_.grad_logprobs.empty()) gradient += problem_.grad_logprobs[i] * (hit - p);
    if (!problem_.grad_entropy.empty()) gradient += problem_.grad_entropy[i] * -p * (z.value - lse + entropy_[i]);
    return gradient;
}

template <class Real>
double BasicReference<Real>::slope(std::int64_t token) const {
    const Spec& spec = problem_.spec;
    const auto i = static_cast<std::size_t>(token);
    const double upstream =
        static_cast<double>(loss_factor(token)) * (problem_.grad_loss.empty() ? (spec.outputs.loss ? 1 : 0) : problem_.grad_loss[i]);
    const double smoothing = spec.label_smoothing;
    const double weights = (1 - smoothing) * static_cast<double>(class_weight(problem_.target[i])) +
                           smoothing / static_cast<double>(whole_vocab_size(spec)) * class_weight_total_;
    double probabilities = 0;
    problem_.for_each_named(token, [&](std::int64_t, std::size_t, double q) { probabilities += std::fabs(q); });
    const double shares = problem_.hard_weight() * weights + (1 - problem_.hard_weight()) * probabilities;
    double size = std::fabs(upstream / loss_divisor_) * shares +
                  std::fabs(upstream / z_loss_divisor_ * 2 * spec.z_loss * static_cast<double>(lse_[i]));
    if (!problem_.grad_lse.empty()) size += std::fabs(problem_.grad_lse[i]);
    if (!problem_.grad_logprobs.empty()) size += std::fabs(problem_.grad_logprobs[i]);
    return size;
}

template <class Real>
void BasicReference<Real>::load_weight(Range rows, Range columns, Real* out) const {
    const Spec& spec = problem_.spec;
    if (is_quantized(spec)) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row) {
            for (std::int64_t column = columns.begin; column < columns.end; ++column) {
                const float number = problem_.dequantized(row, column);
                *out++ = Real{is_fp8(spec) ? number : stored_value(number, spec.dtype)};
            }
        }
        return;
    }
    const std::size_t element = element_bytes(weight_dtype(spec));
    const bool by_rows = spec.layout == WeightLayout::vocab_major;
    const std::int64_t stride = by_rows ? spec.hidden_size : spec.padded_vocab_size;
    const auto at = [&](std::int64_t row, std::int64_t column) {
        return problem_.weight + static_cast<std::size_t>(by_rows ? row * stride + column : column * stride + row) * element;
    };
    const auto read = [&](const std::byte* from, Real* to, std::size_t count) {
        to_real(from, weight_dtype(spec), to, count);
        if (rounds_weight(spec)) {
            std::transform(to, to + count, to, [&](Real value) { return Real{stored_value(static_cast<float>(value), spec.dtype)}; });
        }
    };
    const auto width = static_cast<std::size_t>(columns.end - columns.begin);
    if (by_rows) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row, out += width) read(at(row, columns.begin), out, width);
        return;
    }
    Real column[kWeightBlock];
    const auto height = static_cast<std::size_t>(rows.end - rows.begin);
    for (std::size_t k = 0; k < width; ++k) {
        read(at(rows.begin, columns.begin + static_cast<std::int64_t>(k)), column, height);
        for (std::size_t r = 0; r < height; ++r) out[r * width + k] = column[r];
    }
}

/// Every core works on the same few tokens: a large layer has no more of them, and each block of the weight is converted once for all of
/// them.
template <class Real>
void BasicReference<Real>::compute_tokens(std::size_t begin, std::size_t end) {
    const auto v = static_cast<std::size_t>(problem_.spec.vocab_size);
    std::vector<Logit> logits((end - begin) * v);
    std::vector<double> lengths(v);  // lengths of the weight's rows
    compute_logits(begin, end, logits, lengths);
    std::vector<Real> gradients(logits.size());
    const auto at_once = static_cast<std::int64_t>(kLeastLogits / v + 1);
    parallel_blocks(static_cast<std::int64_t>(end - begin), at_once, [&](std::int64_t first, std::int64_t last) {
        for (auto r = static_cast<std::size_t>(first); r < static_cast<std::size_t>(last); ++r) {
            if (ignored(tokens_[begin + r])) continue;
            const std::span<const Logit> row{logits.data() + r * v, v};
            reduce_token(begin + r, row);
            compute_gradients(begin + r, row, lengths, {gradients.data() + r * v, v});
        }
    });
    add_grad_hidden(begin, end, gradients);
}

template <class Real>
void BasicReference<Real>::compute_logits(std::size_t begin, std::size_t end, std::span<Logit> logits, std::span<double> lengths) const {
    const std::int64_t v = problem_.spec.vocab_size;
    const std::int64_t d = problem_.spec.hidden_size;
    constexpr std::int64_t kShares = 8;  // shares of a thread: some threads are slower than others
    const std::int64_t share = (v / (kShares * hardware_threads()) / kWeightBlock + 1) * kWeightBlock;
    parallel_blocks(v, share, [&](std::int64_t first, std::int64_t last) {
        std::vector<Real> weight(static_cast<std::size_t>(kWeightBlock * d));
        for (std::int64_t j0 = first; j0 < last; j0 += kWeightBlock) {
            if (problem_.between_blocks) problem_.between_blocks();
            const std::int64_t j1 = std::min(last, j0 + kWeightBlock);
            load_logit_weight({j0, j1}, weight.data());
            for (std::int64_t j = j0; j < j1; ++j) {
                const Real* row = weight.data() + (j - j0) * d;
                lengths[static_cast<std::size_t>(j)] = std::sqrt(static_cast<double>(dot<Real>(row, row, d)));
                for (std::size_t r = begin; r < end; ++r) {
                    logits[(r - begin) * static_cast<std::size_t>(v) + static_cast<std::size_t>(j)] = logit(tokens_[r], row, j);
                }
            }
        }
    });
}

template <class Real>
void BasicReference<Real>::reduce_token(std::size_t index, std::span<const Logit> logits) {
    const Spec& spec = problem_.spec;
    const std::int64_t token = tokens_[index];
    const std::int64_t target = problem_.target[static_cast<std::size_t>(token)];
    Real max = logits.front().value;
    for (const Logit& z : logits) max = std::max(max, z.value);
    const Real sum = sum_of<Real>(logits.size(), [&](std::size_t j) { return std::exp(logits[j].value - max); });
    const Real log_sum = std::log(sum);
    const auto log_p = [&](std::size_t j) { return (logits[j].value - max) - log_sum; };
    const Real logprob = log_p(static_cast<std::size_t>(target));
    const Real entropy = sum_of<Real>(logits.size(), [&](std::size_t j) {
        const Real p = std::exp(log_p(j));
        return p > 0 ? -p * log_p(j) : Real(0);
    });
    const Real lse = max + log_sum;
    // Other shards' classes have no logits here.
    const auto elsewhere = static_cast<Real>(spec.class_weight ? 0 : whole_vocab_size(spec) - spec.vocab_size);
    Real smooth = 0;
    if (spec.label_smoothing > 0)
        smooth = elsewhere * lse +
                 sum_of<Real>(logits.size(), [&](std::size_t j) { return -class_weight(static_cast<std::int64_t>(j)) * log_p(j); });
    const auto smoothing = static_cast<Real>(spec.label_smoothing);
    const Real z_loss = static_cast<Real>(spec.z_loss) * lse * lse;
    const auto share = static_cast<Real>(problem_.hard_weight());
    Real cross_entropy = 0;
    if (share > 0) {
        cross_entropy =
            share * (-(1 - smoothing) * class_weight(target) * logprob + smoothing / static_cast<Real>(whole_vocab_size(spec)) * smooth);
    }
    std::vector<double> teacher_logprobs(static_cast<std::size_t>(spec.teacher_top_k));
    problem_.for_each_named(token, [&](std::int64_t id, std::size_t k, float q) {
        const Real named = log_p(static_cast<std::size_t>(id));
        teacher_logprobs[k] = named;
        cross_entropy -= (1 - share) * Real{q} * named;
    });
    const Real squares = sum_of<Real>(logits.size(), [&](std::size_t j) { return std::exp(2 * log_p(j)); });
    std::size_t top = 0;
    while (logits[top].value != max) ++top;
    logprob_[static_cast<std::size_t>(token)] = logprob;
    const Real factor = loss_factor(token);
    results_[index] = {.loss = factor * (cross_entropy + z_loss),
                       .z_loss = factor * z_loss,
                       .lse = lse,
                       .logprob = logprob,
                       .entropy = entropy,
                       .log_sum_sq_probs = std::log(squares),
                       .top1 = static_cast<std::int64_t>(top),
                       .largest_logit = max,
                       .teacher_logprobs = std::move(teacher_logprobs)};
    lse_[static_cast<std::size_t>(token)] = lse;
    entropy_[static_cast<std::size_t>(token)] = entropy;
}

template <class Real>
void BasicReference<Real>::compute_gradients(std::size_t index, std::span<const Logit> logits, std::span<const double> lengths,
                                             std::span<Real> gradients) {
    const std::int64_t token = tokens_[index];
    const double multiplier = slope(token);
    for (std::size_t j = 0; j < logits.size(); ++j) {
        const Logit& z = logits[j];
        gradients[j] = grad_logit(token, static_cast<std::int64_t>(j), z);
        const double part = multiplier * static_cast<double>(std::exp(z.value - lse_[static_cast<std::size_t>(token)]) * z.derivative);
        probabilities2_[index] += part * part;
        hidden_terms_[index] += part * lengths[j];
        gradients2_[index] += static_cast<double>(gradients[j]) * static_cast<double>(gradients[j]);
    }
}

template <class Real>
void BasicReference<Real>::add_grad_hidden(std::size_t begin, std::size_t end, std::span<const Real> gradients) {
    const std::int64_t v = problem_.spec.vocab_size;
    const std::int64_t d = problem_.spec.hidden_size;
    constexpr std::int64_t kFewestColumns = 16;
    // Columns know nothing of each other: how many are taken together changes no sum.
    const std::int64_t together = std::max(kFewestColumns, (d + hardware_threads() - 1) / hardware_threads());
    parallel_blocks(d, together, [&](std::int64_t first, std::int64_t last) {
        const std::int64_t width = last - first;
        std::vector<Real> weight(static_cast<std::size_t>(kWeightBlock * width));
        std::vector<Real> slice(static_cast<std::size_t>(width));
        for (std::int64_t j0 = 0; j0 < v; j0 += kWeightBlock) {
            if (problem_.between_blocks) problem_.between_blocks();
            const std::int64_t j1 = std::min(v, j0 + kWeightBlock);
            load_weight({j0, j1}, {first, last}, weight.data());
            const bool smooths_fp8 = is_fp8(problem_.spec) && problem_.spec.label_smoothing > 0;
            const std::vector<Real> exact = smooths_fp8 ? weight : std::vector<Real>();
            if (is_fp8(problem_.spec)) fp8_.to_gradient_operand(weight);
            for (std::size_t r = begin; r < end; ++r) {
                if (ignored(tokens_[r])) continue;
                const Real* of_token = gradients.data() + (r - begin) * static_cast<std::size_t>(v);
                std::fill(slice.begin(), slice.end(), Real(0));
                if (smooths_fp8) add_smoothing_terms(tokens_[r], {j0, j1}, exact, weight, slice);
                for (std::int64_t j = j0; j < j1; ++j) add_scaled<Real>(slice.data(), of_token[j], weight.data() + (j - j0) * width, width);
                add_scaled<Real>(grad_hidden_.data() + static_cast<std::int64_t>(r) * d + first, Real(1), slice.data(), width);
            }
        }
    });
    const auto rows = grad_hidden_.begin() + static_cast<std::ptrdiff_t>(begin) * d;
    std::transform(rows, rows + static_cast<std::ptrdiff_t>(end - begin) * d, rows,
                   [&](Real value) { return stored(value, problem_.spec.dtype); });
}

template <class Real>
Real BasicReference<Real>::grad_weight_row(std::int64_t row, std::span<Real> out) const {
    const std::int64_t d = problem_.spec.hidden_size;
    std::vector<Real> weight(static_cast<std::size_t>(d));
    load_logit_weight({row, row + 1}, weight.data());
    std::fill(out.begin(), out.end(), Real(0));
    Real bias = 0;
    std::vector<Real> slice(static_cast<std::size_t>(d));
    // slices of a framework's length: tokens that are alike make terms that are alike, and a slice's error grows with its length
    constexpr std::int64_t kSlice = 256;
    for (std::int64_t begin = 0; begin < problem_.num_tokens; begin += kSlice) {
        std::fill(slice.begin(), slice.end(), Real(0));
        for (std::int64_t i = begin; i < std::min(problem_.num_tokens, begin + kSlice); ++i) {
            if (ignored(i)) continue;
            const Logit z = logit(i, weight.data(), row);
            const Real dz = grad_logit(i, row, z);
            bias += dz;
            if (is_fp8(problem_.spec) && problem_.target[static_cast<std::size_t>(i)] != row) {
                add_scaled<Real>(slice.data(), fp8_exponential(i, z), fp8_.gradient_hidden(i), d);
                add_scaled<Real>(slice.data(), -fp8_smoothing(i, row), hidden_.data() + i * d, d);
                bias -= fp8_smoothing(i, row);
            } else {
                add_scaled<Real>(slice.data(), dz, hidden_.data() + i * d, d);
            }
        }
        add_scaled<Real>(out.data(), Real(1), slice.data(), d);
    }
    return bias;
}

template <class Real>
double BasicReference<Real>::operations(const Spec& spec, std::int64_t num_tokens, std::int64_t tokens, std::int64_t rows) {
    const auto d = static_cast<double>(spec.hidden_size);
    return 2 * d * static_cast<double>(tokens * spec.vocab_size + num_tokens * rows);
}

template class BasicReference<double>;
template class BasicReference<float>;

}  // namespace flce

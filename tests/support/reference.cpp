#include <tbb/blocked_range.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "tests/support/dense.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/reference_evaluation.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kTokenBlock = 8;
constexpr std::int64_t kVocabBlock = 32;

// Rounding of `length` numbers of Euclidean norm `norm` to dtype.
void add_rounding(Budget& budget, DType dtype, double norm, std::int64_t length) {
    const double underflow = underflow_error(dtype) * std::sqrt(double(length));
    budget.floor = std::hypot(budget.floor, kExpected.rounding(unit_roundoff(dtype)) * norm + underflow);
    budget.limit += kLargest.rounding(unit_roundoff(dtype)) * norm + underflow;
}

}  // namespace

// Backward of log-softmax and of what follows it, as autograd composes them.
float Evaluation::logit_gradient(std::int64_t i, const ReferenceToken& token, const TokenUpstream& g, std::int64_t j, float z) const {
    const auto eps = static_cast<float>(spec_.label_smoothing);
    const auto omega = static_cast<float>(spec_.z_loss);
    const float log_p = (z - token.top) - token.log_sum;
    const auto times = static_cast<float>(layer_.times(i, j));
    if (times == 0) return 0;
    const float p = times * std::exp(log_p);
    const float hit = j == token.label ? 1.0F : 0.0F;
    const auto share = static_cast<float>(layer_.hard_weight());
    const float hard = g.cross_entropy * share * (1.0F - eps) * class_weight(token.label);
    const float smooth = g.cross_entropy * share * eps / static_cast<float>(spec_.vocab_size);
    float gradient = hard * (p - hit) + smooth * (class_sum_ * p - class_weight(j));
    layer_.for_each_named(i, [&](std::int64_t id, std::int64_t, float q) {
        gradient += g.cross_entropy * (1.0F - share) * q * (p - (id == j ? 1.0F : 0.0F));
    });
    gradient += g.logprob * (hit - p);
    gradient += (g.z_loss * 2.0F * omega * (token.top + token.log_sum) + g.lse) * p;
    if (p != 0) gradient -= g.entropy * p * (log_p + token.entropy);
    return gradient;
}

void Evaluation::round_gradients(float scale, float* values, std::int64_t count) const {
    if (spec_.dtype == DType::fp32) return;
    for (std::int64_t i = 0; i < count; ++i) values[i] = rounded(values[i] * scale, spec_.dtype) / scale;
}

// The power of two that takes the largest possible gradient of a logit just below fp16's largest number, as loss scaling does.
float Evaluation::gradient_scale() const {
    if (spec_.dtype != DType::fp16) return 1;
    double largest = 0;
    for (const ReferenceToken& token : all_tokens_) {
        if (!token.valid) continue;
        const double entropy_part = token.sizes.slope_z * (1 + token.sizes.entropy + std::log(double(spec_.vocab_size)));
        largest = std::max(largest, token.sizes.slope + entropy_part);
    }
    if (!spec_.offset_gradient) largest *= std::fabs(spec_.logit_scale);
    double coldest = 1;
    for (std::int64_t i = 0; i < layer_.num_tokens; ++i) {
        if (layer_.valid(i)) coldest = std::min(coldest, layer_.temperature_of(i));
    }
    largest /= coldest;
    return largest > 0 ? static_cast<float>(std::ldexp(1.0, std::clamp(14 - std::ilogb(largest), -100, 100))) : 1.0F;
}

void Evaluation::token_outputs(std::int64_t at, ReferenceToken& token, const float* z) {
    const std::int64_t v = spec_.vocab_size;
    std::vector<float> times(static_cast<std::size_t>(v));
    token.top = std::numeric_limits<float>::lowest();
    bool names_any = false;
    for (std::int64_t j = 0; j < v; ++j) {
        times[j] = static_cast<float>(layer_.times(selection_.tokens[at], j));
        if (times[j] > 0) token.top = std::max(token.top, z[j]);
        names_any = names_any || times[j] > 0;
    }
    Sum exp_sum;
    for (std::int64_t j = 0; j < v; ++j) exp_sum.add(times[j] > 0 ? times[j] * std::exp(z[j] - token.top) : 0.0F);
    if (!names_any) {  // nothing is named
        token.top = 0;
        exp_sum.add(1);
    }
    token.log_sum = std::log(exp_sum.total());
    Sum smooth;
    Sum entropy;
    const auto eps = static_cast<float>(spec_.label_smoothing);
    for (std::int64_t j = 0; j < v; ++j) {
        const float log_p = (z[j] - token.top) - token.log_sum;
        const float p = times[j] > 0 ? times[j] * std::exp(log_p) : 0.0F;
        if (eps > 0) smooth.add(-class_weight(j) * log_p);
        if (p != 0) entropy.add(-p * log_p);
    }
    token.entropy = entropy.total();
    const float lse = token.top + token.log_sum;
    const float logprob = (z[token.label] - token.top) - token.log_sum;
    token.logprob = logprob;
    const float factor = loss_factor(selection_.tokens[at], token);
    const float z_loss = factor * static_cast<float>(spec_.z_loss) * lse * lse;
    Sum squares;
    for (std::int64_t j = 0; j < v; ++j) squares.add(std::exp(2 * ((z[j] - token.top) - token.log_sum)));
    Result& r = out_.result;
    r.log_sum_sq_probs[at] = std::log(squares.total());
    const auto share = static_cast<float>(layer_.hard_weight());
    float cross_entropy =
        share > 0 ? share * (-(1.0F - eps) * class_weight(token.label) * logprob + eps / static_cast<float>(v) * smooth.total()) : 0.0F;
    layer_.for_each_named(selection_.tokens[at], [&](std::int64_t id, std::int64_t k, float q) {
        const float log_p = (z[id] - token.top) - token.log_sum;
        r.teacher_logprobs[at * spec_.teacher_top_k + k] = log_p;
        if (q != 0) cross_entropy -= (1.0F - share) * q * log_p;
    });
    r.loss[at] = factor * cross_entropy + z_loss;
    r.z_loss[at] = z_loss;
    r.lse[at] = lse;
    r.logprobs[at] = logprob;
    r.entropy[at] = token.entropy;
    r.top1[at] = static_cast<double>(std::max_element(z, z + v) - z);
}

// Gradients of the logits in place of the logits; the row's budget.
void Evaluation::token_gradient(std::int64_t at, const ReferenceToken& token, float* z, const float* gain) {
    const TokenUpstream g = upstream(selection_.tokens[at], token);
    const double adding = ErrorModel::accumulating(spec_.vocab_size);
    BudgetSum sum(expected_, largest_), retained(expected_, largest_);
    double common = 0;
    double apart = 0;
    for (std::int64_t j = 0; j < spec_.vocab_size; ++j) {
        const float dz = logit_gradient(selection_.tokens[at], token, g, j, z[j]);
        const LogitSizes e = logit_sizes(selection_.tokens[at], token, j, z[j], gain[j], dz);
        const double w = weight_norm_[j];
        sum.add(gradient_error(spec_, token.sizes, e, expected_) * w,
                (gradient_error(spec_, token.sizes, e, largest_) + adding * e.gradient) * w);
        retained.add(retained_error(spec_, token.sizes, e, expected_) * w, retained_error(spec_, token.sizes, e, largest_) * w);
        common += e.p * e.gain * w;
        apart += apart_error(spec_, token.sizes, e, expected_) * w;
        z[j] = dz * gain[j];
    }
    // An error of lse moves all of a row's probabilities together, so it adds up instead of averaging out.
    sum.add(common * token.sizes.lse_error.floor * (token.sizes.slope + token.sizes.slope_z), 0);
    sum.add(apart, 0);
    out_.budgets.grad_hidden[at] = sum.value();
    if (spec_.label_smoothing > 0) out_.budgets.retained_hidden[at] = retained.value();
}

BlockLogits Evaluation::logits(std::int64_t first, std::int64_t last) const {
    const std::int64_t v = spec_.vocab_size;
    const std::int64_t d = spec_.hidden_size;
    const std::int64_t count = last - first;
    std::vector<float> hidden(static_cast<std::size_t>(count * d));
    for (std::int64_t s = 0; s < count; ++s) std::copy_n(layer_.hidden + selection_.tokens[first + s] * d, d, &hidden[s * d]);
    BlockLogits out{std::vector<float>(static_cast<std::size_t>(count * v)), std::vector<float>(static_cast<std::size_t>(count * v))};
    multiply_transposed(summation_, hidden.data(), layer_.weight, out.z.data(), count, v, d);
    for (std::int64_t at = 0; at < count * v; ++at) out.gain[at] = transform(out.z[at], selection_.tokens[first + at / v], at % v);
    return out;
}

void Evaluation::forward_block(std::int64_t first, std::int64_t last) {
    const BlockLogits block = logits(first, last);
    for (std::int64_t at = first; at < last; ++at) {
        const std::int64_t i = selection_.tokens[at];
        const std::int64_t row = (at - first) * spec_.vocab_size;
        ReferenceToken& token = tokens_[at];
        token.valid = layer_.valid(i);
        token.label = layer_.target[i];
        if (!token.valid) continue;
        token_outputs(at, token, &block.z[row]);
        set_sizes(i, token);
        token_budgets(at, token, &block.z[row], &block.gain[row]);
    }
}

void Evaluation::grad_hidden_block(std::int64_t first, std::int64_t last) {
    const std::int64_t v = spec_.vocab_size;
    const std::int64_t d = spec_.hidden_size;
    BlockLogits block = logits(first, last);
    for (std::int64_t at = first; at < last; ++at) {
        float* z = &block.z[(at - first) * v];
        if (!tokens_[at].valid) {
            std::fill_n(z, v, 0.0F);
            continue;
        }
        token_gradient(at, tokens_[at], z, &block.gain[(at - first) * v]);
        round_gradients(scale_, z, v);
    }
    multiply_add(summation_, block.z.data(), layer_.weight, &grad_hidden_[first * d], last - first, d, v);
    for (std::int64_t at = first; at < last; ++at) {
        double square = 0;
        for (std::int64_t k = 0; k < d; ++k) {
            const float value = grad_hidden_[at * d + k];
            square += double(value) * double(value);
            out_.result.grad_hidden[at * d + k] = rounded(value, spec_.dtype);
        }
        add_rounding(out_.budgets.grad_hidden[at], spec_.dtype, std::sqrt(square), d);
    }
}

void Evaluation::vocab_block(std::int64_t first, std::int64_t last) {
    const std::int64_t d = spec_.hidden_size;
    const std::int64_t n = layer_.num_tokens;
    const std::int64_t count = last - first;
    std::vector<float> weight(static_cast<std::size_t>(count * d));
    for (std::int64_t s = 0; s < count; ++s) std::copy_n(layer_.weight + selection_.vocab[first + s] * d, d, &weight[s * d]);
    std::vector<float> z(static_cast<std::size_t>(n * count));
    std::vector<float> dz(static_cast<std::size_t>(count * n));
    multiply_transposed(summation_, layer_.hidden, weight.data(), z.data(), n, count, d);
    const double adding = ErrorModel::accumulating(n);
    for (std::int64_t s = 0; s < count; ++s) {
        const std::int64_t j = selection_.vocab[first + s];
        BudgetSum of_weight(expected_, largest_), of_bias(expected_, largest_);
        BudgetSum retained_weight(expected_, largest_), retained_bias(expected_, largest_);
        double shared = 0;  // common factor of a teacher's and the target's shares
        double apart = 0;
        double apart_bias = 0;
        for (std::int64_t i = 0; i < n; ++i) {
            const ReferenceToken& token = all_tokens_[i];
            if (!token.valid) continue;
            float x = z[i * count + s];
            const float gain = transform(x, i, j);
            const float gradient = logit_gradient(i, token, upstream(i, token), j, x);
            dz[s * n + i] = gradient * gain;
            const LogitSizes e = logit_sizes(i, token, j, x, gain, gradient);
            const double expected = gradient_error(spec_, token.sizes, e, expected_);
            const double largest = gradient_error(spec_, token.sizes, e, largest_) + adding * e.gradient;
            const double size = token.sizes.hidden_norm;
            const double of_named = apart_error(spec_, token.sizes, e, expected_);
            apart += of_named * size;
            apart_bias += of_named;
            of_weight.add(expected * size, largest * size);
            of_bias.add(expected, largest);
            // In a product with hidden states its factor is rounded, too.
            const double kept = retained_error(spec_, token.sizes, e, expected_);
            const double kept_largest = retained_error(spec_, token.sizes, e, largest_);
            retained_weight.add(std::numbers::sqrt2 * kept * size, 2 * kept_largest * size);
            retained_bias.add(kept, kept_largest);
            const double taken = (e.is_label ? token.sizes.hit : 0) + token.sizes.spread + e.named;
            if (token.sizes.teacher > 0) shared += (e.p * token.sizes.slope + taken) * e.gain;
        }
        // The shares are rounded once, alike for all tokens: in a sum over them that does not average out.
        of_bias.add(2 * expected_.rounding(kU32) * shared, 0);
        of_bias.add(apart_bias, 0);
        of_weight.add(apart, 0);
        round_gradients(scale_, dz.data() + s * n, n);
        out_.budgets.grad_weight[first + s] = of_weight.value();
        if (spec_.label_smoothing > 0) out_.budgets.retained_weight[first + s] = retained_weight.value();
        if (!spec_.bias) continue;
        Sum bias;
        for (std::int64_t i = 0; i < n; ++i) bias.add(dz[s * n + i]);
        grad_bias_[first + s] = bias.total();
        out_.budgets.grad_bias[first + s] = of_bias.value();
        if (spec_.label_smoothing > 0) out_.budgets.retained_bias[first + s] = retained_bias.value();
    }
    multiply_add(summation_, dz.data(), layer_.hidden, &grad_weight_[first * d], count, d, n);
}

void Evaluation::reduce() {
    Sum cross_entropy;
    Sum z_loss;
    for (std::size_t s = 0; s < selection_.tokens.size(); ++s) {
        if (!layer_.valid(selection_.tokens[s])) continue;
        cross_entropy.add(float(out_.result.loss[s]) - float(out_.result.z_loss[s]));
        z_loss.add(float(out_.result.z_loss[s]));
    }
    if (layer_.num_tokens == 0 || divide_.z_loss == 0) return;
    out_.result.reduced_z_loss = z_loss.total() / float(divide_.z_loss);
    out_.result.reduced_loss = cross_entropy.total() / float(divide_.cross_entropy) + float(out_.result.reduced_z_loss);
}

// Adds what the buffers held and rounds as stored; budgets grow by that rounding.
void Evaluation::store_weight_rows() {
    const std::int64_t d = spec_.hidden_size;
    const DType dtype = spec_.grad_weight_dtype;
    const auto store = [&](std::vector<float>& values, const std::vector<float>& old, std::int64_t width, std::vector<Budget>& budgets,
                           std::vector<double>& out) {
        for (std::size_t s = 0; s < selection_.vocab.size(); ++s) {
            double square = 0;
            for (std::int64_t k = 0; k < width; ++k) {
                float& value = values[s * width + k];
                if (!old.empty()) value += old[selection_.vocab[s] * width + k];
                square += double(value) * double(value);
                out[s * width + k] = rounded(value, dtype);
            }
            add_rounding(budgets[s], dtype, std::sqrt(square), width);
        }
    };
    store(grad_weight_, problem_.old_grad_weight, d, out_.budgets.grad_weight, out_.result.grad_weight);
    if (spec_.bias) store(grad_bias_, problem_.old_grad_bias, 1, out_.budgets.grad_bias, out_.result.grad_bias);
}

void Evaluation::prepare() {
    const auto rows = selection_.tokens.size();
    const auto columns = selection_.vocab.size();
    const auto d = static_cast<std::size_t>(spec_.hidden_size);
    Result& r = out_.result;
    Budgets& b = out_.budgets;
    for (auto* values : {&r.loss, &r.z_loss, &r.lse, &r.logprobs, &r.entropy, &r.log_sum_sq_probs}) values->assign(rows, 0.0);
    r.top1.assign(rows, -1.0);
    r.teacher_logprobs.assign(rows * static_cast<std::size_t>(spec_.teacher_top_k), 0.0);
    for (auto* values :
         {&b.loss, &b.z_loss, &b.lse, &b.logprobs, &b.entropy, &b.log_sum_sq_probs, &b.logit, &b.teacher_logprobs, &b.grad_hidden}) {
        values->assign(rows, {});
    }
    for (auto* values : {&b.grad_weight, &b.grad_bias}) values->assign(columns, {});
    if (spec_.label_smoothing > 0) {
        b.retained_hidden.assign(rows, {});
        for (auto* values : {&b.retained_weight, &b.retained_bias}) values->assign(columns, {});
    }
    tokens_.resize(rows);
    grad_hidden_.assign(rows * d, 0);
    grad_weight_.assign(columns * d, 0);
    r.grad_hidden.assign(rows * d, 0);
    r.grad_weight.assign(columns * d, 0);
    if (!spec_.bias) return;
    grad_bias_.assign(columns, 0);
    r.grad_bias.assign(columns, 0);
}

Reference Evaluation::run() {
    const auto rows = std::ssize(selection_.tokens);
    const auto columns = std::ssize(selection_.vocab);
    const auto in_blocks = [](std::int64_t count, std::int64_t grain, const auto& body) {
        tbb::parallel_for(
            tbb::blocked_range<std::int64_t>(0, count, grain), [&](const auto& range) { body(range.begin(), range.end()); },
            tbb::simple_partitioner{});
    };
    prepare();
    in_blocks(rows, kTokenBlock, [&](std::int64_t first, std::int64_t last) { forward_block(first, last); });
    reduce();
    complete_tokens();
    scale_ = gradient_scale();
    in_blocks(rows, kTokenBlock, [&](std::int64_t first, std::int64_t last) { grad_hidden_block(first, last); });
    if (columns == 0) return std::move(out_);
    in_blocks(columns, kVocabBlock, [&](std::int64_t first, std::int64_t last) { vocab_block(first, last); });
    store_weight_rows();
    return std::move(out_);
}

Reference reference(const Problem& problem, const Selection& selection, const KnownTokens& known, Summation summation) {
    return Evaluation(problem, selection, known, summation).run();
}

}  // namespace flce::test

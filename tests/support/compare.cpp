#include "tests/support/compare.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace flce::test {
namespace {

double norm(const std::vector<double>& values) {
    double square = 0;
    for (double v : values) square += v * v;
    return std::sqrt(square);
}

double distance(const double* a, const double* b, std::int64_t count) {
    double square = 0;
    for (std::int64_t i = 0; i < count; ++i) square += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(square);
}

// Takes numbers that are rightly not finite out of the comparison, and budgets of rows that have no others. Returns the fault.
std::string take_out_non_finite(std::vector<double>& got, std::vector<double>& truth, std::vector<double>& yardstick,
                                std::vector<Budget>& budgets, std::int64_t width) {
    std::vector<std::int64_t> finite(budgets.size(), width);
    for (std::size_t i = 0; i < got.size(); ++i) {
        // An infinity is right, too, for a number beyond the range of its type.
        const bool overflows = std::isinf(got[i]) && got[i] == yardstick[i];
        const bool as_it_should = std::isnan(truth[i]) ? std::isnan(got[i]) : got[i] == truth[i];
        if (std::isfinite(got[i]) && std::isfinite(truth[i])) continue;
        if (!overflows && !as_it_should) return fmt::format("[{}, {}] is {}, should be {}", i / width, i % width, got[i], truth[i]);
        got[i] = truth[i] = yardstick[i] = 0;
        if (--finite[i / width] == 0) budgets[i / width] = {};
    }
    for (std::size_t row = 0; row < budgets.size(); ++row) {
        if (!std::isfinite(budgets[row].floor) || !std::isfinite(budgets[row].limit)) return fmt::format("row {} has no budget", row);
    }
    return {};
}

// Expected norm of all rows' errors. `independent` errors make the norm up where rows have equal budgets. Fewer make it up where some rows
// have most of the budget: (Σ b²)² / Σ b⁴ of them.
double expected_norm(const std::vector<Budget>& budgets, std::int64_t independent) {
    double squares = 0;
    double fourths = 0;
    for (const Budget& b : budgets) {
        squares += b.floor * b.floor;
        fourths += b.floor * b.floor * b.floor * b.floor;
    }
    if (fourths > 0) independent = std::min<std::int64_t>(independent, std::llround(squares * squares / fourths));
    return std::sqrt(squares) * chance_factor(independent);
}

// Rows of `width` numbers, each with a budget. `independent` errors make up the whole; they are `roundings` times the yardstick's where
// there are more.
Judgement judge_rows(std::string name, std::vector<double> got, std::vector<double> truth, std::vector<double> yardstick,
                     std::vector<Budget> budgets, std::int64_t width, double cap, std::int64_t independent, double roundings = 1) {
    Judgement j{std::move(name)};
    if (got.size() != truth.size()) {
        j.failure = fmt::format("{} numbers where {} are expected", got.size(), truth.size());
        return j;
    }
    j.failure = take_out_non_finite(got, truth, yardstick, budgets, width);
    if (!j.failure.empty()) return j;
    const double floor = expected_norm(budgets, independent);
    const double size = norm(truth);
    const double unit = size > 0 ? size : 1;
    const auto count = static_cast<std::int64_t>(got.size());
    j.error = distance(got.data(), truth.data(), count) / unit;
    j.reference_error = distance(yardstick.data(), truth.data(), count) / unit;
    j.bound = error_bound(j.reference_error * roundings, floor / unit, cap * roundings);
    if (j.error > j.bound) {
        j.failure = fmt::format("error {:.3e} over bound {:.3e} (reference {:.3e}, floor {:.3e}, norm {:.3e})", j.error, j.bound,
                                j.reference_error, floor / unit, size);
    }
    for (std::size_t row = 0; row < budgets.size(); ++row) {
        const double error = distance(&got[row * width], &truth[row * width], width);
        if (error <= budgets[row].limit) continue;
        j.failure += fmt::format("{}row {} is off by {:.3e}, limit {:.3e} (first element {}, should be {})", j.failure.empty() ? "" : "; ",
                                 row, error, budgets[row].limit, got[row * width], truth[row * width]);
        break;
    }
    return j;
}

// Budgets, with what `more` of them, or none, adds.
std::vector<Budget> with(std::vector<Budget> budgets, const std::vector<Budget>& more) {
    for (std::size_t row = 0; row < more.size(); ++row) {
        budgets[row] = {std::hypot(budgets[row].floor, more[row].floor), budgets[row].limit + more[row].limit};
    }
    return budgets;
}

/// Sums that a reduced loss is made of, each with an error of its own: of the tokens' losses, of the class weights that a mean divides by,
/// and of those that label smoothing has.
double sums_of_loss(const Problem& p) {
    return 1 + (p.spec.class_weight ? 1 : 0) + (p.spec.class_weight && p.spec.label_smoothing > 0 ? 1 : 0);
}

// A reduced loss: its budget is that of its tokens, in part independent and in part alike, and of `sums` over them or as many numbers.
Judgement judge_scalar(std::string name, double got, double truth, double yardstick, const std::vector<Budget>& tokens, double divisor,
                       double sums, double cap) {
    Budget sum;
    double square = 0;
    double alike = 0;
    for (const Budget& b : tokens) {
        square += b.floor * b.floor;
        alike += b.alike;
        sum.limit += b.limit;
    }
    if (divisor == 0) divisor = 1;
    sum.floor =
        std::hypot(std::sqrt(square), alike) / std::fabs(divisor) + kExpected.sum(std::ssize(tokens)) * std::sqrt(sums) * std::fabs(truth);
    sum.limit = sum.limit / std::fabs(divisor) + kLargest.sum(std::ssize(tokens)) * sums * std::fabs(truth);
    return judge_rows(std::move(name), {got}, {truth}, {yardstick}, {sum}, 1, cap, 1);
}

std::vector<double> accumulated(const Problem& p, const Selection& selection, std::vector<double> gradient, const std::vector<float>& old,
                                std::int64_t width) {
    if (old.empty() || p.spec.grad_weight_mode != GradMode::accumulate) return gradient;
    for (std::size_t s = 0; s < selection.vocab.size(); ++s) {
        for (std::int64_t k = 0; k < width; ++k) gradient[s * width + k] += double(old[selection.vocab[s] * width + k]);
    }
    return gradient;
}

/// Each class is the largest logit's, or one whose logit is as large as far as logits are known.
Judgement judge_top1(const Problem& p, const Selection& selection, const std::vector<double>& got, const Result& truth,
                     const Budgets& budgets) {
    Judgement j{"top1"};
    const Layer<float> layer = layer_of(p);
    const std::int64_t d = p.spec.hidden_size;
    for (std::size_t at = 0; at < got.size(); ++at) {
        if (got[at] == truth.top1[at]) continue;
        const std::int64_t token = selection.tokens[at];
        const auto top = static_cast<std::int64_t>(got[at]);
        double gap = std::numeric_limits<double>::infinity();
        if (layer.valid(token) && top >= 0 && top < p.spec.vocab_size) {
            double x = layer.bias != nullptr ? double(layer.bias[top]) : 0;
            for (std::int64_t k = 0; k < d; ++k) x += double(layer.hidden[token * d + k]) * double(layer.weight[top * d + k]);
            gap = truth.largest_logit[at] - logit_of(p.spec, x, layer.offset_of(token, top), layer.temperature_of(token));
        }
        j.error = std::max(j.error, gap);
        if (gap <= 2 * budgets.logit[at].limit) continue;
        j.failure = fmt::format("token {}: class {}, whose logit is {:.3e} below class {}'s", token, got[at], gap, truth.top1[at]);
        break;
    }
    return j;
}

}  // namespace

std::vector<Judgement> judge(const Problem& p, const Selection& selection, const KernelOutputs& got, const Result& truth,
                             const Reference& yardstick, bool exponentials, std::int64_t rounded_parts) {
    const Result& ref = yardstick.result;
    const Budgets& budgets = yardstick.budgets;
    const double output_cap = output_error_cap(p.spec.dtype);
    const double loss_cap = loss_error_cap(p.spec);
    const double gradient_cap = gradient_error_cap(p.spec.dtype);
    const Layer<float> layer = layer_of(p);
    const Divisors divide = divisors(layer);
    std::int64_t valid = 0;
    for (std::int64_t token : selection.tokens) valid += layer.valid(token) ? 1 : 0;
    std::vector<Judgement> out;
    const auto per_token = [&](const char* name, const std::vector<double>& values, const std::vector<double>& expected,
                               const std::vector<double>& reference, const std::vector<Budget>& budget) {
        const double cap = std::string_view(name).ends_with("loss") ? loss_cap : output_cap;
        if (!values.empty()) out.push_back(judge_rows(name, values, expected, reference, budget, 1, cap, valid));
    };
    if (p.options.reduction == Reduction::none) {
        per_token("loss", got.loss, truth.loss, ref.loss, budgets.loss);
        per_token("z_loss", got.z_loss, truth.z_loss, ref.z_loss, budgets.z_loss);
    } else if (std::ssize(selection.tokens) == p.num_tokens()) {
        const double least = std::min(std::fabs(divide.cross_entropy), std::fabs(divide.z_loss));
        if (!got.loss.empty())
            out.push_back(
                judge_scalar("loss", got.loss[0], truth.reduced_loss, ref.reduced_loss, budgets.loss, least, sums_of_loss(p), loss_cap));
        if (!got.z_loss.empty()) {
            out.push_back(judge_scalar("z_loss", got.z_loss[0], truth.reduced_z_loss, ref.reduced_z_loss, budgets.z_loss, divide.z_loss, 1,
                                       loss_cap));
        }
    }
    per_token("lse", got.lse, truth.lse, ref.lse, budgets.lse);
    per_token("logprobs", got.logprobs, truth.logprobs, ref.logprobs, budgets.logprobs);
    per_token("entropy", got.entropy, truth.entropy, ref.entropy, budgets.entropy);
    per_token("log_sum_sq_probs", got.log_sum_sq_probs, truth.log_sum_sq_probs, ref.log_sum_sq_probs, budgets.log_sum_sq_probs);
    if (!got.teacher_logprobs.empty()) {
        out.push_back(judge_rows("teacher_logprobs", got.teacher_logprobs, truth.teacher_logprobs, ref.teacher_logprobs,
                                 budgets.teacher_logprobs, p.spec.teacher_top_k, output_cap, valid));
    }
    if (!got.top1.empty()) out.push_back(judge_top1(p, selection, got.top1, truth, budgets));
    const std::int64_t d = p.spec.hidden_size;
    if (!got.grad_hidden.empty()) {
        std::vector<Budget> of_hidden = exponentials ? with(budgets.grad_hidden, budgets.retained_hidden) : budgets.grad_hidden;
        const double more = std::sqrt(static_cast<double>(rounded_parts));
        for (Budget& b : of_hidden) b = {b.floor * more, b.limit * more};
        out.push_back(judge_rows("grad_hidden", got.grad_hidden, truth.grad_hidden, ref.grad_hidden, of_hidden, d, gradient_cap, valid));
    }
    if (!got.grad_weight.empty()) {
        std::vector<Budget> of_weight = budgets.grad_weight;
        if (exponentials) {
            for (Budget& b : of_weight) b = {b.floor * std::numbers::sqrt2, b.limit * 2};
            of_weight = with(of_weight, budgets.retained_weight);
        }
        out.push_back(judge_rows("grad_weight", got.grad_weight, accumulated(p, selection, truth.grad_weight, p.old_grad_weight, d),
                                 ref.grad_weight, of_weight, d, gradient_cap, valid, exponentials ? std::numbers::sqrt2 : 1));
    }
    if (!got.grad_bias.empty()) {
        const std::vector<Budget> of_bias = exponentials ? with(budgets.grad_bias, budgets.retained_bias) : budgets.grad_bias;
        out.push_back(judge_rows("grad_bias", got.grad_bias, accumulated(p, selection, truth.grad_bias, p.old_grad_bias, 1), ref.grad_bias,
                                 of_bias, 1, gradient_cap, valid));
    }
    return out;
}

std::string failures(const std::vector<Judgement>& judgements) {
    std::string text;
    for (const Judgement& j : judgements) {
        if (!j.failure.empty()) text += fmt::format("\n  {}: {}", j.output, j.failure);
    }
    return text;
}

}  // namespace flce::test

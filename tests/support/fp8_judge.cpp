// Judges outputs of an FP8 head by their truth.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tests/support/fp8.hpp"
#include "tests/support/number_formats.hpp"

namespace flce::test {
namespace {

/// One gradient: each number within its limit, and the whole within the dtype's cap and what ties add. `norm`: of the parts of a sum.
std::string judge_gradient(const char* name, std::vector<double> got, std::vector<double> truth, const std::vector<double>& limit,
                           const std::vector<float>& old, double ties, double cap, double norm = 0) {
    if (got.empty()) return {};
    if (got.size() != truth.size()) return fmt::format("\n  {}: {} numbers where {} are expected", name, got.size(), truth.size());
    double error2 = 0;
    double size2 = 0;
    for (std::size_t at = 0; at < got.size(); ++at) {
        if (!old.empty()) truth[at] += double(old[at]);
        size2 += std::isfinite(truth[at]) ? truth[at] * truth[at] : 0;
        if (!std::isfinite(truth[at])) {
            if (std::isfinite(got[at])) return fmt::format("\n  {}: [{}] is {}, should be {}", name, at, got[at], truth[at]);
            continue;
        }
        const double error = std::fabs(got[at] - truth[at]);
        if (!(error <= limit[at])) {
            return fmt::format("\n  {}: [{}] is {}, should be {}: off by {:.3e}, limit {:.3e}", name, at, got[at], truth[at], error,
                               limit[at]);
        }
        error2 += error * error;
    }
    const double bound = cap * std::max(std::sqrt(size2), norm) + 2 * ties;
    if (std::sqrt(error2) <= bound || std::sqrt(error2) < 1e-30) return {};
    return fmt::format("\n  {}: error {:.3e} over bound {:.3e}, norm {:.3e}", name, std::sqrt(error2), bound, std::sqrt(size2));
}

/// The layer without fp8 whose numbers are those of the operands of the logits: its outputs are those of the FP8 head.
struct Dequantised {
    Problem problem;
    std::vector<double> hidden, weight, bias;

    explicit Dequantised(const Problem& given)
        : problem(given),
          hidden(dequantised_rows(given.spec, given.spec.fp8_hidden_scale, given.hidden)),
          weight(dequantised_weight(given)),
          bias(given.bias.begin(), given.bias.end()) {
        problem.spec.weight_format = WeightFormat::numbers;
        problem.spec.fp8 = Fp8Operands::none;
        problem.spec.fp8_dlogits = Fp8Dlogits::e5m2;
        problem.spec.fp8_hidden_scale = problem.spec.fp8_weight_scale = 0;
        problem.hidden.assign(hidden.begin(), hidden.end());
        problem.weight.assign(weight.begin(), weight.end());
    }

    /// In fp64, of the numbers themselves.
    [[nodiscard]] Result truth(const Selection& selection) const {
        const Layer<float> of = layer_of(problem);
        Layer<double> layer;
        layer.spec = of.spec;
        layer.num_tokens = of.num_tokens;
        layer.hidden = hidden.data();
        layer.weight = weight.data();
        if (of.bias != nullptr) layer.bias = bias.data();
        layer.class_weight = of.class_weight;
        layer.class_offset = of.class_offset;
        layer.target = of.target;
        layer.temperature = of.temperature;
        layer.token_weight = of.token_weight;
        layer.ignore_index = of.ignore_index;
        layer.reduction = of.reduction;
        layer.num_valid = of.num_valid;
        return oracle(layer, selection);
    }
};

/// Budgets of outputs, with the error of logits whose products tensor cores add: each addition is cut off at `roundoff` of the largest
/// addend, towards 0, so that errors of products of one sign are alike. `sizes`: Fp8Truth::logit_sizes.
Reference with_sums(Reference reference, const std::vector<double>& sizes, double roundoff, std::int64_t length) {
    Budgets& b = reference.budgets;
    for (std::size_t i = 0; i < b.lse.size(); ++i) {
        const double limit = roundoff * (8 + 3 * std::sqrt(double(length))) * sizes[i];
        if (!(b.lse[i].limit > 0) || !(b.lse[i].floor > 0)) continue;
        const double more = 1 + 2 * limit / b.lse[i].limit;  // log-probabilities have it twice
        const double more_expected = 1 + limit / 4 / b.lse[i].floor;
        for (auto* budgets : {&b.loss, &b.z_loss, &b.lse, &b.logprobs, &b.entropy, &b.log_sum_sq_probs}) {
            if (i >= budgets->size()) continue;
            Budget& each = (*budgets)[i];
            const double floor = each.floor * more_expected;
            each = {floor, each.limit * more, each.alike + floor - each.floor};
        }
    }
    return reference;
}

}  // namespace

std::string fp8_failures(const Problem& problem, const KernelOutputs& got, const std::vector<float>& lse,
                         const std::vector<float>& logprobs, const Fp8Tolerance& tolerance, const Fp8Shards& shards) {
    const Dequantised plain(problem);
    const Selection all = select_all(problem);
    KernelOutputs outputs = got;
    outputs.grad_hidden.clear();
    outputs.grad_weight.clear();
    outputs.grad_bias.clear();
    const Fp8Truth truth = fp8_truth(problem, lse, logprobs, got.entropy, tolerance, shards);
    Reference yardstick = reference(plain.problem, all);
    if (tolerance.cuts_off() && problem.spec.fp8 == Fp8Operands::e4m3) {  // integers' sums are exact
        yardstick = with_sums(std::move(yardstick), truth.logit_sizes, tolerance.sum_roundoff, problem.spec.hidden_size);
    }
    std::string text = failures(judge(plain.problem, all, outputs, plain.truth(all), yardstick));
    // Sums of products of tensor cores are far from fp32's.
    const double cap =
        gradient_error_cap(problem.spec.dtype) + (problem.spec.dtype == DType::fp32 ? 2e-5 : 0) + (tolerance.cuts_off() ? 2e-2 : 0);
    text += judge_gradient("grad_hidden", got.grad_hidden, truth.grad_hidden, truth.hidden_limit, {}, truth.hidden_ties, cap,
                           truth.hidden_norm);
    text += judge_gradient("grad_weight", got.grad_weight, truth.grad_weight, truth.weight_limit, problem.old_grad_weight,
                           truth.weight_ties, cap);
    text += judge_gradient("grad_bias", got.grad_bias, truth.grad_bias, truth.bias_limit, problem.old_grad_bias, truth.bias_ties, cap);
    return text;
}

}  // namespace flce::test

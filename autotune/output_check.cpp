#include "autotune/output_check.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/parallel_blocks.hpp"

namespace flce {
namespace {

/// Multiply-adds in fp64 that take some seconds on two cores; beyond them the reference is a sample.
constexpr double kOperationBudget = 1e10;

std::vector<std::int64_t> spread(std::int64_t count, std::int64_t wanted) {
    wanted = std::min(count, wanted);
    std::vector<std::int64_t> indices;
    for (std::int64_t i = 0; i < wanted; ++i) {
        // (i + ½)·count/wanted without the product's overflow
        indices.push_back(
            static_cast<std::int64_t>((static_cast<double>(i) + 0.5) * static_cast<double>(count) / static_cast<double>(wanted)));
    }
    return indices;
}

class OutputCheck {
public:
    OutputCheck(const ReferenceProblem& problem, const Coverage& coverage, const WrittenOutputs& written, bool of_exponentials)
        : problem_(problem),
          spec_(problem.spec),
          coverage_(coverage),
          written_(written),
          of_exponentials_(of_exponentials),
          judge_(spec_.dtype, kRandomLogitDeviation * std::sqrt(static_cast<double>(spec_.hidden_size))),
          reference_(problem, coverage.tokens),
          yardstick_(problem, coverage.tokens) {
        if (coverage.complete) return;
        reference_.set_other(written.lse, written.entropy, written.logprobs);
        yardstick_.set_other(written.lse, written.entropy, written.logprobs);
    }

    Verdicts run() && {
        compare_tokens();
        compare_loss();
        compare_grad_hidden();
        compare_grad_weight();
        return std::move(verdicts_);
    }

private:
    void add_output(const std::string& name, const NormPair& norms) {
        const bool loss = name.ends_with("loss");
        verdicts_.emplace_back(name, loss ? judge_.loss(norms, spec_) : judge_.output(norms));
    }
    void add_gradient(const std::string& name, const NormPair& norms) {
        Verdict verdict = judge_.gradient(norms);
        // Tensor cores keep fewer bits of sums of FP8 products, and references of exponentials are not those of lse.
        if (is_fp8(spec_)) {
            verdict.bound = std::max(verdict.bound, problem_.summation == Summation::truncating ? kFp8GpuGradientError : kFp8TieError);
        }
        verdicts_.emplace_back(name, verdict);
    }

    void compare_tokens() {
        const auto compare_one = [&](const std::string& name, const std::vector<float>& values, double ReferenceToken::* field) {
            NormPair norms;
            for (std::size_t r = 0; r < reference_.tokens().size(); ++r) {
                norms.add(values[static_cast<std::size_t>(reference_.tokens()[r])], yardstick_.token(r).*field, reference_.token(r).*field);
            }
            add_output(name, norms);
        };
        if (spec_.outputs.loss) compare_one("token_loss", written_.token_loss, &ReferenceToken::loss);
        if (spec_.outputs.loss && spec_.z_loss != 0) compare_one("token_z_loss", written_.token_z_loss, &ReferenceToken::z_loss);
        compare_one("lse", written_.lse, &ReferenceToken::lse);
        if (spec_.outputs.logprobs) compare_one("logprobs", written_.logprobs, &ReferenceToken::logprob);
        if (spec_.outputs.entropy) compare_one("entropy", written_.entropy, &ReferenceToken::entropy);
        if (spec_.outputs.log_sum_sq_probs) {
            compare_one("log_sum_sq_probs", written_.log_sum_sq_probs, &ReferenceToken::log_sum_sq_probs);
        }
        if (spec_.outputs.top1) compare_top1();
        if (spec_.teacher_top_k > 0) compare_teacher_logprobs();
        if (spec_.outputs.loss && problem_.reduction == Reduction::none) compare_one("loss", written_.loss, &ReferenceToken::loss);
    }

    void compare_teacher_logprobs() {
        const auto top_k = static_cast<std::size_t>(spec_.teacher_top_k);
        NormPair norms;
        for (std::size_t r = 0; r < reference_.tokens().size(); ++r) {
            if (reference_.ignored(reference_.tokens()[r])) continue;
            const float* row = written_.teacher_logprobs.data() + static_cast<std::size_t>(reference_.tokens()[r]) * top_k;
            for (std::size_t k = 0; k < top_k; ++k) {
                norms.add(row[k], yardstick_.token(r).teacher_logprobs[k], reference_.token(r).teacher_logprobs[k]);
            }
        }
        add_output("teacher_logprobs", norms);
    }

    /// How far the logits of the classes are below the largest ones, to how far they are known: at most 1.
    void compare_top1() {
        double worst = 0;
        for (std::size_t r = 0; r < reference_.tokens().size(); ++r) {
            const std::int64_t got = written_.top1[static_cast<std::size_t>(reference_.tokens()[r])];
            if (got == reference_.token(r).top1) continue;
            const bool is_class = reference_.token(r).top1 >= 0 && got >= 0 && got < spec_.vocab_size;
            const auto known = is_class ? reference_.gap_to_largest(r, got) : Reference::LogitGap{INFINITY, 1};
            worst = std::max(worst, known.gap / known.known_to);
        }
        verdicts_.emplace_back("top1", Verdict{worst, 0, 1});
    }

    struct ReducedLoss {
        double loss = 0;
        double z_loss = 0;
    };
    /// The reference's tokens summed up; tokens that a sample lacks are taken from the kernel.
    template <class AnyReference>
    ReducedLoss reduced(const AnyReference& reference) const {
        std::vector<double> loss(written_.token_loss.begin(), written_.token_loss.end());
        std::vector<double> z_loss(written_.token_z_loss.begin(), written_.token_z_loss.end());
        z_loss.resize(loss.size());
        for (std::size_t r = 0; r < reference.tokens().size(); ++r) {
            loss[static_cast<std::size_t>(reference.tokens()[r])] = reference.token(r).loss;
            z_loss[static_cast<std::size_t>(reference.tokens()[r])] = reference.token(r).z_loss;
        }
        double cross_entropy = 0;
        double z = 0;
        for (std::size_t i = 0; i < loss.size(); ++i) {
            cross_entropy += loss[i] - z_loss[i];
            z += z_loss[i];
        }
        z /= reference.z_loss_divisor();
        return {cross_entropy / reference.loss_divisor() + z, z};
    }

    void compare_loss() {
        if (!spec_.outputs.loss || problem_.reduction == Reduction::none) return;  // compared token by token
        const ReducedLoss expected = reduced(reference_);
        const ReducedLoss other = reduced(yardstick_);
        NormPair loss;
        loss.add(written_.loss.front(), static_cast<float>(other.loss), expected.loss);
        add_output("loss", loss);
        if (spec_.z_loss == 0) return;
        NormPair z_loss;
        z_loss.add(written_.z_loss.front(), static_cast<float>(other.z_loss), expected.z_loss);
        add_output("z_loss", z_loss);
    }

    void compare_grad_hidden() {
        const auto d = static_cast<std::size_t>(spec_.hidden_size);
        NormPair norms;
        for (std::size_t r = 0; r < reference_.tokens().size(); ++r) {
            const double* row = written_.grad_hidden.data() + static_cast<std::size_t>(reference_.tokens()[r]) * d;
            for (std::size_t k = 0; k < d; ++k) norms.add(row[k], yardstick_.grad_hidden(r)[k], reference_.grad_hidden(r)[k]);
        }
        add_gradient("grad_hidden", norms);
    }

    struct RowNorms {
        NormPair weight, bias;
    };
    /// Row by row, as the whole fp64 gradient of a large vocabulary need not fit in memory.
    void compare_grad_weight() {
        if (is_quantized(spec_) && !spec_.bias) return;
        std::vector<RowNorms> norms(coverage_.rows.size());  // summed in order, so the error repeats bit for bit
        parallel_blocks(static_cast<std::int64_t>(norms.size()), 16, [&](std::int64_t begin, std::int64_t end) {
            if (problem_.between_blocks) problem_.between_blocks();
            std::vector<double> expected(static_cast<std::size_t>(spec_.hidden_size));
            std::vector<float> other(expected.size());
            for (std::int64_t r = begin; r < end; ++r) {
                const auto which = static_cast<std::size_t>(r);
                compare_row(coverage_.rows[which], expected, other, norms[which]);
            }
        });
        RowNorms total;
        for (const RowNorms& part : norms) {
            total.weight.add(part.weight);
            total.bias.add(part.bias);
        }
        if (is_quantized(spec_)) return add_gradient("grad_bias", total.bias);
        if (of_exponentials_ && !is_fp8(spec_)) {
            verdicts_.emplace_back("grad_weight", judge_.retained_grad_weight(total.weight, problem_.num_tokens));
        } else {
            add_gradient("grad_weight", total.weight);
        }
        if (spec_.bias) add_gradient("grad_bias", total.bias);
        if (spec_.padded_vocab_size > spec_.vocab_size) verdicts_.emplace_back("grad_weight_padding", Verdict{padding_error(), 0, 0});
    }

    void compare_row(std::int64_t row, std::vector<double>& expected, std::vector<float>& other, RowNorms& norms) const {
        const auto stored = [&](double value) { return stored_value(static_cast<float>(value), spec_.grad_weight_dtype); };
        const double expected_bias = reference_.grad_weight_row(row, expected);
        const double other_bias = yardstick_.grad_weight_row(row, other);
        for (std::int64_t k = 0; k < spec_.hidden_size && !is_quantized(spec_); ++k) {
            const std::size_t at = weight_index(row, k);
            const double initial = initial_weight(at);
            const auto i = static_cast<std::size_t>(k);
            norms.weight.add(written_.grad_weight(at), stored(initial + other[i]), initial + expected[i]);
        }
        if (!spec_.bias) return;
        const auto at = static_cast<std::size_t>(row);
        const double initial = written_.initial_bias.empty() ? 0.0 : written_.initial_bias[at];
        norms.bias.add(written_.grad_bias[at], stored(initial + other_bias), initial + expected_bias);
    }

    [[nodiscard]] std::size_t weight_index(std::int64_t row, std::int64_t k) const {
        return static_cast<std::size_t>(spec_.layout == WeightLayout::vocab_major ? row * spec_.hidden_size + k
                                                                                  : k * spec_.padded_vocab_size + row);
    }

    [[nodiscard]] double initial_weight(std::size_t at) const {
        return written_.initial_weight.empty() ? 0.0 : written_.initial_weight[at];
    }

    /// Rows past the vocabulary: 0 when written, untouched when accumulated into.
    [[nodiscard]] double padding_error() const {
        double worst = 0;
        for (std::int64_t row = spec_.vocab_size; row < spec_.padded_vocab_size; ++row) {
            for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
                const std::size_t at = weight_index(row, k);
                const double difference = std::abs(written_.grad_weight(at) - initial_weight(at));
                if (!(difference <= worst)) worst = difference;
            }
        }
        return worst;
    }

    const ReferenceProblem& problem_;
    const Spec& spec_;
    const Coverage& coverage_;
    const WrittenOutputs& written_;
    bool of_exponentials_;
    Judge judge_;
    Reference reference_;
    Yardstick yardstick_;
    Verdicts verdicts_;
};

}  // namespace

Coverage plan_coverage(const Spec& spec, const RandomLayer& layer) {
    const std::int64_t n = layer.num_tokens;
    Coverage coverage;
    coverage.complete = Reference::operations(spec, n, n, spec.vocab_size) <= kOperationBudget;
    if (coverage.complete) {
        coverage.tokens = spread(n, n);
        coverage.rows = spread(spec.vocab_size, spec.vocab_size);
        return coverage;
    }
    const double token_cost = Reference::operations(spec, n, 1, 0);
    const double row_cost = Reference::operations(spec, n, 0, 1);
    const auto affordable = [](double cost) { return std::max<std::int64_t>(4, static_cast<std::int64_t>(kOperationBudget / 2 / cost)); };
    coverage.tokens = spread(n, affordable(token_cost));
    const std::int64_t rows = std::min(spec.vocab_size, affordable(row_cost));
    std::set<std::int64_t> chosen{0, spec.vocab_size - 1};
    for (const std::int64_t target : layer.target) {
        if (target >= 0 && static_cast<std::int64_t>(chosen.size()) < rows / 2) chosen.insert(target);
    }
    for (const std::int64_t row : spread(spec.vocab_size, std::max<std::int64_t>(1, rows - static_cast<std::int64_t>(chosen.size())))) {
        chosen.insert(row);
    }
    coverage.rows.assign(chosen.begin(), chosen.end());
    return coverage;
}

Verdicts check_outputs(const ReferenceProblem& problem, const Coverage& coverage, const WrittenOutputs& written, bool of_exponentials) {
    return OutputCheck(problem, coverage, written, of_exponentials).run();
}

}  // namespace flce

// `flce check`: for every output, dtype and option a result that is off by three times its bound is refused, one off by half of it passes.
#include "autotune/output_check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "runtime/layer/number_formats.hpp"
#include "tests/autotune/documented_bounds.hpp"

namespace flce {
namespace {

using namespace test;

/// A tiny layer, and its outputs as fp64 or a framework gives them.
struct CheckedLayer {
    CheckedLayer(const std::string& options, DType dtype, Reduction reduction)
        : spec(parse_spec("D=16,V=24,dtype=" + std::string(to_string(dtype)) + options).normalized()),
          layer(make_random_layer(spec, 12, {.seed = 3, .ignored = 0.3, .upstream = true, .reduction = reduction})),
          problem(reference_problem(spec, layer)),
          coverage(plan_coverage(spec, layer)) {
        problem.reduction = reduction;
    }

    template <class AnyReference>
    [[nodiscard]] WrittenOutputs written() const {
        const AnyReference reference(problem, coverage.tokens);
        WrittenOutputs w;
        double loss = 0;
        double z_loss = 0;
        for (std::size_t i = 0; i < coverage.tokens.size(); ++i) {
            const ReferenceToken& t = reference.token(i);
            const auto add = [](std::vector<float>& to, double value) { to.push_back(static_cast<float>(value)); };
            add(w.token_loss, t.loss);
            add(w.token_z_loss, t.z_loss);
            add(w.lse, t.lse);
            add(w.logprobs, t.logprob);
            add(w.entropy, t.entropy);
            add(w.log_sum_sq_probs, t.log_sum_sq_probs);
            w.top1.push_back(t.top1);
            for (int k = 0; k < spec.teacher_top_k; ++k) add(w.teacher_logprobs, t.teacher_logprobs.empty() ? 0 : t.teacher_logprobs[k]);
            w.grad_hidden.insert(w.grad_hidden.end(), reference.grad_hidden(i).begin(), reference.grad_hidden(i).end());
            loss += (t.loss - t.z_loss) / reference.loss_divisor() + t.z_loss / reference.z_loss_divisor();
            z_loss += t.z_loss / reference.z_loss_divisor();
        }
        const bool reduced = problem.reduction != Reduction::none;
        w.loss = reduced ? std::vector{static_cast<float>(loss)} : w.token_loss;
        w.z_loss = reduced ? std::vector{static_cast<float>(z_loss)} : w.token_z_loss;
        std::vector<double> weight(static_cast<std::size_t>(spec.padded_vocab_size * spec.hidden_size));
        if (spec.grad_weight_mode == GradMode::accumulate) {
            for (std::size_t i = 0; i < weight.size(); ++i) w.initial_weight.push_back(static_cast<double>(1 + i % 7) / 128);
            if (spec.bias) w.initial_bias.assign(static_cast<std::size_t>(spec.vocab_size), 0.0625);
            weight = w.initial_weight;
        }
        auto row = std::vector(static_cast<std::size_t>(spec.hidden_size), reference.grad_hidden(0)[0]);
        for (std::int64_t j = 0; j < spec.vocab_size; ++j) {
            const double bias = reference.grad_weight_row(j, row);
            w.grad_bias.push_back(bias + (w.initial_bias.empty() ? 0 : w.initial_bias.front()));
            for (std::int64_t k = 0; k < spec.hidden_size; ++k) {
                weight[static_cast<std::size_t>(at(j, k))] += row[static_cast<std::size_t>(k)];
            }
        }
        if constexpr (std::is_same_v<AnyReference, Yardstick>) {
            for (double& value : weight) value = stored_value(static_cast<float>(value), spec.grad_weight_dtype);
            for (double& value : w.grad_bias) value = stored_value(static_cast<float>(value), spec.grad_weight_dtype);
        }
        w.grad_weight = [weight](std::size_t i) { return weight[i]; };
        return w;
    }

    [[nodiscard]] std::int64_t at(std::int64_t row, std::int64_t column) const {
        return spec.layout == WeightLayout::vocab_major ? row * spec.hidden_size + column : column * spec.padded_vocab_size + row;
    }
    [[nodiscard]] std::map<std::string, Verdict> check(const WrittenOutputs& w, bool of_exponentials = false) const {
        const Verdicts verdicts = check_outputs(problem, coverage, w, of_exponentials);
        return {verdicts.begin(), verdicts.end()};
    }

    Spec spec;
    RandomLayer layer;
    ReferenceProblem problem;
    Coverage coverage;
};

/// The outputs with one of them off by `relative`.
WrittenOutputs off(WrittenOutputs written, const std::string& output, double relative) {
    const auto scale = [&](auto& values) {
        for (auto& value : values) value = static_cast<std::decay_t<decltype(value)>>(value * (1 + relative));
    };
    if (output == "token_loss") scale(written.token_loss);
    if (output == "token_z_loss") scale(written.token_z_loss);
    if (output == "loss") scale(written.loss);
    if (output == "z_loss") scale(written.z_loss);
    if (output == "lse") scale(written.lse);
    if (output == "logprobs") scale(written.logprobs);
    if (output == "entropy") scale(written.entropy);
    if (output == "log_sum_sq_probs") scale(written.log_sum_sq_probs);
    if (output == "teacher_logprobs") scale(written.teacher_logprobs);
    if (output == "grad_hidden") scale(written.grad_hidden);
    if (output == "grad_bias") scale(written.grad_bias);
    if (output == "grad_weight") {
        written.grad_weight = [right = written.grad_weight, relative](std::size_t i) { return right(i) * (1 + relative); };
    }
    return written;
}

double root_mean_square(const std::vector<float>& values) {
    double sum = 0;
    for (const float value : values) sum += static_cast<double>(value) * value;
    return std::sqrt(sum / static_cast<double>(std::max<std::size_t>(values.size(), 1)));
}

/// Bound by docs/numerics.md of an output that a framework computes as wrong as `yardstick`.
double documented_bound(const CheckedLayer& layer, const std::string& output, const WrittenOutputs& right, double yardstick) {
    const Spec& spec = layer.spec;
    const double product_norm = 2 * std::sqrt(static_cast<double>(spec.hidden_size));
    if (output.starts_with("grad_")) return bound_of(yardstick, gradient_floor(spec.dtype, product_norm), gradient_cap(spec.dtype));
    const std::map<std::string, const std::vector<float>*> values{{"token_loss", &right.token_loss},
                                                                  {"token_z_loss", &right.token_z_loss},
                                                                  {"loss", &right.loss},
                                                                  {"z_loss", &right.z_loss},
                                                                  {"lse", &right.lse},
                                                                  {"logprobs", &right.logprobs},
                                                                  {"entropy", &right.entropy},
                                                                  {"log_sum_sq_probs", &right.log_sum_sq_probs},
                                                                  {"teacher_logprobs", &right.teacher_logprobs}};
    const double floor = output_floor(product_norm, root_mean_square(*values.at(output)));
    return bound_of(yardstick, floor, output_cap(spec.dtype) * (spec.dft && output.ends_with("loss") ? 2 : 1));
}

struct CheckCase {
    const char* options;
    Reduction reduction = Reduction::mean;
};
// Each option by itself and all that go together; every output is in one of them.
const std::vector<CheckCase>& check_cases() {
    static const std::vector<CheckCase> cases{
        {""},
        {"", Reduction::none},
        {"", Reduction::sum},
        {",bias"},
        {",logit_scale=0.05"},
        {",logit_scale=6"},
        {",softcap=5"},
        {",label_smoothing=0.1"},
        {",z_loss=0.01"},
        {",z_loss=0.01,outputs=loss", Reduction::none},
        {",class_weight"},
        {",temperature"},
        {",token_weight", Reduction::weighted_mean},
        {",dft,outputs=loss+logprobs"},
        {",batch_invariant"},
        {",layout=hidden_major,padded_vocab_size=32"},
        {",tied,bias"},
        {",grad_weight_mode=accumulate,grad_weight_dtype=fp32,padded_vocab_size=32"},
        {",grad_weight_dtype=fp32,weight_dtype=fp32"},
        {",teacher_top_k=3,hard_weight=0.5"},
        {",whole_vocab_size=60,grad_hidden_dtype=fp32"},
        {",outputs=lse+logprobs+entropy+top1+log_sum_sq_probs"},
        {",bias,softcap=20,label_smoothing=0.1,z_loss=0.01,class_weight,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_"
         "probs"},
    };
    return cases;
}

class ChecksOutputs : public testing::TestWithParam<DType> {};

TEST_P(ChecksOutputs, OffByThreeTimesTheBound_Refused_ByHalfOfIt_Passes) {
    std::set<std::string> seen;
    for (const CheckCase& each : check_cases()) {
        SCOPED_TRACE(each.options);
        const CheckedLayer layer(each.options, GetParam(), each.reduction);
        ASSERT_TRUE(layer.coverage.complete);
        const WrittenOutputs right = layer.written<Reference>();
        const auto frameworks = layer.check(layer.written<Yardstick>());
        for (const auto& [output, verdict] : layer.check(right)) {
            SCOPED_TRACE(output);
            seen.insert(output);
            EXPECT_TRUE(verdict.passed()) << verdict.error;
            EXPECT_TRUE(frameworks.at(output).passed());
            if (output == "top1" || output == "grad_weight_padding") continue;
            EXPECT_NEAR(verdict.yardstick, frameworks.at(output).error, 1e-3 * verdict.yardstick);
            const double bound = documented_bound(layer, output, right, frameworks.at(output).error);
            for (const double sign : {-1.0, 1.0}) {
                const auto passes = layer.check(off(right, output, sign * kPasses * bound));
                EXPECT_TRUE(passes.at(output).passed()) << passes.at(output).error << " of " << passes.at(output).bound;
                const auto refused = layer.check(off(right, output, sign * kRefused * bound));
                EXPECT_FALSE(refused.at(output).passed()) << refused.at(output).error << " of " << refused.at(output).bound;
                for (const auto& [other, beside] : refused) {
                    EXPECT_TRUE(other == output || other == "grad_weight_padding" || beside.passed()) << other;
                }
            }
            EXPECT_FALSE(layer.check(off(right, output, NAN)).at(output).passed());
        }
    }
    EXPECT_EQ(seen.size(), 14U) << testing::PrintToString(seen);
}

TEST_P(ChecksOutputs, GradWeightOfExponentials_MayHaveOneRoundingMore) {
    const CheckedLayer layer("", GetParam(), Reduction::mean);
    const WrittenOutputs right = layer.written<Reference>();
    const double yardstick = layer.check(layer.written<Yardstick>()).at("grad_weight").error;
    const double floor = gradient_floor(GetParam(), 2 * std::sqrt(16.0), 3) * (1 + 3 / std::sqrt(12.0));
    const double bound = bound_of(std::sqrt(2.0) * yardstick, floor, std::sqrt(2.0) * gradient_cap(GetParam()));
    EXPECT_TRUE(layer.check(off(right, "grad_weight", 0.95 * bound), true).at("grad_weight").passed());
    EXPECT_FALSE(layer.check(off(right, "grad_weight", 1.05 * bound), true).at("grad_weight").passed());
    EXPECT_FALSE(layer.check(off(right, "grad_weight", 0.95 * bound), false).at("grad_weight").passed());
}

// Every row counts: rows of tokens, of the vocabulary, and past the vocabulary, where a gradient has to be unchanged.
TEST_P(ChecksOutputs, OneRowWrong_Refused) {
    for (const char* options :
         {",bias,padded_vocab_size=32", ",bias,padded_vocab_size=32,grad_weight_mode=accumulate,layout=hidden_major"}) {
        SCOPED_TRACE(options);
        const CheckedLayer layer(options, GetParam(), Reduction::mean);
        const WrittenOutputs right = layer.written<Reference>();
        EXPECT_EQ(layer.check(right).at("grad_weight_padding").error, 0);
        for (std::int64_t row = 0; row < layer.spec.padded_vocab_size; ++row) {
            WrittenOutputs wrong = right;
            const auto place = static_cast<std::size_t>(layer.at(row, row % layer.spec.hidden_size));
            const double more = row < layer.spec.vocab_size ? 0.1 : 1e-30;
            wrong.grad_weight = [&, place, more](std::size_t i) { return right.grad_weight(i) + (i == place ? more : 0); };
            const double initial = right.initial_weight.empty() ? 0 : right.initial_weight[place];
            if (more < 1e-20 && initial != 0) {
                wrong.grad_weight = [&, place](std::size_t i) { return right.grad_weight(i) * (i == place ? 1 + 1e-9 : 1); };
            }
            EXPECT_FALSE(layer.check(wrong).at(row < layer.spec.vocab_size ? "grad_weight" : "grad_weight_padding").passed()) << row;
            if (row >= layer.spec.vocab_size) continue;
            wrong = right;
            wrong.grad_bias[static_cast<std::size_t>(row)] += 0.1;
            EXPECT_FALSE(layer.check(wrong).at("grad_bias").passed()) << row;
        }
        for (std::size_t token = 0; token < 12; ++token) {
            WrittenOutputs wrong = right;
            wrong.grad_hidden[token * 16 + token] += 0.1;
            wrong.lse[token] += 0.1F;
            wrong.token_loss[token] += 0.1F;
            for (const char* output : {"grad_hidden", "lse", "token_loss"}) EXPECT_FALSE(layer.check(wrong).at(output).passed()) << token;
        }
    }
}

TEST_P(ChecksOutputs, Top1_AnotherClassPassesWhereItsLogitIsAsLarge) {
    CheckedLayer layer(",bias,outputs=loss+top1", GetParam(), Reduction::mean);
    const WrittenOutputs right = layer.written<Reference>();
    const Reference reference(layer.problem, layer.coverage.tokens);
    const auto counts = [&](std::size_t token) { return !reference.ignored(static_cast<std::int64_t>(token)); };
    std::size_t before = 0;
    while (!counts(before)) ++before;
    std::size_t token = before + 1;
    while (!counts(token)) ++token;
    const std::int64_t top = right.top1[token];
    const std::int64_t other = top == 0 ? 1 : top - 1;
    for (const std::int64_t wrong_class : {other, std::int64_t{-1}, layer.spec.vocab_size, layer.spec.vocab_size + 5}) {
        WrittenOutputs wrong = right;
        wrong.top1[token] = wrong_class;
        EXPECT_FALSE(layer.check(wrong).at("top1").passed()) << wrong_class;
    }
    WrittenOutputs ignored = right;
    const auto left_out = static_cast<std::size_t>(std::ranges::find(layer.layer.target, -100) - layer.layer.target.begin());
    ASSERT_LT(left_out, right.top1.size());
    EXPECT_EQ(right.top1[left_out], -1);
    ignored.top1[left_out] = 0;
    EXPECT_FALSE(layer.check(ignored).at("top1").passed());

    const std::size_t element = element_bytes(layer.spec.dtype);
    const std::size_t row = 16 * element;
    std::byte* weight = layer.layer.weight.data();
    std::memcpy(weight + static_cast<std::size_t>(other) * row, weight + static_cast<std::size_t>(top) * row, row);
    std::byte* bias = layer.layer.bias.data();
    std::memcpy(bias + static_cast<std::size_t>(other) * element, bias + static_cast<std::size_t>(top) * element, element);
    WrittenOutputs either = layer.written<Reference>();
    either.top1[token] = either.top1[token] == top ? other : top;
    EXPECT_TRUE(layer.check(either).at("top1").passed());
    either.top1[before] = either.top1[before] == 0 ? 1 : 0;
    EXPECT_FALSE(layer.check(either).at("top1").passed());
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ChecksOutputs, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const auto& info) { return std::string(to_string(info.param)); });

// A layer that takes minutes in fp64 is compared by a sample; numbers outside the sample are taken from the kernel.
TEST(PlanCoverage, LargeLayer_SampleHasBothEndsAndTheTargets) {
    const Spec spec = parse_spec("D=4096,V=128000,dtype=bf16").normalized();
    RandomLayer layer{.num_tokens = 1000};
    layer.target = {5, 77'777, -100};
    const Coverage coverage = plan_coverage(spec, layer);
    EXPECT_FALSE(coverage.complete);
    EXPECT_TRUE(std::is_sorted(coverage.rows.begin(), coverage.rows.end()));
    for (const std::int64_t row : {0, 5, 77'777, 127'999}) EXPECT_TRUE(std::ranges::binary_search(coverage.rows, row)) << row;
    EXPECT_GT(coverage.rows.size(), 100U);
    EXPECT_LT(coverage.rows.size(), 2000U);
    ASSERT_EQ(coverage.tokens.size(), 4U);
    for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(coverage.tokens[static_cast<std::size_t>(i)] / 250, i);
}

}  // namespace
}  // namespace flce

// Invariants between two calls, whatever the numbers are: nothing here knows how a loss is computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>

#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/random.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kHidden = 48;
constexpr std::int64_t kVocab = 211;

using Parameters = std::tuple<Target, DType, OptionSet>;

KernelOutputs outputs_of(Target target, const Problem& problem) {
    KernelRun run(kernel_on(target, problem.spec), problem);
    run.forward();
    run.backward();
    EXPECT_EQ(run.violations(), "");
    return run.outputs(select_all(problem));
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double square = 0;
    double size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        square += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return size > 0 ? std::sqrt(square / size) : std::sqrt(square);
}

using Member = std::vector<double> KernelOutputs::*;
constexpr std::pair<const char*, Member> kOutputs[] = {
    {"loss", &KernelOutputs::loss},         {"z_loss", &KernelOutputs::z_loss},   {"lse", &KernelOutputs::lse},
    {"logprobs", &KernelOutputs::logprobs}, {"entropy", &KernelOutputs::entropy}, {"log_sum_sq_probs", &KernelOutputs::log_sum_sq_probs}};
constexpr std::pair<const char*, Member> kGradients[] = {
    {"grad_hidden", &KernelOutputs::grad_hidden}, {"grad_weight", &KernelOutputs::grad_weight}, {"grad_bias", &KernelOutputs::grad_bias}};

// Two results that were computed along different ways: each within its bound of the truth.
void expect_close(const KernelOutputs& a, const KernelOutputs& b, DType dtype) {
    for (const auto& [name, member] : kOutputs) EXPECT_LE(distance(a.*member, b.*member), 2 * output_error_cap(dtype)) << name;
    for (const auto& [name, member] : kGradients) EXPECT_LE(distance(a.*member, b.*member), 2 * gradient_error_cap(dtype)) << name;
}

// Every output of both has the same bits: −0 differs from 0.
void expect_same_bits(const KernelOutputs& a, const KernelOutputs& b) {
    const auto bits = [](double x) { return std::bit_cast<std::uint64_t>(x); };
    const auto same = [&](const std::vector<double>& x, const std::vector<double>& y) { return std::ranges::equal(x, y, {}, bits, bits); };
    EXPECT_FALSE(a.loss.empty() || a.grad_hidden.empty() || a.grad_weight.empty());
    for (const auto& [name, member] : kOutputs) EXPECT_TRUE(same(a.*member, b.*member)) << name;
    for (const auto& [name, member] : kGradients) EXPECT_TRUE(same(a.*member, b.*member)) << name;
}

class Invariants : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(target()); }
    static Target target() { return std::get<0>(GetParam()); }
    static DType dtype() { return std::get<1>(GetParam()); }
    static Spec spec() { return make_spec(kHidden, kVocab, dtype(), WeightLayout::vocab_major, std::get<2>(GetParam())); }
};

TEST_P(Invariants, Padding_ChangesNoBitOfTheOutputs) {
    const Problem plain = make_problem(spec(), {.num_tokens = 77});
    Problem padded = plain;
    padded.spec.padded_vocab_size = kVocab + 45;
    expect_same_bits(outputs_of(target(), plain), outputs_of(target(), padded));
}

TEST_P(Invariants, PermutedTokens_PermutedOutputs) {
    ProblemOptions o{.num_tokens = 130, .reduction = Reduction::none};
    const Problem p = make_problem(spec(), o);
    std::vector<std::int64_t> order(130);
    std::iota(order.begin(), order.end(), 0);
    const Stream random{77};
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return random.bits(a) < random.bits(b); });
    Problem q = p;
    const auto permute = [&](auto& to, const auto& from, std::int64_t width) {
        for (std::size_t i = 0; !from.empty() && i < order.size(); ++i) std::copy_n(&from[order[i] * width], width, &to[i * width]);
    };
    permute(q.hidden, p.hidden, kHidden);
    permute(q.target, p.target, 1);
    permute(q.temperature, p.temperature, 1);
    permute(q.token_weight, p.token_weight, 1);
    permute(q.teacher_ids, p.teacher_ids, spec().teacher_top_k);
    permute(q.teacher_probs, p.teacher_probs, spec().teacher_top_k);
    permute(q.grad_loss, p.grad_loss, 1);
    permute(q.grad_lse, p.grad_lse, 1);
    permute(q.grad_logprobs, p.grad_logprobs, 1);
    permute(q.grad_entropy, p.grad_entropy, 1);
    const KernelOutputs a = outputs_of(target(), p);
    const KernelOutputs b = outputs_of(target(), q);
    KernelOutputs expected = b;
    for (const auto& [name, member] : kOutputs) permute(expected.*member, a.*member, 1);
    permute(expected.grad_hidden, a.grad_hidden, kHidden);
    expected.grad_weight = a.grad_weight;
    expected.grad_bias = a.grad_bias;
    expect_close(b, expected, dtype());
}

TEST_P(Invariants, IgnoredTokensHidden_ChangesNoBit) {
    const Problem p = make_problem(spec(), {.num_tokens = 130});
    Problem q = p;
    const Layer<float> layer = layer_of(p);
    for (std::int64_t i = 0; i < 130; ++i) {
        if (layer.valid(i)) continue;
        for (std::int64_t k = 0; k < kHidden; ++k) q.hidden[i * kHidden + k] = rounded(1000.0F * (k % 2 == 0 ? 1 : -1), dtype());
    }
    expect_same_bits(outputs_of(target(), p), outputs_of(target(), q));
}

TEST_P(Invariants, TeachersClassesInAnotherOrder_SameNumbers) {
    const std::int64_t top_k = spec().teacher_top_k;
    if (top_k == 0) GTEST_SKIP() << "there is no teacher";
    const Problem p = make_problem(spec(), {.num_tokens = 130, .reduction = Reduction::none});
    Problem q = p;
    for (std::int64_t i = 0; i < 130; ++i) {
        std::reverse(q.teacher_ids.begin() + i * top_k, q.teacher_ids.begin() + (i + 1) * top_k);
        std::reverse(q.teacher_probs.begin() + i * top_k, q.teacher_probs.begin() + (i + 1) * top_k);
    }
    const KernelOutputs a = outputs_of(target(), p);
    KernelOutputs b = outputs_of(target(), q);
    for (std::int64_t i = 0; i < 130; ++i) {
        std::reverse(b.teacher_logprobs.begin() + i * top_k, b.teacher_logprobs.begin() + (i + 1) * top_k);
    }
    EXPECT_EQ(a.teacher_logprobs, b.teacher_logprobs);
    expect_close(a, b, dtype());
}

TEST_P(Invariants, Accumulate_IsWritePlusOld) {
    Spec writing = spec();
    writing.grad_weight_dtype = DType::fp32;
    writing.bias = true;
    Spec adding = writing;
    adding.grad_weight_mode = GradMode::accumulate;
    const Problem p = make_problem(writing, {.num_tokens = 130});
    const Problem q = make_problem(adding, {.num_tokens = 130});
    ASSERT_EQ(p.hidden, q.hidden);
    const KernelOutputs a = outputs_of(target(), p);
    const KernelOutputs b = outputs_of(target(), q);
    for (std::size_t i = 0; i < a.grad_weight.size(); ++i) {
        const double sum = a.grad_weight[i] + double(q.old_grad_weight[i]);
        ASSERT_NEAR(b.grad_weight[i], sum, 4 * kU32 * (std::fabs(a.grad_weight[i]) + std::fabs(sum)) + 1e-30) << i;
    }
    for (std::size_t i = 0; i < a.grad_bias.size(); ++i) {
        const double sum = a.grad_bias[i] + double(q.old_grad_bias[i]);
        ASSERT_NEAR(b.grad_bias[i], sum, 4 * kU32 * (std::fabs(a.grad_bias[i]) + std::fabs(sum)) + 1e-30) << i;
    }
}

TEST_P(Invariants, SumIsMeanTimesCount) {
    if (spec().class_weight) GTEST_SKIP() << "cross entropy and z-loss are divided by different numbers";
    ProblemOptions o{.num_tokens = 130, .reduction = Reduction::sum, .upstream = false};
    const Problem sum = make_problem(spec(), o);
    o.reduction = Reduction::mean;
    const Problem mean = make_problem(spec(), o);
    const Layer<float> layer = layer_of(sum);
    double count = 0;
    for (std::int64_t i = 0; i < 130; ++i) count += layer.valid(i) ? 1 : 0;
    const KernelOutputs a = outputs_of(target(), sum);
    KernelOutputs b = outputs_of(target(), mean);
    for (auto* values : {&b.loss, &b.z_loss, &b.grad_hidden, &b.grad_weight, &b.grad_bias}) {
        for (double& v : *values) v *= count;
    }
    expect_close(a, b, dtype());
}

TEST_P(Invariants, Microbatches_AddUpToTheWhole) {
    Spec whole_spec = spec();
    whole_spec.grad_weight_dtype = DType::fp32;
    whole_spec.grad_weight_mode = GradMode::accumulate;
    ProblemOptions o{.num_tokens = 128, .upstream = false};
    o.num_valid = 90.0;
    Problem whole = make_problem(whole_spec, o);
    std::fill(whole.old_grad_weight.begin(), whole.old_grad_weight.end(), 0.0F);
    std::fill(whole.old_grad_bias.begin(), whole.old_grad_bias.end(), 0.0F);
    const KernelOutputs expected = outputs_of(target(), whole);
    KernelOutputs sum;
    for (const Member reduced : {&KernelOutputs::loss, &KernelOutputs::z_loss}) (sum.*reduced).assign((expected.*reduced).size(), 0.0);
    std::vector<float> gradient = whole.old_grad_weight;
    std::vector<float> bias_gradient = whole.old_grad_bias;
    for (std::int64_t first : {0, 32, 64, 96}) {
        Problem part = whole;
        part.options.num_tokens = 32;
        part.hidden.assign(whole.hidden.begin() + first * kHidden, whole.hidden.begin() + (first + 32) * kHidden);
        part.target.assign(whole.target.begin() + first, whole.target.begin() + first + 32);
        const auto cut = [&](const std::vector<float>& values) {
            return values.empty() ? values : std::vector<float>(values.begin() + first, values.begin() + first + 32);
        };
        part.temperature = cut(whole.temperature);
        part.token_weight = cut(whole.token_weight);
        if (const std::int64_t top_k = part.spec.teacher_top_k; top_k > 0) {
            std::copy_n(whole.teacher_ids.begin() + first * top_k, 32 * top_k, part.teacher_ids.begin());
            std::copy_n(whole.teacher_probs.begin() + first * top_k, 32 * top_k, part.teacher_probs.begin());
        }
        part.old_grad_weight = gradient;
        part.old_grad_bias = bias_gradient;
        const KernelOutputs got = outputs_of(target(), part);
        for (const Member reduced : {&KernelOutputs::loss, &KernelOutputs::z_loss}) {
            for (std::size_t i = 0; i < (sum.*reduced).size(); ++i) (sum.*reduced)[i] += (got.*reduced)[i];
        }
        for (const Member of_token : {&KernelOutputs::lse, &KernelOutputs::logprobs, &KernelOutputs::entropy,
                                      &KernelOutputs::log_sum_sq_probs, &KernelOutputs::grad_hidden}) {
            (sum.*of_token).insert((sum.*of_token).end(), (got.*of_token).begin(), (got.*of_token).end());
        }
        gradient.assign(got.grad_weight.begin(), got.grad_weight.end());
        bias_gradient.assign(got.grad_bias.begin(), got.grad_bias.end());
    }
    sum.grad_weight.assign(gradient.begin(), gradient.end());
    sum.grad_bias.assign(bias_gradient.begin(), bias_gradient.end());
    expect_close(sum, expected, dtype());
}

TEST_P(Invariants, OtherLayout_SameResults) {
    const Problem p = make_problem(spec(), {.num_tokens = 130});
    Problem q = p;
    q.spec.layout = WeightLayout::hidden_major;
    q.spec.tied = false;
    expect_close(outputs_of(target(), p), outputs_of(target(), q), dtype());
}

TEST_P(Invariants, ScaledUpstream_ScaledGradients) {
    Problem p = make_problem(spec(), {.num_tokens = 130, .reduction = Reduction::none});
    const KernelOutputs a = outputs_of(target(), p);
    for (auto* values : {&p.grad_loss, &p.grad_lse, &p.grad_logprobs, &p.grad_entropy}) {
        for (float& v : *values) v *= 4.0F;
    }
    KernelOutputs b = outputs_of(target(), p);
    for (auto* values : {&b.grad_hidden, &b.grad_weight, &b.grad_bias}) {
        for (double& v : *values) v /= 4;
    }
    if (dtype() == DType::fp16) return expect_close(b, a, dtype());  // fp16's smallest numbers have fewer digits
    expect_same_bits(b, a);
}

std::vector<OptionSet> option_sets() {
    std::vector<OptionSet> sets;
    for (const OptionSet& set : loss_options()) {
        const std::string_view name = set.name;
        if (name == "plain" || name == "label_smoothing" || name == "everything" || name == "everything_teacher") sets.push_back(set);
    }
    return sets;
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    return std::string(to_string(std::get<1>(info.param))) + "_" + std::get<2>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Invariants,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(option_sets())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, Invariants,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(option_sets())),
                         name_of);

}  // namespace
}  // namespace flce::test

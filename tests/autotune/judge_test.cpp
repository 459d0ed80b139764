// The judge of `flce check` and of the tuner: errors beyond a bound are refused, those within it pass.
#include "autotune/judge.hpp"

#include <gtest/gtest.h>

#include "tests/autotune/documented_bounds.hpp"

namespace flce {
namespace {

using namespace test;

/// Errors of `count` numbers around `size`.
NormPair norms(double error, double yardstick, double size = 1, std::size_t count = 1000) {
    const double reference2 = size * size * static_cast<double>(count);
    return {
        .kernel = {error * error * reference2, reference2}, .yardstick = {yardstick * yardstick * reference2, reference2}, .count = count};
}

class Judges : public testing::TestWithParam<DType> {
protected:
    static constexpr double kProductNorm = 16;
    DType dtype = GetParam();
    Judge judge{GetParam(), kProductNorm};

    /// `verdict`: of an error. `off`: by how much a result has to be off at most to pass, and at least to be refused.
    template <class VerdictOf>
    static void expect_bound(double bound, const VerdictOf& verdict, double passes = kPasses, double refused = kRefused) {
        EXPECT_TRUE(verdict(bound * passes).passed()) << bound << " is allowed, the judge says " << verdict(0).bound;
        EXPECT_FALSE(verdict(bound * refused).passed()) << bound << " is allowed, the judge says " << verdict(0).bound;
        EXPECT_FALSE(verdict(NAN).passed());
    }
};

TEST_P(Judges, Outputs_TwiceTheFrameworksErrorAndAtMostTheCap) {
    for (const double size : {0.5, 5.0, 40.0}) {
        for (const double yardstick : {0.0, 2e-7, 4e-7, 3e-6, 7e-6, 1e-3}) {
            const double bound = bound_of(yardstick, output_floor(kProductNorm, size), output_cap(dtype));
            expect_bound(bound, [&](double error) { return judge.output(norms(error, yardstick, size)); });
            Spec spec{.dtype = dtype};
            expect_bound(bound, [&](double error) { return judge.loss(norms(error, yardstick, size), spec); });
            spec.dft = true;
            const double with_dft = bound_of(yardstick, output_floor(kProductNorm, size), 2 * output_cap(dtype));
            expect_bound(with_dft, [&](double error) { return judge.loss(norms(error, yardstick, size), spec); });
        }
    }
    // Numbers so small that a logit's rounding is all of them are held to the cap, or to the framework's.
    const double cap = output_cap(dtype);
    expect_bound(cap, [&](double error) { return judge.output(norms(error, 0, 1e-6)); }, 0.99, 1.01);
    expect_bound(8 * cap, [&](double error) { return judge.output(norms(error, 4 * cap, 1e-6)); }, 0.99, 1.01);
    expect_bound(cap, [&](double error) { return judge.loss(norms(error, 0, 1e-6), {.dtype = dtype}); }, 0.99, 1.01);
    expect_bound(2 * cap, [&](double error) { return judge.loss(norms(error, 0, 1e-6), {.dtype = dtype, .dft = true}); }, 0.99, 1.01);
}

TEST_P(Judges, Gradients_TwiceTheFrameworksErrorAndAtMostTheCap) {
    const double cap = gradient_cap(dtype);
    for (const double yardstick : {0.0, 0.2 * cap, 0.4 * cap, 0.9 * cap, 4 * cap}) {
        const double bound = bound_of(yardstick, gradient_floor(dtype, kProductNorm), cap);
        expect_bound(bound, [&](double error) { return judge.gradient(norms(error, yardstick)); });
        if (yardstick > 0.5 * cap) expect_bound(bound, [&](double error) { return judge.gradient(norms(error, yardstick)); }, 0.99, 1.01);
    }
}

// Both factors of the products are rounded, and a few tokens may all be alike to chance.
TEST_P(Judges, GradWeightOfRetainedExponentials_HasOneRoundingMore) {
    const double cap = gradient_cap(dtype) * std::sqrt(2.0);
    for (const std::int64_t num_tokens : {1, 9, 1'000'000}) {
        const double floor = gradient_floor(dtype, kProductNorm, 3) * (1 + 3 / std::sqrt(static_cast<double>(num_tokens)));
        for (const double yardstick : {0.0, 0.3 * gradient_cap(dtype), 4 * cap}) {
            const double bound = bound_of(yardstick * std::sqrt(2.0), floor, cap);
            expect_bound(bound, [&](double error) { return judge.retained_grad_weight(norms(error, yardstick), num_tokens); });
        }
    }
    // Four times the floor of a single token is more than the cap, which holds all the same.
    if (4 * gradient_floor(dtype, kProductNorm, 3) > cap) {
        expect_bound(cap, [&](double error) { return judge.retained_grad_weight(norms(error, 0), 1); }, 0.99, 1.01);
    }
}

/// Sizes of a layer that is not confident: probabilities and gradients of one size.
LogitGradientSizes plain_sizes() {
    return {.probabilities = 1, .gradients = 1, .largest_lse = 5, .hidden_terms = 1, .grad_weight_terms = 1, .num_terms = 1000};
}

TEST_P(Judges, PlainSizes_ChangeNoBoundByMuch) {
    // One row of numbers: ‖reference‖ is 1, as the sizes are.
    const auto one = [](double error, double yardstick) { return norms(error, yardstick, 1, 1); };
    const LogitGradientSizes sizes = plain_sizes();
    const double expected = 4 * logit_error(kProductNorm) + kFp32Unit * 8;
    for (const double yardstick : {0.0, 3e-7, 3e-6}) {
        const double gradient = std::max(bound_of(yardstick, gradient_floor(dtype, kProductNorm), gradient_cap(dtype)), expected);
        expect_bound(gradient, [&](double error) { return judge.gradient(one(error, yardstick), &sizes); });
        expect_bound(gradient, [&](double error) { return judge.grad_hidden(one(error, yardstick), sizes); });
        const double output = std::max(bound_of(yardstick, output_floor(kProductNorm, 1), output_cap(dtype)), expected);
        expect_bound(output, [&](double error) { return judge.output(one(error, yardstick), &sizes); });
    }
    LogitGradientSizes few = sizes;
    few.num_terms = 1;  // terms that are independent, and one of them
    const double weight = std::max(bound_of(0, gradient_floor(dtype, kProductNorm), gradient_cap(dtype)), expected);
    expect_bound(weight, [&](double error) { return judge.grad_weight(one(error, 0), few); });
}

// Gradients that are differences of far larger probabilities are known as far as those are.
TEST_P(Judges, ConfidentTokens_BoundIsWhatTheirProbabilitiesAreKnownTo) {
    const auto one = [](double error, double yardstick) { return norms(error, yardstick, 1, 1); };
    for (const double lse : {0.0, 100.0}) {
        for (const double larger : {1e3, 1e5}) {
            LogitGradientSizes sizes = plain_sizes();
            sizes.largest_lse = lse;
            const double probability = 4 * logit_error(kProductNorm) + kFp32Unit * (lse + 3);
            const double plain = bound_of(0, gradient_floor(dtype, kProductNorm), gradient_cap(dtype));
            const double expected = std::min(probability * larger, 0.5);
            const double bound = std::max(plain, expected);
            sizes.probabilities = larger;
            expect_bound(bound, [&](double error) { return judge.gradient(one(error, 0), &sizes); }, 0.9, 1.1);
            sizes.probabilities = larger * larger;
            sizes.gradients = larger;
            expect_bound(bound, [&](double error) { return judge.gradient(one(error, 0), &sizes); }, 0.9, 1.1);
            sizes.probabilities = sizes.gradients = 1;
            sizes.hidden_terms = larger;
            expect_bound(bound, [&](double error) { return judge.grad_hidden(one(error, 0), sizes); }, 0.9, 1.1);
            // A gradient that is as much larger as its terms has an equal bound.
            sizes.hidden_terms = larger * 8;
            expect_bound(bound, [&](double error) { return judge.grad_hidden(norms(error, 0, 8, 1), sizes); }, 0.9, 1.1);
            sizes = plain_sizes();
            sizes.largest_lse = lse;
            sizes.probabilities = larger;
            sizes.num_terms = 1;
            expect_bound(bound, [&](double error) { return judge.grad_weight(one(error, 0), sizes); }, 0.9, 1.1);
            // A term that is a tenth of its sum is known no better for that.
            sizes.grad_weight_terms = 0.1;
            expect_bound(bound, [&](double error) { return judge.grad_weight(one(error, 0), sizes); }, 0.9, 1.1);
            sizes.grad_weight_terms = 1;
            // 10,000 terms that cancel to a hundredth of what independent ones would come to.
            sizes.probabilities = larger / 100;
            sizes.num_terms = 10'000;
            expect_bound(bound, [&](double error) { return judge.grad_weight(one(error, 0), sizes); }, 0.9, 1.1);
            // Outputs near 0, for the same reason.
            const double output = std::max(bound_of(0, output_floor(kProductNorm, 1 / larger), output_cap(dtype)), expected);
            expect_bound(output, [&](double error) { return judge.output(norms(error, 0, 1 / larger, 1), &sizes); }, 0.9, 1.1);
        }
    }
}

TEST_P(Judges, ExpectedErrorBeyondTheCap_TwiceTheFrameworksErrorHoldsAgain) {
    LogitGradientSizes sizes = plain_sizes();
    sizes.probabilities = sizes.hidden_terms = 1e5;
    sizes.num_terms = 1;
    const double yardstick = 0.2;  // more than the expected error
    expect_bound(2 * yardstick, [&](double error) { return judge.gradient(norms(error, yardstick, 1, 1), &sizes); }, 0.99, 1.01);
    expect_bound(2 * yardstick, [&](double error) { return judge.grad_hidden(norms(error, yardstick, 1, 1), sizes); }, 0.99, 1.01);
    expect_bound(2 * yardstick, [&](double error) { return judge.grad_weight(norms(error, yardstick, 1, 1), sizes); }, 0.99, 1.01);
    // An error is expected that is beyond the cap: the framework's own, which keeps to it, counts twice.
    const double cap = gradient_cap(dtype);
    const double expected = (4 * logit_error(kProductNorm) + kFp32Unit * 8);
    sizes.probabilities = 1.1 * cap / expected;
    sizes.hidden_terms = 0;
    expect_bound(1.8 * cap, [&](double error) { return judge.gradient(norms(error, 0.9 * cap, 1, 1), &sizes); }, 0.99, 1.01);
    sizes.probabilities = 0.9 * cap / expected;
    expect_bound(cap, [&](double error) { return judge.gradient(norms(error, 0.9 * cap, 1, 1), &sizes); }, 0.99, 1.01);
}

TEST_P(Judges, NoBoundLetsEverythingPass) {
    LogitGradientSizes sizes = plain_sizes();
    sizes.probabilities = sizes.hidden_terms = 1e12;
    for (const auto& verdict : {judge.gradient(norms(1, 0.1, 1, 1), &sizes), judge.grad_hidden(norms(1, 0.1, 1, 1), sizes),
                                judge.grad_weight(norms(1, 0.1, 1, 1), sizes), judge.output(norms(1, 0.1, 1e-6, 1), &sizes)}) {
        EXPECT_FALSE(verdict.passed());
        EXPECT_EQ(verdict.bound, 0.5);
    }
}

// Terms that are all alike are rounded alike, as many as are added one after the other.
TEST(JudgesOfAlikeTerms, GradWeight_BoundGrowsWithTheirNumber) {
    const Judge judge(DType::fp32, 0.0);
    for (const std::int64_t count : {64, 384, 10'000}) {
        LogitGradientSizes sizes = plain_sizes();
        sizes.probabilities = 0;
        sizes.num_terms = count;
        sizes.grad_weight_terms = 1 / std::sqrt(static_cast<double>(count));  // `count` terms of 1 / count make up 1
        const double expected = 0.2 * kFp32Unit * static_cast<double>(std::min<std::int64_t>(count, 384));
        const double bound = std::max(expected, gradient_floor(DType::fp32, 0));
        EXPECT_TRUE(judge.grad_weight(norms(0.9 * bound, 0, 1, 1), sizes).passed()) << count;
        EXPECT_FALSE(judge.grad_weight(norms(1.1 * bound, 0, 1, 1), sizes).passed()) << count;
    }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Judges, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace flce

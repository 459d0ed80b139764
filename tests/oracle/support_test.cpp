// The instruments that judge kernels, judged themselves.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <tuple>
#include <vector>

#include "tests/support/compare.hpp"
#include "tests/support/dense.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/random.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/tensor_core.hpp"

namespace flce::test {
namespace {

TEST(NumberFormats, EveryFiniteHalf_ComesBack) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        EXPECT_TRUE(!std::isfinite(from_fp16(half)) || to_fp16(from_fp16(half)) == half) << bits;
        EXPECT_TRUE(!std::isfinite(from_bf16(half)) || to_bf16(from_bf16(half)) == half) << bits;
    }
}

TEST(NumberFormats, TiesGoToEven) {
    EXPECT_EQ(rounded(1.0F + 0x1p-8F, DType::bf16), 1.0F);
    EXPECT_EQ(rounded(1.0F + 3 * 0x1p-8F, DType::bf16), 1.0F + 0x1p-6F);
    EXPECT_EQ(rounded(1.0F + 0x1p-11F, DType::fp16), 1.0F);
    EXPECT_EQ(rounded(1.0F + 3 * 0x1p-11F, DType::fp16), 1.0F + 0x1p-9F);
    EXPECT_EQ(rounded(0x1p-25F, DType::fp16), 0.0F);
    EXPECT_EQ(rounded(0x1.8p-24F, DType::fp16), 0x1p-23F);
    EXPECT_EQ(rounded(65519.0F, DType::fp16), 65504.0F);
    EXPECT_TRUE(std::isinf(rounded(65520.0F, DType::fp16)));
    EXPECT_TRUE(std::isnan(rounded(NAN, DType::bf16)));
    EXPECT_TRUE(std::isnan(rounded(NAN, DType::fp16)));
}

TEST(Dense, Products_MatchTripleLoops) {
    const Stream random{7};
    const std::int64_t m = 5, n = 41, k = 70;
    std::vector<float> a(m * k), b(n * k);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = random.normal(i);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = random.normal(10000 + i);
    std::vector<double> c(m * n, -1), back(m * k, 0.5);
    multiply_transposed(a.data(), b.data(), c.data(), m, n, k, std::int64_t{16});
    multiply_add(c.data(), b.data(), back.data(), m, k, n, std::int64_t{16});
    for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (std::int64_t d = 0; d < k; ++d) sum += double(a[i * k + d]) * double(b[j * k + d]);
            EXPECT_NEAR(c[i * n + j], sum, 1e-12);
        }
        for (std::int64_t d = 0; d < k; ++d) {
            double sum = 0.5;
            for (std::int64_t j = 0; j < n; ++j) sum += c[i * n + j] * double(b[j * k + d]);
            EXPECT_NEAR(back[i * k + d], sum, 1e-11);
        }
    }
}

// 1 and then, a step later, 1.5 units of its last place: rounding goes up to 2 of them, truncation down to 1; half a unit less is lost
// whole.
TEST(FrameworkProducts, TruncateOrRound_AsTheDeviceDoes) {
    constexpr std::int64_t k = 2 * kTensorCoreStep;
    for (const auto& [last, truncated, rounded] : {std::tuple{0x1.8p-23F, 0x1p-23F, 0x1p-22F}, std::tuple{0x1.8p-24F, 0.0F, 0x1p-23F}}) {
        std::vector<float> a(k, 0.0F);
        const std::vector<float> b(k, 1.0F);
        a.front() = 1;
        a.back() = last;
        for (const auto& [summation, expected] : {std::pair{Summation::truncating, truncated}, std::pair{Summation::rounding, rounded}}) {
            float product = 0;
            multiply_transposed(summation, a.data(), b.data(), &product, 1, 1, k);
            EXPECT_EQ(product, 1 + expected);
            float sum = 0;
            multiply_add(summation, a.data(), b.data(), &sum, 1, 1, k);
            EXPECT_EQ(sum, 1 + expected);
        }
    }
}

// Within a step, addends lose what lies 25 bits below the largest.
TEST(FrameworkProducts, OneStep_CutsOffSmallProducts) {
    std::vector<float> a(kTensorCoreStep, 0x1p-25F);
    a.front() = 1;
    std::vector<float> b(kTensorCoreStep, 1.0F);
    const auto product = [&] {
        float c = 0;
        multiply_transposed(Summation::truncating, a.data(), b.data(), &c, 1, 1, kTensorCoreStep);
        return c;
    };
    EXPECT_EQ(product(), 1 + 3 * 0x1p-23F);  // 1 + 15·2⁻²⁵, cut off
    b.back() = -1;
    EXPECT_EQ(product(), 1 + 3 * 0x1p-23F);  // 1 + 13·2⁻²⁵
    std::fill(a.begin() + 1, a.end(), 0x1.8p-26F);
    EXPECT_EQ(product(), 1.0F);
    std::fill(a.begin() + 1, a.end(), -0x1.8p-26F);
    EXPECT_EQ(product(), 1.0F);  // towards 0, not down
}

// The sizes of a step's parts, of all signs and exponents, against the same step in integers.
TEST(FrameworkProducts, RandomSteps_AreAsDefined) {
    const Stream random{7};
    for (std::int64_t trial = 0; trial < 200; ++trial) {
        float a[kTensorCoreStep];
        float b[kTensorCoreStep];
        float before = rounded(random.normal(1000 * trial), DType::fp32);
        int top = std::ilogb(before);
        for (std::int64_t i = 0; i < kTensorCoreStep; ++i) {
            const auto draw = [&](std::int64_t which) {
                const int exponent = static_cast<int>(random.below(1000 * trial + which, 30)) - 15;
                return rounded(std::ldexp(random.normal(1000 * trial + which + 1), exponent), DType::bf16);
            };
            a[i] = draw(10 + 4 * i);
            b[i] = draw(12 + 4 * i);
            top = std::max(top, std::ilogb(a[i]) + std::ilogb(b[i]));
        }
        const auto kept = [&](double value) { return static_cast<std::int64_t>(std::trunc(std::ldexp(value, 25 - top))); };
        std::int64_t sum = kept(before);
        for (std::int64_t i = 0; i < kTensorCoreStep; ++i) sum += kept(double(a[i]) * b[i]);
        float after = before;
        multiply_add(Summation::truncating, a, b, &after, 1, 1, kTensorCoreStep);
        const double exact = std::ldexp(static_cast<double>(sum), top - 25);
        EXPECT_LE(std::fabs(after), std::fabs(exact));
        EXPECT_GT(std::fabs(after), std::fabs(exact) * (1 - 0x1p-23));
    }
}

struct Judged : testing::TestWithParam<DType> {
    static Spec spec() {
        Spec s;
        s.hidden_size = 64;
        s.vocab_size = 127;
        s.dtype = s.grad_weight_dtype = GetParam();
        s.bias = true;
        s.outputs = {true, true, true, true};
        return s;
    }
    Problem problem = make_problem(spec(), {.num_tokens = 100});
    Selection selection = select_all(problem);
    Result truth = oracle(layer_of(problem), selection);
    Reference yardstick = reference(problem, selection);

    static KernelOutputs outputs_of(const Result& r) {
        return {.loss = {r.reduced_loss},
                .z_loss = {r.reduced_z_loss},
                .lse = r.lse,
                .logprobs = r.logprobs,
                .entropy = r.entropy,
                .log_sum_sq_probs = r.log_sum_sq_probs,
                .top1 = r.top1,
                .grad_hidden = r.grad_hidden,
                .grad_weight = r.grad_weight,
                .grad_bias = r.grad_bias};
    }
};

TEST_P(Judged, ReferenceAndOracle_Pass) {
    for (const Result* result : {&yardstick.result, &truth}) {
        const auto judgements = judge(problem, selection, outputs_of(*result), truth, yardstick);
        EXPECT_EQ(judgements.size(), 10U);
        EXPECT_EQ(failures(judgements), "");
    }
}

TEST_P(Judged, ReferenceErrors_AreOfTheDtypesSize) {
    for (const Judgement& j : judge(problem, selection, outputs_of(yardstick.result), truth, yardstick)) {
        const bool gradient = j.output.starts_with("grad_");
        const double unit = gradient ? unit_roundoff(GetParam()) : kU32;
        if (truth.reduced_z_loss == 0 && j.output == "z_loss") continue;
        EXPECT_LT(j.reference_error, 10 * unit) << j.output;
        EXPECT_LT(j.bound, 32 * unit) << j.output;
        EXPECT_TRUE(!gradient || j.bound <= gradient_error_cap(GetParam())) << j.output << " " << j.bound;
    }
}

TEST_P(Judged, OneWrongRow_Fails) {
    for (auto field : {&KernelOutputs::lse, &KernelOutputs::logprobs, &KernelOutputs::entropy, &KernelOutputs::log_sum_sq_probs,
                       &KernelOutputs::grad_hidden, &KernelOutputs::grad_weight, &KernelOutputs::grad_bias}) {
        KernelOutputs got = outputs_of(yardstick.result);
        std::vector<double>& values = got.*field;
        const std::size_t width = values.size() % 64 == 0 && values.size() > 127 ? 64 : 1;
        // The smallest row that is not zero: the one that an error of the whole would hide.
        std::size_t smallest = 0;
        double least = 1e300;
        for (std::size_t row = 0; row < values.size() / width; ++row) {
            double square = 0;
            for (std::size_t k = 0; k < width; ++k) square += values[row * width + k] * values[row * width + k];
            if (square > 0 && square < least) {
                least = square;
                smallest = row;
            }
        }
        for (std::size_t k = 0; k < width; ++k) values[smallest * width + k] *= 1.25;
        EXPECT_NE(failures(judge(problem, selection, got, truth, yardstick)), "") << "row " << smallest;
    }
}

TEST_P(Judged, FiniteWhereNoNumberIsRight_Fails) {
    const KernelOutputs got = outputs_of(yardstick.result);
    for (const double right : {double(NAN), double(INFINITY)}) {
        Result expected = truth;
        expected.grad_weight[5] = right;
        EXPECT_NE(failures(judge(problem, selection, got, expected, yardstick)).find("grad_weight: [0, 5]"), std::string::npos);
    }
}

TEST_P(Judged, NotANumber_Fails) {
    KernelOutputs got = outputs_of(yardstick.result);
    got.grad_weight[5] = NAN;
    EXPECT_NE(failures(judge(problem, selection, got, truth, yardstick)).find("grad_weight: [0, 5]"), std::string::npos);
}

TEST_P(Judged, LossOffByTenTimesTheCap_Fails) {
    KernelOutputs got = outputs_of(yardstick.result);
    got.loss[0] *= 1 + 10 * output_error_cap(GetParam());
    EXPECT_NE(failures(judge(problem, selection, got, truth, yardstick)).find("loss"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Judged, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const auto& info) { return std::string(to_string(info.param)); });

// fp16 holds logits' gradients scaled by what the largest of all tokens allows, those of tokens that are left out among them.
TEST(Reference, TokensLeftOutHaveLargerGradients_BudgetsAreThoseOfAllTokens) {
    Spec spec;
    spec.hidden_size = 16;
    spec.vocab_size = 24;
    spec.dtype = spec.grad_weight_dtype = DType::fp16;
    spec.bias = true;
    Problem p = make_problem(spec, {.num_tokens = 40, .ignored = Ignored::none, .reduction = Reduction::none});
    for (std::size_t i = 1; i + 1 < p.grad_loss.size(); ++i) p.grad_loss[i] = 900;
    const Reference all = reference(p, select_all(p));
    const std::vector<float> lse(all.result.lse.begin(), all.result.lse.end());
    Selection some = select_all(p);
    some.tokens = {0, 39};
    const Reference sampled = reference(p, some, {.lse = lse.data()});
    for (std::size_t j = 0; j < some.vocab.size(); ++j) {
        EXPECT_NEAR(sampled.result.grad_bias[j] / all.result.grad_bias[j], 1, 1e-2) << j;
        EXPECT_NEAR(sampled.budgets.grad_bias[j].floor / all.budgets.grad_bias[j].floor, 1, 0.1) << j;
    }
}

// The floor's formula against the model that agrees with a GPU.
TEST(ErrorModel, TruncatedProducts_AreAsFarOffAsTensorCoresLeaveThem) {
    constexpr std::int64_t kRows = 32;
    for (const std::int64_t depth : {64, 1024, 2560}) {
        std::vector<float> a(kRows * depth), b(kRows * depth), c(kRows * kRows);
        for (std::size_t i = 0; i < a.size(); ++i) {
            a[i] = rounded(Stream{1}.normal(i), DType::bf16);
            b[i] = rounded(Stream{2}.normal(i), DType::bf16);
        }
        tensor_core_transposed(a.data(), b.data(), c.data(), kRows, kRows, depth);
        double towards_zero = 0;
        for (std::int64_t i = 0; i < kRows; ++i) {
            for (std::int64_t j = 0; j < kRows; ++j) {
                double exact = 0, aa = 0, bb = 0;
                for (std::int64_t d = 0; d < depth; ++d) {
                    const double x = a[i * depth + d], y = b[j * depth + d];
                    exact += x * y;
                    aa += x * x;
                    bb += y * y;
                }
                towards_zero += std::copysign(1.0, exact) * (exact - c[i * kRows + j]) / std::sqrt(aa * bb);
            }
        }
        const double expected = ErrorModel{true, Summation::truncating}.truncated(depth);
        EXPECT_NEAR(towards_zero / (kRows * kRows) / expected, 1.0, 0.3) << depth;
        EXPECT_EQ((ErrorModel{true, Summation::rounding}.truncated(depth)), 0);
    }
}

TEST(Problem, IsDeterministicAndCoversEnds) {
    Spec spec;
    spec.hidden_size = 16;
    spec.vocab_size = 30;
    const Problem a = make_problem(spec, {.num_tokens = 100, .seed = 5});
    const Problem b = make_problem(spec, {.num_tokens = 100, .seed = 5});
    EXPECT_EQ(a.hidden, b.hidden);
    EXPECT_EQ(a.weight, b.weight);
    EXPECT_EQ(a.target, b.target);
    EXPECT_EQ(a.target[0], 29);
    EXPECT_GT(std::count(a.target.begin(), a.target.end(), -100), 20);
    EXPECT_NE(a.hidden, make_problem(spec, {.num_tokens = 100, .seed = 6}).hidden);
}

TEST(Problem, Saturated_LogitsReachTenThousand) {
    Spec spec;
    spec.hidden_size = 16;
    spec.vocab_size = 30;
    const Problem p = make_problem(spec, {.num_tokens = 10, .ignored = Ignored::none, .logits = Logits::saturated});
    const Result r = oracle(layer_of(p), select_all(p));
    for (double lse : r.lse) EXPECT_NEAR(lse, 1e4, 50);
    EXPECT_LT(*std::min_element(r.logprobs.begin(), r.logprobs.end()), -1.9e4);
}

}  // namespace
}  // namespace flce::test

// Ignored tokens among many: wherever they are and however many, on kernels that leave them out and on those that do not.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <tuple>

#include "generator/cuda/common/cuda_path.hpp"
#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kHidden = 136;
constexpr std::int64_t kVocab = 2571;
constexpr std::int64_t kIgnoreIndex = -100;

enum class Pattern : std::uint8_t { scattered, runs, front, back };
constexpr std::array kPatterns = {Pattern::scattered, Pattern::runs, Pattern::front, Pattern::back};

/// Ignores `percent` of the tokens: here and there, in runs as prompts and answers follow each other, or those at one end.
void ignore(Problem& p, int percent, Pattern pattern) {
    std::mt19937 random(static_cast<unsigned>(percent));
    const std::int64_t n = p.num_tokens();
    for (std::int64_t i = 0; i < n; ++i) {
        bool ignored = false;
        switch (pattern) {
            case Pattern::scattered: ignored = static_cast<int>(random() % 100) < percent; break;
            case Pattern::runs: ignored = i % 200 < 2 * percent; break;
            case Pattern::front: ignored = i * 100 < n * percent; break;
            case Pattern::back: ignored = (n - 1 - i) * 100 < n * percent; break;
        }
        auto& target = p.target[static_cast<std::size_t>(i)];
        if (ignored) target = kIgnoreIndex;
    }
}

using Parameters = std::tuple<Target, DType, WeightLayout, OptionSet>;

class IgnoredRows : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(std::get<0>(GetParam())); }
    static Spec spec() {
        const auto& [target, dtype, layout, options] = GetParam();
        Spec s = make_spec(kHidden, kVocab, dtype, layout, options);
        if (layout == WeightLayout::hidden_major) s.padded_vocab_size = (kVocab + 15) / 8 * 8;  // rows of whole 16 bytes
        return s;
    }
    static std::shared_ptr<const Kernel> kernel(const std::string& plan = {}) { return kernel_on(std::get<0>(GetParam()), spec(), plan); }
    static bool on_gpu() { return std::get<0>(GetParam()) == Target::gpu; }
};

TEST_P(IgnoredRows, AnyShare_WithinBounds) {
    const auto k = kernel();
    for (const int percent : {0, 50, 75, 99, 100}) {
        for (const Pattern pattern : kPatterns) {
            if ((percent == 0 || percent == 100) && pattern != Pattern::scattered) continue;
            for (const std::int64_t n : on_gpu() ? std::vector<std::int64_t>{257, 700, 2100} : std::vector<std::int64_t>{300}) {
                const Reduction reduction = pattern == Pattern::runs ? Reduction::none : Reduction::mean;
                Problem problem = make_problem(k->spec(), {.num_tokens = n, .ignored = Ignored::none, .reduction = reduction, .seed = 3});
                ignore(problem, percent, pattern);
                EXPECT_TRUE(run_and_judge(k, problem, 4e7)) << percent << " % of " << n << ", pattern " << static_cast<int>(pattern);
            }
        }
    }
}

TEST_P(IgnoredRows, LabelsOutOfRange_AreReportedAndIgnored) {
    const auto k = kernel();
    Problem problem = make_problem(k->spec(), {.num_tokens = 700, .invalid_labels = true, .seed = 4});
    ignore(problem, 50, Pattern::scattered);
    EXPECT_TRUE(run_and_judge(k, problem, 4e7));
}

// A valid token's results do not depend on how many others are ignored, beyond the order in which sums are taken.
TEST_P(IgnoredRows, SameTokensAmongOthers_SameLosses) {
    const auto k = kernel();
    Problem problem = make_problem(k->spec(), {.num_tokens = 700, .ignored = Ignored::none, .reduction = Reduction::none, .seed = 5});
    KernelRun all(k, problem);
    all.forward();
    const std::vector<float> lse = all.token_floats("lse");
    Problem fewer = problem;
    ignore(fewer, 75, Pattern::scattered);
    KernelRun some(k, fewer);
    some.forward();
    const std::vector<float> lse_of_some = some.token_floats("lse");
    const std::vector<float> loss = all.token_floats("loss");
    const std::vector<float> loss_of_some = some.token_floats("loss");
    ASSERT_EQ(loss.size(), lse.size());
    for (std::size_t i = 0; i < lse.size(); ++i) {
        const bool valid = fewer.target[i] != kIgnoreIndex;
        const double error = valid ? 1e-5 * (1 + std::abs(lse[i]) + std::abs(loss[i])) : 0.0;
        EXPECT_NEAR(lse_of_some[i], valid ? lse[i] : 0.F, error) << i;
        EXPECT_NEAR(loss_of_some[i], valid ? loss[i] : 0.F, error) << i;
    }
}

// Where the workspace has room, forward brings the hidden states of valid tokens together first.
TEST_P(IgnoredRows, MoreWorkspaceThanNeeded_SameBits) {
    const auto k = kernel();
    Problem problem = make_problem(k->spec(), {.num_tokens = 700, .ignored = Ignored::none, .seed = 8});
    ignore(problem, 60, Pattern::scattered);
    KernelRun exact(k, problem);
    exact.forward();
    KernelRun roomy(k, problem);
    ASSERT_GT(roomy.backward_workspace().bytes, roomy.forward_workspace().bytes);
    k->forward(roomy.forward_args(), roomy.backward_workspace());
    const auto expected = exact.all_bytes();
    const auto found = roomy.all_bytes();
    for (const char* output : {"loss", "z_loss", "lse", "logprobs", "entropy"}) {
        EXPECT_EQ(found.contains(output), expected.contains(output)) << output;
        if (!expected.contains(output)) continue;
        EXPECT_EQ(found.at(output) == expected.at(output), true) << output;
    }
}

TEST_P(IgnoredRows, OneGradientAtATime_WithinBoundsAndSameBits) {
    const auto k = kernel();
    Problem problem = make_problem(k->spec(), {.num_tokens = 700, .ignored = Ignored::none, .seed = 6});
    ignore(problem, 75, Pattern::scattered);
    KernelRun together(k, problem);
    together.forward();
    together.backward();
    const auto expected = together.bytes();
    KernelRun apart(k, problem);
    apart.forward();
    apart.backward({.grad_weight = false, .grad_bias = false});
    EXPECT_EQ(apart.bytes().at("grad_hidden") == expected.at("grad_hidden"), true);
    apart.backward({.grad_hidden = false});
    for (const auto& [name, content] : apart.bytes()) EXPECT_EQ(content == expected.at(name), true) << name;
    EXPECT_EQ(apart.bytes().size(), expected.size());
    EXPECT_EQ(apart.violations(), "");
    EXPECT_TRUE(run_and_judge(k, problem, 4e7));
}

// Backward walks tokens in blocks where there are many of them and little scratch.
TEST_P(IgnoredRows, TokensInBlocks_WithinBounds) {
    if (!on_gpu()) GTEST_SKIP() << "the CPU's passes list no rows";
    Plan plan = kernel()->plan();
    plan.scratch_bytes = std::max<std::int64_t>(16 << 20, cuda_path(plan.path).least_scratch_bytes(spec().normalized(), plan));
    const auto k = kernel(plan.text());
    for (const int percent : {50, 99, 100}) {
        Problem problem = make_problem(k->spec(), {.num_tokens = 9000, .ignored = Ignored::none, .seed = 7});
        ignore(problem, percent, Pattern::scattered);
        EXPECT_TRUE(run_and_judge(k, problem, 4e7)) << percent;
    }
}

const std::vector<OptionSet>& options() {
    static const std::vector<OptionSet> sets = [] {
        std::vector<OptionSet> chosen;
        for (const OptionSet& set : all_options()) {
            for (const char* name : {"plain", "entropy", "class_weight", "tied", "everything", "everything_teacher"}) {
                if (std::string_view(set.name) == name) chosen.push_back(set);
            }
        }
        return chosen;
    }();
    return sets;
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [target, dtype, layout, options] = info.param;
    return fmt::format("{}_{}_{}", to_string(dtype), to_string(layout), options.name);
}

INSTANTIATE_TEST_SUITE_P(Gpu, IgnoredRows,
                         testing::Combine(testing::Values(Target::gpu), testing::Values(DType::bf16, DType::fp16),
                                          testing::Values(WeightLayout::vocab_major, WeightLayout::hidden_major),
                                          testing::ValuesIn(options())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Cpu, IgnoredRows,
                         testing::Combine(testing::Values(Target::cpu), testing::Values(DType::bf16),
                                          testing::Values(WeightLayout::vocab_major), testing::ValuesIn(options())),
                         name_of);

}  // namespace
}  // namespace flce::test

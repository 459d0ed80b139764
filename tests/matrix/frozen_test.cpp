// One gradient alone of many tokens, as a frozen head or frozen hidden states ask for it: on Hopper halves of the tokens, in groups, take
// turns then.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<OptionSet, std::int64_t>;  // the last is hidden_size

class Frozen : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(Target::gpu); }
    static std::shared_ptr<const Kernel> kernel() {
        const auto& [options, depth] = GetParam();
        return kernel_on(Target::gpu, make_spec(depth, 20'011, DType::bf16, WeightLayout::vocab_major, options));
    }
};

TEST_P(Frozen, OneGradientOfManyTokens_WithinBounds) {
    const auto k = kernel();
    for (const std::int64_t n : {2047, 2048, 3001, 9000}) {
        const Problem problem = make_problem(k->spec(), {.num_tokens = n, .seed = 3});
        EXPECT_TRUE(run_and_judge(k, problem, 4e8, {.grad_weight = false, .grad_bias = false})) << n;
        EXPECT_TRUE(run_and_judge(k, problem, 4e8, {.grad_hidden = false})) << n;
    }
}

TEST_P(Frozen, AgainAndWithNearlyAllIgnored_SameBits) {
    const auto k = kernel();
    Problem problem = make_problem(k->spec(), {.num_tokens = 9000, .seed = 4});
    for (const std::int64_t kept : {9000, 2500, 300, 1, 0}) {
        for (std::int64_t token = kept; token < 9000; ++token) {
            problem.target[static_cast<std::size_t>(token * 7 % 9000)] = problem.options.ignore_index;
        }
        KernelRun run(k, problem);
        run.forward();
        run.backward({.grad_weight = false, .grad_bias = false});
        const auto first = run.bytes().at("grad_hidden");
        EXPECT_EQ(run.violations(), "") << kept;
        for (int i = 0; i < 20; ++i) {
            run.backward({.grad_weight = false, .grad_bias = false});
            ASSERT_EQ(run.bytes().at("grad_hidden") == first, true) << kept << " tokens, " << i;
        }
    }
}

std::vector<OptionSet> options() {
    std::vector<OptionSet> sets;
    for (const OptionSet& set : all_options()) {
        for (const char* name : {"plain", "bias", "softcap", "temperature", "label_smoothing", "accumulate"}) {
            if (std::string_view(set.name) == name) sets.push_back(set);
        }
    }
    return sets;
}

INSTANTIATE_TEST_SUITE_P(Gpu, Frozen, testing::Combine(testing::ValuesIn(options()), testing::Values(136, 520)), [](const auto& info) {
    return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
});

}  // namespace
}  // namespace flce::test

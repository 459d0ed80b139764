// One gradient alone of many tokens, as a frozen head or frozen hidden states ask for it: on Hopper halves of the tokens, in groups, take
// turns then. A weight that is rounded is rounded in the same launch, and with both gradients too.
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
        if (is_quantized(k->spec())) continue;  // it has no other gradient
        EXPECT_TRUE(run_and_judge(k, problem, 4e8, {.grad_hidden = false})) << n;
    }
}

TEST_P(Frozen, BothGradientsOfARoundedWeight_WithinBounds) {
    const auto k = kernel();
    if (!rounds_weight(k->spec()) || is_quantized(k->spec())) GTEST_SKIP() << "other tests have these";
    for (const std::int64_t n : {513, 2048, 3001}) {
        EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), {.num_tokens = n, .seed = 5}), 4e8)) << n;
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
    sets.push_back({"fp32", apply_weight_fp32});
    sets.push_back({"fp32_bias_softcap", [](Spec& s) {
                        apply_weight_fp32(s);
                        s.bias = true;
                        s.softcap = 20.0;
                    }});
    sets.push_back({"e4m3", [](Spec& s) { s.weight_format = WeightFormat::e4m3; }});
    sets.push_back({"e4m3_blocks_temperature", [](Spec& s) {
                        s.weight_format = WeightFormat::e4m3;
                        s.weight_block = 128;
                        s.temperature = true;
                    }});
    sets.push_back({"nvfp4_label_smoothing", [](Spec& s) {
                        s.weight_format = WeightFormat::nvfp4;
                        s.label_smoothing = 0.1;
                    }});
    return sets;
}

INSTANTIATE_TEST_SUITE_P(Gpu, Frozen, testing::Combine(testing::ValuesIn(options()), testing::Values(144, 528)), [](const auto& info) {
    return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
});

}  // namespace
}  // namespace flce::test

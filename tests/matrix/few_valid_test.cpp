// No valid token, and one: batches whose tokens are masked, in layers so deep that kernels take their shortest arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string_view>
#include <tuple>
#include <vector>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<Target, DType, WeightLayout, OptionSet>;

constexpr std::int64_t kDeep = 520;
constexpr std::int64_t kVocab = 517;

/// Every option, and softcaps that kernels tell by a logit's fall with the options that may stand beside them.
std::vector<OptionSet> options() {
    std::vector<OptionSet> sets = all_options();
    sets.push_back({"softcap_scaled", [](Spec& s) {
                        s.softcap = 30.0;
                        s.logit_scale = 8.0;
                        s.outputs = {true, true, true, false};
                    }});
    sets.push_back({"softcap_bias_accumulate", [](Spec& s) {
                        s.softcap = 30.0;
                        s.bias = s.class_weight = s.token_weight = true;
                        s.z_loss = 1e-2;
                        s.grad_weight_mode = GradMode::accumulate;
                    }});
    return sets;
}

/// The planner's choice, and the first plan of every other path.
std::vector<Plan> plans_of(const Spec& spec, const Device& device) {
    std::vector<Plan> plans{choose_plan(spec, device)};
    for (const Plan& plan : candidate_plans(spec, device)) {
        const auto same_path = [&](const Plan& other) { return other.path == plan.path; };
        if (std::ranges::none_of(plans, same_path)) plans.push_back(plan);
    }
    return plans;
}

/// The label of the one valid token; −1: none.
Problem problem_of(const Spec& spec, std::int64_t num_tokens, std::int64_t label, Reduction reduction) {
    Problem problem = make_problem(spec, {.num_tokens = num_tokens, .ignored = Ignored::all, .reduction = reduction, .seed = 41});
    if (label >= 0) problem.target[static_cast<std::size_t>(num_tokens / 2)] = label;
    return problem;
}

class FewValid : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(std::get<0>(GetParam())); }

    static void expect_good(const Spec& spec, const std::vector<std::int64_t>& numbers_of_tokens) {
        const Target target = std::get<0>(GetParam());
        for (const Plan& plan : plans_of(spec, device_of(target))) {
            const auto kernel = kernel_on(target, spec, plan.text());
            int turn = 0;
            for (const std::int64_t n : numbers_of_tokens) {
                for (const std::int64_t label : {std::int64_t{-1}, spec.vocab_size - 1}) {
                    const auto reduction = static_cast<Reduction>(turn++ % 3);
                    EXPECT_TRUE(run_and_judge(kernel, problem_of(spec, n, label, reduction), 4e7)) << "label " << label;
                }
            }
        }
    }
};

TEST_P(FewValid, DeepLayer_ZeroOrWithinBounds) {
    const auto& [target, dtype, layout, options] = GetParam();
    // On a GPU each of these takes a forward kernel of its own.
    std::vector<std::int64_t> tokens{65};
    if (target == Target::gpu) tokens = {1, 65, 150, 300};
    expect_good(make_spec(kDeep, kVocab, dtype, layout, options), tokens);
}

TEST_P(FewValid, TwoClasses_ZeroOrWithinBounds) {
    const auto& [target, dtype, layout, options] = GetParam();
    expect_good(make_spec(kDeep, 2, dtype, layout, options), {1, 300});
}

// A gradient so small that fp16 has no number for it is scaled as far as fp32 allows.
TEST_P(FewValid, TinyUpstreamOfLse_Finite) {
    const auto& [target, dtype, layout, options] = GetParam();
    Spec spec = make_spec(kDeep, kVocab, dtype, layout, options);
    if (!spec.outputs.lse) GTEST_SKIP() << "no lse to take a gradient of";
    const auto kernel = kernel_on(target, spec);
    Problem problem = problem_of(spec, 65, 3, Reduction::sum);
    for (auto* gradient : {&problem.grad_loss, &problem.grad_lse, &problem.grad_logprobs, &problem.grad_entropy}) {
        for (float& g : *gradient) g = 0;
    }
    for (float& g : problem.grad_lse) g = 1e-37F;
    KernelRun run(kernel, problem);
    run.forward();
    run.backward();
    const KernelOutputs got = run.outputs(select_all(problem));
    for (const auto* gradient : {&got.grad_hidden, &got.grad_weight, &got.grad_bias}) {
        for (const double g : *gradient) ASSERT_TRUE(std::isfinite(g)) << spec.text();
    }
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [target, dtype, layout, options] = info.param;
    return std::string(to_string(dtype)) + "_" + std::string(to_string(layout)) + "_" + options.name;
}

/// Each option in one dtype and layout, which take turns: the CPU's kernels differ in neither here.
std::vector<Parameters> by_turns() {
    std::vector<Parameters> all;
    std::size_t turn = 0;
    for (const OptionSet& set : options()) {
        all.emplace_back(Target::cpu, kDtypes[turn % std::size(kDtypes)], kLayouts[turn / 3 % std::size(kLayouts)], set);
        ++turn;
    }
    return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, FewValid, testing::ValuesIn(by_turns()), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, FewValid,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::ValuesIn(options())),
                         name_of);

}  // namespace
}  // namespace flce::test

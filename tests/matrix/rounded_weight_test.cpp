// A weight in fp32 under a 16-bit dtype, where it does not fit in scratch at once, and against a copy rounded beforehand.
#include <gtest/gtest.h>

#include <iterator>
#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

class RoundedWeight : public testing::TestWithParam<std::tuple<Target, DType, WeightLayout>> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(target()); }
    static Target target() { return std::get<0>(GetParam()); }
    static Spec spec(std::int64_t vocab_size, void (*option)(Spec&)) {
        return make_spec(136, vocab_size, std::get<1>(GetParam()), std::get<2>(GetParam()), {"", option});
    }
    /// The planner's first choice with the least power of two of scratch.
    static Plan plan_in_little_scratch(const Spec& spec) {
        std::int64_t bytes = kDefaultScratchBytes;
        while (true) {
            try {
                (void)choose_plan(spec, device_of(target()), {.scratch_bytes = bytes / 2});
            } catch (const PlanError&) {
                return choose_plan(spec, device_of(target()), {.scratch_bytes = bytes});
            }
            bytes /= 2;
        }
    }
};

// A dozen stretches of the vocabulary, the last of them ragged, with every way of cutting tokens: few, all at once, in blocks.
TEST_P(RoundedWeight, ManyStretches_WithinBoundsAndWorkspace) {
    void (*const everything)(Spec&) = [](Spec& s) {
        apply_everything(s);
        apply_padding(s);
        apply_weight_fp32(s);
        s.grad_weight_mode = GradMode::accumulate;
    };
    for (void (*const option)(Spec&) : {static_cast<void (*)(Spec&)>(apply_weight_fp32), everything}) {
        const Spec s = spec(kSanitized ? 1031 : 7001, option);
        const Plan plan = plan_in_little_scratch(s);
        const auto kernel = kernel_on(target(), s, plan.text());
        for (const std::int64_t n : {1, 100, 300, 2000}) {
            EXPECT_TRUE(run_and_judge(kernel, make_problem(s, {.num_tokens = n, .seed = 41}), 2e7)) << n << " tokens, " << plan.text();
            EXPECT_LE(kernel->workspace_bytes(n), static_cast<std::size_t>(plan.scratch_bytes + 4 * n * s.hidden_size)) << plan.text();
        }
    }
}

// Enough scratch for a list of the tokens that are not ignored, too little for the weight.
TEST_P(RoundedWeight, StretchesOfListedTokens_WithinBounds) {
    const auto& [target, dtype, layout] = GetParam();
    const Spec s = make_spec(1024, target == Target::gpu ? 9001 : 4700, dtype, layout, {"", apply_weight_fp32});
    const Plan plan = choose_plan(s, device_of(target), {.scratch_bytes = 16 << 20});
    const auto kernel = kernel_on(target, s, plan.text());
    for (const Ignored ignored : {Ignored::some, Ignored::all}) {
        EXPECT_TRUE(run_and_judge(kernel, make_problem(s, {.num_tokens = 300, .ignored = ignored, .seed = 44}), 1e7)) << plan.text();
    }
}

// Given the same statistics, backward makes the gradients of a copy rounded beforehand, to the bit; on a CPU forward does too.
TEST_P(RoundedWeight, OneChunk_BitsOfARoundedCopy) {
    const Spec s = spec(1031, apply_weight_fp32);
    const std::string plan = choose_plan(s, device_of(target())).text();
    Spec of_copy = s;
    of_copy.weight_dtype.reset();
    const Problem problem = make_problem(s, {.num_tokens = 400, .seed = 42});
    Problem rounded = problem;
    rounded.spec = of_copy;
    KernelRun run(kernel_on(target(), s, plan), problem);
    KernelRun expected(kernel_on(target(), of_copy, plan), rounded);
    run.forward();
    expected.forward();
    if (target() == Target::cpu) {
        EXPECT_EQ(run.bytes(), expected.bytes());
    }
    expected.backward();
    BackwardArgs args = run.backward_args();
    args.lse = expected.forward_args().lse;
    run.backward();  // marks gradients as written
    run.kernel().backward(args, run.backward_workspace());
    synchronize(run.kernel().device_ref());
    for (const char* gradient : {"grad_hidden", "grad_weight"}) {
        EXPECT_EQ(run.bytes().at(gradient) == expected.bytes().at(gradient), true) << gradient << " with " << plan;
    }
}

// Halfway between two numbers of the dtype, and below its normal ones.
TEST_P(RoundedWeight, TiesAndSmallWeights_RoundToNearestEven) {
    const Spec s = spec(1031, apply_weight_fp32);
    Problem problem = make_problem(s, {.num_tokens = 130, .seed = 43});
    constexpr float kWeights[] = {1.00390625F, 1.01171875F, 1.00048828125F, 1.00146484375F, 3e-39F, -2.9e-8F, 6.1e-5F};
    for (std::size_t i = 0; i < problem.weight.size(); i += 97) {
        problem.unrounded_weight[i] = kWeights[i / 97 % std::size(kWeights)] * (i % 2 == 0 ? 0.25F : -0.125F);
        problem.weight[i] = rounded(problem.unrounded_weight[i], s.dtype);
    }
    EXPECT_TRUE(run_and_judge(kernel_on(target(), s), problem, 4e7));
}

std::string name_of(const testing::TestParamInfo<RoundedWeight::ParamType>& info) {
    return std::string(to_string(std::get<1>(info.param))) + "_" + std::string(to_string(std::get<2>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Cpu, RoundedWeight,
                         testing::Combine(testing::Values(Target::cpu), testing::Values(DType::bf16, DType::fp16),
                                          testing::ValuesIn(kLayouts)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, RoundedWeight,
                         testing::Combine(testing::Values(Target::gpu), testing::Values(DType::bf16, DType::fp16),
                                          testing::ValuesIn(kLayouts)),
                         name_of);

}  // namespace
}  // namespace flce::test

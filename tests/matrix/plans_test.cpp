// Every plan that the planner may choose, and on a CPU every narrower instruction set, at shapes that fill no tile.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<Target, DType, WeightLayout>;

class Plans : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(std::get<0>(GetParam())); }

    static Spec spec(const OptionSet& options) { return make_spec(136, 1031, std::get<1>(GetParam()), std::get<2>(GetParam()), options); }
    static void expect_good(const Spec& spec, const Plan& plan, std::int64_t num_tokens) {
        const auto kernel = kernel_on(std::get<0>(GetParam()), spec, plan.text());
        ASSERT_EQ(kernel->plan().text(), plan.text());
        EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, {.num_tokens = num_tokens, .seed = 31}), 5e7));
    }
};

// In parts, since a GPU's candidates are a hundred kernels to compile.
class Candidates : public testing::TestWithParam<std::tuple<Target, DType, WeightLayout, int>> {
public:
    static constexpr int kParts = 8;
};

TEST_P(Candidates, Every_WithinBounds) {
    const auto& [target, dtype, layout, part] = GetParam();
    FLCE_REQUIRE_TARGET(target);
    for (const OptionSet& options : {loss_options().front(), memory_options().back()}) {
        const Spec s = make_spec(136, 1031, dtype, layout, options);
        const std::vector<Plan> plans = candidate_plans(s, device_of(target));
        ASSERT_FALSE(plans.empty());
        const std::size_t most = std::min<std::size_t>(kSanitized ? 2 : plans.size(), plans.size());
        for (auto i = static_cast<std::size_t>(part); i < most; i += kParts) {
            const auto kernel = kernel_on(target, s, plans[i].text());
            ASSERT_EQ(kernel->plan().text(), plans[i].text());
            EXPECT_TRUE(run_and_judge(kernel, make_problem(s, {.num_tokens = 139, .seed = 31})));
        }
    }
}

// Little scratch: many vocabulary chunks, and tokens walked in blocks.
TEST_P(Plans, LittleScratch_WithinBounds) {
    for (const OptionSet& options : {loss_options().front(), memory_options().back()}) {
        const Spec s = spec(options);
        const Device& device = device_of(std::get<0>(GetParam()));
        std::int64_t bytes = kDefaultScratchBytes;
        // The smallest power of two that is enough.
        const auto plans_at = [&](std::int64_t scratch) {
            try {
                return candidate_plans(s, device, {.scratch_bytes = scratch});
            } catch (const PlanError&) {
                return std::vector<Plan>();
            }
        };
        while (bytes > 4096 && !plans_at(bytes / 2).empty()) bytes /= 2;
        const Plan plan = plans_at(bytes).front();
        ASSERT_LT(bytes, kDefaultScratchBytes);
        const std::int64_t n = kSanitized ? 700 : 3000;
        expect_good(s, plan, n);
        const auto kernel = kernel_on(std::get<0>(GetParam()), s, plan.text());
        EXPECT_LE(kernel->workspace_bytes(n), static_cast<std::size_t>(bytes + 4 * n * s.hidden_size)) << plan.text();
    }
}

// Many tokens' chunks are one launch in tiles of dlogits, grad_hidden's sum is in parts with few that are not ignored, and calls for one
// gradient go chunk by chunk in tiles of their own: whatever those are, all have to mean the same parts.
TEST_P(Plans, TilesBesideJoinedChunks_WithinBounds) {
    const auto& [target, dtype, layout] = GetParam();
    if (target != Target::gpu || dtype == DType::fp32 || layout != WeightLayout::vocab_major) GTEST_SKIP() << "chunks are never joined";
    const Device& device = device_of(target);
    for (const OptionSet& options : {loss_options().front(), memory_options().back()}) {
        const Spec s = make_spec(136, 9001, dtype, layout, options);
        Plan plan = choose_plan(s, device);
        if (plan.path != PlanPath::cuda_sm90a) GTEST_SKIP() << "chunks are never joined on " << device.name;
        int tried = 0;
        constexpr TileSchedule kTurns = TileSchedule::by_turns;
        constexpr TileSchedule kTogether = TileSchedule::together;
        for (const auto& [m, n, schedule] : {std::tuple{128, 256, kTogether}, {128, 192, kTurns}, {256, 128, kTogether}}) {
            plan.cuda.grad_hidden = {.block_m = m, .block_n = n, .block_k = 64, .stages = 4, .schedule = schedule};
            if (illegal_reason(s, device, plan)) continue;
            ++tried;
            for (const std::int64_t tokens : {700, 2100}) expect_good(s, plan, tokens);
        }
        EXPECT_GE(tried, 2);
    }
}

// Where hidden_size ends within the first panel of a tile, the tile's panels are not as many as its buffers expect. A tile of few tokens is
// multiplied so quickly that its panels wait for the copy engine.
TEST_P(Plans, GradientAddedToBesideATail_WithinBounds) {
    const auto& [target, dtype, layout] = GetParam();
    if (target != Target::gpu || dtype == DType::fp32 || layout != WeightLayout::vocab_major) GTEST_SKIP() << "has no panels";
    const Device& device = device_of(target);
    Spec s = make_spec(576, 9001, dtype, layout, loss_options().front());
    s.grad_weight_mode = GradMode::accumulate;
    Plan plan = choose_plan(s, device);
    if (plan.path != PlanPath::cuda_sm90a) GTEST_SKIP() << device.name << " has no panels";
    constexpr TileSchedule kTurns = TileSchedule::by_turns;
    constexpr TileSchedule kTogether = TileSchedule::together;
    int tried = 0;
    for (const auto& [m, n, schedule] : {std::tuple{256, 128, kTogether}, {128, 256, kTogether}, {192, 128, kTurns}, {128, 128, kTurns}}) {
        plan.cuda.grad_weight = {.block_m = m, .block_n = n, .block_k = 64, .stages = 4, .schedule = schedule};
        if (illegal_reason(s, device, plan)) continue;
        ++tried;
        for (const std::int64_t tokens : {1, 60, 600}) {
            for (int time = 0; time < 3; ++time) expect_good(s, plan, tokens);
        }
    }
    EXPECT_GE(tried, 3);
}

TEST_P(Plans, NarrowerInstructionSets_WithinBounds) {
    if (std::get<0>(GetParam()) != Target::cpu) GTEST_SKIP() << "only CPUs run another's code";
    const Device& here = device_of(Target::cpu);
    int tried = 0;
    for (const char* name : {"x86-64", "x86-64-v3", "x86-64-v4"}) {
        for (const OptionSet& options : {loss_options().front(), memory_options().back()}) {
            const Spec s = spec(options);
            const Plan plan = choose_plan(s, describe_device(name));
            if (illegal_reason(s, here, plan)) continue;  // wider than this machine
            ++tried;
            for (std::int64_t n : {1, 139}) expect_good(s, plan, n);
        }
    }
    EXPECT_GE(tried, 2);
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    return std::string(to_string(std::get<1>(info.param))) + "_" + std::string(to_string(std::get<2>(info.param)));
}

INSTANTIATE_TEST_SUITE_P(Cpu, Plans,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts)), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, Plans,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts)), name_of);

std::string name_of_part(const testing::TestParamInfo<Candidates::ParamType>& info) {
    return std::string(to_string(std::get<1>(info.param))) + "_" + std::string(to_string(std::get<2>(info.param))) + "_part_" +
           std::to_string(std::get<3>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Cpu, Candidates,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::Range(0, Candidates::kParts)),
                         name_of_part);
INSTANTIATE_TEST_SUITE_P(Gpu, Candidates,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::Range(0, Candidates::kParts)),
                         name_of_part);

}  // namespace
}  // namespace flce::test

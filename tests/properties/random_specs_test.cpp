// Random Specs, small, with fixed seeds: text there and back, a kernel, and every output within bounds.
#include "tests/support/random_specs.hpp"

#include <gtest/gtest.h>

#include "generator/planner.hpp"
#include "tests/support/level.hpp"

namespace flce::test {
namespace {

constexpr std::uint64_t kSpecsOfOneTest = 25;
constexpr std::uint64_t kTests = 16;

class RandomSpecs : public testing::TestWithParam<std::tuple<Target, std::uint64_t>> {};

TEST_P(RandomSpecs, CompileAndStayWithinBounds) {
    const auto [target, part] = GetParam();
    FLCE_REQUIRE_TARGET(target);
    for (std::uint64_t i = 0; i < (kSanitized || level() == Level::quick ? 3 : kSpecsOfOneTest); ++i) {
        const std::uint64_t seed = 1000 + part * kSpecsOfOneTest + i;
        Draw draw(seed);
        Spec spec = random_spec(draw);
        spec.batch_invariant = seed % 5 == 0;
        if (!smallest_scratch_bytes(spec, device_of(target))) spec.batch_invariant = false;  // not every device and dtype has it
        const Spec read = parse_spec(spec.text());
        ASSERT_EQ(read == spec, true) << "seed " << seed << ": " << spec.text() << " came back as " << read.text();
        ASSERT_EQ(parse_spec_json(spec.json()) == spec, true) << "seed " << seed << ": " << spec.json();
        const auto kernel = kernel_on(target, read);
        EXPECT_EQ(parse_plan(kernel->plan().text()) == kernel->plan(), true) << kernel->plan().text();
        EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, random_options(draw, spec.token_weight, seed)))) << "seed " << seed;
    }
}

std::string name_of(const testing::TestParamInfo<std::tuple<Target, std::uint64_t>>& info) {
    return "part" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Cpu, RandomSpecs, testing::Combine(testing::Values(Target::cpu), testing::Range<std::uint64_t>(0, kTests)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, RandomSpecs, testing::Combine(testing::Values(Target::gpu), testing::Range<std::uint64_t>(0, kTests)),
                         name_of);

}  // namespace
}  // namespace flce::test

// Random layers over random shards, with fixed seeds: every output within the bounds of the whole layer.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/support/level.hpp"
#include "tests/support/random_specs.hpp"
#include "tests/support/sharded_run.hpp"

namespace flce::test {
namespace {

constexpr std::uint64_t kLayersOfOneTest = 12;
constexpr std::uint64_t kTests = 16;

class RandomShards : public testing::TestWithParam<std::tuple<Target, std::uint64_t>> {};

TEST_P(RandomShards, WithinBoundsOfTheWholeLayer) {
    const auto [target, part] = GetParam();
    FLCE_REQUIRE_TARGET(target);
    for (std::uint64_t i = 0; i < (kSanitized || level() == Level::quick ? 3 : kLayersOfOneTest); ++i) {
        const std::uint64_t seed = 7000 + part * kLayersOfOneTest + i;
        Draw draw(seed);
        Spec whole = random_spec(draw);
        whole.padded_vocab_size = whole.vocab_size;
        const bool hidden_major = whole.layout == WeightLayout::hidden_major;  // hidden_major shards have as many columns as the spec says
        const auto rows = random_rows(draw, whole.vocab_size, hidden_major);
        const std::int64_t most = std::max<std::int64_t>(*std::ranges::max_element(rows), 1);
        Spec spec = shard_spec(whole, std::min(most, whole.vocab_size), most);
        if (draw.coin(0.3)) spec.grad_hidden_dtype = DType::fp32;
        spec = spec.normalized();
        ASSERT_EQ(parse_spec(spec.text()) == spec, true) << spec.text();
        ASSERT_EQ(parse_spec_json(spec.json()) == spec, true) << spec.json();
        const Problem problem = make_problem(whole, random_options(draw, spec.token_weight, seed));
        EXPECT_TRUE(run_and_judge_shards(kernel_on(target, spec), problem, shards_of(whole.vocab_size, rows))) << "seed " << seed;
    }
}

std::string name_of(const testing::TestParamInfo<std::tuple<Target, std::uint64_t>>& info) {
    return "part" + std::to_string(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Cpu, RandomShards, testing::Combine(testing::Values(Target::cpu), testing::Range<std::uint64_t>(0, kTests)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, RandomShards, testing::Combine(testing::Values(Target::gpu), testing::Range<std::uint64_t>(0, kTests)),
                         name_of);

}  // namespace
}  // namespace flce::test

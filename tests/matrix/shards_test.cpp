// A layer whose classes lie on several shards, against the oracle of the whole layer: every option, shards of all kinds.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/sharded_run.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Rows = std::vector<std::int64_t>;

std::int64_t largest(const Rows& rows) { return *std::ranges::max_element(rows); }

/// The kernel of shards that have at most as many rows as the largest of these.
std::shared_ptr<const Kernel> kernel_of_shards(Target target, const Spec& whole, const Rows& rows) {
    return kernel_on(target, shard_spec(whole, std::min(largest(rows), whole.vocab_size), largest(rows)));
}

using Parameters = std::tuple<Target, DType, OptionSet>;

class Shards : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(std::get<0>(GetParam())); }
    [[nodiscard]] static Spec whole_spec(std::int64_t d, std::int64_t v, WeightLayout layout = WeightLayout::vocab_major) {
        const auto& [target, dtype, options] = GetParam();
        Spec spec = make_spec(d, v, dtype, layout, options);
        spec.padded_vocab_size = v;
        return spec;
    }
    [[nodiscard]] static Target target() { return std::get<0>(GetParam()); }
};

// Even, uneven, smaller than a tile, with nothing but padding, with nothing at all, and one alone.
TEST_P(Shards, OfEverySize_WithinBoundsOfTheWholeLayer) {
    int turn = 0;
    for (const Rows& rows : {Rows{100, 100}, Rows{130, 1, 69}, Rows{50, 50, 50, 80}, Rows{200, 30}, Rows{200, 0}, Rows{200}}) {
        const Spec whole = whole_spec(64, 200);
        const auto kernel = kernel_of_shards(target(), whole, rows);
        ProblemOptions o;
        o.num_tokens = std::array{70, 0, 129, 1}[turn % 4];
        o.reduction = static_cast<Reduction>(turn % 3);
        o.target_bits = turn % 2 == 0 ? 64 : 32;
        o.ignored = turn == 3 ? Ignored::all : Ignored::some;
        o.seed = static_cast<std::uint64_t>(300 + turn);
        ++turn;
        EXPECT_TRUE(run_and_judge_shards(kernel, make_problem(whole, o), shards_of(200, rows)));
    }
}

TEST_P(Shards, OfColumns_WithinBounds) {
    const Rows rows{104, 104};  // the second has 8 that are padding
    const Spec whole = whole_spec(72, 200, WeightLayout::hidden_major);
    const auto kernel = kernel_of_shards(target(), whole, rows);
    ProblemOptions o;
    o.num_tokens = 90;
    EXPECT_TRUE(run_and_judge_shards(kernel, make_problem(whole, o), shards_of(200, rows)));
}

TEST_P(Shards, OneGradientAlone_WithinBounds) {
    const Rows rows{90, 110};
    const Spec whole = whole_spec(64, 200);
    const auto kernel = kernel_of_shards(target(), whole, rows);
    ProblemOptions o;
    o.num_tokens = 66;
    const Problem problem = make_problem(whole, o);
    EXPECT_TRUE(
        run_and_judge_shards(kernel, problem, shards_of(200, rows), {.grad_hidden = true, .grad_weight = false, .grad_bias = false}));
    EXPECT_TRUE(
        run_and_judge_shards(kernel, problem, shards_of(200, rows), {.grad_hidden = false, .grad_weight = true, .grad_bias = true}));
}

// A sum over shards that is rounded once.
TEST_P(Shards, GradHiddenInFp32_WithinBounds) {
    const Rows rows{90, 110};
    const Spec whole = whole_spec(64, 200);
    Spec spec = shard_spec(whole, 110);
    spec.grad_hidden_dtype = DType::fp32;
    const auto kernel = kernel_on(target(), spec.normalized());
    ProblemOptions o;
    o.num_tokens = 140;
    EXPECT_TRUE(run_and_judge_shards(kernel, make_problem(whole, o), shards_of(200, rows)));
}

// More names than classes, so that shards have many of a token's, one alone, or none.
TEST_P(Shards, OfManyNamedClasses_WithinBounds) {
    const Rows rows{130, 1, 69, 0};
    Spec whole = whole_spec(64, 200);
    if (whole.teacher_top_k == 0 || whole.support) GTEST_SKIP() << "there is no teacher of the whole vocabulary";
    whole.teacher_top_k = 300;
    const auto kernel = kernel_of_shards(target(), whole, rows);
    for (const std::int64_t num_tokens : {90, 270}) {
        ProblemOptions o;
        o.num_tokens = num_tokens;
        o.ignored = Ignored::some;
        EXPECT_TRUE(run_and_judge_shards(kernel, make_problem(whole, o), shards_of(200, rows)));
    }
}

TEST_P(Shards, LabelsAtFault_AreOneFaultOnEveryShard) {
    const Rows rows{90, 110};
    const Spec whole = whole_spec(64, 200);
    const auto kernel = kernel_of_shards(target(), whole, rows);
    ProblemOptions o;
    o.num_tokens = 60;
    o.invalid_labels = true;
    const Problem problem = make_problem(whole, o);
    EXPECT_TRUE(run_and_judge_shards(kernel, problem, shards_of(200, rows)));
    ShardedRun run(kernel, problem, shards_of(200, rows));
    run.forward();
    const auto layer = layer_of(problem);
    std::int64_t first = 0;
    while (layer.valid(first) || problem.target[static_cast<std::size_t>(first)] == o.ignore_index) ++first;
    for (std::size_t shard = 0; shard < run.size(); ++shard) EXPECT_EQ(run.run(shard).invalid_label(), first);
}

TEST_P(Shards, RunTwice_SameBits) {
    const Rows rows{60, 80, 60};
    const Spec whole = whole_spec(64, 200);
    const auto kernel = kernel_of_shards(target(), whole, rows);
    ProblemOptions o;
    o.num_tokens = 150;
    const Problem problem = make_problem(whole, o);
    ShardedRun first(kernel, problem, shards_of(200, rows));
    ShardedRun second(kernel, problem, shards_of(200, rows));
    for (ShardedRun* run : {&first, &second}) {
        run->forward();
        run->backward();
    }
    for (std::size_t shard = 0; shard < first.size(); ++shard) EXPECT_EQ(first.run(shard).bytes(), second.run(shard).bytes());
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [target, dtype, options] = info.param;
    return std::string(to_string(dtype)) + "_" + options.name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Shards,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(all_options())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, Shards,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(all_options())),
                         name_of);

}  // namespace
}  // namespace flce::test

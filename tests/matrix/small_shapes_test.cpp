// Every dtype, layout and option at every small shape, with every number of tokens.
#include <gtest/gtest.h>

#include <algorithm>
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

class SmallShapes : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(std::get<0>(GetParam())); }

    // Takes each value of a remainder of 6 once for an option, over dtypes and layouts, and once for these, over six options.
    static int combination() {
        const auto& [target, dtype, layout, options] = GetParam();
        const std::vector<OptionSet> sets = all_options();
        const auto option = std::ranges::find_if(sets, [&](const OptionSet& set) { return std::string_view(set.name) == options.name; });
        const auto kind = std::ranges::find(kDtypes, dtype) - std::begin(kDtypes);
        return static_cast<int>(option - sets.begin()) + 2 * static_cast<int>(kind) + static_cast<int>(layout);
    }

    // Every number of tokens, and how many of them are ignored; target width and reduction take turns.
    static void all_tokens(std::int64_t d, std::int64_t v) {
        const auto& [target, dtype, layout, options] = GetParam();
        const auto kernel = kernel_on(target, make_spec(d, v, dtype, layout, options));
        int turn = static_cast<int>(d + v);
        for (std::int64_t n : {0, 1, 3, 127, 128}) {
            for (Ignored ignored : {Ignored::none, Ignored::some, Ignored::all}) {
                if (kSanitized && (turn++ % 3 != 0)) continue;
                ProblemOptions o;
                o.num_tokens = n;
                o.ignored = ignored;
                o.reduction = static_cast<Reduction>(turn % 3);
                o.target_bits = turn % 2 == 0 ? 64 : 32;
                o.seed = static_cast<std::uint64_t>(100 + turn);
                ++turn;
                EXPECT_TRUE(run_and_judge(kernel, make_problem(kernel->spec(), o)));
            }
        }
    }
};

TEST_P(SmallShapes, EveryNumberOfTokens_WithinBounds) {
    for (std::int64_t d : {8, 64}) {
        for (std::int64_t v : {2, 50, 127}) all_tokens(d, v);
    }
}

// Depths that are no multiple of a block, and many tokens.
TEST_P(SmallShapes, DeepAndMany_WithinBounds) {
    const auto& [target, dtype, layout, options] = GetParam();
    struct Shape {
        std::int64_t n, d, v;
        int turn_of_cpu = -1;  ///< too dear on a CPU for every combination: every option meets it in one dtype and layout
    };
    int turn = 0;
    for (const Shape& s : {Shape{127, 200, 50}, {4096, 200, 127, 0}, {3, 2560, 127}, {128, 2560, 50}, {4096, 2560, 2, 3}, {4096, 64, 50}}) {
        ++turn;
        if (kSanitized && s.n * s.d * s.v > (4 << 20)) continue;
        if (target == Target::cpu && s.turn_of_cpu >= 0 && (combination() + s.turn_of_cpu) % 6 != 0) continue;
        const auto kernel = kernel_on(target, make_spec(s.d, s.v, dtype, layout, options));
        ProblemOptions o;
        o.num_tokens = s.n;
        o.reduction = static_cast<Reduction>((turn + 1) % 3);
        o.target_bits = turn % 2 == 0 ? 64 : 32;
        o.seed = static_cast<std::uint64_t>(200 + turn);
        EXPECT_TRUE(run_and_judge(kernel, make_problem(kernel->spec(), o)));
    }
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [target, dtype, layout, options] = info.param;
    return std::string(to_string(dtype)) + "_" + std::string(to_string(layout)) + "_" + options.name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, SmallShapes,
                         testing::Combine(testing::Values(Target::cpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::ValuesIn(all_options())),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, SmallShapes,
                         testing::Combine(testing::Values(Target::gpu), testing::ValuesIn(kDtypes), testing::ValuesIn(kLayouts),
                                          testing::ValuesIn(all_options())),
                         name_of);

}  // namespace
}  // namespace flce::test

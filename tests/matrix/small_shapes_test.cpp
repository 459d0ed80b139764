// Every dtype, layout and option at every small shape, with every number of tokens; in quick every combination meets two of six shapes.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "tests/support/kernel_run.hpp"
#include "tests/support/level.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<Target, DType, WeightLayout, OptionSet>;

constexpr std::size_t kTurns = 6;

// Takes each value of a remainder of 6 once for an option, over dtypes and layouts, and once for these, over six options.
std::size_t combination_of(const Parameters& parameters) {
    const auto& [target, dtype, layout, options] = parameters;
    const std::vector<OptionSet> sets = all_options();
    const auto option = std::ranges::find_if(sets, [&](const OptionSet& set) { return std::string_view(set.name) == options.name; });
    const auto kind = std::ranges::find(kDtypes, dtype) - std::begin(kDtypes);
    return static_cast<std::size_t>((option - sets.begin()) + 2 * kind + static_cast<int>(layout));
}

class SmallShapes : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(std::get<0>(GetParam())); }

    static std::size_t combination() { return combination_of(GetParam()); }

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
    std::size_t turn = 0;
    for (std::int64_t d : {8, 64}) {
        for (std::int64_t v : {2, 50, 127}) {
            if (has_turn(combination(), kTurns, turn++)) all_tokens(d, v);
        }
    }
}

// Depths that are no multiple of a block, and many tokens.
TEST_P(SmallShapes, DeepAndMany_WithinBounds) {
    const auto& [target, dtype, layout, options] = GetParam();
    struct Shape {
        std::int64_t n, d, v;
        std::size_t turn_of_cpu = 6;  ///< too dear on a CPU for every combination: every option meets it in one dtype and layout
    };
    std::size_t turn = 0;
    for (const Shape& s : {Shape{127, 200, 50}, {4096, 200, 127, 0}, {3, 2560, 127}, {128, 2560, 50}, {4096, 2560, 2, 3}, {4096, 64, 50}}) {
        ++turn;
        const bool dear = target == Target::cpu && s.turn_of_cpu < 6;
        if (dear ? !is_turn(combination(), 6, s.turn_of_cpu) : !has_turn(combination(), kTurns, turn)) continue;
        if (kSanitized && s.n * s.d * s.v > (4 << 20)) continue;
        const auto kernel = kernel_on(target, make_spec(s.d, s.v, dtype, layout, options));
        ProblemOptions o;
        o.num_tokens = s.n;
        o.reduction = static_cast<Reduction>((turn + 1) % 3);
        o.target_bits = turn % 2 == 0 ? 64 : 32;
        o.seed = static_cast<std::uint64_t>(200 + turn);
        EXPECT_TRUE(run_and_judge(kernel, make_problem(kernel->spec(), o)));
    }
}

/// "dtype shape", "layout shape", … of every combination that meets a shape in quick, or of all.
std::set<std::string> pairs(bool quick) {
    std::set<std::string> found;
    for (const DType dtype : kDtypes) {
        for (const WeightLayout layout : kLayouts) {
            for (const OptionSet& options : all_options()) {
                for (std::size_t shape = 0; shape < 6; ++shape) {
                    const std::size_t combination = combination_of({Target::cpu, dtype, layout, options});
                    if (quick && !is_turn(combination, kTurns, shape)) continue;
                    const std::vector<std::string> values = {std::string(to_string(dtype)), std::string(to_string(layout)), options.name,
                                                             std::to_string(shape)};
                    for (std::size_t i = 0; i < values.size(); ++i) {
                        for (std::size_t j = 0; j < i; ++j) found.insert(values[j] + " " + values[i]);
                    }
                }
            }
        }
    }
    return found;
}

TEST(SmallShapesLevels, Quick_HasEveryPairOfDtypeLayoutOptionAndShape) {
    EXPECT_EQ(pairs(true), pairs(false));
    const std::size_t options = all_options().size();
    EXPECT_EQ(pairs(true).size(), 3 * 2 + 3 * options + 3 * 6 + 2 * options + 2 * 6 + options * 6);
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

#include "generator/launch_program.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <string_view>

#include "flce/error.hpp"
#include "tests/support/interpreter.hpp"

namespace flce {
namespace {

using test::interpret;
using test::InterpretedLaunch;

std::string text_of(const Expr& e) { return SharedTexts().of(e); }

CallSlots slots_of(std::int64_t num_tokens) {
    CallSlots slots{};
    slots[static_cast<std::size_t>(Slot::num_tokens)] = num_tokens;
    slots[static_cast<std::size_t>(Slot::workspace)] = 1 << 20;
    return slots;
}

std::uint32_t word(const std::vector<std::byte>& bytes, std::size_t offset) {
    std::uint32_t value = 0;
    std::memcpy(&value, bytes.data() + offset, sizeof(value));
    return value;
}

std::vector<InterpretedLaunch> launches_of(const LaunchProgram& program, const CallSlots& slots) {
    std::vector<InterpretedLaunch> launches;
    interpret(program, slots, [&](const InterpretedLaunch& l) { launches.push_back(l); }, [](std::int64_t, std::int64_t) { FAIL(); });
    return launches;
}

TEST(Expr, Operators_OnConstants_Fold) {
    const Expr e = select(less(3, 4), min(ceil_div(1000, 128), 7) * 4 - 1, 0) + equal(2, 2);
    ASSERT_NE(e.constant(), nullptr);
    EXPECT_EQ(*e.constant(), 28);
    EXPECT_EQ(*round_up(129, 128).constant(), 256);
    EXPECT_EQ(*round_down(129, 128).constant(), 128);
    EXPECT_EQ(*max(-1, 5).constant(), 5);
}

TEST(Expr, Identities_AreFolded) {
    const Expr n = slot(Slot::num_tokens);
    EXPECT_EQ(text_of(n + 0), "num_tokens");
    EXPECT_EQ(text_of(0 + n), "num_tokens");
    EXPECT_EQ(text_of(n - 0), "num_tokens");
    EXPECT_EQ(text_of(n * 1), "num_tokens");
    EXPECT_EQ(text_of(round_up(n, 1)), "num_tokens");
    EXPECT_EQ(*(n * 0).constant(), 0);
    EXPECT_EQ(*(0 * n).constant(), 0);
}

TEST(Expr, Text_IsCLikeWithTheParenthesesThatAreNeeded) {
    const Expr n = slot(Slot::num_tokens);
    EXPECT_EQ(text_of(ceil_div(n, 128) * 4), "(num_tokens + 127) / 128 * 4");
    EXPECT_EQ(text_of(n - (n - 3)), "num_tokens - (num_tokens - 3)");
    EXPECT_EQ(text_of(n * (n * 2)), "num_tokens * (num_tokens * 2)");
    EXPECT_EQ(text_of(select(equal(slot(Slot::grad_bias), 0), min(n, 7), variable(2) + 1)), "grad_bias == 0 ? min(num_tokens, 7) : i2 + 1");
    EXPECT_EQ(text_of(select(less(n, 4), n, 4) + 1), "(num_tokens < 4 ? num_tokens : 4) + 1");
    SharedTexts texts;
    EXPECT_EQ(texts.of(n - (n - 3)), "num_tokens - (num_tokens - 3)");
    EXPECT_EQ(texts.of((n - 3) * 2), "(num_tokens - 3) * 2");
    EXPECT_TRUE(texts.definitions().empty());
    EXPECT_EQ(text_of(slot(Slot::workspace)), "workspace");
}

TEST(SharedTexts, PartsUsedAgain_AreWrittenOnce) {
    const auto grown = [] {
        Expr e = slot(Slot::num_tokens) + 1;
        for (int i = 0; i < 40; ++i) e = max(e * e, e + 1);  // 2⁴⁰ parts and more, written out
        return e;
    };
    const Expr one = grown();
    const Expr two = grown();
    SharedTexts texts;
    const std::string name = texts.of(one);
    EXPECT_LE(name.size(), SharedTexts::kLongest);
    EXPECT_EQ(texts.of(one * 2), name + " * 2");
    EXPECT_EQ(texts.of(two), name) << "the same, built again";
    EXPECT_LE(texts.definitions().size(), 80U);
    for (const std::string& line : texts.definitions()) EXPECT_LE(line.size(), 3 * SharedTexts::kLongest);
    try {
        (void)evaluate(one, CallSlots{1000});
        ADD_FAILURE() << "a value of 2^400 was accepted";
    } catch (const ArgumentError& error) {
        EXPECT_LE(std::string_view(error.what()).size(), 5 * SharedTexts::kLongest);
    }
    SharedTexts again;
    (void)again.of(two);
    EXPECT_EQ(again.definitions(), texts.definitions());
}

TEST(Expr, Evaluate_AgreesWithTheOperators) {
    for (const std::int64_t count : {0, 1, 127, 128, 129, 100000}) {
        const Expr n = slot(Slot::num_tokens);
        const CallSlots slots = slots_of(count);
        EXPECT_EQ(evaluate(ceil_div(n, 128), slots), (count + 127) / 128);
        EXPECT_EQ(evaluate(round_down(n, 64), slots), count / 64 * 64);
        EXPECT_EQ(evaluate(max(n, 100) - min(n, 100), slots), std::abs(count - 100));
        EXPECT_EQ(evaluate(select(less(n, 128), n, 128), slots), std::min<std::int64_t>(count, 128));
        EXPECT_EQ(evaluate(equal(n, 128), slots), count == 128 ? 1 : 0);
        EXPECT_EQ(evaluate(variable(1) * n, slots, {5, 3}), 3 * count);
    }
}

TEST(Expr, LogicalForms_AreTheirTruthTables) {
    const Expr a = slot(Slot::num_tokens);
    const Expr b = slot(Slot::hidden);
    for (const bool left : {false, true}) {
        for (const bool right : {false, true}) {
            CallSlots slots{};
            slots[static_cast<std::size_t>(Slot::num_tokens)] = left;
            slots[static_cast<std::size_t>(Slot::hidden)] = right;
            EXPECT_EQ(evaluate(a && b, slots), left && right);
            EXPECT_EQ(evaluate(a || b, slots), left || right);
            EXPECT_EQ(evaluate(and_not(a, b), slots), left && !right);
            EXPECT_EQ(evaluate(!a, slots), !left);
            EXPECT_EQ(*(Expr(left) && Expr(right)).constant(), left && right) << "constants fold";
            EXPECT_EQ(*(Expr(left) || Expr(right)).constant(), left || right);
            EXPECT_EQ(*and_not(left, right).constant(), left && !right);
            EXPECT_EQ(*(!Expr(left)).constant(), !left);
        }
    }
}

TEST(Expr, Evaluate_OutsideSixtyFourBits_Throws) {
    const Expr n = slot(Slot::num_tokens);
    EXPECT_EQ(evaluate(n * 8, slots_of(INT64_MAX / 8)), INT64_MAX / 8 * 8);
    EXPECT_THROW((void)evaluate(n * 8, slots_of(INT64_MAX / 8 + 1)), ArgumentError);
    EXPECT_THROW((void)evaluate(n + 1, slots_of(INT64_MAX)), ArgumentError);
    EXPECT_THROW((void)evaluate(floor_div(5, n), slots_of(0)), ArgumentError);
    EXPECT_THROW((void)evaluate(floor_div(Expr(5), Expr(0)), slots_of(0)), ArgumentError);
}

TEST(Expr, Evaluate_LeavesOutTheBranchNotTaken) {
    const Expr n = slot(Slot::num_tokens);
    EXPECT_EQ(evaluate(select(equal(n, 0), 7, floor_div(100, n)), slots_of(0)), 7);
    EXPECT_EQ(evaluate(select(equal(n, 0), 7, floor_div(100, n)), slots_of(20)), 5);
}

TEST(Expr, FloatBits_AreTheBitsOfTheFloat) {
    EXPECT_EQ(*float_bits(1.0F).constant(), 0x3f800000);
    EXPECT_EQ(*float_bits(-2.0F).constant(), 0xc0000000LL);
}

TEST(LaunchProgram, Interpret_LoopsBranchesAndFields) {
    const Expr n = slot(Slot::num_tokens);
    Launch launch{.kernel = 3, .grid = {ceil_div(n, 100), 2, 1}, .param_bytes = 24};
    launch.params = {{.offset = 0, .bytes = 8, .value = variable(0) * 7}, {.offset = 12, .bytes = 4, .value = float_bits(-1.5F)}};
    LaunchProgram program{.variable_count = 1};
    program.body.push_back({Loop{.variable = 0, .count = 2, .body = {{If{.condition = less(0, n), .then = {{launch}}}}}}});

    const auto launches = launches_of(program, slots_of(250));
    ASSERT_EQ(launches.size(), 2U);
    EXPECT_EQ(launches[1].kernel, 3);
    EXPECT_EQ(launches[1].grid, (std::array<std::int64_t, 3>{3, 2, 1}));
    ASSERT_EQ(launches[1].params.size(), 24U);
    EXPECT_EQ(word(launches[1].params, 0), 7U);
    EXPECT_EQ(word(launches[1].params, 8), 0U) << "fields not named are zero";
    EXPECT_EQ(word(launches[1].params, 12), 0xbfc00000U);
    EXPECT_EQ(word(launches[1].params, 16), 0U);
    EXPECT_TRUE(launches_of(program, slots_of(0)).empty());
}

TEST(LaunchProgram, Interpret_LeavesOutEmptyGridsAndMemsets) {
    const Expr n = slot(Slot::num_tokens);
    LaunchProgram program;
    program.body.push_back({Launch{.grid = {1, n, 1}}});
    program.body.push_back({MemsetZero{slot(Slot::workspace) + 256, n * 4}});
    auto memsets_for = [&](std::int64_t tokens) {
        std::vector<std::pair<std::int64_t, std::int64_t>> memsets;
        int launches = 0;
        interpret(
            program, slots_of(tokens), [&](const auto&) { ++launches; },
            [&](auto address, auto bytes) { memsets.push_back({address, bytes}); });
        EXPECT_EQ(launches, tokens > 0 ? 1 : 0);
        return memsets;
    };
    EXPECT_TRUE(memsets_for(0).empty());
    EXPECT_EQ(memsets_for(10), (std::vector<std::pair<std::int64_t, std::int64_t>>{{(1 << 20) + 256, 40}}));
}

TEST(LaunchProgram, Interpret_FieldOutsideItsBlock_Throws) {
    LaunchProgram program;
    program.body.push_back({Launch{.param_bytes = 8, .params = {{.offset = 4, .bytes = 8, .value = 1}}}});
    EXPECT_THROW(launches_of(program, slots_of(1)), InternalError);
}

}  // namespace
}  // namespace flce

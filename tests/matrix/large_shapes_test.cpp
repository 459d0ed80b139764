// Vocabularies of real models against sampled oracles: every combination of sizes that the device can afford, dtype, layout and options
// taking turns so that each meets each size.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/support/kernel_run.hpp"
#include "tests/support/level.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

struct LargeCase {
    Target target = Target::cpu;
    std::int64_t n = 0, d = 0, v = 0;
    DType dtype = DType::bf16;
    WeightLayout layout = WeightLayout::vocab_major;
    OptionSet options{};
    Reduction reduction = Reduction::mean;
    friend std::ostream& operator<<(std::ostream& out, const LargeCase& c) { return out << c.n << "x" << c.d << "x" << c.v; }
};

bool affordable(Target target, std::int64_t n, std::int64_t d, std::int64_t v) {
    const double products = double(n) * double(d) * double(v);
    if (target == Target::gpu) return products <= 1.7e12;
    if (kSanitized) return products <= 3e7 && double(d) * double(v) <= 2e7;
    // The widest weights cost more to make than to use: once is enough.
    if (d * v > 2e8) return n == 3;
    return products <= 1.7e9 || (n == 4096 && d == 8);
}

std::vector<LargeCase> large_cases(Target target) {
    std::vector<LargeCase> cases;
    const auto& options = all_options();
    std::size_t turn = 0;
    for (std::int64_t v : {50257, 151936}) {
        for (std::int64_t d : {8, 64, 200, 2560}) {
            for (std::int64_t n : {0, 1, 3, 127, 128, 4096}) {
                ++turn;
                if (!affordable(target, n, d, v)) continue;
                // Every size meets every dtype and layout: what follows moves on by one from row to row.
                const std::size_t row = turn / 6;
                cases.push_back({target, n, d, v, kDtypes[(turn + row) % 3], kLayouts[(turn / 2 + row) % 2],
                                 options[turn * 7 % options.size()], static_cast<Reduction>((turn / 2 + row / 2) % 3)});
            }
        }
    }
    // The whole output layer of a real model in every dtype, plain and with everything.
    for (DType dtype : kDtypes) {
        if (target == Target::gpu) {
            cases.push_back({target, 4096, 2560, 151936, dtype, WeightLayout::vocab_major, loss_options().front(), Reduction::mean});
            cases.push_back({target, 4096, 2560, 151936, dtype, WeightLayout::hidden_major, memory_options().back(), Reduction::none});
        } else if (!kSanitized) {
            cases.push_back({target, 128, 64, 50257, dtype, WeightLayout::vocab_major, loss_options().front(), Reduction::mean});
            cases.push_back({target, 127, 64, 50257, dtype, WeightLayout::hidden_major, memory_options().back(), Reduction::none});
        }
    }
    return cases;
}

class LargeShapes : public testing::TestWithParam<LargeCase> {};

TEST_P(LargeShapes, Sampled_WithinBounds) {
    const LargeCase& c = GetParam();
    FLCE_REQUIRE_TARGET(c.target);
    // quick has one of the largest weights, which take seconds to make
    if (c.target == Target::cpu && c.d == 2560 && (c.n != 3 || c.v != 50257)) FLCE_FROM_LEVEL(Level::full);
    const auto kernel = kernel_on(c.target, make_spec(c.d, c.v, c.dtype, c.layout, c.options));
    ProblemOptions o;
    o.num_tokens = c.n;
    o.reduction = c.reduction;
    const Problem problem = make_problem(kernel->spec(), o);
    EXPECT_TRUE(run_and_judge(kernel, problem, 1e8));
    EXPECT_LE(kernel->workspace_bytes(c.n), std::size_t(kDefaultScratchBytes + 4 * c.n * c.d));
}

std::string name_of(const testing::TestParamInfo<LargeCase>& info) {
    const LargeCase& c = info.param;
    return fmt::format("N{}_D{}_V{}_{}_{}_{}_{}", c.n, c.d, c.v, to_string(c.dtype), to_string(c.layout), c.options.name, info.index);
}

INSTANTIATE_TEST_SUITE_P(Cpu, LargeShapes, testing::ValuesIn(large_cases(Target::cpu)), name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, LargeShapes, testing::ValuesIn(large_cases(Target::gpu)), name_of);

// N·V = 2.5·10⁹: offsets of [N, V] in 32 bits would wrap.
TEST(GpuHugeShapes, TokensTimesVocabPast32Bits_WithinBounds) {
    FLCE_REQUIRE_TARGET(Target::gpu);
    for (DType dtype : {DType::bf16, DType::fp32}) {
        const auto kernel = kernel_on(Target::gpu, make_spec(64, 151936, dtype, WeightLayout::vocab_major, loss_options().front()));
        ProblemOptions o;
        o.num_tokens = 16400;
        EXPECT_TRUE(run_and_judge(kernel, make_problem(kernel->spec(), o), 2e8));
    }
}

// N·D and V·D beyond 2³¹ bytes as well.
TEST(GpuHugeShapes, HiddenPast32Bits_WithinBounds) {
    FLCE_REQUIRE_TARGET(Target::gpu);
    const auto kernel = kernel_on(Target::gpu, make_spec(2560, 127, DType::fp32, WeightLayout::hidden_major, loss_options().front()));
    ProblemOptions o;
    o.num_tokens = 210000;
    EXPECT_TRUE(run_and_judge(kernel, make_problem(kernel->spec(), o), 2e8));
}

}  // namespace
}  // namespace flce::test

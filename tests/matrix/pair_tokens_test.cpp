// Numbers of tokens on both sides of where forward's kernels of Hopper change, every option: 129 to 192 tokens are one tile, of which the
// blocks of a cluster have tiles of the vocabulary beside each other. At vocabularies of whole, ragged, even and odd numbers of tiles.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

using Parameters = std::tuple<DType, WeightLayout, OptionSet>;

class PairTokens : public testing::TestWithParam<Parameters> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(Target::gpu); }

    static std::shared_ptr<const Kernel> kernel(std::int64_t hidden_size, std::int64_t vocab_size) {
        const auto& [dtype, layout, options] = GetParam();
        Spec spec = make_spec(hidden_size, vocab_size, dtype, layout, options);
        if (layout == WeightLayout::hidden_major) spec.padded_vocab_size = (vocab_size + 15) / 8 * 8;  // rows of whole 16 bytes
        return kernel_on(Target::gpu, spec);
    }
    /// One tile, or two and one of a single column: the last pair of an odd number has one tile.
    static std::shared_ptr<const Kernel> kernel_of_few_tiles() {
        return kernel(520, std::get<1>(GetParam()) == WeightLayout::vocab_major ? 257 : 100);
    }
    /// Every cluster has several pairs, the last of 313 tiles one tile of 65 columns.
    static std::shared_ptr<const Kernel> kernel_of_many_tiles() { return kernel(200, 40'001); }

    static void all_tokens(const std::shared_ptr<const Kernel>& k, double work) {
        int turn = 0;
        for (const std::int64_t n : {129, 130, 144, 145, 191, 192, 193, 255}) {
            ProblemOptions o{.num_tokens = n, .seed = static_cast<std::uint64_t>(60 + turn)};
            o.ignored = turn % 3 == 1 ? Ignored::none : Ignored::some;
            o.reduction = static_cast<Reduction>(turn++ % 3);
            EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), o), work)) << n << " tokens";
        }
    }
};

TEST_P(PairTokens, FewTiles_WithinBounds) { all_tokens(kernel_of_few_tiles(), 4e8); }

TEST_P(PairTokens, ManyTiles_WithinBounds) { all_tokens(kernel_of_many_tiles(), 2e7); }

TEST_P(PairTokens, LogitsOfAnySize_WithinBounds) {
    const auto k = kernel_of_few_tiles();
    for (const Logits logits : {Logits::saturated, Logits::huge}) {
        EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), {.num_tokens = 150, .logits = logits, .seed = 70})));
    }
}

TEST_P(PairTokens, FiftyTimes_SameBits) {
    const auto k = kernel_of_many_tiles();
    const Problem problem = make_problem(k->spec(), {.num_tokens = 161, .seed = 71});
    const Problem other = make_problem(k->spec(), {.num_tokens = 300, .seed = 72});
    KernelRun run(k, problem);
    KernelRun beside(k, other);
    run.forward();
    const auto expected = run.bytes();
    for (int i = 0; i < 50; ++i) {
        beside.forward();
        run.forward();
        ASSERT_EQ(run.bytes() == expected, true) << i;
    }
    EXPECT_EQ(run.violations(), "");
}

std::string name_of(const testing::TestParamInfo<Parameters>& info) {
    const auto& [dtype, layout, options] = info.param;
    return std::string(to_string(dtype)) + "_" + std::string(to_string(layout)) + "_" + options.name;
}

INSTANTIATE_TEST_SUITE_P(Gpu, PairTokens,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16), testing::ValuesIn(kLayouts),
                                          testing::ValuesIn(all_options())),
                         name_of);

}  // namespace
}  // namespace flce::test

// grad_hidden of retained exponentials where its last tiles are made by several clusters each (TailParts): by Hopper's path, on a real GPU.
// The generic path makes each by one block.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

struct Case {
    const char* name;
    void (*apply)(Spec&);
};

class RetainedTails : public testing::TestWithParam<std::tuple<Case, PlanPath>> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(Target::gpu);
        if (plan_on_path(spec(), path()).empty()) GTEST_SKIP() << "this GPU has no plan of " << to_string(path());
        if (kernel()->plan().strategy != Strategy::retain) GTEST_SKIP() << "these kernels retain nothing: " << kernel()->plan().text();
    }
    /// Five tiles across, and a vocabulary of 79 slices: two parts of 40 and 39, or more where parts of the sum have rows of their own.
    static Spec spec() {
        Spec spec{.hidden_size = 1032, .vocab_size = 5001};
        std::get<0>(GetParam()).apply(spec);
        return spec;
    }
    static PlanPath path() { return std::get<1>(GetParam()); }
    static std::shared_ptr<const Kernel> kernel() { return kernel_on(Target::gpu, spec(), plan_on_path(spec(), path())); }
};

TEST_P(RetainedTails, AnyNumberOfTokens_WithinBounds) {
    const auto k = kernel();
    for (const std::int64_t n : {16, 129, 300, 700, 1500, 3300}) {
        ProblemOptions o{.num_tokens = n, .seed = 31};
        o.ignored = n == 1500 ? Ignored::none : Ignored::some;
        EXPECT_TRUE(run_and_judge(k, make_problem(k->spec(), o))) << n;
    }
}

TEST_P(RetainedTails, FiftyTimes_SameBits) {
    const auto k = kernel();
    const Problem problem = make_problem(k->spec(), {.num_tokens = 700, .seed = 32});
    const Problem other = make_problem(k->spec(), {.num_tokens = 300, .seed = 33});
    KernelRun run(k, problem);
    KernelRun beside(k, other);
    run.retain(RetainedPlace::own, k->retained_bytes(700));
    beside.retain(RetainedPlace::own, k->retained_bytes(300));
    run.forward();
    beside.forward();
    run.backward();
    const auto expected = run.bytes();
    for (int i = 0; i < 50; ++i) {
        beside.backward();
        run.backward();
        ASSERT_EQ(run.bytes() == expected, true) << i;
    }
    EXPECT_EQ(run.violations(), "");
}

const Case kCases[] = {{"plain", [](Spec&) {}},
                       {"label_smoothing", [](Spec& s) { s.label_smoothing = 0.1; }},
                       {"softcap_bias",
                        [](Spec& s) {
                            s.softcap = 20;
                            s.bias = true;
                        }},
                       {"hidden_major", [](Spec& s) {
                            s.layout = WeightLayout::hidden_major;
                            s.padded_vocab_size = 5008;
                        }}};

INSTANTIATE_TEST_SUITE_P(Gpu, RetainedTails,
                         testing::Combine(testing::ValuesIn(kCases), testing::Values(PlanPath::cuda_sm90a, PlanPath::cuda_sm80)),
                         [](const auto& info) {
                             return std::string(std::get<0>(info.param).name) + "_" + std::string(to_string(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace flce::test

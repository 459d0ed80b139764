// An FP8 head on a GPU, against its truth: several stretches and chunks, parts that are retained, and rows whose logits are far above what
// is known of them.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/planner.hpp"
#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kDepth = 40;  // the truth multiplies every token by every class
constexpr std::int64_t kVocab = 2571;

class Fp8Gpu : public testing::TestWithParam<std::tuple<PlanPath, const char*>> {
protected:
    void SetUp() override {
        FLCE_REQUIRE_TARGET(Target::gpu);
        if (plan_on_path(spec(), path()).empty()) GTEST_SKIP() << "this GPU has no plan of " << to_string(path());
    }
    static PlanPath path() { return std::get<0>(GetParam()); }
    static Spec spec() { return parse_spec("D=40,V=2571,fp8" + std::string(std::get<1>(GetParam()))).normalized(); }
    static std::shared_ptr<const Kernel> kernel() { return kernel_on(Target::gpu, spec(), plan_on_path(spec(), path())); }
    /// A kernel with the least scratch and the narrowest chunks.
    static std::shared_ptr<const Kernel> narrow_kernel() {
        Plan plan = path_plans(spec(), device_of(Target::gpu), path()).front();
        plan.vocab_chunk = path() == PlanPath::cuda_fp8 ? 384 : 768;
        plan.scratch_bytes = cuda_path(path()).least_scratch_bytes(spec(), plan);
        return kernel_on(Target::gpu, spec(), plan.text());
    }
    /// `row` of the weight becomes `factor` times hidden state `token`: that token's logit there is factor · |hidden|².
    static void point_at(Problem& p, std::int64_t row, std::int64_t token, float factor) {
        for (std::int64_t k = 0; k < kDepth; ++k) {
            p.weight[static_cast<std::size_t>(row * kDepth + k)] =
                rounded(factor * p.hidden[static_cast<std::size_t>(token * kDepth + k)], DType::bf16);
        }
    }
};

TEST_P(Fp8Gpu, AnyNumberOfTokens_WithinBounds) {
    for (const std::int64_t n : {0, 1, 15, 140})
        EXPECT_TRUE(run_and_judge(kernel(), make_problem(spec(), {.num_tokens = n, .seed = 5}))) << n;
}

TEST_P(Fp8Gpu, SeveralStretchesAndChunks_WithinBounds) {
    EXPECT_TRUE(run_and_judge(narrow_kernel(), make_problem(spec(), {.num_tokens = 140, .seed = 6})));
}

// Forward knows the first classes and the target when it chooses a row's power; classes behind them may be far above.
TEST_P(Fp8Gpu, LogitsFarAboveTheFirst_WithinBounds) {
    for (const float factor : {0.4F, 1.5F, 6.F}) {  // some 16, 60 and 240 nats
        Problem p = make_problem(spec(), {.num_tokens = 140, .seed = 7});
        point_at(p, 1700, 3, factor);
        point_at(p, kVocab - 1, 133, factor);
        EXPECT_TRUE(run_and_judge(kernel(), p)) << factor;
    }
}

TEST_P(Fp8Gpu, ManyTokensOfOneClass_WithinBounds) {
    Problem p = make_problem(spec(), {.num_tokens = 140, .seed = 8});
    for (std::size_t i = 0; i < 60; ++i) p.target[i * 2] = 77;
    EXPECT_TRUE(run_and_judge(kernel(), p));
}

INSTANTIATE_TEST_SUITE_P(
    Specs, Fp8Gpu,
    testing::Combine(testing::Values(PlanPath::cuda_fp8, PlanPath::cuda_fp8_sm89),
                     testing::Values("", ",fp8_dlogits=e4m3", ",tied,temperature", ",bias,grad_weight_dtype=fp32", ",softcap=20",
                                     ",fp8_hidden_scale=0.04,fp8_weight_scale=0.003", ",label_smoothing=0.1",
                                     ",label_smoothing=0.1,class_weight,bias,temperature,tied",
                                     ",layout=hidden_major,padded_vocab_size=2576",
                                     ",layout=hidden_major,padded_vocab_size=2576,bias,class_weight,label_smoothing=0.1",
                                     ",layout=hidden_major,padded_vocab_size=2584,grad_weight_mode=accumulate,temperature",
                                     ",layout=hidden_major,padded_vocab_size=2576,fp8_dlogits=e4m3,grad_weight_dtype=fp32,"
                                     "grad_weight_mode=accumulate,label_smoothing=0.1,fp8_hidden_scale=0.04,fp8_weight_scale=0.003")),
    [](const auto& info) { return std::string(to_string(std::get<0>(info.param))) + "_" + std::to_string(info.index); });

}  // namespace
}  // namespace flce::test

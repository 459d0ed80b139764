// A weight of codes and scales: results are those of the dequantised weight, rounded to the dtype.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "tests/support/kernel_run.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/option_sets.hpp"
#include "tests/support/sharded_run.hpp"
#include "tests/support/targets.hpp"

namespace flce::test {
namespace {

struct Format {
    const char* name;
    WeightFormat format;
    int block;
};
void PrintTo(const Format& format, std::ostream* out) { *out << format.name; }
constexpr Format kFormats[] = {
    {"e4m3", WeightFormat::e4m3, 0}, {"e4m3_blocks", WeightFormat::e4m3, 128}, {"nvfp4", WeightFormat::nvfp4, 0}};

class QuantizedWeight : public testing::TestWithParam<std::tuple<Target, DType, Format>> {
protected:
    void SetUp() override { FLCE_REQUIRE_TARGET(target()); }
    static Target target() { return std::get<0>(GetParam()); }
    static const Format& format() { return std::get<2>(GetParam()); }
    static Spec spec(std::int64_t hidden_size, std::int64_t vocab_size, void (*option)(Spec&)) {
        Spec s = make_spec(hidden_size, vocab_size, std::get<1>(GetParam()), WeightLayout::vocab_major, {"", option});
        s.weight_format = format().format;
        s.weight_block = format().block;
        return s.normalized();
    }
    static void plain(Spec&) {}
    static void everything(Spec& s) {
        apply_everything(s);
        apply_padding(s);
    }
    /// The planner's first choice with the least power of two of scratch.
    static Plan plan_in_little_scratch(const Spec& spec) {
        for (std::int64_t bytes = kDefaultScratchBytes;; bytes /= 2) {
            try {
                (void)choose_plan(spec, device_of(target()), {.scratch_bytes = bytes / 2});
            } catch (const PlanError&) {
                return choose_plan(spec, device_of(target()), {.scratch_bytes = bytes});
            }
        }
    }
    /// The problem of the dequantised weight, rounded beforehand.
    static Problem of_copy(const Problem& problem) {
        Problem copy = problem;
        copy.spec.weight_format = WeightFormat::numbers;
        copy.spec.weight_block = 0;
        return copy;
    }
};

// 144 columns are whole groups of 16, and one block of 128 and a part of one.
TEST_P(QuantizedWeight, OfEveryNumberOfTokens_WithinBounds) {
    for (void (*const option)(Spec&) : {plain, everything}) {
        const Spec s = spec(144, 1031, option);
        const auto kernel = kernel_on(target(), s);
        for (const std::int64_t n : {0, 1, 100, 300}) {
            EXPECT_TRUE(run_and_judge(kernel, make_problem(s, {.num_tokens = n, .seed = 57}), 2e7)) << n;
        }
    }
}

// Kernels of a GPU read codes in stretches alone.
TEST_P(QuantizedWeight, OfATeacher_WithinBoundsOnACpu) {
    for (void (*const option)(Spec&) : {apply_everything_with_teacher, apply_everything_with_support}) {
        const Spec s = spec(144, 1031, option);
        if (target() == Target::gpu) {
            EXPECT_THROW((void)choose_plan(s, device_of(target())), PlanError);
            continue;
        }
        EXPECT_TRUE(run_and_judge(kernel_on(target(), s), make_problem(s, {.num_tokens = 150, .seed = 58}), 2e7));
    }
}

// A dozen stretches, most of which begin within a block.
TEST_P(QuantizedWeight, ManyStretches_WithinBoundsAndWorkspace) {
    const Spec s = spec(272, kSanitized ? 2063 : 7001, everything);
    const Plan plan = plan_in_little_scratch(s);
    const auto kernel = kernel_on(target(), s, plan.text());
    for (const std::int64_t n : {100, 700}) {
        EXPECT_TRUE(run_and_judge(kernel, make_problem(s, {.num_tokens = n, .seed = 52}), 2e7)) << plan.text();
        EXPECT_LE(kernel->workspace_bytes(n), static_cast<std::size_t>(plan.scratch_bytes + 4 * n * s.hidden_size)) << plan.text();
    }
}

// Given the same statistics, backward makes the gradient of a copy rounded beforehand, to the bit; on a CPU forward does too.
TEST_P(QuantizedWeight, OneChunk_BitsOfADequantizedCopy) {
    const Spec s = spec(144, 1031, plain);
    const std::string plan = choose_plan(s, device_of(target())).text();
    const Problem problem = make_problem(s, {.num_tokens = 400, .seed = 53});
    const Problem copy = of_copy(problem);
    KernelRun run(kernel_on(target(), s, plan), problem);
    KernelRun expected(kernel_on(target(), copy.spec, plan), copy);
    run.forward();
    expected.forward();
    if (target() == Target::cpu) {
        EXPECT_EQ(run.bytes(), expected.bytes());
    }
    expected.backward({.grad_weight = false});
    BackwardArgs args = run.backward_args();
    args.lse = expected.forward_args().lse;
    run.backward();  // marks gradients as written
    run.kernel().backward(args, run.backward_workspace());
    synchronize(run.kernel().device_ref());
    EXPECT_EQ(run.bytes().at("grad_hidden") == expected.bytes().at("grad_hidden"), true) << plan;
}

// Every code, in rows whose scales reach from the dtype's subnormal numbers on.
TEST_P(QuantizedWeight, EveryCode_IsItsNumberTimesItsScale) {
    const Spec s = spec(256, 259, plain);
    Problem problem = make_problem(s, {.num_tokens = 200, .seed = 54});
    const bool nvfp4 = format().format == WeightFormat::nvfp4;
    for (std::size_t i = 0; i < problem.codes.codes.size(); ++i) {
        const std::size_t code = nvfp4 ? i * 7 + i / 128 : i + i / 256;
        problem.codes.codes[i] = std::byte(!nvfp4 && code % 128 == 127 ? 0 : code % 256);
    }
    for (std::size_t i = 0; i < problem.codes.scales.size(); ++i) problem.codes.scales[i] = std::ldexp(1.1F, -7 - static_cast<int>(i % 28));
    for (std::size_t i = 0; i < problem.codes.groups.size(); ++i) problem.codes.groups[i] = std::byte(i % 127);
    problem.codes.tensor_scale = 0x1.3p-11F;
    problem.unrounded_weight = dequantized(s, problem.codes);
    for (std::size_t i = 0; i < problem.weight.size(); ++i) problem.weight[i] = rounded(problem.unrounded_weight[i], s.dtype);
    const auto kernel = kernel_on(target(), s);
    EXPECT_TRUE(run_and_judge(kernel, problem, 4e7));
    if (target() == Target::cpu) return;
    KernelRun run(kernel, problem);
    const Problem copy = of_copy(problem);
    KernelRun expected(kernel_on(target(), copy.spec, kernel->plan().text()), copy);
    for (KernelRun* each : {&run, &expected}) {
        each->forward();
        each->backward({.grad_weight = false});
    }
    EXPECT_EQ(run.bytes().at("lse") == expected.bytes().at("lse"), true);
    EXPECT_EQ(run.bytes().at("grad_hidden") == expected.bytes().at("grad_hidden"), true);
}

TEST_P(QuantizedWeight, NanCodeOrScale_MakesItsClassNan) {
    const Spec s = spec(144, 300, plain);
    Problem problem = make_problem(s, {.num_tokens = 40, .seed = 55});
    if (format().format == WeightFormat::nvfp4) {
        problem.codes.groups[9 * 144 / 16 + 3] = std::byte{0xff};
    } else {
        problem.codes.codes[9 * 144 + 50] = std::byte{0x7f};
    }
    KernelRun run(kernel_on(target(), s), problem);
    run.forward();
    const Layer<float> layer = layer_of(problem);
    const std::vector<float> lse = run.token_floats("lse");
    for (std::int64_t i = 0; i < problem.num_tokens(); ++i) {
        EXPECT_EQ(std::isnan(lse[static_cast<std::size_t>(i)]), layer.valid(i)) << i;
    }
}

// A shard's scales begin with its own first row.
TEST_P(QuantizedWeight, OverShards_WithinBoundsOfTheWholeLayer) {
    if (format().block != 0) GTEST_SKIP() << "blocks of a shard are not the whole layer's";
    const Spec whole = spec(80, 330, everything);
    Spec unpadded = whole;
    unpadded.padded_vocab_size = unpadded.vocab_size;
    const std::vector<std::int64_t> rows{130, 1, 250};
    const auto kernel = kernel_on(target(), shard_spec(unpadded, 250, 250));
    EXPECT_TRUE(
        run_and_judge_shards(kernel, make_problem(unpadded, {.num_tokens = 90, .seed = 56}), shards_of(330, rows), {.grad_weight = false}));
    if (target() == Target::gpu) return;
    for (void (*const option)(Spec&) : {apply_everything_with_teacher, apply_everything_with_support}) {
        const Spec of_teacher = spec(80, 330, option);
        EXPECT_TRUE(run_and_judge_shards(kernel_on(target(), shard_spec(of_teacher, 250, 250)),
                                         make_problem(of_teacher, {.num_tokens = 90, .seed = 59}), shards_of(330, rows),
                                         {.grad_weight = false}));
    }
}

std::string name_of(const testing::TestParamInfo<QuantizedWeight::ParamType>& info) {
    return std::string(to_string(std::get<1>(info.param))) + "_" + std::get<2>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(Cpu, QuantizedWeight,
                         testing::Combine(testing::Values(Target::cpu), testing::Values(DType::bf16, DType::fp16),
                                          testing::ValuesIn(kFormats)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Gpu, QuantizedWeight,
                         testing::Combine(testing::Values(Target::gpu), testing::Values(DType::bf16, DType::fp16),
                                          testing::ValuesIn(kFormats)),
                         name_of);

}  // namespace
}  // namespace flce::test

// An FP8 head in every instruction set, made straight from plans with small blocks; threads, gradients that are asked for, and memory.
#include <gtest/gtest.h>

#include <map>

#include "generator/cpu/code.hpp"
#include "generator/cpu/layout.hpp"
#include "tests/cpu/cpu_test_support.hpp"
#include "tests/support/kernel_run.hpp"

namespace flce::test {
namespace {

class CpuFp8 : public testing::TestWithParam<IsaLevel> {
protected:
    static Spec spec_of(DType dtype, Fp8Operands operands, Fp8Dlogits dlogits, bool everything) {
        Spec spec{.hidden_size = 72, .vocab_size = 403, .dtype = dtype, .grad_weight_dtype = dtype};
        spec.fp8 = operands;
        spec.fp8_dlogits = dlogits;
        if (everything) {
            spec.padded_vocab_size = 416;
            spec.bias = spec.class_weight = spec.class_offset = spec.temperature = true;
            spec.logit_scale = 0.75;
            spec.softcap = 20;
            spec.z_loss = 1e-2;
            spec.outputs = {true, true, true, false};
        }
        return spec.normalized();
    }
};

TEST_P(CpuFp8, EveryDtypeAndForm_WithinBounds) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        for (const bool e4m3 : {false, true}) {
            const Spec spec =
                spec_of(dtype, e4m3 ? Fp8Operands::e4m3 : Fp8Operands::int8, e4m3 ? Fp8Dlogits::e4m3 : Fp8Dlogits::e5m2, !e4m3);
            const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam()));
            for (const std::int64_t tokens : {0, 1, 57}) {
                EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, {.num_tokens = tokens})));
            }
        }
    }
}

// Numbers of 8 bits are exact in bf16, and so are their products in fp32.
TEST_P(CpuFp8, Bf16Pairs_WithinBounds) {
    if (!GetParam().cpu.bf16_dot) GTEST_SKIP() << "no VDPBF16PS";
    for (const Fp8Operands operands : {Fp8Operands::int8, Fp8Operands::e4m3}) {
        const Spec spec = spec_of(DType::bf16, operands, Fp8Dlogits::e5m2, true);
        const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam(), /*bf16_pairs=*/true));
        EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, {.num_tokens = 57})));
    }
}

TEST_P(CpuFp8, AnyNumberOfThreads_TheSameBits) {
    const Spec spec = spec_of(DType::bf16, Fp8Operands::int8, Fp8Dlogits::e5m2, true);
    const Problem problem = make_problem(spec, {.num_tokens = 57});
    std::map<std::string, std::vector<std::byte>> expected;
    for (const int threads : {1, 2, 5}) {
        KernelRun run(kernel_of(GetParam(), spec, tiny_plan(GetParam()), threads), problem);
        for (int repeat = 0; repeat < 2; ++repeat) {
            run.forward();
            run.backward();
            if (expected.empty()) expected = run.bytes();
            EXPECT_TRUE(run.bytes() == expected) << threads << " threads, run " << repeat;
        }
    }
}

/// Expects of each gradient by itself the bits that it has beside the others.
void expect_each_alone(const std::shared_ptr<const Kernel>& kernel, const Problem& problem,
                       const std::map<std::string, std::vector<std::byte>>& expected) {
    for (const Wanted& wanted : {Wanted{true, false, false}, Wanted{false, true, false}, Wanted{false, false, true}}) {
        KernelRun one(kernel, problem);
        one.forward();
        one.backward(wanted);
        const char* name = wanted.grad_hidden ? "grad_hidden" : wanted.grad_weight ? "grad_weight" : "grad_bias";
        EXPECT_TRUE(one.bytes().at(name) == expected.at(name)) << name;
        EXPECT_EQ(one.violations(), "");
    }
}

TEST_P(CpuFp8, AnySubsetOfGradients_TheSameBits) {
    const Spec spec = spec_of(DType::bf16, Fp8Operands::int8, Fp8Dlogits::e5m2, true);
    const Problem problem = make_problem(spec, {.num_tokens = 57});
    const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam()));
    KernelRun all(kernel, problem);
    all.forward();
    all.backward();
    expect_each_alone(kernel, problem, all.bytes());
}

// Label smoothing's sums over all classes and tokens have one order.
TEST_P(CpuFp8, LabelSmoothing_WithinBoundsAndTheSameBits) {
    Spec spec = spec_of(DType::bf16, Fp8Operands::int8, Fp8Dlogits::e5m2, true);
    spec.softcap = 0;
    spec.label_smoothing = 0.15;
    spec.hidden_size = 264;
    const Problem problem = make_problem(spec, {.num_tokens = 57});
    const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam()));
    EXPECT_TRUE(run_and_judge(kernel, problem));
    KernelRun all(kernel, problem);
    all.forward();
    all.backward();
    const auto expected = all.bytes();
    KernelRun threads(kernel_of(GetParam(), spec, tiny_plan(GetParam()), 5), problem);
    threads.forward();
    threads.backward();
    EXPECT_TRUE(threads.bytes() == expected);
    expect_each_alone(kernel, problem, expected);
}

// A class's codes are of its own numbers, wherever they lie.
TEST_P(CpuFp8, EitherLayout_TheSameBits) {
    for (const bool e4m3 : {false, true}) {
        for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
            Spec spec = spec_of(dtype, e4m3 ? Fp8Operands::e4m3 : Fp8Operands::int8, Fp8Dlogits::e5m2, true);
            if (e4m3) {
                spec.softcap = 0;
                spec.label_smoothing = 0.15;
                spec.grad_weight_mode = GradMode::accumulate;
            }
            Problem problem = make_problem(spec, {.num_tokens = 57});
            std::fill_n(problem.weight.begin() + 7 * 72, 72, 0.F);
            std::fill_n(problem.weight.begin() + 9 * 72, 3, 1e-40F);  // below fp32's normal numbers
            KernelOutputs of_layout[2];
            for (const bool hidden_major : {false, true}) {
                problem.spec.layout = hidden_major ? WeightLayout::hidden_major : WeightLayout::vocab_major;
                KernelRun run(kernel_of(GetParam(), problem.spec, tiny_plan(GetParam())), problem);
                run.forward();
                run.backward();
                of_layout[hidden_major ? 1 : 0] = run.outputs(select_all(problem));
                EXPECT_EQ(run.violations(), "");
            }
            for (auto KernelOutputs::* each : {&KernelOutputs::loss, &KernelOutputs::lse, &KernelOutputs::logprobs,
                                               &KernelOutputs::grad_hidden, &KernelOutputs::grad_weight, &KernelOutputs::grad_bias}) {
                EXPECT_FALSE((of_layout[0].*each).empty());
                EXPECT_TRUE(of_layout[0].*each == of_layout[1].*each) << spec.text();
            }
        }
    }
}

TEST_P(CpuFp8, GivenScales_WithinBoundsAndNoOtherMachineCode) {
    for (const Fp8Operands operands : {Fp8Operands::int8, Fp8Operands::e4m3}) {
        const Spec dynamic = spec_of(DType::bf16, operands, Fp8Dlogits::e5m2, true);
        const double most = operands == Fp8Operands::int8 ? 127 : 448;
        for (const double reach : {1.0, 8.0}) {  // hidden states have a deviation of 2
            Spec spec = dynamic;
            spec.fp8_hidden_scale = reach / most;
            spec.fp8_weight_scale = reach / 10 / most;
            const Plan plan = tiny_plan(GetParam());
            EXPECT_EQ(cpu_code_identity(spec, GetParam().cpu, plan.cpu), cpu_code_identity(dynamic, GetParam().cpu, plan.cpu));
            EXPECT_TRUE(run_and_judge(kernel_of(GetParam(), spec, plan), make_problem(spec, {.num_tokens = 57}))) << reach;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Isa, CpuFp8, testing::ValuesIn(isa_levels()), isa_name);

// The bound holds with fp8: the CPU backend copies neither the weight nor hidden states to 8 bits as a whole.
TEST(CpuFp8Layout, AnyNumberOfTokens_StaysWithinTheBound) {
    const IsaLevel isa{"x86-64-v4", {}, 12, 32};
    Plan plan = tiny_plan(isa);
    plan.cpu = {.vector_bits = 512, .micro_m = 12, .micro_n = 32, .block_m = 516, .block_n = 192, .block_k = 384};
    for (const std::int64_t d : {8, 2048, 8192}) {
        for (const std::int64_t v : {2, 50257, 256000}) {
            Spec spec{.hidden_size = d, .vocab_size = v};
            spec.fp8 = Fp8Operands::int8;
            spec.label_smoothing = v == 50257 ? 0.1 : 0;
            spec = spec.normalized();
            for (const std::int64_t n : {0L, 1L, 1000L, 100'000L, 5'000'000'000L}) {
                for (const int threads : {1, 2, 500}) {
                    EXPECT_LE(cpu_forward_layout(spec, plan, threads, n, v).bytes, plan.scratch_bytes);
                    EXPECT_LE(cpu_backward_layout(spec, plan, threads, n, v).bytes, plan.scratch_bytes + 4 * n * d);
                }
            }
        }
    }
}

}  // namespace
}  // namespace flce::test

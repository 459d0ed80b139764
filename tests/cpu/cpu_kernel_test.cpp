// Whole kernels, made straight from plans whose blocks are small enough that every loop runs several times, against the fp64 oracle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <thread>

#include "flce/error.hpp"
#include "generator/cpu/layout.hpp"
#include "tests/cpu/cpu_test_support.hpp"
#include "tests/support/kernel_run.hpp"

namespace flce::test {
namespace {

class CpuKernelTest : public testing::TestWithParam<IsaLevel> {
protected:
    static Spec spec_of(DType dtype, WeightLayout layout, bool everything) {
        Spec spec{.hidden_size = 72, .vocab_size = 403, .dtype = dtype, .layout = layout, .grad_weight_dtype = dtype};
        if (everything) {
            spec.padded_vocab_size = 416;
            spec.bias = spec.class_weight = true;
            spec.logit_scale = 0.75;
            spec.softcap = 20;
            spec.label_smoothing = 0.1;
            spec.z_loss = 1e-2;
            spec.outputs = {true, true, true, true};
        }
        return spec.normalized();
    }
};

TEST_P(CpuKernelTest, EveryDtypeAndLayout_WithinBounds) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
        for (const WeightLayout layout : {WeightLayout::vocab_major, WeightLayout::hidden_major}) {
            for (const bool everything : {false, true}) {
                const auto kernel = kernel_of(GetParam(), spec_of(dtype, layout, everything), tiny_plan(GetParam()));
                for (const std::int64_t tokens : {0, 1, 57}) {
                    const Problem problem = make_problem(kernel->spec(), {.num_tokens = tokens});
                    EXPECT_TRUE(run_and_judge(kernel, problem)) << kernel->spec().text() << " N=" << tokens;
                }
            }
        }
    }
}

TEST_P(CpuKernelTest, SmallestScratch_WalksRowsInBlocksWithinBounds) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const GradMode mode : {GradMode::write, GradMode::accumulate}) {
            Spec spec = spec_of(dtype, WeightLayout::vocab_major, true);
            spec.grad_weight_mode = mode;
            Plan plan = tiny_plan(GetParam());
            plan.scratch_bytes = cpu_least_scratch_bytes(spec, plan);
            const auto kernel = kernel_of(GetParam(), spec, plan);
            constexpr std::int64_t kTokens = 400;
            EXPECT_GT(cpu_backward_layout(spec, plan, 2, kTokens, spec.vocab_size).row_blocks.count, 1);
            EXPECT_GT(cpu_forward_layout(spec, plan, 2, kTokens, spec.vocab_size).row_blocks.count, 1);
            EXPECT_LE(kernel->workspace_bytes(kTokens), plan.scratch_bytes + 4 * kTokens * spec.hidden_size);
            EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, {.num_tokens = kTokens}))) << spec.text();
        }
    }
}

TEST_P(CpuKernelTest, Bf16Pairs_WithinBounds) {
    for (const WeightLayout layout : {WeightLayout::vocab_major, WeightLayout::hidden_major}) {
        const auto kernel = kernel_of(GetParam(), spec_of(DType::bf16, layout, true), tiny_plan(GetParam(), /*bf16_pairs=*/true));
        for (const std::int64_t tokens : {1, 57}) {
            EXPECT_TRUE(run_and_judge(kernel, make_problem(kernel->spec(), {.num_tokens = tokens}))) << kernel->spec().text();
        }
    }
}

TEST_P(CpuKernelTest, SaturatedLogits_WithinBounds) {
    for (const double softcap : {0.0, 30.0}) {
        Spec spec = spec_of(DType::fp32, WeightLayout::vocab_major, false);
        spec.softcap = softcap;
        const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam()));
        EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, {.num_tokens = 40, .logits = Logits::saturated})));
    }
}

TEST_P(CpuKernelTest, AnyNumberOfThreads_TheSameBits) {
    const Spec spec = spec_of(DType::bf16, WeightLayout::vocab_major, true);
    const Problem problem = make_problem(spec, {.num_tokens = 57});
    std::map<std::string, std::vector<std::byte>> expected;
    for (const int threads : {1, 2, 3, 7}) {
        KernelRun run(kernel_of(GetParam(), spec, tiny_plan(GetParam()), threads), problem);
        for (int repeat = 0; repeat < 3; ++repeat) {
            run.forward();
            run.backward();
            if (expected.empty()) expected = run.bytes();
            EXPECT_TRUE(run.bytes() == expected) << threads << " threads, run " << repeat;
        }
    }
}

TEST_P(CpuKernelTest, AnySubsetOfGradients_TheSameBits) {
    const Spec spec = spec_of(DType::fp32, WeightLayout::hidden_major, true);
    const Problem problem = make_problem(spec, {.num_tokens = 57});
    const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam()));
    KernelRun all(kernel, problem);
    all.forward();
    all.backward();
    const auto expected = all.bytes();
    for (const Wanted& wanted : {Wanted{true, false, false}, Wanted{false, true, false}, Wanted{false, false, true}}) {
        KernelRun one(kernel, problem);
        one.forward();
        one.backward(wanted);
        const auto got = one.bytes();
        const char* name = wanted.grad_hidden ? "grad_hidden" : wanted.grad_weight ? "grad_weight" : "grad_bias";
        EXPECT_TRUE(got.at(name) == expected.at(name)) << name;
        EXPECT_EQ(one.violations(), "");
    }
}

TEST_P(CpuKernelTest, OneKernelOnManyThreads_TheSameBits) {
    const Spec spec = spec_of(DType::fp32, WeightLayout::vocab_major, true);
    const Problem problem = make_problem(spec, {.num_tokens = 57});
    const auto kernel = kernel_of(GetParam(), spec, tiny_plan(GetParam()));
    std::vector<std::unique_ptr<KernelRun>> runs;
    for (int i = 0; i < 4; ++i) runs.push_back(std::make_unique<KernelRun>(kernel, problem));
    {
        std::vector<std::jthread> threads;
        for (auto& run : runs) {
            threads.emplace_back([&run] {
                for (int repeat = 0; repeat < 3; ++repeat) {
                    run->forward();
                    run->backward();
                }
            });
        }
    }
    for (const auto& run : runs) EXPECT_TRUE(run->bytes() == runs[0]->bytes());
}

INSTANTIATE_TEST_SUITE_P(Isa, CpuKernelTest, testing::ValuesIn(isa_levels()), isa_name);

/// A call in a child that was forked beside a call. The child's exit status is 0 where its call had the `expected` bits.
[[noreturn]] void compute_in_child(const std::shared_ptr<const Kernel>& kernel, const Problem& problem,
                                   const std::map<std::string, std::vector<std::byte>>& expected) {
    ::alarm(60);  // a child that hangs is ended by a signal
    KernelRun run(kernel, problem);
    run.forward();
    run.backward();
    ::_exit(run.bytes() == expected ? 0 : 1);
}

TEST(CpuFork, WhileAnotherThreadIsInACall_ChildComputesTheSameBits) {
#if defined(__SANITIZE_ADDRESS__)
    GTEST_SKIP() << "AddressSanitizer's list of threads may be locked at the fork, and a child that starts threads then waits for ever";
#endif
    const IsaLevel isa = isa_levels().back();
    const auto kernel = kernel_of(isa, Spec{.hidden_size = 256, .vocab_size = 5000}, tiny_plan(isa));
    const Problem problem = make_problem(kernel->spec(), {.num_tokens = 150});
    KernelRun before(kernel, problem);
    before.forward();
    before.backward();
    const auto expected = before.bytes();
    std::atomic<bool> stop{false};
    std::thread caller([&] {
        KernelRun run(kernel, problem);
        while (!stop) {
            run.forward();
            run.backward();
        }
    });
    for (int i = 0; i < 6 && !testing::Test::HasFailure(); ++i) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) compute_in_child(kernel, problem, expected);
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
        EXPECT_EQ(WEXITSTATUS(status), 0);
    }
    stop = true;
    caller.join();
}

class CpuCache : public testing::Test {
protected:
    CpuCache() : directory_(std::filesystem::temp_directory_path() / ("flce-cpu-cache-" + std::to_string(getpid()))) {}
    ~CpuCache() override { std::filesystem::remove_all(directory_); }
    std::filesystem::path directory_;
};

TEST_F(CpuCache, SecondCache_LoadsTheObjectWithoutCompiling) {
    const IsaLevel isa = isa_levels().back();
    const Spec spec = Spec{.hidden_size = 64, .vocab_size = 100, .dtype = DType::fp32, .grad_weight_dtype = DType::fp32}.normalized();
    {
        ArtifactCache cache({.directory = directory_});
        compile_cpu_kernel(build_request(isa, spec, tiny_plan(isa)), cache);
        EXPECT_EQ(cache.statistics().created, 1);
    }
    ArtifactCache cache({.directory = directory_});
    const auto kernel = make_cpu_kernel(build_request(isa, spec, tiny_plan(isa)), cache);
    EXPECT_EQ(cache.statistics().created, 0);
    EXPECT_EQ(cache.statistics().disk_hits, 1);
    EXPECT_TRUE(run_and_judge(kernel, make_problem(spec, {.num_tokens = 20})));
}

TEST_F(CpuCache, ShapesAndOptionValues_ShareAnObject) {
    const IsaLevel isa = isa_levels().back();
    ArtifactCache cache({});
    Spec spec{.hidden_size = 64, .vocab_size = 100, .dtype = DType::bf16, .softcap = 30, .z_loss = 1e-4};
    const auto first = make_cpu_kernel(build_request(isa, spec, tiny_plan(isa)), cache);
    spec.hidden_size = 128;
    spec.vocab_size = 333;
    spec.softcap = 50;
    spec.z_loss = 1e-3;
    const auto second = make_cpu_kernel(build_request(isa, spec, tiny_plan(isa)), cache);
    EXPECT_EQ(cache.statistics().created, 1);
    spec.softcap = 0;  // another structure
    const auto third = make_cpu_kernel(build_request(isa, spec, tiny_plan(isa)), cache);
    EXPECT_EQ(cache.statistics().created, 2);
}

TEST(CpuLayout, AnyNumberOfTokens_StaysWithinTheBound) {
    const IsaLevel isa{"x86-64-v4", {}, 12, 32};
    Plan plan = tiny_plan(isa);
    plan.cpu = {.vector_bits = 512, .micro_m = 12, .micro_n = 32, .block_m = 516, .block_n = 192, .block_k = 384};
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const std::int64_t d : {8, 2048, 8192}) {
            for (const std::int64_t v : {2, 50257, 256000}) {
                const Spec spec = Spec{.hidden_size = d, .vocab_size = v, .dtype = dtype, .grad_weight_dtype = dtype}.normalized();
                for (const std::int64_t n : {0L, 1L, 1000L, 4096L, 100'000L, 5'000'000'000L}) {
                    for (const int threads : {1, 2, 16, 500}) {
                        const auto forward = cpu_forward_layout(spec, plan, threads, n, spec.vocab_size);
                        const auto backward = cpu_backward_layout(spec, plan, threads, n, spec.vocab_size);
                        EXPECT_LE(forward.bytes, plan.scratch_bytes);
                        EXPECT_LE(backward.bytes, plan.scratch_bytes + (dtype == DType::fp32 ? 0 : 4 * n * d));
                        EXPECT_EQ(backward.chunks.count, cpu_backward_layout(spec, plan, 1, n, spec.vocab_size).chunks.count);
                    }
                }
            }
        }
    }
}

TEST(CpuLayout, ScratchBelowTheLeast_IsAPlanErrorNamingIt) {
    const IsaLevel isa{"x86-64-v4", {}, 12, 32};
    Plan plan = tiny_plan(isa);
    const Spec spec = Spec{.hidden_size = 4096, .vocab_size = 50257}.normalized();
    const std::int64_t least = cpu_least_scratch_bytes(spec, plan);
    plan.scratch_bytes = least;
    EXPECT_NO_THROW((void)cpu_backward_layout(spec, plan, 2, 100'000, spec.vocab_size));
    EXPECT_NO_THROW((void)cpu_forward_layout(spec, plan, 2, 100'000, spec.vocab_size));
    plan.scratch_bytes = least / 2;
    EXPECT_THROW((void)cpu_backward_layout(spec, plan, 2, 100'000, spec.vocab_size), PlanError);
}

}  // namespace
}  // namespace flce::test

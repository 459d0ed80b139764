// Comparisons of two kernels' steps: what the first use of a GPU's kernels is judged by.
#include "runtime/layer/agreement.hpp"

#include <gmock/gmock.h>

#include "runtime/layer/out_of_memory.hpp"
#include "tests/cpu/cpu_test_support.hpp"
#include "tests/session/fake_backend.hpp"

namespace flce::test {
namespace {

using testing::HasSubstr;

std::shared_ptr<const Kernel> kernel_for(const std::string& spec, const IsaLevel& level = isa_levels().back()) {
    return kernel_of(level, parse_spec(spec).normalized(), tiny_plan(level));
}

constexpr const char* kEverything =
    ",bias,class_weight,temperature,token_weight,softcap=20,z_loss=0.01,label_smoothing=0.1,outputs=loss+lse+logprobs+entropy+top1";

constexpr const char* kHeads =
    ",bias,temperature,token_weight,softcap=20,teacher_hidden_size=104,divergence_beta=0.3,teacher_bias,teacher_softcap=9,outputs=loss+"
    "entropy";

TEST(Agreement, EqualKernels_Agree) {
    for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
        for (const std::string options :
             {"", kEverything, ",teacher_top_k=5,hard_weight=0.3", ",layout=hidden_major,grad_weight_mode=accumulate", kHeads,
              ",teacher_hidden_size=40,divergence_beta=1"}) {
            const auto kernel = kernel_for("D=72,V=403,dtype=" + dtype + options);
            const auto differences = compare_steps(*kernel, *kernel);
            EXPECT_EQ(fault_of(differences), "") << kernel->spec().text();
            EXPECT_GE(differences.size(), 4U);
        }
    }
}

// Two correct kernels whose arithmetic differs, where the layer makes rounding show.
TEST(Agreement, KernelsOfOtherVectors_AgreeWhateverTheLayer) {
    const std::vector<IsaLevel> levels = isa_levels();
    if (levels.size() < 2) GTEST_SKIP() << "this CPU has one instruction set";
    for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
        for (const std::string options : {"", ",softcap=0.001", ",softcap=0.05,bias", ",softcap=30", ",logit_scale=0.01", ",logit_scale=30",
                                          ",z_loss=0.1", ",dft,outputs=loss+logprobs", ",temperature,outputs=loss+lse+logprobs+entropy"}) {
            const std::string spec = "D=72,V=403,dtype=" + dtype + options;
            const auto differences = compare_steps(*kernel_for(spec, levels.back()), *kernel_for(spec, levels.front()));
            EXPECT_EQ(fault_of(differences), "") << spec;
        }
    }
}

TEST(Agreement, ResultsThatAreNotFinite_CannotBeCompared) {
    const auto kernel = kernel_for("D=72,V=403,dtype=fp16,logit_scale=1e-05,bias");
    EXPECT_THROW((void)compare_steps(*kernel, *kernel), SpecError);
}

TEST(Agreement, AnotherFormula_IsFound) {
    const auto kernel = kernel_for("D=72,V=403,dtype=bf16,logit_scale=1.02");
    EXPECT_NE(fault_of(compare_steps(*kernel, *kernel_for("D=72,V=403,dtype=bf16"))), "");
    const auto smooth = kernel_for("D=72,V=403,dtype=bf16,label_smoothing=0.11");
    EXPECT_NE(fault_of(compare_steps(*smooth, *kernel_for("D=72,V=403,dtype=bf16,label_smoothing=0.1"))), "");
}

TEST(Agreement, GradientOfSeveralSlices_IsComparedWhole) {
    const auto kernel = kernel_for("D=1024,V=8300,dtype=bf16");
    const auto differences = compare_steps(*kernel, *kernel);
    EXPECT_EQ(fault_of(differences), "");
    const RecordingKernel idle(kernel->spec(), native_cpu());
    for (const Difference& each : compare_steps(idle, *kernel)) EXPECT_FALSE(each.passed()) << each.output;
}

TEST(Agreement, LayerThatTheHostCannotHold_OutOfMemoryBeforeAnythingIsMade) {
    const RecordingKernel huge(parse_spec("D=65536,V=1000000000,dtype=bf16").normalized(), native_cpu());
    EXPECT_THROW((void)compare_steps(huge, huge), OutOfMemory);
}

TEST(Agreement, KernelThatWritesNothing_IsFound) {
    const Spec spec = parse_spec("D=72,V=403,dtype=bf16,bias").normalized();
    const RecordingKernel idle(spec, native_cpu());
    const auto differences = compare_steps(idle, *kernel_for("D=72,V=403,dtype=bf16,bias"));
    for (const Difference& each : differences) EXPECT_FALSE(each.passed()) << each.output;
}

}  // namespace
}  // namespace flce::test

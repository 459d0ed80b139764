// Comparisons of two kernels' steps: what the first use of a GPU's kernels is judged by.
#include "runtime/layer/agreement.hpp"

#include <gmock/gmock.h>

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

TEST(Agreement, EqualKernels_Agree) {
    for (const std::string dtype : {"bf16", "fp16", "fp32"}) {
        for (const std::string options :
             {"", kEverything, ",teacher_top_k=5,hard_weight=0.3", ",layout=hidden_major,grad_weight_mode=accumulate"}) {
            const auto kernel = kernel_for("D=72,V=403,dtype=" + dtype + options);
            const auto differences = compare_steps(*kernel, *kernel);
            EXPECT_EQ(fault_of(differences), "") << kernel->spec().text();
            EXPECT_GE(differences.size(), 4U);
        }
    }
}

TEST(Agreement, AnotherFormula_IsFound) {
    const auto kernel = kernel_for("D=72,V=403,dtype=bf16,logit_scale=1.02");
    EXPECT_NE(fault_of(compare_steps(*kernel, *kernel_for("D=72,V=403,dtype=bf16"))), "");
    const auto smooth = kernel_for("D=72,V=403,dtype=bf16,label_smoothing=0.11");
    EXPECT_NE(fault_of(compare_steps(*smooth, *kernel_for("D=72,V=403,dtype=bf16,label_smoothing=0.1"))), "");
}

TEST(Agreement, KernelThatWritesNothing_IsFound) {
    const Spec spec = parse_spec("D=72,V=403,dtype=bf16,bias").normalized();
    const RecordingKernel idle(spec, native_cpu());
    const auto differences = compare_steps(idle, *kernel_for("D=72,V=403,dtype=bf16,bias"));
    for (const Difference& each : differences) EXPECT_FALSE(each.passed()) << each.output;
}

}  // namespace
}  // namespace flce::test

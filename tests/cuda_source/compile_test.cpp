// Every variant of the CUDA source compiles for every architecture, and its main loops keep everything in registers.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/nvrtc.hpp"
#include "tests/support/gpu.hpp"

namespace flce {
namespace {

struct Variant {
    const char* name;
    const char* spec;
};

constexpr Variant kPlain = {"Bf16", "D=2048,V=151936"};
constexpr Variant kEverything = {"Bf16Everything",
                                 "D=200,V=1001,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
                                 "grad_weight_mode=accumulate,outputs=loss+lse+logprob+entropy"};
constexpr Variant kFp16HiddenMajor = {"Fp16HiddenMajor", "D=200,V=1001,padded_vocab_size=1008,dtype=fp16,layout=hidden_major,softcap=30"};
constexpr Variant kFp32Everything = {
    "Fp32Everything",
    "D=200,V=1001,dtype=fp32,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
    "outputs=loss+lse+logprob+entropy"};

class CudaSourceCompile : public testing::TestWithParam<std::tuple<const char*, Variant>> {};

/// The kernels that hold a tile of a GEMM in registers.
bool has_main_loop(const std::string& kernel) {
    return kernel == "flce_forward" || kernel == "flce_dlogits" || kernel == "flce_grad_hidden" || kernel == "flce_grad_weight";
}

void expect_sound(const KernelResources& used, const Plan& plan) {
    EXPECT_GT(used.registers, 0) << used.name;
    EXPECT_LE(used.registers, 255) << used.name;
    if (!has_main_loop(used.name)) return;
    EXPECT_EQ(used.stack_bytes, 0) << used.name << " with " << plan.text();
    EXPECT_EQ(used.spill_store_bytes, 0) << used.name << " with " << plan.text();
    EXPECT_EQ(used.spill_load_bytes, 0) << used.name << " with " << plan.text();
}

TEST_P(CudaSourceCompile, Variant_CompilesWithoutSpills) {
    FLCE_REQUIRE_NVRTC();
    const auto& [arch, variant] = GetParam();
    const Spec spec = parse_spec(variant.spec);
    const Device device = describe_device(arch);
    const Plan plan = choose_plan(spec, device);
    const CudaProgram program = generate_cuda(spec, device, plan);
    std::vector<std::string> options = program.options;
    options.emplace_back("--ptxas-options=-v");
    std::size_t kernels = 0;
    for (const CudaUnit& unit : program.units) {
        const auto result = Nvrtc::load()->compile(unit.source, embedded_templates(), options, unit.kernels);
        EXPECT_EQ(result.log.find("warning"), std::string::npos) << result.log;
        const auto report = parse_ptxas_report(result.log);
        ASSERT_EQ(report.size(), unit.kernels.size()) << result.log;
        kernels += report.size();
        for (const KernelResources& used : report) expect_sound(used, plan);
    }
    EXPECT_EQ(kernels, program.kernels.size());
}

std::string test_name(const testing::TestParamInfo<CudaSourceCompile::ParamType>& info) {
    return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(EveryArchitecture, CudaSourceCompile,
                         testing::Combine(testing::Values("sm_80", "sm_90a", "sm_100a", "sm_120"),
                                          testing::Values(kPlain, kEverything, kFp16HiddenMajor, kFp32Everything)),
                         test_name);

INSTANTIATE_TEST_SUITE_P(
    EveryVariant, CudaSourceCompile,
    testing::Combine(
        testing::Values("sm_90a"),
        testing::Values(Variant{"Bf16HiddenMajorUnaligned", "D=200,V=1001,layout=hidden_major,grad_weight_dtype=fp32"},
                        Variant{"Bf16HiddenMajorAligned", "D=200,V=1000,layout=hidden_major,bias"},
                        Variant{"Bf16TiedFp32Gradient", "D=2560,V=50257,tied,grad_weight_dtype=fp32,softcap=30"},
                        Variant{"Bf16Smoothing", "D=2048,V=50257,label_smoothing=0.1,outputs=loss+entropy"},
                        Variant{"Bf16SmoothedClasses", "D=2048,V=50257,class_weight,label_smoothing=0.1"},
                        Variant{"Bf16SmoothedClassesEntropy", "D=2048,V=50257,class_weight,label_smoothing=0.1,outputs=loss+entropy"},
                        Variant{"Bf16CappedEntropy", "D=2048,V=50257,softcap=30,outputs=loss+entropy"},
                        Variant{"Bf16CappedSmoothing", "D=2048,V=50257,softcap=30,label_smoothing=0.1"},
                        Variant{"Bf16HiddenMajorSums",
                                "D=200,V=1001,padded_vocab_size=1008,layout=hidden_major,grad_weight_mode=accumulate"},
                        Variant{"Bf16AllButBias",
                                "D=2048,V=50257,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
                                "grad_weight_mode=accumulate,outputs=loss+lse+logprob+entropy"},
                        Variant{"Fp16AllButBias",
                                "D=2048,V=50257,dtype=fp16,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
                                "outputs=loss+lse+logprob+entropy"},
                        Variant{"Fp16", "D=2048,V=151936,dtype=fp16,z_loss=0.0001"},
                        Variant{"Fp16Everything",
                                "D=200,V=1001,dtype=fp16,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,"
                                "logit_scale=0.5,outputs=loss+lse+logprob+entropy"},
                        Variant{"Fp32", "D=2048,V=151936,dtype=fp32"},
                        Variant{"Fp32HiddenMajorUnaligned", "D=200,V=1001,dtype=fp32,layout=hidden_major,class_weight"},
                        Variant{"Fp32HiddenMajorPartial",
                                "D=200,V=1001,padded_vocab_size=1004,dtype=fp32,layout=hidden_major,grad_weight_mode=accumulate"})),
    test_name);

}  // namespace
}  // namespace flce

// Every variant of the CUDA source compiles for every architecture, and its main loops keep everything in registers.
#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "flce/plan.hpp"
#include "generator/planner.hpp"
#include "tests/cuda_source/kernel_check.hpp"
#include "tests/support/gpu.hpp"
#include "tests/support/level.hpp"

namespace flce {
namespace {

using test::Level;

struct Variant {
    const char* name;
    const char* spec;
    bool logits_alone = false;  ///< the two kernels that see no logits are another variant's
    Level from = Level::full;   ///< nightly where a variant near it is always compiled
};

constexpr Variant kPlain = {"Bf16", "D=2048,V=151936"};
constexpr Variant kEverything = {"Bf16Everything",
                                 "D=200,V=1001,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
                                 "grad_weight_mode=accumulate,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"};
constexpr Variant kFp16HiddenMajor = {"Fp16HiddenMajor", "D=200,V=1001,padded_vocab_size=1008,dtype=fp16,layout=hidden_major,softcap=30"};
constexpr Variant kFp32Everything = {
    "Fp32Everything",
    "D=200,V=1001,dtype=fp32,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
    "temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"};

constexpr Variant kTokens = {"Bf16Tokens", "D=2048,V=151936,temperature,outputs=loss+top1+log_sum_sq_probs"};
constexpr Variant kGroups = {"Bf16Groups", "D=1024,V=65536,class_groups,temperature"};
constexpr Variant kGroupsEverything = {
    "Fp16GroupsEverything",
    "D=200,V=1001,whole_vocab_size=3000,dtype=fp16,grad_hidden_dtype=fp32,bias,class_weight,class_groups,z_loss=0.001,softcap=30,"
    "logit_scale=0.5,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"};
constexpr Variant kTeacher = {"Bf16Teacher", "D=2048,V=151936,teacher_top_k=64"};
constexpr Variant kManyNames = {"Bf16ManyNames", "D=2048,V=151936,teacher_top_k=1024"};
constexpr Variant kTeacherEverything = {
    "Fp16TeacherEverything",
    "D=200,V=1001,dtype=fp16,weight_dtype=fp32,bias,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
    "temperature,teacher_top_k=5,hard_weight=0.5,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"};
constexpr Variant kShard = {"Bf16Shard", "D=4096,V=32064,whole_vocab_size=128256"};
constexpr Variant kShardEverything = {
    "Fp16ShardEverything",
    "D=200,V=1001,whole_vocab_size=3000,dtype=fp16,grad_hidden_dtype=fp32,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,"
    "logit_scale=0.5,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"};
constexpr Variant kSupport = {"Bf16Support", "D=2048,V=151936,teacher_top_k=64,support,outputs=loss+lse+entropy"};
constexpr Variant kSupportEverything = {
    "Fp16SupportEverything",
    "D=200,V=1001,whole_vocab_size=3000,padded_vocab_size=1008,dtype=fp16,layout=hidden_major,weight_dtype=fp32,grad_hidden_dtype=fp32,"
    "grad_weight_mode=accumulate,bias,temperature,token_weight,softcap=30,logit_scale=0.5,teacher_top_k=5,support,outputs=loss+lse+"
    "entropy"};
constexpr Variant kSupportShallow = {"Fp32SupportShallow", "D=8,V=1001,dtype=fp32,teacher_top_k=4,support,outputs=loss+lse"};
constexpr Variant kFp32Weight = {"Bf16Fp32Weight", "D=2048,V=151936,weight_dtype=fp32"};
constexpr Variant kHeads = {"Bf16Heads", "D=2048,V=151936,teacher_hidden_size=4096,divergence_beta=0.5"};
constexpr Variant kHeadsOptions = {"Bf16HeadsOptions",
                                   "D=2048,V=151936,teacher_hidden_size=4096,softcap=30,teacher_softcap=30,temperature,logit_scale=0.5"};
constexpr Variant kHeadsBias = {"Fp16HeadsBias",
                                "D=200,V=1001,padded_vocab_size=1008,whole_vocab_size=3000,dtype=fp16,grad_hidden_dtype=fp32,"
                                "teacher_hidden_size=104,divergence_beta=0.5,bias,teacher_bias,temperature,layout=hidden_major,"
                                "outputs=loss+lse+entropy"};
constexpr Variant kE4m3 = {"Bf16E4m3", "D=2048,V=151936,weight_dtype=e4m3"};
constexpr Variant kE4m3Blocks = {"Fp16E4m3Blocks", "D=2064,V=151936,dtype=fp16,weight_dtype=e4m3,weight_block=128"};
constexpr Variant kNvfp4Everything = {
    "Bf16Nvfp4Everything",
    "D=208,V=1001,whole_vocab_size=3000,weight_dtype=nvfp4,grad_hidden_dtype=fp32,bias,class_weight,label_smoothing=0.1,z_loss=0.001,"
    "softcap=30,logit_scale=0.5,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"};

class CudaSourceCompile : public testing::TestWithParam<std::tuple<const char*, Variant>> {};

constexpr const char* kArchitectures[] = {"sm_80", "sm_90a", "sm_100a", "sm_120"};
constexpr Variant kVariants[] = {kPlain,      kEverything,      kFp16HiddenMajor,  kFp32Everything,    kFp32Weight,
                                 kTokens,     kGroups,          kGroupsEverything, kTeacher,           kTeacherEverything,
                                 kShard,      kShardEverything, kSupport,          kSupportEverything, kSupportShallow,
                                 kManyNames,  kHeads,           kHeadsOptions,     kHeadsBias,         kE4m3,
                                 kE4m3Blocks, kNvfp4Everything};

// Every path with every option, and each architecture, are quick. Architectures without a path of their own have the kernels of sm_80.
Level level_of(std::string_view arch, std::string_view variant) {
    const bool plain = variant == kPlain.name;
    const bool fp32 = variant == kFp32Everything.name;
    const bool everything = variant.ends_with("Everything");
    // One path on every architecture.
    if (variant.find("Heads") != std::string_view::npos) return arch == "sm_90a" ? Level::quick : Level::nightly;
    if (variant.find("Support") != std::string_view::npos) return arch == "sm_80" ? Level::quick : Level::nightly;
    if (arch == "sm_100a") return fp32 ? Level::full : Level::quick;  // the path of library products, whose kernels are small
    if (arch == "sm_120") return fp32 || plain ? Level::quick : Level::nightly;
    if (arch != "sm_80" && arch != "sm_90a") return Level::nightly;
    // The path of sm_90a has bf16 and fp16 layers of some depth; others are compiled for it as for sm_80.
    const bool own_path = plain || variant == kTokens.name || variant == kGroups.name || variant == kTeacher.name ||
                          variant == kManyNames.name || variant == kShard.name || variant == kFp32Weight.name || variant == kE4m3.name;
    if (variant == kE4m3Blocks.name) return Level::quick;
    return (arch == "sm_90a" ? own_path : everything || variant == kFp16HiddenMajor.name) ? Level::quick : Level::nightly;
}

void expect_sound(const std::vector<KernelResources>& report, const Spec& spec, const Plan& plan) {
    for (const KernelResources& used : report) {
        if (has_teacher_head(spec) && used.name == "flce_dlogits") continue;  // between products, bound by memory
        const bool of_rows = used.name.starts_with("flce_teacher") || used.name.starts_with("flce_retained") ||
                             used.name.starts_with("flce_gather") || used.name.starts_with("flce_sort") ||
                             used.name.starts_with("flce_named") || used.name.starts_with("flce_round");
        if (!test::has_main_loop(used.name) && !of_rows) continue;
        EXPECT_EQ(used.stack_bytes, 0) << used.name << " with " << plan.text();
        EXPECT_EQ(used.spill_store_bytes, 0) << used.name << " with " << plan.text();
        EXPECT_EQ(used.spill_load_bytes, 0) << used.name << " with " << plan.text();
    }
}

/// The planner's plan; on Blackwell, where it takes shallow layers to the generic path, that of library products all the same.
Plan tested_plan(const Spec& spec, const Device& device) {
    if (device.gpu.compute_capability == 100) {
        const std::vector<Plan> plans = path_plans(spec, device, PlanPath::cuda_lt);
        if (!plans.empty()) return plans.front();
    }
    return choose_plan(spec, device);
}

// Compiles units like the runtime: every GEMM by itself.
TEST_P(CudaSourceCompile, Units_CompileWithoutSpills) {
    const auto& [arch, variant] = GetParam();
    FLCE_FROM_LEVEL(level_of(arch, variant.name));
    FLCE_REQUIRE_NVRTC_FOR(arch);
    const Spec spec = parse_spec(variant.spec);
    const Device device = describe_device(arch);
    const Plan plan = tested_plan(spec, device);
    const CudaProgram program = generate_cuda(spec, device, plan);
    std::size_t kernels = 0;
    for (const CudaUnit& unit : program.units) {
        const std::vector<KernelResources> report = test::compiled(unit, program.options);
        kernels += report.size();
        expect_sound(report, spec, plan);
    }
    EXPECT_EQ(kernels, program.kernels.size());
}

// The kernels that see logits, in one compile, for the many combinations of options. The others see none.
class CudaOptionsCompile : public testing::TestWithParam<std::tuple<const char*, Variant>> {};

TEST_P(CudaOptionsCompile, Together_CompileWithoutSpills) {
    const auto& [arch, variant] = GetParam();
    FLCE_FROM_LEVEL(variant.from);
    FLCE_REQUIRE_NVRTC_FOR(arch);
    const Spec spec = parse_spec(variant.spec);
    const Device device = describe_device(arch);
    const Plan plan = choose_plan(spec, device);
    CudaProgram program = generate_cuda(spec, device, plan);
    std::erase_if(program.units, [&](const CudaUnit& unit) {
        const std::string& name = unit.kernels.front().name;
        return variant.logits_alone && (name == "flce_grad_hidden" || name == "flce_grad_weight");
    });
    expect_sound(test::compiled(test::together(program.units), program.options), spec, plan);
}

std::string test_name(const testing::TestParamInfo<CudaSourceCompile::ParamType>& info) {
    return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(EveryArchitecture, CudaSourceCompile,
                         testing::Combine(testing::ValuesIn(kArchitectures), testing::ValuesIn(kVariants)), test_name);

// Where cuBLASLt is not there.
TEST(CudaSourceCompile, GenericPath_CompilesWithoutSpillsWhereAnotherIsPreferred) {
    FLCE_FROM_LEVEL(Level::nightly);
    FLCE_REQUIRE_NVRTC_FOR("sm_100a");
    const Spec spec = parse_spec(kPlain.spec);
    const Device device = describe_device("sm_100a");
    const Plan plan = path_plans(spec, device, PlanPath::cuda_sm80).front();
    const CudaProgram program = generate_cuda(spec, device, plan);
    for (const CudaUnit& unit : program.units) expect_sound(test::compiled(unit, program.options), spec, plan);
}

/// Pairs of a path of kernels and a dtype, layout or option, of the variants up to a level; and the architectures.
std::set<std::string> covered(Level most) {
    std::set<std::string> found;
    for (const char* arch : kArchitectures) {
        for (const Variant& variant : kVariants) {
            if (level_of(arch, variant.name) > most) continue;
            const Spec spec = parse_spec(variant.spec);
            const std::string path(to_string(tested_plan(spec, describe_device(arch)).path));
            found.insert({arch, path + " " + std::string(to_string(spec.dtype)), path + " " + std::string(to_string(spec.layout))});
            if (std::string_view(variant.name) == kPlain.name) found.insert(path + " plain");
            std::stringstream text(variant.spec);
            for (std::string option; std::getline(text, option, ',');) found.insert(path + " " + option.substr(0, option.find('=')));
        }
    }
    return found;
}

TEST(CudaSourceLevels, Quick_HasEveryPairOfAPathAndAnOption) {
    EXPECT_EQ(covered(Level::quick), covered(Level::nightly));
    EXPECT_GT(covered(Level::quick).size(), 35U);
}

INSTANTIATE_TEST_SUITE_P(OtherArchitectures, CudaSourceCompile,
                         testing::Combine(testing::Values("sm_86", "sm_87", "sm_88", "sm_89", "sm_103a", "sm_110a", "sm_121"),
                                          testing::Values(kPlain, kFp32Everything)),
                         test_name);

INSTANTIATE_TEST_SUITE_P(
    EveryVariant, CudaOptionsCompile,
    testing::Combine(
        testing::Values("sm_90a"),
        testing::Values(
            Variant{"Bf16HiddenMajorUnaligned", "D=200,V=1001,layout=hidden_major,grad_weight_dtype=fp32", false, Level::quick},
            Variant{"Bf16HiddenMajorAligned", "D=200,V=1000,layout=hidden_major,bias", false, Level::nightly},
            Variant{"Bf16TiedFp32Gradient", "D=2560,V=50257,tied,grad_weight_dtype=fp32,softcap=30", false, Level::nightly},
            Variant{"Bf16Smoothing", "D=2048,V=50257,label_smoothing=0.1,outputs=loss+entropy", true, Level::nightly},
            Variant{"Bf16SmoothedClasses", "D=2048,V=50257,class_weight,label_smoothing=0.1", true, Level::nightly},
            Variant{"Bf16SmoothedClassesEntropy", "D=2048,V=50257,class_weight,label_smoothing=0.1,outputs=loss+entropy", true},
            Variant{"Bf16CappedEntropy", "D=2048,V=50257,softcap=30,outputs=loss+entropy", true},
            Variant{"Bf16CappedSmoothing", "D=2048,V=50257,softcap=30,label_smoothing=0.1", true, Level::nightly},
            Variant{"Bf16BiasSmoothing", "D=2048,V=50257,bias,label_smoothing=0.1", true, Level::nightly},
            Variant{"Bf16BiasAdded", "D=4096,V=128256,bias,grad_weight_mode=accumulate", false, Level::nightly},
            Variant{"Fp16BiasCapped", "D=2048,V=50257,dtype=fp16,bias,softcap=30,temperature,grad_weight_mode=accumulate", true},
            Variant{"Bf16CappedBias", "D=2048,V=50257,bias,softcap=30,grad_weight_mode=accumulate", true, Level::nightly},
            Variant{"Bf16Falls", "D=2304,V=256000,softcap=30", true, Level::quick},
            Variant{"Fp16FallsOfAShard", "D=2048,V=32064,whole_vocab_size=128256,dtype=fp16,bias,softcap=30"},
            Variant{"Fp16CappedBias", "D=2048,V=50257,dtype=fp16,bias,softcap=30,grad_weight_mode=accumulate", true, Level::nightly},
            Variant{"Bf16HiddenMajorSums", "D=200,V=1001,padded_vocab_size=1008,layout=hidden_major,grad_weight_mode=accumulate", false,
                    Level::nightly},
            Variant{"Bf16AllButBias",
                    "D=2048,V=50257,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
                    "grad_weight_mode=accumulate,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs",
                    false, Level::nightly},
            Variant{"Fp16AllButBias",
                    "D=2048,V=50257,dtype=fp16,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,logit_scale=0.5,"
                    "temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs"},
            Variant{"Fp16", "D=2048,V=151936,dtype=fp16,z_loss=0.0001", true, Level::nightly},
            Variant{"Fp16Everything",
                    "D=200,V=1001,dtype=fp16,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,"
                    "logit_scale=0.5,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs",
                    false, Level::nightly},
            Variant{"Bf16Fp32WeightEverything",
                    "D=200,V=1001,weight_dtype=fp32,bias,class_weight,label_smoothing=0.1,z_loss=0.001,softcap=30,"
                    "logit_scale=0.5,temperature,outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs",
                    false, Level::nightly},
            Variant{"Fp16Fp32WeightHiddenMajor",
                    "D=200,V=1001,padded_vocab_size=1008,dtype=fp16,weight_dtype=fp32,layout=hidden_major,softcap=30", false,
                    Level::nightly},
            Variant{"Bf16Fp32WeightHiddenMajorUnaligned", "D=200,V=1001,weight_dtype=fp32,layout=hidden_major", false, Level::nightly},
            Variant{"Fp32", "D=2048,V=151936,dtype=fp32", false, Level::nightly},
            Variant{"Fp32HiddenMajorUnaligned", "D=200,V=1001,dtype=fp32,layout=hidden_major,class_weight"},
            Variant{"Fp32HiddenMajorPartial",
                    "D=200,V=1001,padded_vocab_size=1004,dtype=fp32,layout=hidden_major,grad_weight_mode=accumulate", false,
                    Level::nightly},
            Variant{"Fp32Shallow", "D=64,V=50257,dtype=fp32", false, Level::quick})),
    test_name);

INSTANTIATE_TEST_SUITE_P(
    Temperatures, CudaOptionsCompile,
    testing::Combine(testing::Values("sm_90a"),
                     testing::Values(Variant{"Entropy", "D=2048,V=50257,temperature,outputs=loss+entropy", true, Level::nightly},
                                     Variant{"Capped", "D=2048,V=50257,temperature,softcap=30", true, Level::nightly},
                                     Variant{"CappedSmoothing", "D=2048,V=50257,temperature,softcap=30,label_smoothing=0.1", true,
                                             Level::quick},
                                     Variant{"SmoothedClassesEntropy",
                                             "D=2048,V=50257,temperature,class_weight,label_smoothing=0.1,outputs=loss+entropy", true})),
    test_name);

INSTANTIATE_TEST_SUITE_P(
    Offsets, CudaOptionsCompile,
    testing::Combine(testing::Values("sm_90a"),
                     testing::Values(Variant{"Alone", "D=2048,V=50257,class_offset", true, Level::quick},
                                     Variant{"Capped", "D=2048,V=50257,class_offset,softcap=30", true, Level::nightly},
                                     Variant{"CappedTemperature", "D=2048,V=50257,class_offset,softcap=30,temperature", true},
                                     Variant{"Bias", "D=2048,V=50257,class_offset,bias", true},
                                     Variant{"Gradient", "D=2048,V=50257,dtype=fp16,class_offset,bias,offset_gradient,softcap=30", true},
                                     Variant{"SmoothedClasses", "D=2048,V=50257,class_offset,class_weight,label_smoothing=0.1", true},
                                     Variant{"Everything",
                                             "D=2048,V=50257,class_offset,bias,class_weight,label_smoothing=0.1,softcap=30,temperature,"
                                             "outputs=loss+lse+logprobs+entropy+top1+log_sum_sq_probs",
                                             true})),
    test_name);

INSTANTIATE_TEST_SUITE_P(TokenOptions, CudaOptionsCompile,
                         testing::Combine(testing::Values("sm_80", "sm_90a"),
                                          testing::Values(Variant{"Temperature", "D=2048,V=50257,temperature", true, Level::nightly},
                                                          Variant{"Top1", "D=2048,V=50257,outputs=loss+top1", true},
                                                          Variant{"Squares", "D=2048,V=50257,outputs=loss+log_sum_sq_probs", true,
                                                                  Level::nightly})),
                         test_name);

INSTANTIATE_TEST_SUITE_P(
    Teachers, CudaOptionsCompile,
    testing::Combine(
        testing::Values("sm_80", "sm_90a"),
        testing::Values(
            Variant{"Bf16HiddenMajor", "D=200,V=1000,layout=hidden_major,bias,teacher_top_k=1024", true, Level::nightly},
            Variant{"Fp32HiddenMajor", "D=200,V=1001,dtype=fp32,layout=hidden_major,teacher_top_k=1", true},
            Variant{"Bf16Capped", "D=2048,V=50257,bias,temperature,softcap=30,teacher_top_k=64", true},
            Variant{"Bf16ManyCapped", "D=2048,V=50257,bias,temperature,softcap=30,teacher_top_k=1024,outputs=loss+entropy", true},
            Variant{"Fp16ManyHiddenMajor", "D=200,V=1008,dtype=fp16,layout=hidden_major,class_offset,softcap=30,teacher_top_k=256", true},
            Variant{"Bf16Smoothed", "D=2048,V=50257,label_smoothing=0.1,teacher_top_k=64,hard_weight=0.5", true, Level::nightly},
            Variant{"Fp32", "D=200,V=1001,dtype=fp32,bias,temperature,softcap=30,teacher_top_k=8", true, Level::nightly},
            Variant{"Bf16Fp32WeightHiddenMajor", "D=200,V=1000,weight_dtype=fp32,layout=hidden_major,teacher_top_k=8", true})),
    test_name);

INSTANTIATE_TEST_SUITE_P(
    Shards, CudaOptionsCompile,
    testing::Combine(
        testing::Values("sm_80", "sm_90a"),
        testing::Values(
            Variant{"Bf16Teacher", "D=2048,V=32064,whole_vocab_size=128256,bias,label_smoothing=0.1,teacher_top_k=64,hard_weight=0.5"},
            Variant{"Bf16ManyNames", "D=2048,V=32064,whole_vocab_size=128256,label_smoothing=0.1,teacher_top_k=512,hard_weight=0.5"},
            Variant{"Bf16Capped", "D=2048,V=32064,whole_vocab_size=128256,softcap=30,temperature,outputs=loss+entropy+top1"},
            Variant{"Bf16SmoothedClasses", "D=2048,V=32064,whole_vocab_size=128256,class_weight,label_smoothing=0.1", false,
                    Level::nightly},
            Variant{"Bf16HiddenMajorSums",
                    "D=200,V=1001,padded_vocab_size=1008,whole_vocab_size=3000,layout=hidden_major,grad_weight_mode=accumulate"},
            Variant{"Bf16Fp32WeightFp32Gradient", "D=2048,V=32064,whole_vocab_size=128256,weight_dtype=fp32,grad_hidden_dtype=fp32", false,
                    Level::nightly},
            Variant{"Fp32", "D=200,V=1001,whole_vocab_size=3000,dtype=fp32,bias,class_weight,label_smoothing=0.1,outputs=loss+top1", false,
                    Level::nightly})),
    test_name);

INSTANTIATE_TEST_SUITE_P(
    Fp8, CudaOptionsCompile,
    testing::Combine(
        testing::Values("sm_90a"),
        testing::Values(Variant{"Plain", "D=2048,V=151936,fp8", false, Level::quick},
                        Variant{"Added", "D=2560,V=50257,fp8,tied,grad_weight_dtype=fp32", false, Level::nightly},
                        Variant{"E4m3", "D=200,V=1001,fp8=e4m3,fp8_dlogits=e4m3,grad_weight_mode=accumulate", false},
                        Variant{"Scales", "D=2048,V=50257,fp8=e4m3,fp8_hidden_scale=0.22,fp8_weight_scale=0.0036", true},
                        Variant{"Codes", "D=2048,V=151936,fp8=e4m3,weight_dtype=e4m3", false},
                        Variant{"CodesHiddenScale", "D=2048,V=50257,fp8=e4m3,weight_dtype=e4m3,fp8_hidden_scale=0.02", true},
                        Variant{"SmoothedCodes",
                                "D=208,V=1001,whole_vocab_size=2001,fp8=e4m3,weight_dtype=e4m3,fp8_dlogits=e4m3,bias,class_weight,"
                                "label_smoothing=0.1",
                                false},
                        Variant{"Smoothed", "D=2048,V=50257,fp8,label_smoothing=0.1", false},
                        Variant{"SmoothedAdded",
                                "D=2560,V=50257,fp8,tied,class_weight,bias,label_smoothing=0.1,temperature,logit_scale=0.5", false,
                                Level::nightly},
                        Variant{"Bias", "D=2048,V=50257,fp8,bias", true},
                        Variant{"Entropy", "D=2048,V=50257,fp8,outputs=loss+entropy,bias,temperature", true},
                        Variant{"Temperature", "D=2048,V=50257,fp8,temperature,logit_scale=0.5", true, Level::nightly},
                        Variant{"Offset", "D=2048,V=50257,fp8,class_offset", true, Level::nightly},
                        Variant{"BiasOffset", "D=2048,V=50257,fp8,bias,class_offset,temperature,logit_scale=0.5", true, Level::nightly},
                        Variant{"Shard", "D=2048,V=75968,whole_vocab_size=151936,fp8", false, Level::quick},
                        Variant{"SmoothedShard", "D=2048,V=75968,whole_vocab_size=151936,fp8,label_smoothing=0.1,class_weight,bias", false},
                        Variant{"HiddenMajor", "D=2048,V=151936,fp8,layout=hidden_major", false, Level::quick},
                        Variant{"HiddenMajorAdded", "D=200,V=1000,fp8=e4m3,layout=hidden_major,grad_weight_mode=accumulate", false},
                        Variant{"HiddenMajorSmoothed",
                                "D=200,V=1001,padded_vocab_size=1008,fp8,layout=hidden_major,grad_weight_mode=accumulate,"
                                "label_smoothing=0.1,class_weight,bias,temperature",
                                false},
                        Variant{"HiddenMajorShard",
                                "D=200,V=1001,padded_vocab_size=1008,whole_vocab_size=2001,fp8,fp8_dlogits=e4m3,layout=hidden_major,"
                                "label_smoothing=0.1,class_weight,grad_weight_dtype=fp32,grad_weight_mode=accumulate",
                                false, Level::nightly},
                        Variant{"ShardInFp32",
                                "D=200,V=1001,whole_vocab_size=2001,fp8=e4m3,fp8_dlogits=e4m3,bias,class_weight,class_offset,"
                                "temperature,grad_hidden_dtype=fp32,outputs=loss+lse+logprobs",
                                true},
                        Variant{"Everything",
                                "D=200,V=1001,fp8,bias,class_weight,z_loss=0.001,softcap=30,logit_scale=0.5,temperature,"
                                "token_weight,grad_weight_mode=accumulate,outputs=loss+lse+logprobs",
                                false, Level::quick})),
    test_name);

// GPUs that have 8-bit mma.sync in place of wgmma.
INSTANTIATE_TEST_SUITE_P(
    Fp8Mma, CudaOptionsCompile,
    testing::Combine(testing::Values("sm_89", "sm_120"),
                     testing::Values(Variant{"Plain", "D=2048,V=151936,fp8", false, Level::quick},
                                     Variant{"Added", "D=2560,V=50257,fp8,tied,grad_weight_dtype=fp32", false, Level::nightly},
                                     Variant{"E4m3", "D=200,V=1001,fp8=e4m3,fp8_dlogits=e4m3,grad_weight_mode=accumulate", false},
                                     Variant{"Codes", "D=2048,V=50257,fp8=e4m3,weight_dtype=e4m3,label_smoothing=0.1", false},
                                     Variant{"BiasOffset", "D=2048,V=50257,fp8,bias,class_offset,temperature,logit_scale=0.5", true,
                                             Level::nightly},
                                     Variant{"Shard", "D=2048,V=75968,whole_vocab_size=151936,fp8"},
                                     Variant{"Smoothed", "D=2048,V=50257,fp8,label_smoothing=0.1,class_weight,bias"},
                                     Variant{"HiddenMajor", "D=2048,V=151936,fp8,layout=hidden_major"},
                                     Variant{"HiddenMajorSmoothed",
                                             "D=200,V=1001,padded_vocab_size=1008,fp8,layout=hidden_major,grad_weight_mode=accumulate,"
                                             "label_smoothing=0.1,class_weight,bias,temperature"},
                                     Variant{"Entropy", "D=2048,V=50257,fp8,outputs=loss+entropy,bias,temperature", true},
                                     Variant{"Everything",
                                             "D=200,V=1001,fp8,bias,class_weight,z_loss=0.001,softcap=30,logit_scale=0.5,temperature,"
                                             "token_weight,grad_weight_mode=accumulate,outputs=loss+lse+logprobs",
                                             false})),
    test_name);

// Where the path is asked for by name. Products of FP8 are taken apart to fp16 there, for which registers do not suffice.
TEST(CudaSourceCompile, EightBitMma_CompilesForOtherGpusThatHaveIt) {
    FLCE_FROM_LEVEL(Level::full);
    for (const char* arch : {"sm_90a", "sm_100a", "sm_121"}) {
        FLCE_REQUIRE_NVRTC_FOR(arch);
        const Spec spec = parse_spec("D=2048,V=151936,fp8");
        const Device device = describe_device(arch);
        const CudaProgram program = generate_cuda(spec, device, path_plans(spec, device, PlanPath::cuda_fp8_sm89).front());
        EXPECT_EQ(test::compiled(test::together(program.units), program.options).size(), program.kernels.size()) << arch;
    }
}

// A weight that stays in codes.
INSTANTIATE_TEST_SUITE_P(Codes, CudaOptionsCompile,
                         testing::Combine(testing::Values("sm_89", "sm_120"),
                                          testing::Values(Variant{"E4m3", "D=2048,V=151936,weight_dtype=e4m3"},
                                                          Variant{"Nvfp4", "D=2048,V=151936,weight_dtype=nvfp4"})),
                         test_name);

INSTANTIATE_TEST_SUITE_P(OldestGpus, CudaOptionsCompile,
                         testing::Combine(testing::Values("sm_80"),
                                          testing::Values(Variant{"Fp32ShallowHiddenMajor", "D=64,V=50257,dtype=fp32,layout=hidden_major"},
                                                          Variant{"Bf16Falls", "D=2304,V=256000,softcap=30", true},
                                                          Variant{"Fp16FallsOfAShard",
                                                                  "D=2048,V=32064,whole_vocab_size=128256,dtype=fp16,bias,softcap=30"})),
                         test_name);

}  // namespace
}  // namespace flce

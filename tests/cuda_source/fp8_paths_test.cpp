// Paths whose products are of numbers in 8 bits: which GPUs have one, what they refuse by name, scales that are given, and memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <string>
#include <vector>

#include "flce/error.hpp"
#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "generator/planner.hpp"
#include "records/record.hpp"
#include "templates/fp8/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce {
namespace {

using test::Recorded;

/// A path, and a GPU that has it for its own.
struct OwnPath {
    const char* device;
    PlanPath path;
};
constexpr OwnPath kOwnPaths[] = {{"h200", PlanPath::cuda_fp8}, {"l40s", PlanPath::cuda_fp8_sm89}, {"rtx 5090", PlanPath::cuda_fp8_sm89}};

std::string reason_on(PlanPath path, const char* own, const char* text, const char* device) {
    const Spec spec = parse_spec(text).normalized();
    Plan plan = path_plans(parse_spec("D=64,V=1000,fp8").normalized(), describe_device(own), path).front();
    plan.strategy = Strategy::recompute;
    return illegal_reason(spec, describe_device(device), plan).value_or("");
}

TEST(Fp8Path, OtherSpecs_AreRefusedByName) {
    for (const OwnPath& gpu : kOwnPaths) {
        const auto reason = [&](const char* text) { return reason_on(gpu.path, gpu.device, text, gpu.device); };
        EXPECT_EQ(reason("D=64,V=1000,fp8"), "");
        EXPECT_EQ(reason("D=64,V=1000,fp8=e4m3,weight_dtype=e4m3"), "");
        EXPECT_NE(reason("D=64,V=1000,fp8,dtype=fp16").find("dtype=fp16"), std::string::npos);
        EXPECT_NE(reason("D=64,V=1000").find("for specs with fp8"), std::string::npos);
        EXPECT_NE(reason("D=64,V=1000,fp8,outputs=loss+top1").find("outputs"), std::string::npos);
        EXPECT_NE(reason("D=64,V=1000,fp8,softcap=30,class_offset").find("class_offset"), std::string::npos);
    }
}

TEST(Fp8Path, OtherGpus_AreRefusedByName) {
    const auto reason = [](PlanPath path, const char* device) { return reason_on(path, "h200", "D=64,V=1000,fp8", device); };
    EXPECT_NE(reason(PlanPath::cuda_fp8, "b200").find("sm_90a"), std::string::npos);
    EXPECT_NE(reason(PlanPath::cuda_fp8, "l40s").find("sm_90a"), std::string::npos);
    for (const char* device : {"a100", "sm_86", "sm_87"}) {
        EXPECT_NE(reason(PlanPath::cuda_fp8_sm89, device).find("8.9"), std::string::npos) << device;
    }
    for (const char* device : {"l4", "rtx 4090", "sm_120", "gb10", "h100"})
        EXPECT_EQ(reason(PlanPath::cuda_fp8_sm89, device), "") << device;
}

TEST(Fp8Path, EveryGpu_HasItsOwnOrSaysWhichHave) {
    const Spec spec = parse_spec("D=2048,V=151936,fp8").normalized();
    for (const char* device : {"l40s", "rtx 4090", "rtx 5090", "gb10"}) {
        EXPECT_EQ(choose_plan(spec, describe_device(device)).path, PlanPath::cuda_fp8_sm89) << device;
    }
    EXPECT_EQ(choose_plan(spec, describe_device("h200")).path, PlanPath::cuda_fp8) << "wgmma is the quicker one";
    const auto refusal = [](const char* text, const char* device) -> std::string {
        try {
            (void)choose_plan(parse_spec(text), describe_device(device));
            return "";
        } catch (const PlanError& error) {
            return error.what();
        }
    };
    for (const char* device : {"a100", "rtx 3090", "b200"}) {
        EXPECT_NE(refusal("D=2048,V=151936,fp8", device).find("cuda_fp8_sm89"), std::string::npos) << device;
    }
    for (const char* device : {"h100", "l40s"}) {
        const std::string why = refusal("D=2048,V=151936,dtype=fp16,fp8", device);
        EXPECT_NE(why.find("dtype=fp16"), std::string::npos) << why;
        EXPECT_EQ(why.find("cuda_sm80"), std::string::npos) << why;
        const std::string rows = refusal("D=2048,V=1001,fp8,layout=hidden_major", device);
        EXPECT_NE(rows.find("layout=hidden_major with rows of 1001"), std::string::npos) << rows;
        EXPECT_EQ(refusal("D=2048,V=1001,padded_vocab_size=1008,fp8,layout=hidden_major", device), "");
    }
}

std::vector<std::string> sources_of(const CudaProgram& program) {
    std::vector<std::string> sources;
    for (const CudaUnit& unit : program.units) sources.push_back(unit.source);
    return sources;
}

// Scales are slots of a call: programs of another value are the same, to their launchers' machine code.
TEST(Fp8Scales, AnotherValue_CompilesNothing) {
    const Device h200 = describe_device("h200");
    const auto spec_of = [](const std::string& scales) { return parse_spec("D=2048,V=50257,fp8=e4m3" + scales).normalized(); };
    const auto program_of = [&](const std::string& scales) {
        return generate_cuda(spec_of(scales), h200, path_plans(spec_of(scales), h200, PlanPath::cuda_fp8).front());
    };
    const std::string ones = ",fp8_hidden_scale=0.22,fp8_weight_scale=0.0036";
    const std::string others = ",fp8_hidden_scale=3,fp8_weight_scale=1";
    const CudaProgram one = program_of(ones);
    const CudaProgram other = program_of(others);
    EXPECT_EQ(sources_of(one), sources_of(other));
    EXPECT_EQ(program_identity(one.forward), program_identity(other.forward));
    EXPECT_EQ(program_identity(one.backward), program_identity(other.backward));
    EXPECT_NE(sources_of(one), sources_of(program_of("")));
    const auto record_of = [&](const std::string& scales) { return record_key(spec_of(scales), h200, {}, "none", 0).digest(); };
    EXPECT_EQ(record_of(ones), record_of(others));
    EXPECT_EQ(record_of(",weight_dtype=e4m3,fp8_hidden_scale=2"), record_of(",weight_dtype=e4m3,fp8_hidden_scale=3"));
    EXPECT_NE(record_of(",weight_dtype=e4m3,fp8_hidden_scale=2"), record_of(",weight_dtype=e4m3"));
    EXPECT_NE(record_of(ones), record_of(""));
}

// Every kernel that makes codes of hidden or of the weight has that operand's scale.
TEST(Fp8Scales, EachOperand_HasItsOwn) {
    const Device h200 = describe_device("h200");
    const Spec spec = parse_spec("D=264,V=2571,fp8,fp8_hidden_scale=0.25,fp8_weight_scale=2").normalized();
    const CudaProgram program = generate_cuda(spec, h200, path_plans(spec, h200, PlanPath::cuda_fp8).front());
    CallSlots slots = test::made_up_call(300, {});
    slots[static_cast<std::size_t>(Slot::fp8_hidden_scale)] = std::bit_cast<std::int32_t>(0.25F);
    slots[static_cast<std::size_t>(Slot::fp8_weight_scale)] = std::bit_cast<std::int32_t>(2.F);
    const auto hidden = reinterpret_cast<const void*>(slots[static_cast<std::size_t>(Slot::hidden)]);
    int found = 0;
    for (const LaunchProgram* pass : {&program.forward, &program.backward}) {
        for (const Recorded& r : test::run(program, *pass, slots)) {
            if (r.kernel == "flce_fp8_codes" || r.kernel == "flce_fp8_scales") {
                const auto p = r.params<Fp8CodesParams>();
                EXPECT_EQ(p.given_scale, p.from == hidden ? 0.25F : 2.F) << r.kernel;
                ++found;
            } else if (r.kernel == "flce_fp8_targets") {
                EXPECT_EQ(r.params<Fp8TargetsParams>().hidden_scale, 0.25F);
                EXPECT_EQ(r.params<Fp8TargetsParams>().weight_scale, 2.F);
                ++found;
            }
        }
    }
    EXPECT_GE(found, 5);
}

// Chunks cost the same beside their products, whatever their width.
TEST(Fp8Path, ChunksOfBackward_AreAsWideAsTheMemoryBehindThemAllows) {
    const Spec spec = parse_spec("D=2048,V=151936,fp8").normalized();
    const Device h200 = describe_device("h200");
    const CudaProgram program = generate_cuda(spec, h200, path_plans(spec, h200, PlanPath::cuda_fp8, {.scratch_bytes = 64 << 20}).front());
    std::vector<int> widths;
    for (const Recorded& r : test::run(program, program.backward, test::made_up_call(4096, {}))) {
        if (r.kernel == "flce_forward") widths.push_back(r.params<Fp8LogitsParams>().columns);
    }
    ASSERT_FALSE(widths.empty());
    EXPECT_GE(widths.front() * 5, spec.vocab_size) << "a quarter of grad_weight's memory holds what a quarter of the classes needs";
    EXPECT_TRUE(std::ranges::is_sorted(widths, std::greater<>()));
    EXPECT_LE(widths.size(), 14U);
}

// Half of the exponentials where a row of the gradient takes as many bytes as a column of them, once.
TEST(Fp8Path, GradientsMemory_HoldsHalfOfTheExponentials) {
    const Device h200 = describe_device("h200");
    const auto columns = [&](const char* text, std::int64_t tokens) {
        const Spec spec = parse_spec(text).normalized();
        const CudaProgram program = generate_cuda(spec, h200, path_plans(spec, h200, PlanPath::cuda_fp8).front());
        CallSlots slots = test::made_up_call(tokens, {});
        const std::int64_t lendable = evaluate(program.lendable_bytes, slots);
        slots[static_cast<std::size_t>(Slot::retained)] = slots[static_cast<std::size_t>(Slot::grad_weight)];
        slots[static_cast<std::size_t>(Slot::retained_bytes)] = lendable;
        slots[static_cast<std::size_t>(Slot::retained_in_grad_weight)] = 1;
        std::int64_t stored = 0;
        for (const Recorded& r : test::run(program, program.forward, slots)) {
            if (r.kernel == "flce_forward") stored += r.params<Fp8LogitsParams>().stored;
        }
        return stored / 2;  // the second walk, of rows that turn out to have another power, names them again
    };
    EXPECT_NEAR(static_cast<double>(columns("D=2048,V=151936,fp8", 4096)), 151936 / 2, 384);
    EXPECT_NEAR(static_cast<double>(columns("D=2048,V=151936,fp8", 8192)), 151936 / 4, 384);
    EXPECT_NEAR(static_cast<double>(columns("D=2048,V=151936,fp8", 1024)), 151936 * 0.8, 384);
    EXPECT_EQ(columns("D=2048,V=151936,fp8,tied", 4096), 0) << "old values are there";
    EXPECT_EQ(columns("D=2048,V=151936,fp8,fp8_dlogits=e4m3", 4096), 0) << "nothing is kept in e4m3";
    EXPECT_EQ(columns("D=2048,V=151936,fp8,layout=hidden_major", 4096), 0) << "a chunk's gradient is in all rows";
}

}  // namespace
}  // namespace flce

// Where logits under a softcap are told by their fall from it, and what their kernels are given then.
#include "generator/cuda/common/falls.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/output_params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce {
namespace {

CudaProgram capped_program(const std::string& spec_text) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("h100");
    return generate_cuda(spec, device, choose_plan(spec, device));
}

std::string capped_source(const std::string& spec_text) {
    std::string sources;
    for (const CudaUnit& unit : capped_program(spec_text).units) sources += unit.source;
    return sources;
}

CallSlots capped_call() {
    CallSlots slots{};
    std::int64_t address = 0;
    for (const Slot slot : {Slot::hidden, Slot::weight, Slot::target, Slot::loss, Slot::lse, Slot::workspace}) {
        slots[static_cast<std::size_t>(slot)] = address += std::int64_t{1} << 44;
    }
    slots[static_cast<std::size_t>(Slot::num_tokens)] = 1000;
    slots[static_cast<std::size_t>(Slot::target_bits)] = 64;
    slots[static_cast<std::size_t>(Slot::reduction)] = static_cast<std::int64_t>(ReductionCode::mean);
    return slots;
}

constexpr const char* kCapped = "D=512,V=1000,softcap=30,logit_scale=0.5";

TEST(Falls, ValuesOfTheOptions_DoNotChangeTheSourceUpToTheLargestSoftcap) {
    EXPECT_EQ(capped_source(kCapped), capped_source("D=512,V=1000,softcap=20,logit_scale=0.25"));
    // Logits further apart than exponentials of a row may be.
    EXPECT_NE(capped_source(kCapped), capped_source("D=512,V=1000,softcap=30.1,logit_scale=0.5"));
}

TEST(Falls, ForwardIsGivenRateAndSteepness) {
    const CudaProgram program = capped_program(kCapped);
    bool launched = false;
    for (const test::Recorded& r : test::run(program, program.forward, capped_call()).launches) {
        if (r.kernel != "flce_forward") continue;
        launched = true;
        const auto p = r.params<ForwardParams>();
        EXPECT_FLOAT_EQ(p.transform[1], 30.F);
        // e^2y as a power of two, y = 0.5·x / 30, and e^(30·2·fall).
        EXPECT_FLOAT_EQ(p.transform[kFallRate], 1.44269504F / 30);
        EXPECT_FLOAT_EQ(p.transform[kFallSteepness], 60 * 1.44269504F);
    }
    EXPECT_TRUE(launched);
}

TEST(Falls, OptionsThatNeedALogitItself_HaveItAgain) {
    for (const char* options : {"temperature", "label_smoothing=0.1", "outputs=loss+entropy", "outputs=loss+top1"}) {
        EXPECT_FALSE(sums_falls(parse_spec(fmt::format("{},{}", kCapped, options)))) << options;
    }
    EXPECT_TRUE(sums_falls(parse_spec(kCapped)));
}

TEST(Falls, ShortSumsOtherDtypesAndNoSoftcap_AreTransformedAsBefore) {
    EXPECT_FALSE(has_falls(parse_spec("D=504,V=1000,softcap=30")));
    EXPECT_FALSE(has_falls(parse_spec("D=512,V=1000,softcap=30,dtype=fp32")));
    EXPECT_FALSE(has_falls(parse_spec("D=512,V=1000")));
}

}  // namespace
}  // namespace flce

// Kernels that tell capped logits by their falls, and their numbers.
#include "generator/cuda/common/falls.hpp"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <string>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/source.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/output_params.cuh"
#include "templates/sm90/params.cuh"
#include "tests/cuda_source/recorded_launch.hpp"

namespace flce {
namespace {

using test::Launched;
using test::made_up_call;
using test::Recorded;
using test::run;

constexpr const char* kCapped = "D=512,V=1000,softcap=30,logit_scale=0.5";

CudaProgram program_of(const std::string& spec_text) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("h100");
    return generate_cuda(spec, device, choose_plan(spec, device, {}));
}

std::string source_of(const std::string& spec_text) {
    std::string all;
    for (const CudaUnit& unit : program_of(spec_text).units) all += unit.source;
    return all;
}

TEST(Falls, Softcaps_ShareASourceUpToThirty) {
    EXPECT_EQ(source_of(kCapped), source_of("D=512,V=1000,softcap=20,logit_scale=0.25"));
    // Logits are further apart than exponentials of a row may be.
    EXPECT_NE(source_of(kCapped), source_of("D=512,V=1000,softcap=30.1,logit_scale=0.5"));
}

TEST(Falls, TheirNumbers_AreLaunchParameters) {
    const CudaProgram program = program_of(kCapped);
    const Launched forward = run(program, program.forward, made_up_call(1000, {}));
    int seen = 0;
    for (const Recorded& r : forward.launches) {
        if (r.kernel != "flce_forward") continue;
        ++seen;
        const auto p = r.params<ForwardParams>();
        EXPECT_FLOAT_EQ(p.transform[1], 30.F);
        // e^2y as a power of two, y = 0.5·x / 30, and e^(60·fall).
        EXPECT_FLOAT_EQ(p.transform[kFallRate], 1.44269504F / 30);
        EXPECT_FLOAT_EQ(p.transform[kFallSteepness], 60 * 1.44269504F);
    }
    EXPECT_GT(seen, 0);
}

TEST(Falls, WhatNeedsLogitsThemselves_HasNone) {
    EXPECT_TRUE(has_falls(parse_spec(kCapped)));
    for (const char* option : {"temperature", "label_smoothing=0.1", "outputs=loss+entropy", "outputs=loss+top1"}) {
        EXPECT_FALSE(has_falls(parse_spec(fmt::format("{},{}", kCapped, option)))) << option;
    }
    for (const char* spec : {"D=504,V=1000,softcap=30", "D=512,V=1000,softcap=30,dtype=fp32", "D=512,V=1000"}) {
        EXPECT_FALSE(has_falls(parse_spec(spec))) << spec;
    }
}

}  // namespace
}  // namespace flce

// Without a loss among the outputs there is no gradient of the loss, whatever was left out of the call.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>

#include "flce/plan.hpp"
#include "generator/cuda_program.hpp"
#include "templates/common/params.cuh"
#include "tests/support/interpreter.hpp"

namespace flce {
namespace {

using test::interpret;
using test::InterpretedLaunch;

/// Values that the launches of row_coefficients take for an absent grad_loss.
std::vector<float> absent_grad_losses(const char* spec_text) {
    const Spec spec = parse_spec(spec_text);
    const Device device = describe_device("sm_80");
    const CudaProgram program = generate_cuda(spec, device, choose_plan(spec, device));
    CallSlots slots{};
    slots[static_cast<std::size_t>(Slot::num_tokens)] = 100;
    slots[static_cast<std::size_t>(Slot::grad_hidden)] = 1 << 20;
    std::vector<float> values;
    const auto on_launch = [&](const InterpretedLaunch& launch) {
        if (program.kernels[static_cast<std::size_t>(launch.kernel)].name.find("row_coefficients") == std::string::npos) return;
        float value = -1;
        std::memcpy(&value, launch.params.data() + offsetof(RowCoefficientsParams, absent_grad_loss), sizeof(value));
        values.push_back(value);
    };
    interpret(program.backward, slots, on_launch, [](std::int64_t, std::int64_t) {});
    return values;
}

TEST(AbsentLoss, SpecWithoutLoss_HasNoGradientOfIt) {
    EXPECT_EQ(absent_grad_losses("D=64,V=1000,outputs=lse+entropy"), std::vector<float>{0});
    EXPECT_EQ(absent_grad_losses("D=64,V=1000,outputs=loss+lse"), std::vector<float>{1});
    EXPECT_EQ(absent_grad_losses("D=64,V=1000"), std::vector<float>{1});
}

}  // namespace
}  // namespace flce

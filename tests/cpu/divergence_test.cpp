// A divergence's reductions and weights on the CPU, beside sums of its tokens; the tokens themselves are python/tests/test_divergence.py's.
#include <gmock/gmock.h>

#include <cmath>

#include "runtime/layer/layer.hpp"
#include "tests/cpu/cpu_test_support.hpp"

namespace flce::test {
namespace {

constexpr std::int64_t kTokens = 23;

struct Step {
    std::vector<float> loss;
    std::vector<std::byte> grad_hidden;
};

Step step(const Kernel& kernel, const LayerInputs& inputs, Reduction reduction) {
    const CallOptions options{.reduction = reduction};
    const LayerOutputs outputs = make_outputs(kernel.spec(), kernel.device_ref(), kTokens, reduction);
    const Scratch workspace("workspace", kernel.device_ref(), step_workspace_bytes(kernel, kTokens));
    kernel.forward(forward_args(inputs, outputs, options), workspace.workspace());
    kernel.backward(backward_args(inputs, outputs, options), workspace.workspace());
    return {outputs.loss.to_host<float>(), outputs.grad_hidden.to_host<std::byte>()};
}

TEST(Divergence, Reductions_AreThoseOfItsTokens) {
    for (const std::string beta : {"0", "0.4", "1"}) {
        const Spec spec = parse_spec("D=72,V=403,dtype=fp32,token_weight,temperature,teacher_hidden_size=40,divergence_beta=" + beta);
        const auto kernel = kernel_of(isa_levels().back(), spec, tiny_plan(isa_levels().back()));
        const RandomLayer layer = make_random_layer(spec, kTokens, {.ignored = 0.3});
        const LayerInputs inputs = upload(spec, layer, kernel->device_ref());
        const std::vector<float> each = step(*kernel, inputs, Reduction::none).loss;
        double sum = 0;
        double weights = 0;
        double count = 0;
        for (std::size_t i = 0; i < each.size(); ++i) {
            const bool ignored = layer.target[i] < 0;
            EXPECT_TRUE(!ignored || each[i] == 0) << i;
            sum += each[i];
            weights += ignored ? 0 : layer.token_weight[i];
            count += ignored ? 0 : 1;
        }
        EXPECT_NEAR(step(*kernel, inputs, Reduction::sum).loss.at(0), sum, 1e-5 * std::abs(sum)) << beta;
        EXPECT_NEAR(step(*kernel, inputs, Reduction::mean).loss.at(0), sum / count, 1e-5 * std::abs(sum / count)) << beta;
        EXPECT_NEAR(step(*kernel, inputs, Reduction::weighted_mean).loss.at(0), sum / weights, 1e-5 * std::abs(sum / weights)) << beta;
    }
}

// No gradient goes through lse or entropy, and none may be dropped in silence.
TEST(Divergence, GradientsOfItsStatistics_AreRefused) {
    const Spec spec = parse_spec("D=72,V=403,dtype=fp32,teacher_hidden_size=40,outputs=loss+lse+entropy");
    const auto kernel = kernel_of(isa_levels().back(), spec, tiny_plan(isa_levels().back()));
    const LayerInputs inputs = upload(spec, make_random_layer(spec, kTokens, {}), kernel->device_ref());
    const LayerOutputs outputs = make_outputs(spec, kernel->device_ref(), kTokens, Reduction::mean);
    const Scratch workspace("workspace", kernel->device_ref(), step_workspace_bytes(*kernel, kTokens));
    for (TensorView BackwardArgs::* gradient : {&BackwardArgs::grad_lse, &BackwardArgs::grad_entropy}) {
        BackwardArgs args = backward_args(inputs, outputs, {});
        args.*gradient = outputs.lse.view;
        EXPECT_THROW(kernel->backward(args, workspace.workspace()), ArgumentError);
    }
    EXPECT_EQ(kernel->retained_bytes(kTokens, RetainedPlace::own), 0U);
}

}  // namespace
}  // namespace flce::test

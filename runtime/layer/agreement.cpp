#include "runtime/layer/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numbers>

#include "runtime/error_bounds.hpp"
#include "runtime/layer/layer.hpp"
#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/parallel_blocks.hpp"

namespace flce {
namespace {

/// A share of tokens whose two largest logits may be closer than rounding.
constexpr double kOtherClasses = 0.05;

DType dtype_of(ScalarType type) {
    switch (type) {
        case ScalarType::bf16: return DType::bf16;
        case ScalarType::fp16: return DType::fp16;
        default: return DType::fp32;
    }
}

/// Fills what a step writes with NaN, so that an element nobody writes shows.
void poison(const Spec& spec, LayerOutputs& outputs) {
    const auto fill = [&](Tensor& tensor) {
        if (tensor.view.present) tensor.buffer.fill(std::byte{0xff});
    };
    for (const auto tensor :
         {&LayerOutputs::loss, &LayerOutputs::z_loss, &LayerOutputs::lse, &LayerOutputs::logprobs, &LayerOutputs::entropy,
          &LayerOutputs::top1, &LayerOutputs::log_sum_sq_probs, &LayerOutputs::teacher_logprobs, &LayerOutputs::grad_hidden}) {
        fill(outputs.*tensor);
    }
    if (spec.grad_weight_mode == GradMode::accumulate) return;
    fill(outputs.grad_weight);
    fill(outputs.grad_bias);
}

/// One step's outputs and gradients, in memory of the kernel's device.
LayerOutputs run_step(const Kernel& kernel, const LayerInputs& inputs, bool lend_grad_weight) {
    const DeviceRef device = kernel.device_ref();
    const CallOptions options{};
    LayerOutputs outputs = make_outputs(kernel.spec(), device, inputs.num_tokens, options.reduction);
    poison(kernel.spec(), outputs);
    const Scratch workspace("workspace", device, step_workspace_bytes(kernel, inputs.num_tokens));
    Retained retained{};
    if (lend_grad_weight) {
        retained = {.data = outputs.grad_weight.buffer.data(),
                    .bytes = kernel.retained_bytes(inputs.num_tokens, RetainedPlace::grad_weight),
                    .place = RetainedPlace::grad_weight};
    }
    ForwardArgs forward = forward_args(inputs, outputs, options);
    forward.retained = retained;
    run_forward(kernel, forward, outputs, workspace.workspace());
    BackwardArgs backward = backward_args(inputs, outputs, options);
    backward.retained = retained;
    kernel.backward(backward, workspace.workspace());
    return outputs;
}

/// ‖values − reference‖ / ‖reference‖ of two tensors of equal shape; 0 where both are 0.
double relative_difference(const Tensor& values, const Tensor& reference) {
    const DType dtype = dtype_of(values.view.dtype);
    const DType reference_dtype = dtype_of(reference.view.dtype);
    const auto found = values.to_host<std::byte>();
    const auto expected = reference.to_host<std::byte>();
    const std::size_t count = found.size() / element_bytes(dtype);
    double difference2 = 0;
    double reference2 = 0;
    std::mutex mutex;
    constexpr std::int64_t kBlock = 1 << 16;
    parallel_blocks(static_cast<std::int64_t>(count), kBlock, [&](std::int64_t begin, std::int64_t end) {
        constexpr std::size_t kRow = 256;
        double a[kRow];
        double b[kRow];
        double apart = 0;
        double size = 0;
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); i += kRow) {
            const std::size_t n = std::min(kRow, static_cast<std::size_t>(end) - i);
            to_real(found.data() + i * element_bytes(dtype), dtype, a, n);
            to_real(expected.data() + i * element_bytes(reference_dtype), reference_dtype, b, n);
            for (std::size_t k = 0; k < n; ++k) {
                apart += (a[k] - b[k]) * (a[k] - b[k]);
                size += b[k] * b[k];
            }
        }
        const std::lock_guard lock(mutex);
        difference2 += apart;
        reference2 += size;
    });
    if (difference2 == 0) return 0;
    return reference2 == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(difference2 / reference2);
}

/// The share of tokens whose class is another one.
double other_classes(const Tensor& values, const Tensor& reference) {
    const auto found = values.to_host<std::int64_t>();
    const auto expected = reference.to_host<std::int64_t>();
    std::size_t others = 0;
    for (std::size_t i = 0; i < found.size(); ++i) others += found[i] != expected[i] ? 1 : 0;
    return found.empty() ? 0 : static_cast<double>(others) / static_cast<double>(found.size());
}

/// Adds the differences of one step. `as`: what the step retained, for names; `roundings`: factors of grad_weight's products that are
/// rounded, as a root of their number.
void add_differences(const Spec& spec, const LayerOutputs& found, const LayerOutputs& expected, const char* as, double roundings,
                     std::vector<Difference>& differences) {
    const auto add = [&](const Tensor LayerOutputs::* tensor, double allowed) {
        const Tensor& values = found.*tensor;
        if (!values.view.present) return;
        differences.push_back({fmt::format("{}, {}", values.name, as), relative_difference(values, expected.*tensor), 2 * allowed});
    };
    const double output = output_error_cap(spec.dtype);
    add(&LayerOutputs::loss, loss_error_cap(spec));
    add(&LayerOutputs::z_loss, loss_error_cap(spec));
    for (const auto tensor : {&LayerOutputs::lse, &LayerOutputs::logprobs, &LayerOutputs::entropy, &LayerOutputs::log_sum_sq_probs,
                              &LayerOutputs::teacher_logprobs}) {
        add(tensor, output);
    }
    if (found.top1.view.present) {
        differences.push_back({fmt::format("top1, {}", as), other_classes(found.top1, expected.top1), kOtherClasses});
    }
    const double gradient = gradient_error_cap(spec.dtype) * roundings;
    for (const auto tensor : {&LayerOutputs::grad_hidden, &LayerOutputs::grad_weight, &LayerOutputs::grad_bias}) add(tensor, gradient);
}

}  // namespace

std::vector<Difference> compare_steps(const Kernel& kernel, const Kernel& reference) {
    const Spec& spec = kernel.spec();
    const RandomLayer layer = make_random_layer(spec, kComparedTokens, {.seed = 20, .ignored = 0.2, .upstream = true});
    const LayerOutputs expected = run_step(reference, upload(spec, layer, reference.device_ref()), /*lend_grad_weight=*/false);
    const LayerInputs inputs = upload(spec, layer, kernel.device_ref());
    std::vector<Difference> differences;
    add_differences(spec, run_step(kernel, inputs, /*lend_grad_weight=*/false), expected, "nothing retained", 1, differences);
    if (kernel.retained_bytes(kComparedTokens, RetainedPlace::grad_weight) > 0) {
        add_differences(spec, run_step(kernel, inputs, /*lend_grad_weight=*/true), expected, "retained in grad_weight's memory",
                        std::numbers::sqrt2, differences);
    }
    return differences;
}

std::string fault_of(const std::vector<Difference>& differences) {
    const Difference* worst = nullptr;
    const auto excess = [](const Difference& of) { return std::isnan(of.relative) ? HUGE_VAL : of.relative / of.allowed; };
    for (const Difference& each : differences) {
        if (!each.passed() && (worst == nullptr || excess(each) > excess(*worst))) worst = &each;
    }
    if (worst == nullptr) return "";
    return fmt::format("{}: differs from the CPU backend's by {:.2g} of its size, where {:.2g} is allowed", worst->output, worst->relative,
                       worst->allowed);
}

}  // namespace flce

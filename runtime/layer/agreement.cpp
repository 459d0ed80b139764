#include "runtime/layer/agreement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <numbers>
#include <optional>

#include "flce/error.hpp"
#include "runtime/error_bounds.hpp"
#include "runtime/layer/layer.hpp"
#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/out_of_memory.hpp"
#include "runtime/layer/parallel_blocks.hpp"
#include "runtime/workers/worker_room.hpp"

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
    for (const auto tensor : {&LayerOutputs::loss, &LayerOutputs::z_loss, &LayerOutputs::lse, &LayerOutputs::logprobs,
                              &LayerOutputs::entropy, &LayerOutputs::top1, &LayerOutputs::log_sum_sq_probs, &LayerOutputs::teacher_logprobs,
                              &LayerOutputs::teacher_lse, &LayerOutputs::teacher_entropy, &LayerOutputs::student_divergence,
                              &LayerOutputs::top_logprobs, &LayerOutputs::top_ids, &LayerOutputs::grad_hidden}) {
        fill(outputs.*tensor);
    }
    if (spec.grad_weight_mode == GradMode::accumulate) return;
    fill(outputs.grad_weight);
    fill(outputs.grad_bias);
}

/// One step's outputs and gradients, in memory of the kernel's device; `place` absent: nothing is retained.
LayerOutputs run_step(const Kernel& kernel, const LayerInputs& inputs, std::optional<RetainedPlace> place = {}) {
    const DeviceRef device = kernel.device_ref();
    const CallOptions options{};
    LayerOutputs outputs = make_outputs(kernel.spec(), device, inputs.num_tokens, options.reduction);
    poison(kernel.spec(), outputs);
    const Scratch workspace("workspace", device, step_workspace_bytes(kernel, inputs.num_tokens));
    Retained retained{};
    if (place) retained = {.bytes = kernel.retained_bytes(inputs.num_tokens, *place), .place = *place};
    std::optional<Scratch> own;
    if (place == RetainedPlace::own) own.emplace("retained", device, retained.bytes);
    if (place) retained.data = own ? own->workspace().data : outputs.grad_weight.buffer.data();
    ForwardArgs forward = forward_args(inputs, outputs, options);
    forward.retained = retained;
    run_forward(kernel, forward, outputs, workspace.workspace());
    BackwardArgs backward = backward_args(inputs, outputs, options);
    backward.retained = retained;
    kernel.backward(backward, workspace.workspace());
    return outputs;
}

/// Sums over a slice of two tensors' elements: of squared differences, and of the reference's squares.
struct SliceSums {
    double difference2 = 0;
    double reference2 = 0;
};

SliceSums compare_slices(const std::vector<std::byte>& found, DType dtype, const std::vector<std::byte>& expected, DType reference_dtype) {
    SliceSums all;
    std::mutex mutex;
    constexpr std::int64_t kBlock = 1 << 16;
    parallel_blocks(static_cast<std::int64_t>(found.size() / element_bytes(dtype)), kBlock, [&](std::int64_t begin, std::int64_t end) {
        constexpr std::size_t kRow = 256;
        double a[kRow];
        double b[kRow];
        SliceSums block;
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); i += kRow) {
            const std::size_t n = std::min(kRow, static_cast<std::size_t>(end) - i);
            to_real(found.data() + i * element_bytes(dtype), dtype, a, n);
            to_real(expected.data() + i * element_bytes(reference_dtype), reference_dtype, b, n);
            for (std::size_t k = 0; k < n; ++k) {
                block.difference2 += (a[k] - b[k]) * (a[k] - b[k]);
                block.reference2 += b[k] * b[k];
            }
        }
        const std::lock_guard lock(mutex);
        all.difference2 += block.difference2;
        all.reference2 += block.reference2;
    });
    return all;
}

/// ‖values − reference‖ / ‖reference‖ of two tensors of equal shape; 0 where both are 0. A slice at a time is on the host.
double relative_difference(const Tensor& values, const Tensor& reference) {
    constexpr std::size_t kElements = 8 << 20;
    const DType dtype = dtype_of(values.view.dtype);
    const DType reference_dtype = dtype_of(reference.view.dtype);
    const auto slice = [](const Tensor& tensor, std::size_t begin, std::size_t count, DType of) {
        std::vector<std::byte> bytes(count * element_bytes(of));
        tensor.buffer.download(bytes.data(), bytes.size(), begin * element_bytes(of));
        return bytes;
    };
    SliceSums sums;
    const std::size_t all = values.bytes() / element_bytes(dtype);
    for (std::size_t begin = 0; begin < all; begin += kElements) {
        const std::size_t count = std::min(kElements, all - begin);
        const SliceSums of =
            compare_slices(slice(values, begin, count, dtype), dtype, slice(reference, begin, count, reference_dtype), reference_dtype);
        sums.difference2 += of.difference2;
        sums.reference2 += of.reference2;
    }
    if (!std::isfinite(sums.reference2)) throw SpecError(fmt::format("{} of random tokens is not finite on a CPU", values.name));
    if (sums.difference2 == 0) return 0;
    return sums.reference2 == 0 ? std::numeric_limits<double>::infinity() : std::sqrt(sums.difference2 / sums.reference2);
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
    const bool few_bits = spec.fp8 == Fp8Operands::e4m3;
    const double output = std::max(output_error_cap(spec.dtype), few_bits ? kFp8GpuOutputError : 0);
    add(&LayerOutputs::loss, std::max(loss_error_cap(spec), output));
    add(&LayerOutputs::z_loss, std::max(loss_error_cap(spec), output));
    for (const auto tensor : {&LayerOutputs::lse, &LayerOutputs::logprobs, &LayerOutputs::entropy, &LayerOutputs::log_sum_sq_probs,
                              &LayerOutputs::teacher_logprobs, &LayerOutputs::teacher_lse, &LayerOutputs::teacher_entropy,
                              &LayerOutputs::student_divergence, &LayerOutputs::top_logprobs}) {
        add(tensor, output);
    }
    if (found.top1.view.present) {
        differences.push_back({fmt::format("top1, {}", as), other_classes(found.top1, expected.top1), kOtherClasses});
    }
    const double gradient = std::max(gradient_error_cap(spec.dtype) * roundings, few_bits ? kFp8GpuGradientError : 0);
    for (const auto tensor : {&LayerOutputs::grad_hidden, &LayerOutputs::grad_weight, &LayerOutputs::grad_bias}) add(tensor, gradient);
}

/// The weight lies on the host twice for a while, its gradient once: a host that has not twice as much left may end the process.
void check_host_memory(const Spec& spec) {
    const auto rows = static_cast<double>(spec.padded_vocab_size);
    const double elements = is_quantized(spec) ? 0 : rows * static_cast<double>(spec.hidden_size);
    const double gradient = elements * static_cast<double>(element_bytes(spec.grad_weight_dtype));
    const double needed = 2 * (rows * static_cast<double>(weight_row_bytes(spec)) + gradient);
    if (needed > static_cast<double>(available_memory_bytes())) throw OutOfMemory("weight", needed, {});
}

}  // namespace

std::vector<Difference> compare_steps(const Kernel& kernel, const Kernel& reference) {
    const Spec& spec = kernel.spec();
    check_host_memory(spec);
    // Logits that a softcap saturates have derivatives of which rounding leaves little.
    const double deviation = spec.softcap > 0 ? std::min(kRandomLogitDeviation, spec.softcap) : kRandomLogitDeviation;
    LayerInputs inputs;
    LayerInputs on_reference;
    {
        const RandomLayer layer =
            make_random_layer(spec, kComparedTokens, {.seed = 20, .ignored = 0.2, .deviation = deviation, .upstream = true});
        inputs = upload(spec, layer, kernel.device_ref());
        on_reference = upload(spec, layer, reference.device_ref());
    }
    const LayerOutputs expected = run_step(reference, on_reference);
    on_reference = {};
    std::vector<Difference> differences;
    add_differences(spec, run_step(kernel, inputs), expected, "nothing retained", 1, differences);
    // One place of the two: the same kernels read either.
    for (const RetainedPlace place : {RetainedPlace::grad_weight, RetainedPlace::own}) {
        if (kernel.retained_bytes(kComparedTokens, place) == 0) continue;
        add_differences(spec, run_step(kernel, inputs, place), expected,
                        place == RetainedPlace::own ? "retained" : "retained in grad_weight's memory", std::numbers::sqrt2, differences);
        break;
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

#include "runtime/layer/layer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "generator/call_tensors.hpp"
#include "generator/shard_layout.hpp"
#include "runtime/call_fields.hpp"
#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/parallel_blocks.hpp"
#include "runtime/scratch_steps.hpp"
#include "templates/common/row_math.cuh"

namespace flce {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;

/// splitmix64: a good hash of a counter, so that any element can be drawn by any thread.
std::uint64_t hash(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

/// Sum of four uniform 16-bit numbers, standardised: close enough to a normal distribution, and a hash a number.
float near_normal(std::uint64_t bits) {
    const auto sum = static_cast<std::int64_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    constexpr double kDeviation = 37837.2;  // standard deviation of the sum: 65536 · sqrt(4 / 12)
    return static_cast<float>(static_cast<double>(sum - std::int64_t{2} * 65535) / kDeviation);
}

/// "hidden [4096, 128]".
std::string described(std::string_view name, const std::vector<std::int64_t>& shape) {
    return shape.empty() ? std::string(name) : fmt::format("{} [{}]", name, fmt::join(shape, ", "));
}

double total_bytes(const std::vector<std::int64_t>& shape, std::size_t element) {
    double bytes = static_cast<double>(element);
    for (const std::int64_t size : shape) bytes *= static_cast<double>(size);
    return bytes;
}

/// Memory of the host for a tensor's elements, zeros.
template <class T>
std::vector<T> host_memory(std::string_view name, const std::vector<std::int64_t>& shape, std::size_t element = sizeof(T)) {
    const double bytes = total_bytes(shape, element);
    return allocated(described(name, shape), bytes, DeviceRef{},
                     [&] { return std::vector<T>(static_cast<std::size_t>(bytes) / sizeof(T)); });
}

std::vector<std::byte> random_elements(std::string_view name, const std::vector<std::int64_t>& shape, DType dtype, double deviation,
                                       std::uint64_t seed) {
    auto bytes = host_memory<std::byte>(name, shape, element_bytes(dtype));
    fill_random(bytes.data(), dtype, bytes.size() / element_bytes(dtype), deviation, seed);
    return bytes;
}

/// Calls `write` with the first of some near-normal numbers, their number and the numbers; from many threads.
template <class Write>
void draw_numbers(std::size_t count, double deviation, std::uint64_t seed, const Write& write) {
    constexpr std::int64_t kBlock = 1 << 14;
    const std::uint64_t stream = hash(seed);
    parallel_blocks(static_cast<std::int64_t>(count), kBlock, [&](std::int64_t begin, std::int64_t end) {
        float values[256];
        for (std::int64_t i = begin; i < end; i += 256) {
            const auto n = static_cast<std::size_t>(std::min<std::int64_t>(256, end - i));
            for (std::size_t k = 0; k < n; ++k) {
                values[k] = near_normal(hash(stream ^ hash(static_cast<std::uint64_t>(i) + k))) * static_cast<float>(deviation);
            }
            write(static_cast<std::size_t>(i), n, values);
        }
    });
}

std::vector<float> random_floats(std::string_view name, std::int64_t count, double deviation, std::uint64_t seed) {
    auto values = host_memory<float>(name, {count});
    fill_random(reinterpret_cast<std::byte*>(values.data()), DType::fp32, values.size(), deviation, seed);
    return values;
}

/// Groups of a few of the classes each, and some −1.
std::vector<std::int32_t> random_groups(std::string_view name, std::int64_t count, std::int64_t vocab_size, std::uint64_t seed) {
    auto groups = host_memory<std::int32_t>(name, {count});
    const auto all = static_cast<std::uint64_t>(std::max<std::int64_t>(vocab_size / 4, 2));
    for (std::size_t i = 0; i < groups.size(); ++i) {
        const std::uint64_t bits = hash(hash(seed) + i);
        groups[i] = bits % 8 == 0 ? -1 : static_cast<std::int32_t>(bits / 8 % all);
    }
    return groups;
}

void add_random_teacher(const Spec& spec, RandomLayer& layer, std::uint64_t seed) {
    const std::int64_t top_k = spec.teacher_top_k;
    layer.teacher_ids = host_memory<std::int64_t>("teacher_ids", {layer.num_tokens, top_k});
    layer.teacher_probs = host_memory<float>("teacher_probs", {layer.num_tokens, top_k});
    for (std::int64_t i = 0; i < layer.num_tokens; ++i) {
        double sum = 0;
        const auto place = [&](std::int64_t k) { return static_cast<std::size_t>(i * top_k + k); };
        for (std::int64_t k = 0; k < top_k; ++k) {
            const std::uint64_t bits = hash(hash(seed) + place(k));
            std::int64_t& id = layer.teacher_ids[place(k)];
            id = static_cast<std::int64_t>(hash(bits) % static_cast<std::uint64_t>(spec.vocab_size));
            if (bits % 16 == 0) id = -1;
            if (bits % 16 == 1 && k > 0) id = layer.teacher_ids[place(k - 1)];
            sum += layer.teacher_probs[place(k)] = static_cast<float>(std::exp2(6 * static_cast<double>(bits >> 40) * 0x1p-24));
        }
        for (std::int64_t k = 0; k < top_k; ++k) layer.teacher_probs[place(k)] /= static_cast<float>(sum);
    }
}

/// A head's weight, with which logits have that deviation.
std::vector<std::byte> random_weight(std::string_view name, const Spec& head, double deviation, std::uint64_t seed) {
    const double scale = std::abs(head.logit_scale) * std::sqrt(static_cast<double>(head.hidden_size));
    return random_elements(name, weight_shape(head), weight_dtype(head), deviation / scale, seed);
}

/// Codes that use most of their format's range, and scales about one from which logits have that deviation.
void add_quantized_weight(const Spec& spec, double deviation, std::uint64_t seed, RandomLayer& layer) {
    const double needed = deviation / (std::abs(spec.logit_scale) * std::sqrt(static_cast<double>(spec.hidden_size)));
    const auto numbers = static_cast<std::size_t>(spec.padded_vocab_size * spec.hidden_size);
    layer.weight = host_memory<std::byte>("weight", weight_shape(spec), 1);
    const auto near_one = [&](std::size_t i) { return 0.75F + 0x1p-25F * static_cast<float>(hash(hash(seed + 1) + i) >> 40); };
    const std::vector<std::int64_t> shape = weight_scale_shape(spec);
    if (spec.weight_format == WeightFormat::nvfp4) {
        constexpr double kDeviation = 2;  // standard deviation of e2m1 codes, which end at 6
        draw_numbers(numbers, kDeviation, seed, [&](std::size_t first, std::size_t n, const float* values) {
            for (std::size_t i = 0; i + 1 < n; i += 2) {
                layer.weight[(first + i) / 2] = std::byte(float_to_e2m1(values[i]) | float_to_e2m1(values[i + 1]) << 4);
            }
        });
        layer.weight_scale = host_memory<std::byte>("weight_scale", shape, 1);
        for (std::size_t i = 0; i < layer.weight_scale.size(); ++i) layer.weight_scale[i] = std::byte(float_to_e4m3(near_one(i)));
        layer.weight_tensor_scale = static_cast<float>(needed / kDeviation);
        return;
    }
    constexpr double kDeviation = 64;  // standard deviation of e4m3 codes, which end at 448
    draw_numbers(numbers, kDeviation, seed, [&](std::size_t first, std::size_t n, const float* values) {
        for (std::size_t i = 0; i < n; ++i) layer.weight[first + i] = std::byte(float_to_e4m3(values[i]));
    });
    layer.weight_scale = host_memory<std::byte>("weight_scale", shape, sizeof(float));
    for (std::size_t i = 0; i < layer.weight_scale.size() / sizeof(float); ++i) {
        const float scale = near_one(i) * static_cast<float>(needed / kDeviation);
        std::memcpy(&layer.weight_scale[i * sizeof(float)], &scale, sizeof(float));
    }
}

std::vector<std::byte> random_bias(std::string_view name, const Spec& head, std::uint64_t seed) {
    return random_elements(name, {head.vocab_size}, head.dtype, 0.5 / std::abs(head.logit_scale), seed);
}

/// Sums of shards that have found nothing for `num_tokens` tokens.
std::vector<float> sums_of_nothing(const Spec& spec, std::int64_t num_tokens, std::int64_t shards) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const ShardFields fields = shard_fields(spec);
    const auto n = static_cast<std::size_t>(num_tokens);
    auto sums = host_memory<float>("all_partial_sums", {shards * fields.count, num_tokens});
    for (std::int64_t shard = 0; shard < shards; ++shard) {
        const auto fill = [&](int field, float value) {
            if (field >= 0) std::fill_n(sums.begin() + (shard * fields.count + field) * num_tokens, n, value);
        };
        fill(fields.max, -kInfinity);
        fill(fields.target_logit, -kInfinity);
        fill(fields.top1, std::bit_cast<float>(int{FLCE_NO_CLASS}));
        for (int k = 0; k < spec.teacher_top_k; ++k) fill(fields.teacher_logits + k, -kInfinity);
        for (int k = 0; k < spec.top_k; ++k) {
            fill(fields.top_logits + k, std::numeric_limits<float>::quiet_NaN());
            fill(fields.top_labels + k, std::bit_cast<float>(int{FLCE_NO_CLASS}));
        }
    }
    return sums;
}

void add_shard_outputs(const Spec& spec, DeviceRef device, std::int64_t num_tokens, LayerOutputs& outputs) {
    if (has_teacher_head(spec)) {
        throw SpecError(
            "spec: whole_vocab_size with teacher_hidden_size: a divergence's shard alone has no outputs; leave one of them out");
    }
    if (spec.padded_vocab_size != spec.vocab_size) {
        throw SpecError(
            fmt::format("spec: padded_vocab_size={} of a shard: rows without a class are the last of the whole layer, and this "
                        "runs its first shard; leave padded_vocab_size out",
                        spec.padded_vocab_size));
    }
    const std::int64_t shards = (spec.whole_vocab_size + spec.vocab_size - 1) / spec.vocab_size;
    const std::int64_t fields = shard_fields(spec).count;
    const std::vector<float> nothing = sums_of_nothing(spec, num_tokens, shards);
    outputs.all_partial_sums = make_tensor("all_partial_sums", device, ScalarType::fp32, {shards * fields, num_tokens}, nothing.data());
    outputs.partial_sums.view = outputs.all_partial_sums.view;
    outputs.partial_sums.view.shape[0] = fields;
    if (!spec.class_weight) return;
    outputs.target_class_weight = make_tensor("target_class_weight", device, ScalarType::fp32, {num_tokens});
    if (spec.label_smoothing > 0) outputs.class_weight_total = make_tensor("class_weight_total", device, ScalarType::fp32, {});
}

/// Takes the tensors of a call that the pass has, under the names that they have among inputs and outputs.
template <class Args, class Inputs, class Outputs>
Args args_of(const Inputs& inputs, const Outputs& outputs, const CallOptions& options) {
    Args args{.ignore_index = options.ignore_index, .reduction = options.reduction};
#define FLCE_TAKE_VIEW(name, ...)                   \
    if constexpr (requires { args.name; }) {        \
        if constexpr (requires { inputs.name; }) {  \
            args.name = inputs.name.view;           \
        }                                           \
        if constexpr (requires { outputs.name; }) { \
            args.name = outputs.name.view;          \
        }                                           \
    }
    FLCE_CALL_TENSORS(FLCE_TAKE_VIEW)
#undef FLCE_TAKE_VIEW
    return args;
}

}  // namespace

std::size_t Tensor::bytes() const {
    if (!view.present) return 0;
    std::int64_t count = 1;
    for (int i = 0; i < view.ndim; ++i) count *= view.shape[static_cast<std::size_t>(i)];
    return static_cast<std::size_t>(count * scalar_bytes(view.dtype));
}

ScalarType scalar_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return ScalarType::bf16;
        case DType::fp16: return ScalarType::fp16;
        case DType::fp32: break;
    }
    return ScalarType::fp32;
}

Tensor make_tensor(const std::string& name, DeviceRef device, ScalarType dtype, const std::vector<std::int64_t>& shape) {
    Tensor tensor;
    tensor.name = name;
    switch (shape.size()) {
        case 0: tensor.view = TensorView::scalar(nullptr, dtype, device); break;
        case 1: tensor.view = TensorView::vector(nullptr, dtype, shape[0], device); break;
        default: tensor.view = TensorView::matrix(nullptr, dtype, shape[0], shape[1], device); break;
    }
    tensor.buffer = allocated(described(name, shape), total_bytes(shape, static_cast<std::size_t>(scalar_bytes(dtype))), device,
                              [&] { return Buffer(device, tensor.bytes()); });
    tensor.view.data = tensor.buffer.data();
    return tensor;
}

Tensor make_tensor(const std::string& name, DeviceRef device, ScalarType dtype, const std::vector<std::int64_t>& shape, const void* host) {
    Tensor tensor = make_tensor(name, device, dtype, shape);
    tensor.buffer.upload(host, tensor.bytes());
    return tensor;
}

ScalarType weight_type(const Spec& spec) {
    switch (spec.weight_format) {
        case WeightFormat::numbers: break;
        case WeightFormat::e4m3: return ScalarType::e4m3;
        case WeightFormat::nvfp4: return ScalarType::uint8;
    }
    return scalar_type(weight_dtype(spec));
}

ScalarType scale_type(const Spec& spec) { return spec.weight_format == WeightFormat::nvfp4 ? ScalarType::e4m3 : ScalarType::fp32; }

std::vector<std::int64_t> weight_scale_shape(const Spec& spec) {
    const ExpectedShape shape = shape_of(Extent::weight_scale, spec, sizes_of(spec, 0, Reduction::mean));
    return shape.ndim == 1 ? std::vector{shape.rows} : std::vector{shape.rows, shape.columns};
}

std::vector<std::int64_t> weight_shape(const Spec& spec) {
    if (spec.weight_format == WeightFormat::nvfp4) return {spec.padded_vocab_size, spec.hidden_size / 2};
    if (spec.layout == WeightLayout::vocab_major) return {spec.padded_vocab_size, spec.hidden_size};
    return {spec.hidden_size, spec.padded_vocab_size};
}

LayerOutputs make_outputs(const Spec& spec, DeviceRef device, std::int64_t num_tokens, Reduction reduction) {
    const std::vector<std::int64_t> tokens{num_tokens};
    std::vector<std::int64_t> loss_shape;
    if (reduction == Reduction::none) loss_shape.push_back(num_tokens);
    LayerOutputs outputs;
    if (spec.outputs.loss) outputs.loss = make_tensor("loss", device, ScalarType::fp32, loss_shape);
    if (spec.outputs.loss && spec.z_loss != 0) outputs.z_loss = make_tensor("z_loss", device, ScalarType::fp32, loss_shape);
    outputs.lse = make_tensor("lse", device, ScalarType::fp32, tokens);
    if (spec.outputs.logprobs) outputs.logprobs = make_tensor("logprobs", device, ScalarType::fp32, tokens);
    if (spec.outputs.entropy) outputs.entropy = make_tensor("entropy", device, ScalarType::fp32, tokens);
    if (spec.outputs.top1) outputs.top1 = make_tensor("top1", device, ScalarType::int64, tokens);
    if (spec.outputs.log_sum_sq_probs) outputs.log_sum_sq_probs = make_tensor("log_sum_sq_probs", device, ScalarType::fp32, tokens);
    if (spec.teacher_top_k > 0) {
        outputs.teacher_logprobs = make_tensor("teacher_logprobs", device, ScalarType::fp32, {num_tokens, spec.teacher_top_k});
    }
    if (has_teacher_head(spec)) {
        outputs.teacher_lse = make_tensor("teacher_lse", device, ScalarType::fp32, tokens);
        outputs.teacher_entropy = make_tensor("teacher_entropy", device, ScalarType::fp32, tokens);
        outputs.student_divergence = make_tensor("student_divergence", device, ScalarType::fp32, tokens);
    }
    if (spec.top_k > 0) {
        outputs.top_logprobs = make_tensor("top_logprobs", device, ScalarType::fp32, {num_tokens, spec.top_k});
        outputs.top_ids = make_tensor("top_ids", device, ScalarType::int64, {num_tokens, spec.top_k});
    }
    outputs.grad_hidden = make_tensor("grad_hidden", device, scalar_type(grad_hidden_dtype(spec)), {num_tokens, spec.hidden_size});
    if (!is_quantized(spec)) {
        outputs.grad_weight = make_tensor("grad_weight", device, scalar_type(spec.grad_weight_dtype), weight_shape(spec));
    }
    if (spec.bias) outputs.grad_bias = make_tensor("grad_bias", device, scalar_type(spec.grad_weight_dtype), {spec.vocab_size});
    if (is_shard(spec)) add_shard_outputs(spec, device, num_tokens, outputs);
    if (spec.grad_weight_mode == GradMode::accumulate) {
        outputs.grad_weight.buffer.fill(std::byte{0});
        if (spec.bias) outputs.grad_bias.buffer.fill(std::byte{0});
    }
    return outputs;
}

ForwardArgs forward_args(const LayerInputs& inputs, const LayerOutputs& outputs, const CallOptions& options) {
    return args_of<ForwardArgs>(inputs, outputs, options);
}

BackwardArgs backward_args(const LayerInputs& inputs, const LayerOutputs& outputs, const CallOptions& options) {
    return args_of<BackwardArgs>(inputs, outputs, options);
}

void run_forward(const Kernel& kernel, const ForwardArgs& args, const LayerOutputs& outputs, Workspace workspace, Stream stream) {
    if (!is_shard(kernel.spec())) return kernel.forward(args, workspace, stream);
    ForwardArgs shard = args;
    MergeArgs merge{.all_partial_sums = outputs.all_partial_sums.view,
                    .ignore_index = args.ignore_index,
                    .reduction = args.reduction,
                    .target_class_weight = outputs.target_class_weight.view,
                    .class_weight_total = outputs.class_weight_total.view};
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        if (kForwardFields[i] == nullptr) continue;
        if (kMergeFields[i] != nullptr) merge.*kMergeFields[i] = args.*kForwardFields[i];
        if (kCallTensors[i].shard == Use::none) shard.*kForwardFields[i] = {};  // merge writes it
    }
    kernel.forward(shard, workspace, stream);
    kernel.merge(merge, workspace, stream);
}

std::size_t step_workspace_bytes(const Kernel& kernel, std::int64_t num_tokens) {
    const std::size_t passes = kernel.workspace_bytes(num_tokens);
    return is_shard(kernel.spec()) ? std::max(passes, kernel.workspace_bytes(num_tokens, Pass::merge)) : passes;
}

Scratch::Scratch(std::string_view name, DeviceRef device, std::size_t bytes)
    : buffer_(allocated(name, static_cast<double>(bytes), device, [&] { return Buffer(device, bytes + kWorkspaceAlignment); })),
      bytes_(bytes) {}

Workspace Scratch::workspace() const {
    const auto address = reinterpret_cast<std::uintptr_t>(buffer_.data());
    const std::uintptr_t aligned = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return {static_cast<std::byte*>(buffer_.data()) + (aligned - address), bytes_};
}

Retained automatic_retained(const Kernel& kernel, std::int64_t num_tokens, std::int64_t workspace_limit_bytes) {
    const auto workspace = static_cast<std::int64_t>(kernel.workspace_bytes(num_tokens));
    if (workspace_limit_bytes > 0 && workspace > workspace_limit_bytes) {
        throw PlanError(limit_too_small(workspace_limit_bytes, workspace, fmt::format("{} tokens with this plan", num_tokens)));
    }
    return kernel.choose_retained(num_tokens, {.workspace_limit_bytes = workspace_limit_bytes});
}

void fill_random(std::byte* to, DType dtype, std::size_t count, double deviation, std::uint64_t seed) {
    draw_numbers(count, deviation, seed, [&](std::size_t first, std::size_t n, const float* values) {
        from_float(values, dtype, to + first * element_bytes(dtype), n);
    });
}

RandomLayer make_random_layer(const Spec& spec, std::int64_t num_tokens, const RandomOptions& options) {
    RandomLayer layer;
    layer.num_tokens = num_tokens;
    const std::uint64_t seed = hash(options.seed) << 4;
    layer.hidden = random_elements("hidden", {num_tokens, spec.hidden_size}, spec.dtype, 1.0, seed + 1);
    if (is_quantized(spec)) {
        add_quantized_weight(spec, options.deviation, seed + 2, layer);
    } else {
        layer.weight = random_weight("weight", spec, options.deviation, seed + 2);
    }
    if (spec.bias) layer.bias = random_bias("bias", spec, seed + 3);
    if (has_teacher_head(spec)) {
        const Spec teacher = teacher_head(spec);
        layer.teacher_hidden = random_elements("teacher_hidden", {num_tokens, teacher.hidden_size}, spec.dtype, 1.0, seed + 13);
        layer.teacher_weight = random_weight("teacher_weight", teacher, options.deviation, seed + 14);
        if (teacher.bias) layer.teacher_bias = random_bias("teacher_bias", teacher, seed + 15);
    }
    if (spec.class_weight) {
        layer.class_weight = random_floats("class_weight", spec.vocab_size, 0.2, seed + 4);
        for (float& weight : layer.class_weight) weight = std::abs(1.0F + weight);
    }
    if (spec.class_offset) layer.class_offset = random_floats("class_offset", spec.vocab_size, 1.0, seed + 16);
    if (spec.class_groups) {
        layer.class_group = random_groups("class_group", spec.vocab_size, spec.vocab_size, seed + 17);
        layer.row_group = random_groups("row_group", num_tokens, spec.vocab_size, seed + 18);
    }
    layer.target = host_memory<std::int64_t>("target", {num_tokens});
    for (std::size_t i = 0; i < layer.target.size(); ++i) {
        const std::uint64_t bits = hash(hash(seed + 5) + i);
        const bool ignored = static_cast<double>(bits >> 40) < options.ignored * 0x1p24;
        layer.target[i] =
            ignored ? options.ignore_index : static_cast<std::int64_t>(hash(bits) % static_cast<std::uint64_t>(spec.vocab_size));
    }
    if (spec.temperature) {
        layer.temperature = random_floats("temperature", num_tokens, 0.5, seed + 10);
        for (float& t : layer.temperature) t = std::exp2(std::clamp(t, -1.0F, 1.0F));
    }
    if (spec.token_weight) {
        layer.token_weight = random_floats("token_weight", num_tokens, 0.5, seed + 11);
        for (float& weight : layer.token_weight) weight += 1.0F;
    }
    if (spec.teacher_top_k > 0) add_random_teacher(spec, layer, seed + 12);
    if (options.upstream) {
        // upstream gradients as large as the loss's own, so that every term is seen in the result
        const bool mean = options.reduction == Reduction::mean || options.reduction == Reduction::weighted_mean;
        const double share = mean ? 1.0 / std::max(1.0, static_cast<double>(num_tokens)) : 1.0;
        if (spec.outputs.loss && options.reduction == Reduction::none)
            layer.grad_loss = random_floats("grad_loss", num_tokens, share, seed + 6);
        if (has_teacher_head(spec)) return layer;
        if (spec.outputs.lse) layer.grad_lse = random_floats("grad_lse", num_tokens, 0.5 * share, seed + 7);
        if (spec.outputs.logprobs) layer.grad_logprobs = random_floats("grad_logprobs", num_tokens, 0.5 * share, seed + 8);
        if (spec.outputs.entropy) layer.grad_entropy = random_floats("grad_entropy", num_tokens, 0.5 * share, seed + 9);
    }
    return layer;
}

LayerInputs upload(const Spec& spec, const RandomLayer& layer, DeviceRef device) {
    LayerInputs inputs;
    const std::int64_t n = layer.num_tokens;
    const ScalarType dtype = scalar_type(spec.dtype);
    inputs.num_tokens = n;
    inputs.hidden = make_tensor("hidden", device, dtype, {n, spec.hidden_size}, layer.hidden.data());
    inputs.weight = make_tensor("weight", device, weight_type(spec), weight_shape(spec), layer.weight.data());
    if (is_quantized(spec)) {
        inputs.weight_scale = make_tensor("weight_scale", device, scale_type(spec), weight_scale_shape(spec), layer.weight_scale.data());
    }
    if (spec.weight_format == WeightFormat::nvfp4) {
        inputs.weight_tensor_scale = make_tensor("weight_tensor_scale", device, ScalarType::fp32, {}, &layer.weight_tensor_scale);
    }
    if (spec.bias) inputs.bias = make_tensor("bias", device, dtype, {spec.vocab_size}, layer.bias.data());
    if (spec.class_weight)
        inputs.class_weight = make_tensor("class_weight", device, ScalarType::fp32, {spec.vocab_size}, layer.class_weight.data());
    if (spec.class_offset)
        inputs.class_offset = make_tensor("class_offset", device, ScalarType::fp32, {spec.vocab_size}, layer.class_offset.data());
    if (spec.class_groups) {
        inputs.class_group = make_tensor("class_group", device, ScalarType::int32, {spec.vocab_size}, layer.class_group.data());
        inputs.row_group = make_tensor("row_group", device, ScalarType::int32, {n}, layer.row_group.data());
    }
    inputs.target = make_tensor("target", device, ScalarType::int64, {n}, layer.target.data());
    if (has_teacher_head(spec)) {
        const Spec teacher = teacher_head(spec);
        inputs.teacher_hidden = make_tensor("teacher_hidden", device, dtype, {n, teacher.hidden_size}, layer.teacher_hidden.data());
        inputs.teacher_weight = make_tensor("teacher_weight", device, dtype, weight_shape(teacher), layer.teacher_weight.data());
        if (teacher.bias) inputs.teacher_bias = make_tensor("teacher_bias", device, dtype, {spec.vocab_size}, layer.teacher_bias.data());
    }
    const auto upstream = [&](const char* name, Tensor& tensor, const std::vector<float>& values) {
        if (!values.empty()) tensor = make_tensor(name, device, ScalarType::fp32, {n}, values.data());
    };
    if (spec.temperature) inputs.temperature = make_tensor("temperature", device, ScalarType::fp32, {n}, layer.temperature.data());
    if (spec.token_weight) inputs.token_weight = make_tensor("token_weight", device, ScalarType::fp32, {n}, layer.token_weight.data());
    if (spec.teacher_top_k > 0) {
        const std::vector<std::int64_t> shape{n, spec.teacher_top_k};
        inputs.teacher_ids = make_tensor("teacher_ids", device, ScalarType::int64, shape, layer.teacher_ids.data());
        inputs.teacher_probs = make_tensor("teacher_probs", device, ScalarType::fp32, shape, layer.teacher_probs.data());
    }
    upstream("grad_loss", inputs.grad_loss, layer.grad_loss);
    upstream("grad_lse", inputs.grad_lse, layer.grad_lse);
    upstream("grad_logprobs", inputs.grad_logprobs, layer.grad_logprobs);
    upstream("grad_entropy", inputs.grad_entropy, layer.grad_entropy);
    return inputs;
}

}  // namespace flce

#include "demo/layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "cache/private_folder.hpp"
#include "runtime/layer/number_formats.hpp"
#include "runtime/text.hpp"

namespace flce::demo {
namespace {

/// The first elements of a tensor as a smaller tensor of the same memory.
Tensor front(const Tensor& tensor, std::int64_t count) {
    Tensor part = tensor;
    part.view.shape[0] = count;
    return part;
}

}  // namespace

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

OutputLayer::OutputLayer(std::shared_ptr<const Kernel> kernel, std::int64_t max_tokens)
    : kernel_(std::move(kernel)),
      device_(kernel_->device_ref()),
      direct_(device_.kind == DeviceKind::cpu && kernel_->spec().dtype == DType::fp32),
      workspace_bytes_(kernel_->workspace_bytes(max_tokens)),
      scratch_("workspace", device_, workspace_bytes_) {
    const Spec& spec = kernel_->spec();
    const ScalarType dtype = scalar_type(spec.dtype);
    hidden_ = make_tensor("hidden", device_, dtype, {max_tokens, spec.hidden_size});
    weight_ = make_tensor("weight", device_, dtype, weight_shape(spec));
    target_ = make_tensor("target", device_, ScalarType::int32, {max_tokens});
    loss_ = make_tensor("loss", device_, ScalarType::fp32, {});
    lse_ = make_tensor("lse", device_, ScalarType::fp32, {max_tokens});
    grad_hidden_ = make_tensor("grad_hidden", device_, dtype, {max_tokens, spec.hidden_size});
    grad_weight_ = make_tensor("grad_weight", device_, ScalarType::fp32, weight_shape(spec));
    const auto count = static_cast<std::size_t>(spec.vocab_size * spec.hidden_size);
    if (direct_) {
        embedding_ = {static_cast<float*>(weight_.view.data), count};
        grad_embedding_ = {static_cast<float*>(grad_weight_.view.data), count};
    } else {
        embedding_storage_.resize(count);
        grad_storage_.resize(count);
        embedding_ = embedding_storage_;
        grad_embedding_ = grad_storage_;
    }
}

Workspace OutputLayer::workspace(std::int64_t num_tokens) {
    const std::size_t bytes = kernel_->workspace_bytes(num_tokens);
    if (bytes > workspace_bytes_) {
        scratch_ = Scratch("workspace", device_, bytes);
        workspace_bytes_ = bytes;
    }
    return scratch_.workspace();
}

void OutputLayer::put(Tensor& tensor, std::span<const float> values) const {
    std::vector<std::byte> bytes(values.size() * element_bytes(kernel_->spec().dtype));
    from_float(values.data(), kernel_->spec().dtype, bytes.data(), values.size());
    tensor.buffer.upload(bytes.data(), bytes.size());
}

void OutputLayer::get(const Tensor& tensor, DType dtype, std::span<float> values) const {
    std::vector<std::byte> bytes(values.size() * element_bytes(dtype));
    tensor.buffer.download(bytes.data(), bytes.size());
    to_real(bytes.data(), dtype, values.data(), values.size());
}

void OutputLayer::embedding_changed() {
    if (!direct_) put(weight_, embedding_);
}

LayerInputs OutputLayer::inputs(std::int64_t n) const {
    LayerInputs inputs;
    inputs.num_tokens = n;
    inputs.hidden = front(hidden_, n);
    inputs.weight = weight_;
    inputs.target = front(target_, n);
    return inputs;
}

LayerOutputs OutputLayer::outputs(std::int64_t n) const {
    LayerOutputs outputs;
    outputs.loss = loss_;
    outputs.lse = front(lse_, n);
    outputs.grad_hidden = front(grad_hidden_, n);
    outputs.grad_weight = grad_weight_;
    return outputs;
}

void OutputLayer::forward(std::span<const float> hidden, std::span<const std::int32_t> targets) {
    put(hidden_, hidden);
    target_.buffer.upload(targets.data(), targets.size_bytes());
    const auto n = static_cast<std::int64_t>(targets.size());
    kernel_->forward(forward_args(inputs(n), outputs(n), {}), workspace(n));
}

double OutputLayer::read_loss() const { return loss_.to_host<float>().front(); }

double OutputLayer::loss(std::span<const float> hidden, std::span<const std::int32_t> targets) {
    forward(hidden, targets);
    synchronize(device_);
    return read_loss();
}

double OutputLayer::loss_and_gradients(std::span<const float> hidden, std::span<const std::int32_t> targets, std::span<float> grad_hidden) {
    forward(hidden, targets);
    const auto n = static_cast<std::int64_t>(targets.size());
    if (!direct_) grad_weight_.buffer.upload(grad_embedding_.data(), grad_embedding_.size_bytes());
    kernel_->backward(backward_args(inputs(n), outputs(n), {}), workspace(n));
    synchronize(device_);
    if (!direct_) grad_weight_.buffer.download(grad_embedding_.data(), grad_embedding_.size_bytes());
    get(grad_hidden_, kernel_->spec().dtype, grad_hidden);
    return read_loss();
}

OutputLayer::Check OutputLayer::check(std::span<const float> hidden, std::span<const std::int32_t> targets,
                                      const std::function<void()>& between_blocks) {
    const Spec& spec = kernel_->spec();
    std::vector<float> grad_hidden(hidden.size());
    std::fill(grad_embedding_.begin(), grad_embedding_.end(), 0.0F);
    const double loss = loss_and_gradients(hidden, targets, grad_hidden);

    const auto n = static_cast<std::int64_t>(targets.size());
    const auto hidden_bytes = hidden_.to_host<std::byte>();  // hidden states that the kernel has seen, rounded as they were
    const auto weight_bytes = weight_.to_host<std::byte>();
    const std::vector<std::int64_t> wide_targets(targets.begin(), targets.end());
    std::vector<std::int64_t> tokens(targets.size());
    std::iota(tokens.begin(), tokens.end(), 0);
    const ReferenceProblem problem{.spec = spec,
                                   .num_tokens = n,
                                   .hidden = hidden_bytes.data(),
                                   .weight = weight_bytes.data(),
                                   .target = wide_targets,
                                   .summation = summation_of(spec.dtype, device_.kind == DeviceKind::cuda),
                                   .between_blocks = between_blocks};
    const Reference reference(problem, tokens);
    const Yardstick yardstick(problem, tokens);

    const auto d = static_cast<std::size_t>(spec.hidden_size);
    double expected_loss = 0;
    double other_loss = 0;
    NormPair hidden_norms;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        expected_loss += reference.token(i).loss / reference.loss_divisor();
        other_loss += yardstick.token(i).loss / yardstick.loss_divisor();
        for (std::size_t k = 0; k < d; ++k)
            hidden_norms.add(grad_hidden[i * d + k], yardstick.grad_hidden(i)[k], reference.grad_hidden(i)[k]);
    }
    NormPair loss_norms;
    loss_norms.add(loss, static_cast<float>(other_loss), expected_loss);
    NormPair weight_norms;
    std::vector<double> row(d);
    std::vector<float> other_row(d);
    for (std::int64_t j = 0; j < spec.vocab_size; ++j) {
        if (between_blocks) between_blocks();
        static_cast<void>(reference.grad_weight_row(j, row));
        static_cast<void>(yardstick.grad_weight_row(j, other_row));
        for (std::size_t k = 0; k < d; ++k) weight_norms.add(grad_embedding_[static_cast<std::size_t>(j) * d + k], other_row[k], row[k]);
    }
    const auto norm = [](std::span<const float> values, std::int64_t rows) {
        double sum = 0;
        for (const float value : values) sum += static_cast<double>(value) * value;
        return std::sqrt(sum / static_cast<double>(rows));
    };
    const Judge judge(spec.dtype, norm(hidden, n) * norm(embedding_, spec.vocab_size));
    const LogitGradientSizes sizes = reference.logit_gradient_sizes();
    return {judge.output(loss_norms, &sizes), judge.grad_hidden(hidden_norms, sizes), judge.grad_weight(weight_norms, sizes)};
}

GetKernelTimes measure_get_kernel(const SessionOptions& options, const Spec& spec, double first_s, bool first_compiled) {
    GetKernelTimes times;
    const auto timed = [&](Session& session) {
        const auto start = std::chrono::steady_clock::now();
        const auto kernel = session.get_kernel(spec);
        return seconds_since(start);
    };
    const PrivateFolder folder("demo");
    SessionOptions own = options;
    own.cache_dir = folder.path();
    own.disk_cache = true;
    if (first_compiled) {
        times.cold_s = first_s;
        times.cold_note = "compiled for this run";
        own.cache_dir = options.cache_dir;
    } else {
        Session empty(own);
        times.cold_s = timed(empty);
        times.cold_note = "the kernel was cached already: measured again in a fresh private cache";
    }
    Session from_disk(own);
    times.disk_s = timed(from_disk);
    // A block of calls, several times: the fastest block is the one that nothing interrupted.
    constexpr int kBlocks = 20;
    constexpr int kCalls = 2000;
    times.hot_s = times.disk_s;
    for (int block = 0; block < kBlocks; ++block) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kCalls; ++i) static_cast<void>(from_disk.get_kernel(spec));
        times.hot_s = std::min(times.hot_s, seconds_since(start) / kCalls);
    }
    return times;
}

std::vector<ArchitectureReport> prewarm_architectures(Session& session, const Spec& spec, const std::function<void()>& between_blocks) {
    std::vector<ArchitectureReport> reports;
    for (const char* name : {"sm_80", "sm_90a", "sm_100a", "sm_120"}) {
        if (between_blocks) between_blocks();
        ArchitectureReport& report = reports.emplace_back();
        report.name = name;
        const auto start = std::chrono::steady_clock::now();
        try {
            const PrewarmResult result = session.prewarm(spec, describe_device(name));
            report.compiled = result.compiled;
            report.hits = result.hits;
        } catch (const Error& e) {
            report.error = first_line(e.what());
        }
        report.seconds = seconds_since(start);
    }
    return reports;
}

}  // namespace flce::demo

#include "tests/support/kernel_run.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "tests/support/number_formats.hpp"

namespace flce::test {
namespace {

/// Outputs that a call of forward, or of merge, writes.
constexpr const char* kOutputs[] = {"loss",         "z_loss", "lse", "logprobs", "entropy", "top1", "log_sum_sq_probs", "teacher_logprobs",
                                    "invalid_label"};

constexpr float kPadding = 6e4F;  // in every dtype's range; a logit made of it would outweigh all others

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
    std::vector<std::byte> bytes(values.size() * sizeof(T));
    if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
}

std::vector<std::byte> label_bytes(const Problem& p, const std::vector<std::int64_t>& labels) {
    if (p.options.target_bits == 64) return bytes_of(labels);
    return bytes_of(std::vector<std::int32_t>(labels.begin(), labels.end()));
}

std::vector<std::byte> num_valid_bytes(const ProblemOptions& o) {
    switch (o.num_valid_type) {
        case ScalarType::int32: return bytes_of(std::vector<std::int32_t>{static_cast<std::int32_t>(*o.num_valid)});
        case ScalarType::int64: return bytes_of(std::vector<std::int64_t>{static_cast<std::int64_t>(*o.num_valid)});
        default: return bytes_of(std::vector<float>{static_cast<float>(*o.num_valid)});
    }
}

// Accumulated gradients: poison where the padding is, so that touching it shows.
std::vector<std::byte> old_weight_bytes(const Problem& p, const Spec& held) {
    if (held.grad_weight_mode == GradMode::write) return {};
    return encode(laid_out(held, p.old_grad_weight, NAN), held.grad_weight_dtype);
}

/// Values of a shard's classes, and `padding` for the rows behind them.
template <class T>
std::vector<T> with_padding(std::vector<T> values, const Problem& p, T padding) {
    if (p.shard) values.resize(static_cast<std::size_t>(p.shard->rows), padding);
    return values;
}

Spec held_spec(const Problem& p) {
    Spec held = p.spec;
    if (p.shard) {
        held.vocab_size = p.shard->classes;
        held.padded_vocab_size = p.shard->rows;
    }
    return held;
}

std::vector<double> floats_at(const GuardedBuffer& buffer) {
    const std::vector<std::byte> bytes = buffer.download();
    const std::vector<float> values = decode(bytes.data(), static_cast<std::int64_t>(bytes.size() / 4), DType::fp32);
    return {values.begin(), values.end()};
}

std::vector<double> integers_at(const GuardedBuffer& buffer) {
    const std::vector<std::byte> bytes = buffer.download();
    std::vector<std::int64_t> values(bytes.size() / 8);
    if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return {values.begin(), values.end()};
}

std::vector<double> selected(const std::vector<double>& values, const std::vector<std::int64_t>& rows) {
    std::vector<double> out;
    out.reserve(rows.size());
    for (std::int64_t row : rows) out.push_back(values[row]);
    return out;
}

bool only_zeros(const std::vector<std::byte>& bytes, std::size_t first, std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) {
        // The sign of a zero is nobody's business.
        if (bytes[first + k] != std::byte{0} && bytes[first + k] != std::byte{0x80}) return false;
    }
    return true;
}

}  // namespace

KernelRun::KernelRun(std::shared_ptr<const Kernel> kernel, const Problem& problem)
    : kernel_(std::move(kernel)),
      problem_(problem),
      held_(held_spec(problem)),
      sizes_{problem.num_tokens(), held_.vocab_size, held_.padded_vocab_size, 1, problem.options.reduction} {
    add_inputs();
    add_outputs();
    if (problem_.shard) add_shard_outputs();
}

void KernelRun::input(const std::string& name, std::vector<std::byte> content, std::size_t residue) {
    Entry& entry = entries_[name];
    entry.buffer = GuardedBuffer(kernel_->device_ref(), content.size(), residue, kPoison);
    entry.buffer.upload(content.data());
    entry.content = std::move(content);
    entry.input = true;
}

void KernelRun::output(const std::string& name, std::size_t bytes, std::size_t residue, std::vector<std::byte> before) {
    Entry& entry = entries_[name];
    entry.buffer = GuardedBuffer(kernel_->device_ref(), bytes, residue, kGuard);
    entry.content = std::move(before);
    reset(name);
}

void KernelRun::reset(const std::string& name) {
    Entry& entry = entries_.at(name);
    if (entry.content.empty()) {
        entry.buffer.fill(kPoison);
    } else {
        entry.buffer.upload(entry.content.data());
    }
}

void KernelRun::add_inputs() {
    const Spec& spec = problem_.spec;
    const std::size_t element = element_bytes(spec.dtype);
    input("hidden", encode(problem_.hidden, spec.dtype), 16);
    if (is_quantized(spec)) {
        add_quantized_weight();
    } else {
        const std::vector<float>& weight = rounds_weight(spec) ? problem_.unrounded_weight : problem_.weight;
        input("weight", encode(laid_out(held_, weight, kPadding), weight_dtype(spec)), 16);
    }
    if (spec.bias) input("bias", encode(with_padding(problem_.bias, problem_, kPadding), spec.dtype), element);
    if (spec.class_weight) input("class_weight", flce::test::bytes_of(with_padding(problem_.class_weight, problem_, NAN)), 4);
    if (spec.class_offset) input("class_offset", flce::test::bytes_of(with_padding(problem_.class_offset, problem_, NAN)), 4);
    if (spec.class_groups) {
        input("class_group", flce::test::bytes_of(with_padding(problem_.class_group, problem_, 1)), 4);
        input("row_group", flce::test::bytes_of(problem_.row_group), 4);
    }
    if (spec.temperature) input("temperature", flce::test::bytes_of(problem_.temperature), 4);
    if (spec.token_weight) input("token_weight", flce::test::bytes_of(problem_.token_weight), 4);
    const auto label_size = static_cast<std::size_t>(problem_.options.target_bits / 8);
    input("target", label_bytes(problem_, problem_.target), label_size);
    if (spec.teacher_top_k > 0) {
        input("teacher_ids", label_bytes(problem_, problem_.teacher_ids), label_size);
        input("teacher_probs", flce::test::bytes_of(problem_.teacher_probs), 4);
    }
    if (problem_.options.num_valid) input("num_valid", num_valid_bytes(problem_.options), 8);
    const auto upstream = [this](const char* name, const std::vector<float>& values) {
        if (!values.empty() || (problem_.options.upstream && problem_.num_tokens() == 0)) input(name, flce::test::bytes_of(values), 4);
    };
    if (spec.outputs.loss && !problem_.grad_loss.empty()) input("grad_loss", flce::test::bytes_of(problem_.grad_loss), 4);
    if (spec.outputs.lse) upstream("grad_lse", problem_.grad_lse);
    if (spec.outputs.logprobs) upstream("grad_logprobs", problem_.grad_logprobs);
    if (spec.outputs.entropy && problem_.options.entropy_upstream) upstream("grad_entropy", problem_.grad_entropy);
}

void KernelRun::add_outputs() {
    const Spec& spec = problem_.spec;
    const auto n = static_cast<std::size_t>(problem_.num_tokens());
    const std::size_t losses = problem_.options.reduction == Reduction::none ? n : 1;
    if (spec.outputs.loss) output("loss", losses * 4, 4);
    if (spec.outputs.loss && spec.z_loss > 0) output("z_loss", losses * 4, 4);
    output("lse", n * 4, 4);
    if (spec.outputs.logprobs) output("logprobs", n * 4, 4);
    if (spec.outputs.entropy) output("entropy", n * 4, 4);
    if (spec.outputs.top1) output("top1", n * 8, 8);
    if (spec.outputs.log_sum_sq_probs) output("log_sum_sq_probs", n * 4, 4);
    if (spec.teacher_top_k > 0) output("teacher_logprobs", n * static_cast<std::size_t>(spec.teacher_top_k) * 4, 4);
    output("invalid_label", 8, 8, std::vector<std::byte>(8, std::byte{0xff}));
    output("grad_hidden", n * static_cast<std::size_t>(spec.hidden_size) * element_bytes(grad_hidden_dtype(spec)), 16);
    const std::size_t grad_element = element_bytes(spec.grad_weight_dtype);
    if (!is_quantized(spec)) {
        output("grad_weight", static_cast<std::size_t>(held_.padded_vocab_size * spec.hidden_size) * grad_element, 16,
               old_weight_bytes(problem_, held_));
    }
    if (spec.bias) {
        const std::int64_t biases = problem_.shard ? problem_.shard->rows : spec.vocab_size;
        output("grad_bias", static_cast<std::size_t>(biases) * grad_element, grad_element,
               encode(spec.grad_weight_mode == GradMode::write ? std::vector<float>() : with_padding(problem_.old_grad_bias, problem_, NAN),
                      spec.grad_weight_dtype));
    }
    output("forward workspace", kernel_->workspace_bytes(problem_.num_tokens(), Pass::forward), 0);
    output("backward workspace", kernel_->workspace_bytes(problem_.num_tokens(), Pass::backward), 0);
}

void KernelRun::add_shard_outputs() {
    const Spec& spec = problem_.spec;
    const std::int64_t n = problem_.num_tokens();
    output("partial_sums", static_cast<std::size_t>(kernel_->partial_sum_fields() * n) * 4, 4);
    if (spec.class_weight) output("target_class_weight", static_cast<std::size_t>(n) * 4, 4);
    if (spec.class_weight && spec.label_smoothing > 0) output("class_weight_total", 4, 4);
    output("merge workspace", kernel_->workspace_bytes(n, Pass::merge), 0);
}

ScalarType KernelRun::type_of(Elements elements) const {
    const Spec& spec = problem_.spec;
    switch (elements) {
        case Elements::spec: return scalar_type(spec.dtype);
        case Elements::weight: return is_quantized(spec) ? ScalarType::uint8 : scalar_type(weight_dtype(spec));
        case Elements::scale: return spec.weight_format == WeightFormat::nvfp4 ? ScalarType::e4m3 : ScalarType::fp32;
        case Elements::grad_hidden: return scalar_type(grad_hidden_dtype(spec));
        case Elements::grad_weight: return scalar_type(spec.grad_weight_dtype);
        case Elements::label: return problem_.options.target_bits == 64 ? ScalarType::int64 : ScalarType::int32;
        case Elements::count: return problem_.options.num_valid_type;
        case Elements::int32: return ScalarType::int32;
        case Elements::uint64: return ScalarType::uint64;
        case Elements::int64: return ScalarType::int64;
        case Elements::fp32: break;
    }
    return ScalarType::fp32;
}

TensorView KernelRun::view(const CallTensor& tensor) const {
    if (!has(tensor.name)) return {};
    const ExpectedShape shape = shape_of(tensor.extent, problem_.spec, sizes_);
    void* data = buffer(tensor.name).data();
    const ScalarType type = type_of(tensor.elements);
    const DeviceRef device = kernel_->device_ref();
    if (shape.ndim == 0) return TensorView::scalar(data, type, device);
    if (shape.ndim == 1) return TensorView::vector(data, type, shape.rows, device);
    return TensorView::matrix(data, type, shape.rows, shape.columns, device);
}

template <class Args>
Args KernelRun::args() const {
    Args args;
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        const auto field = fields_of(args)[i];
        if (field && use_of(kCallTensors[i], args, problem_.spec) != Use::none) args.*field = view(kCallTensors[i]);
    }
    args.ignore_index = problem_.options.ignore_index;
    args.reduction = problem_.options.reduction;
    if constexpr (!std::is_same_v<Args, MergeArgs>) {
        args.retained = retained_;
        args.vocab_start = problem_.shard ? problem_.shard->start : 0;
    }
    return args;
}

ForwardArgs KernelRun::forward_args() const { return args<ForwardArgs>(); }
MergeArgs KernelRun::merge_args() const { return args<MergeArgs>(); }

BackwardArgs KernelRun::backward_args(const Wanted& wanted) const {
    BackwardArgs backward = args<BackwardArgs>();
    if (!wanted.grad_hidden) backward.grad_hidden = {};
    if (!wanted.grad_weight) backward.grad_weight = {};
    if (!wanted.grad_bias) backward.grad_bias = {};
    return backward;
}

void KernelRun::retain(RetainedPlace place, std::size_t bytes) {
    retained_ = {};
    if (bytes == 0) return;
    if (place == RetainedPlace::own) output("retained", bytes, 16);
    retained_ = {buffer(place == RetainedPlace::own ? "retained" : "grad_weight").data(), bytes, place};
}

void KernelRun::forward() {
    std::vector<const char*> written{"forward workspace", "retained", "partial_sums"};
    if (!problem_.shard) written.insert(written.end(), std::begin(kOutputs), std::end(kOutputs));
    for (const char* name : written) prepare(name);
    kernel_->forward(forward_args(), forward_workspace());
    synchronize(kernel_->device_ref());
}

void KernelRun::merge(const std::vector<std::byte>& all_partial_sums) {
    for (const char* name : kOutputs) prepare(name);
    for (const char* name : {"target_class_weight", "class_weight_total", "merge workspace"}) prepare(name);
    input("all_partial_sums", all_partial_sums, 4);
    sizes_.num_shards = static_cast<std::int64_t>(all_partial_sums.size() / std::max<std::size_t>(bytes_of("partial_sums").size(), 1));
    sizes_.num_shards = std::max<std::int64_t>(sizes_.num_shards, 1);  // partial sums of no tokens have no bytes
    kernel_->merge(merge_args(), {buffer("merge workspace").data(), buffer("merge workspace").bytes()});
    synchronize(kernel_->device_ref());
}

void KernelRun::prepare(const char* name) {
    if (!has(name)) return;
    reset(name);
    entries_.at(name).written = true;
}

bool KernelRun::prepare_gradients(const Wanted& wanted, bool keep) {
    const auto prepare = [&](const char* name, bool asked) {
        if (!asked || !has(name)) return;
        if (!keep) reset(name);
        entries_.at(name).written = true;
    };
    const bool lent =
        wanted.grad_weight && has("grad_weight") && retained_.data != nullptr && retained_.data == buffer("grad_weight").data();
    prepare("grad_hidden", wanted.grad_hidden);
    if (lent) {
        entries_.at("grad_weight").written = true;  // the buffer holds retained values
    } else {
        prepare("grad_weight", wanted.grad_weight);
    }
    prepare("grad_bias", wanted.grad_bias);
    reset("backward workspace");
    return lent;
}

void KernelRun::backward(const Wanted& wanted, bool keep) {
    const bool lent = prepare_gradients(wanted, keep);
    kernel_->backward(backward_args(wanted), backward_workspace());
    synchronize(kernel_->device_ref());
    if (lent) retained_ = {};
}

void KernelRun::backward_in_stages(const Wanted& wanted, bool hidden_ready) {
    const bool lent = prepare_gradients(wanted, false);
    BackwardArgs args = backward_args(wanted);
    args.stage = BackwardStage::until_grad_hidden;
    args.hidden_ready = hidden_ready;
    Buffer nothing;  // NaNs, where hidden need not be there yet
    const TensorView hidden_states = args.hidden;
    const std::int64_t classes = problem_.shard ? problem_.shard->classes : 0;
    if (!hidden_ready && args.grad_hidden.present && kernel_->reads_hidden_late(sizes_.num_tokens, retained_, classes)) {
        nothing = Buffer(kernel_->device_ref(), buffer("hidden").bytes());
        nothing.fill(std::byte{0xff});
        args.hidden.data = nothing.data();
    }
    kernel_->backward(args, backward_workspace());
    synchronize(kernel_->device_ref());
    args.hidden = hidden_states;
    const std::vector<std::byte> hidden = has("grad_hidden") ? bytes_of("grad_hidden") : std::vector<std::byte>();
    args.stage = BackwardStage::rest;
    kernel_->backward(args, backward_workspace());
    synchronize(kernel_->device_ref());
    EXPECT_EQ(hidden, has("grad_hidden") ? bytes_of("grad_hidden") : hidden) << "grad_hidden was not complete after its stage";
    if (lent) retained_ = {};
}

std::vector<float> KernelRun::token_floats(const std::string& name) const {
    if (!has(name)) return {};
    const std::vector<double> values = floats_at(buffer(name));
    return {values.begin(), values.end()};
}

std::uint64_t KernelRun::invalid_label() const {
    std::uint64_t index = 0;
    std::memcpy(&index, buffer("invalid_label").download().data(), 8);
    return index;
}

KernelOutputs KernelRun::outputs(const Selection& selection) const {
    const Spec& spec = problem_.spec;
    const std::int64_t d = spec.hidden_size;
    KernelOutputs out;
    const auto written = [this](const char* name) { return has(name) && entries_.at(name).written; };
    const auto losses = [&](const char* name) {
        if (!written(name)) return std::vector<double>();
        const std::vector<double> values = floats_at(buffer(name));
        return problem_.options.reduction == Reduction::none ? selected(values, selection.tokens) : values;
    };
    const auto tokens = [&](const char* name) {
        return written(name) ? selected(floats_at(buffer(name)), selection.tokens) : std::vector<double>();
    };
    out.loss = losses("loss");
    out.z_loss = losses("z_loss");
    out.lse = tokens("lse");
    out.logprobs = tokens("logprobs");
    out.entropy = tokens("entropy");
    out.log_sum_sq_probs = tokens("log_sum_sq_probs");
    if (written("teacher_logprobs")) {
        const std::vector<double> all = floats_at(buffer("teacher_logprobs"));
        const std::int64_t count = spec.teacher_top_k;
        for (const std::int64_t i : selection.tokens) {
            out.teacher_logprobs.insert(out.teacher_logprobs.end(), all.begin() + i * count, all.begin() + (i + 1) * count);
        }
    }
    if (written("top1")) out.top1 = selected(integers_at(buffer("top1")), selection.tokens);
    if (written("grad_hidden")) {
        const auto bytes = buffer("grad_hidden").download();
        out.grad_hidden.reserve(selection.tokens.size() * static_cast<std::size_t>(d));
        for (std::int64_t token : selection.tokens) {
            for (std::int64_t k = 0; k < d; ++k) out.grad_hidden.push_back(decoded(bytes.data(), token * d + k, grad_hidden_dtype(spec)));
        }
    }
    if (written("grad_weight")) {
        const auto bytes = buffer("grad_weight").download();
        out.grad_weight.reserve(selection.vocab.size() * static_cast<std::size_t>(d));
        for (std::int64_t j : selection.vocab) {
            for (std::int64_t k = 0; k < d; ++k) {
                out.grad_weight.push_back(decoded(bytes.data(), weight_index(held_, j, k), spec.grad_weight_dtype));
            }
        }
    }
    if (written("grad_bias")) {
        const auto bytes = buffer("grad_bias").download();
        for (std::int64_t j : selection.vocab) out.grad_bias.push_back(decoded(bytes.data(), j, spec.grad_weight_dtype));
    }
    return out;
}

std::map<std::string, std::vector<std::byte>> KernelRun::bytes() const {
    std::map<std::string, std::vector<std::byte>> out;
    for (const auto& [name, entry] : entries_) {
        if (!entry.input && entry.written && !name.ends_with("workspace") && name != "retained") out[name] = entry.buffer.download();
    }
    return out;
}

std::map<std::string, std::vector<std::byte>> KernelRun::all_bytes() const {
    std::map<std::string, std::vector<std::byte>> out;
    for (const auto& [name, entry] : entries_) out[name] = entry.buffer.download();
    return out;
}

/// Checks a shard's grad_bias behind its classes.
std::string KernelRun::bias_padding_violation() const {
    if (!problem_.shard || !has("grad_bias") || !entries_.at("grad_bias").written) return {};
    const Entry& entry = entries_.at("grad_bias");
    const auto bytes = entry.buffer.download();
    const std::size_t first = static_cast<std::size_t>(held_.vocab_size) * element_bytes(held_.grad_weight_dtype);
    const std::size_t count = bytes.size() - first;
    const bool good = entry.content.empty() ? only_zeros(bytes, first, count)
                                            : count == 0 || std::memcmp(&bytes[first], &entry.content[first], count) == 0;
    return good ? "" : "\n  grad_bias: padding was written wrongly";
}

std::string KernelRun::padding_violation() const {
    const Spec& spec = held_;
    if (spec.padded_vocab_size == spec.vocab_size || !has("grad_weight") || !entries_.at("grad_weight").written) return {};
    const Entry& entry = entries_.at("grad_weight");
    const auto bytes = entry.buffer.download();
    const std::size_t size = element_bytes(spec.grad_weight_dtype);
    for (std::int64_t j = spec.vocab_size; j < spec.padded_vocab_size; ++j) {
        for (std::int64_t k = 0; k < spec.hidden_size; ++k) {
            const auto first = static_cast<std::size_t>(weight_index(spec, j, k)) * size;
            const bool good =
                entry.content.empty() ? only_zeros(bytes, first, size) : std::memcmp(&bytes[first], &entry.content[first], size) == 0;
            if (!good) return fmt::format("\n  grad_weight: padding row {}, column {} was written wrongly", j, k);
        }
    }
    return {};
}

std::string KernelRun::ignored_violation() const {
    const Layer<float> layer = layer_of(problem_);
    const std::size_t row = static_cast<std::size_t>(problem_.spec.hidden_size) * element_bytes(grad_hidden_dtype(problem_.spec));
    std::string text;
    const auto check = [&](const char* name, std::size_t width) {
        if (!has(name) || !entries_.at(name).written) return;
        const auto bytes = buffer(name).download();
        for (std::int64_t i = 0; text.empty() && i < problem_.num_tokens(); ++i) {
            if (!layer.valid(i) && !only_zeros(bytes, static_cast<std::size_t>(i) * width, width)) {
                text = fmt::format("\n  {}: row {} is ignored and not 0", name, i);
            }
        }
    };
    if (problem_.options.reduction == Reduction::none) {
        check("loss", 4);
        check("z_loss", 4);
    }
    for (const char* name : {"lse", "logprobs", "entropy", "log_sum_sq_probs"}) check(name, 4);
    check("teacher_logprobs", static_cast<std::size_t>(problem_.spec.teacher_top_k) * 4);
    check("grad_hidden", row);
    return text;
}

std::string KernelRun::no_valid_token_violation() const {
    const Layer<float> layer = layer_of(problem_);
    for (std::int64_t i = 0; i < problem_.num_tokens(); ++i) {
        if (layer.valid(i)) return {};
    }
    std::string text;
    for (const char* name : {"grad_weight", "grad_bias"}) {
        if (!has(name) || !entries_.at(name).written) continue;
        const Entry& entry = entries_.at(name);
        const auto bytes = entry.buffer.download();
        if (entry.content.empty() ? only_zeros(bytes, 0, bytes.size()) : bytes == entry.content) continue;
        text += fmt::format("\n  {}: no token is valid, and it is neither 0 nor what the buffer held before", name);
    }
    return text;
}

std::string KernelRun::violations() const {
    std::string text;
    for (const auto& [name, entry] : entries_) {
        const std::string overrun = entry.buffer.overrun();
        if (!overrun.empty()) text += fmt::format("\n  {}: {}", name, overrun);
        if (entry.input && !entry.buffer.holds(entry.content)) text += fmt::format("\n  {}: an input was written", name);
    }
    return text + padding_violation() + bias_padding_violation() + ignored_violation() + no_valid_token_violation();
}

}  // namespace flce::test

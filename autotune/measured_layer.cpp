#include "autotune/measured_layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/layer/number_formats.hpp"
#include "runtime/layer/parallel_blocks.hpp"
#include "runtime/session.hpp"

namespace flce {
namespace {

constexpr std::int64_t kSampledTokens = 4;
constexpr std::int64_t kSampledRows = 6;
constexpr std::int64_t kSpread = 127;  ///< rows between two that are compared: one of each tile, each time elsewhere in it
constexpr std::int64_t kEdge = 8;      ///< rows at both ends that are compared besides
/// Two right results differ by the errors of both; a wrong one by far more.
constexpr double kDifferenceToCap = 3;
constexpr double kWrongRow = 0.25;

std::vector<std::int64_t> sampled(std::int64_t count, std::int64_t wanted) {
    wanted = std::min(count, wanted);
    std::vector<std::int64_t> indices;
    for (std::int64_t i = 0; i < wanted; ++i) indices.push_back((2 * i + 1) * count / (2 * wanted));
    return indices;
}

/// Rows of a matrix in memory as they are compared between plans.
std::vector<double> sampled_rows(const Tensor& tensor, DType dtype) {
    const std::int64_t rows = tensor.view.shape[0];
    const std::int64_t columns = tensor.view.shape[1];
    const std::size_t row_bytes = static_cast<std::size_t>(columns) * element_bytes(dtype);
    std::vector<double> values;
    std::vector<std::byte> bytes(row_bytes);
    for (std::int64_t row = 0; row < rows; ++row) {
        if (row >= kEdge && row < rows - kEdge && row % kSpread != 0) continue;
        tensor.buffer.download(bytes.data(), row_bytes, static_cast<std::size_t>(row) * row_bytes);
        values.resize(values.size() + static_cast<std::size_t>(columns));
        to_real(bytes.data(), dtype, values.data() + values.size() - columns, static_cast<std::size_t>(columns));
    }
    return values;
}

/// Difference between two gradients; empty: they agree. Rows have `columns` elements.
std::string difference(const std::string& name, const std::vector<double>& values, const std::vector<double>& others, std::size_t columns,
                       DType dtype) {
    ErrorNorm all;
    std::vector<ErrorNorm> rows(values.size() / std::max<std::size_t>(columns, 1));
    for (std::size_t i = 0; i < values.size(); ++i) {
        all.add(values[i], others[i]);
        rows[i / columns].add(values[i], others[i]);
    }
    const double most = kDifferenceToCap * gradient_error_cap(dtype);
    if (!(all.relative() <= most))
        return fmt::format("{} differs from another plan's by {:.2e}, more than {:.2e}", name, all.relative(), most);
    if (dtype == DType::fp16) return "";  // a mean over many tokens makes subnormal rows, of which little is left
    const double typical = all.reference2 / static_cast<double>(std::max<std::size_t>(rows.size(), 1));
    for (std::size_t row = 0; row < rows.size(); ++row) {
        if (rows[row].difference2 > kWrongRow * kWrongRow * std::max(rows[row].reference2, 0.01 * typical)) {
            return fmt::format("{}: row {} of {} compared differs from another plan's", name, row, rows.size());
        }
    }
    return "";
}

}  // namespace

MeasuredLayer::MeasuredLayer(MeasuredLayerOptions options) : options_(std::move(options)), session_(options_.session) {
    const Spec& spec = options_.spec;
    device_ = SessionAccess::device_ref(session_);
    layer_ = make_random_layer(spec, options_.num_tokens, {.seed = 7, .upstream = true});
    sets_ = make_buffer_sets(spec, layer_, session_.device(), device_, Turn::both);
    rows_ = sampled(spec.vocab_size, kSampledRows);
    rows_.front() = 0;
    rows_.back() = spec.vocab_size - 1;
    if (options_.num_tokens > 0) make_reference();
}

/// Long work for a large layer, and no plan's fault.
void MeasuredLayer::make_reference() {
    const Spec& spec = options_.spec;
    ReferenceProblem problem = reference_problem(spec, layer_);
    problem.summation = summation_of(spec.dtype, device_.kind == DeviceKind::cuda);
    const auto tokens = sampled(options_.num_tokens, kSampledTokens);
    reference_ = std::make_unique<Reference>(problem, tokens);
    yardstick_ = std::make_unique<Yardstick>(problem, tokens);
}

MeasuredLayer::Runnable& MeasuredLayer::runnable(const std::string& plan) {
    auto found = kernels_.find(plan);
    if (found == kernels_.end()) found = kernels_.emplace(plan, make_runnable(plan)).first;
    // Memory is reserved even for a candidate that has had its turn: another candidate's failed request may have cost it.
    reserve("workspace", scratch_, scratch_bytes_, found->second.workspace_bytes);
    const Retained& retained = found->second.retained;
    if (retained.place == RetainedPlace::own && retained.bytes > 0) reserve("retained", retained_, retained_bytes_, retained.bytes);
    return found->second;
}

MeasuredLayer::Runnable MeasuredLayer::make_runnable(const std::string& plan) {
    const std::int64_t n = options_.num_tokens;
    Runnable made{.kernel = session_.get_kernel(options_.spec, {.plan = plan})};
    made.workspace_bytes = step_workspace_bytes(*made.kernel, n);
    if (options_.retain) made.retained = automatic_retained(*made.kernel, n, options_.workspace_limit_bytes);
    return made;
}

Retained MeasuredLayer::retained_by(const Runnable& runnable, const LayerOutputs& outputs) const {
    Retained retained = runnable.retained;
    if (retained.bytes == 0) return {};
    retained.data = retained.place == RetainedPlace::own ? retained_->workspace().data : outputs.grad_weight.view.data;
    return retained;
}

void MeasuredLayer::reserve(const char* name, std::unique_ptr<Scratch>& memory, std::size_t& have, std::size_t wanted) {
    if (wanted <= have && memory != nullptr) return;
    drop_samples();  // samples know the memory by its address
    memory.reset();  // before there is more of it
    memory = std::make_unique<Scratch>(name, device_, wanted);
    have = wanted;
}

void MeasuredLayer::drop_samples() {
    for (auto& [plan, made] : kernels_) made.sample = {};
}

void MeasuredLayer::add_to_runs(std::function<void(Stream)> work) {
    added_work_ = std::move(work);
    drop_samples();  // samples have recorded runs without it
}

void MeasuredLayer::run(const Runnable& runnable, std::size_t which, Stream stream) const {
    const BufferSet& set = sets_[which % sets_.size()];
    ForwardArgs forward = forward_args(set.inputs, set.outputs, {});
    BackwardArgs backward = backward_args(set.inputs, set.outputs, {});
    forward.retained = backward.retained = retained_by(runnable, set.outputs);
    const Workspace workspace{scratch_->workspace().data, runnable.workspace_bytes};
    run_forward(*runnable.kernel, forward, set.outputs, workspace, stream);
    runnable.kernel->backward(backward, workspace, stream);
    if (added_work_) added_work_(stream);
}

/// Fills outputs with bytes that are NaN in every dtype: elements that are not written show.
void MeasuredLayer::poison() {
    LayerOutputs& out = sets_.front().outputs;
    const std::byte bytes = std::byte{0xff};
    for (Tensor* tensor : {&out.loss, &out.z_loss, &out.lse, &out.logprobs, &out.entropy, &out.top1, &out.log_sum_sq_probs,
                           &out.teacher_logprobs, &out.top_logprobs, &out.top_ids, &out.grad_hidden}) {
        if (tensor->view.present) tensor->buffer.fill(bytes);
    }
    const bool accumulates = options_.spec.grad_weight_mode == GradMode::accumulate;
    if (out.grad_weight.view.present) out.grad_weight.buffer.fill(accumulates ? std::byte{0} : bytes);
    if (out.grad_bias.view.present) out.grad_bias.buffer.fill(accumulates ? std::byte{0} : bytes);
}

MeasuredLayer::Sample MeasuredLayer::sample() const {
    const LayerOutputs& out = sets_.front().outputs;
    Sample sample{.lse = out.lse.to_host<float>()};
    if (options_.spec.outputs.entropy) sample.entropy = out.entropy.to_host<float>();
    if (options_.spec.outputs.logprobs) sample.logprobs = out.logprobs.to_host<float>();
    for (const auto& [name, tensor] : {std::pair{"loss", &out.loss},
                                       {"z_loss", &out.z_loss},
                                       {"lse", &out.lse},
                                       {"logprobs", &out.logprobs},
                                       {"entropy", &out.entropy}}) {
        if (tensor->view.present) sample.outputs.emplace_back(name, tensor->to_host<float>());
    }
    if (out.grad_bias.view.present) {
        const auto bytes = out.grad_bias.to_host<std::byte>();
        sample.grad_bias.resize(bytes.size() / element_bytes(options_.spec.grad_weight_dtype));
        to_real(bytes.data(), options_.spec.grad_weight_dtype, sample.grad_bias.data(), sample.grad_bias.size());
    }
    sample.grad_hidden = sampled_rows(out.grad_hidden, grad_hidden_dtype(options_.spec));
    if (out.grad_weight.view.present) sample.grad_weight = sampled_rows(out.grad_weight, options_.spec.grad_weight_dtype);
    return sample;
}

void MeasuredLayer::compare_rows(const Reference& reference, const Yardstick& yardstick, NormPair& norms) const {
    const Spec& spec = options_.spec;
    const Tensor& tensor = sets_.front().outputs.grad_weight;
    const std::size_t element = element_bytes(spec.grad_weight_dtype);
    const auto d = static_cast<std::size_t>(spec.hidden_size);
    std::vector<std::vector<double>> expected(rows_.size(), std::vector<double>(d));
    std::vector<std::vector<float>> others(rows_.size(), std::vector<float>(d));
    parallel_blocks(static_cast<std::int64_t>(2 * rows_.size()), 1, [&](std::int64_t task, std::int64_t) {
        const auto which = static_cast<std::size_t>(task / 2);
        if (task % 2 == 0) {
            static_cast<void>(reference.grad_weight_row(rows_[which], expected[which]));
        } else {
            static_cast<void>(yardstick.grad_weight_row(rows_[which], others[which]));
        }
    });
    std::vector<std::byte> bytes(d * element);
    for (std::size_t which = 0; which < rows_.size(); ++which) {
        const std::int64_t row = rows_[which];
        if (spec.layout == WeightLayout::vocab_major) {
            tensor.buffer.download(bytes.data(), bytes.size(), static_cast<std::size_t>(row) * bytes.size());
        } else {
            for (std::size_t k = 0; k < d; ++k) {
                const std::size_t at = k * static_cast<std::size_t>(spec.padded_vocab_size) + static_cast<std::size_t>(row);
                tensor.buffer.download(bytes.data() + k * element, element, at * element);
            }
        }
        std::vector<double> values(d);
        to_real(bytes.data(), spec.grad_weight_dtype, values.data(), d);
        for (std::size_t k = 0; k < d; ++k)
            norms.add(values[k], stored_value(others[which][k], spec.grad_weight_dtype), expected[which][k]);
    }
}

std::string MeasuredLayer::against_reference(const Sample& sample) {
    const Spec& spec = options_.spec;
    reference_->set_other(sample.lse, sample.entropy, sample.logprobs);
    yardstick_->set_other(sample.lse, sample.entropy, sample.logprobs);
    NormPair lse;
    NormPair grad_hidden;
    const Tensor& rows = sets_.front().outputs.grad_hidden;
    const auto d = static_cast<std::size_t>(spec.hidden_size);
    std::vector<double> row(d);
    const DType hidden_dtype = grad_hidden_dtype(spec);
    std::vector<std::byte> bytes(d * element_bytes(hidden_dtype));
    for (std::size_t i = 0; i < reference_->tokens().size(); ++i) {
        const auto token = static_cast<std::size_t>(reference_->tokens()[i]);
        lse.add(sample.lse[token], yardstick_->token(i).lse, reference_->token(i).lse);
        rows.buffer.download(bytes.data(), bytes.size(), token * bytes.size());
        to_real(bytes.data(), hidden_dtype, row.data(), d);
        for (std::size_t k = 0; k < d; ++k) grad_hidden.add(row[k], yardstick_->grad_hidden(i)[k], reference_->grad_hidden(i)[k]);
    }
    // Later plans' gradients are compared with the first right one's, row for row of a wider spread.
    NormPair grad_weight;
    const bool of_weight = first_ == nullptr && !is_quantized(spec);
    if (of_weight) compare_rows(*reference_, *yardstick_, grad_weight);
    const Judge judge(spec.dtype, kRandomLogitDeviation * std::sqrt(static_cast<double>(spec.hidden_size)));
    const auto verdict = [&](const char* name, const Verdict& v) {
        // the sample has a few rows: chance may double the error of so small a sample, which is not a fault
        constexpr double kSmallSample = 2;
        return v.error <= kSmallSample * v.bound
                   ? ""
                   : fmt::format("{} is off by {:.2e}, allowed are {:.2e}", name, v.error, kSmallSample * v.bound);
    };
    const LogitGradientSizes sizes = reference_->logit_gradient_sizes();
    for (const std::string& why : {verdict("lse", judge.output(lse)), verdict("grad_hidden", judge.gradient(grad_hidden, &sizes)),
                                   verdict("grad_weight", judge.gradient(grad_weight, &sizes))}) {
        if (!why.empty()) return why;
    }
    return "";
}

std::string MeasuredLayer::against_first(const Sample& sample) const {
    const double most = 10 * output_error_cap(options_.spec.dtype);
    for (std::size_t which = 0; which < sample.outputs.size(); ++which) {
        const auto& [name, values] = sample.outputs[which];
        ErrorNorm norm;
        for (std::size_t i = 0; i < values.size(); ++i) norm.add(values[i], first_->outputs[which].second[i]);
        if (!(norm.relative() <= most)) {
            return fmt::format("{} differs from another plan's by {:.2e}, more than {:.2e}", name, norm.relative(), most);
        }
    }
    const LayerOutputs& out = sets_.front().outputs;
    std::string why = difference("grad_hidden", sample.grad_hidden, first_->grad_hidden,
                                 static_cast<std::size_t>(out.grad_hidden.view.shape[1]), grad_hidden_dtype(options_.spec));
    if (!why.empty()) return why;
    why = difference("grad_bias", sample.grad_bias, first_->grad_bias, std::max<std::size_t>(sample.grad_bias.size(), 1),
                     options_.spec.dtype);
    if (!why.empty()) return why;
    return difference("grad_weight", sample.grad_weight, first_->grad_weight, static_cast<std::size_t>(out.grad_weight.view.shape[1]),
                      options_.spec.dtype);
}

MeasuredLayer::Checked MeasuredLayer::check(const std::string& plan) {
    const std::int64_t compiled_before = session_.statistics().compiled;
    const Runnable& candidate = runnable(plan);
    const Retained& retained = candidate.retained;
    Checked checked{.workspace_bytes = static_cast<std::int64_t>(candidate.workspace_bytes),
                    .retained_bytes = retained.place == RetainedPlace::own ? static_cast<std::int64_t>(retained.bytes) : 0,
                    .compiled = session_.statistics().compiled - compiled_before};
    if (options_.num_tokens == 0) return checked;
    poison();
    run(candidate, 0);
    synchronize(device_);
    if (const auto spoil = std::exchange(spoil_, nullptr)) spoil(sets_.front().outputs);
    Sample results = sample();
    checked.wrong = against_reference(results);
    if (checked.wrong.empty() && first_ != nullptr) checked.wrong = against_first(results);
    if (checked.wrong.empty() && first_ == nullptr) first_ = std::make_unique<Sample>(std::move(results));
    return checked;
}

Recording MeasuredLayer::recorded(const Runnable& candidate) {
    const auto work = [this, &candidate](Stream stream) {
        for (int i = 0; i < candidate.repetitions; ++i) run(candidate, next_set_++, stream);
    };
    const DeviceRef host;
    if (!options_.graphs || !graphs_refused_.empty()) return {host, work};
    try {
        if (std::exchange(refuse_, false)) throw DeviceError("a test refuses it", "cuGraphLaunch", 0);
        Recording graph(device_, work);
        graph.submit();  // the first submission sends the graph to the device
        return graph;
    } catch (const DeviceError& error) {
        // A kernel that is at fault fails again below; a driver that cannot have these launches in a graph gets them one by one.
        graphs_refused_ = error.what();
        return {host, work};
    }
}

double MeasuredLayer::time_ms(const std::string& plan) {
    Runnable& candidate = runnable(plan);
    Timer timer(device_);
    if (candidate.repetitions == 0) {
        constexpr double kMostRepetitions = 1000;
        timer.start();
        run(candidate, 0);
        const double ms = timer.stop_ms();
        const double enough = std::clamp(std::ceil(options_.sample_ms / std::max(ms, 1e-6)), 1.0, kMostRepetitions);
        // A graph goes through the same sets each time; launches one by one go on where the last ones were.
        const std::size_t least = options_.graphs && graphs_refused_.empty() ? sets_.size() : 1;
        candidate.repetitions = std::max(static_cast<int>(enough), static_cast<int>(least));
    }
    if (!candidate.sample) candidate.sample = recorded(candidate);
    timer.start(candidate.sample.stream());
    candidate.sample.submit();
    return timer.stop_ms(candidate.sample.stream()) / candidate.repetitions;
}

}  // namespace flce

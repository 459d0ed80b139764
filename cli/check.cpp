// flce check: every output and gradient of a kernel on random inputs, against fp64.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <set>

#include "autotune/judge.hpp"
#include "autotune/layer.hpp"
#include "autotune/number_formats.hpp"
#include "autotune/parallel.hpp"
#include "autotune/reference.hpp"
#include "cli/command.hpp"
#include "cli/finite_number.hpp"
#include "cli/interrupt.hpp"
#include "cli/retained_memory.hpp"

namespace flce::cli {
namespace {

struct CheckOptions {
    std::string spec;
    SessionFlags session;
    std::string plan;
    MemoryFlags memory;
    std::int64_t num_tokens = 128;
    std::uint64_t seed = 1;
    std::string reduction = "mean";
    double ignored = 0.1;
    bool json = false;
};

using Verdicts = std::vector<std::pair<std::string, Verdict>>;

/// Multiply-adds in fp64 that take some seconds on two cores; beyond them the reference is a sample.
constexpr double kOperationBudget = 1e10;

/// What the reference covers: all of it, or tokens spread over the batch and vocabulary rows that hold the targets, both ends and a spread.
struct Coverage {
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> rows;
    bool complete = true;
};

std::vector<std::int64_t> spread(std::int64_t count, std::int64_t wanted) {
    wanted = std::min(count, wanted);
    std::vector<std::int64_t> indices;
    for (std::int64_t i = 0; i < wanted; ++i) {
        // (i + ½)·count/wanted without the product's overflow
        indices.push_back(
            static_cast<std::int64_t>((static_cast<double>(i) + 0.5) * static_cast<double>(count) / static_cast<double>(wanted)));
    }
    return indices;
}

Coverage plan_coverage(const Spec& spec, const RandomLayer& layer) {
    const std::int64_t n = layer.num_tokens;
    Coverage coverage;
    coverage.complete = Reference::operations(spec, n, n, spec.vocab_size) <= kOperationBudget;
    if (coverage.complete) {
        coverage.tokens = spread(n, n);
        coverage.rows = spread(spec.vocab_size, spec.vocab_size);
        return coverage;
    }
    const double token_cost = Reference::operations(spec, n, 1, 0);
    const double row_cost = Reference::operations(spec, n, 0, 1);
    const auto affordable = [](double cost) { return std::max<std::int64_t>(4, static_cast<std::int64_t>(kOperationBudget / 2 / cost)); };
    coverage.tokens = spread(n, affordable(token_cost));
    const std::int64_t rows = std::min(spec.vocab_size, affordable(row_cost));
    std::set<std::int64_t> chosen{0, spec.vocab_size - 1};
    for (const std::int64_t target : layer.target) {
        if (target >= 0 && static_cast<std::int64_t>(chosen.size()) < rows / 2) chosen.insert(target);
    }
    for (const std::int64_t row : spread(spec.vocab_size, std::max<std::int64_t>(1, rows - static_cast<std::int64_t>(chosen.size())))) {
        chosen.insert(row);
    }
    coverage.rows.assign(chosen.begin(), chosen.end());
    return coverage;
}

/// Outputs as doubles, whatever their dtype.
std::vector<double> download(const Tensor& tensor, DType dtype) {
    const auto bytes = tensor.to_host<std::byte>();
    const std::size_t count = bytes.size() / element_bytes(dtype);
    auto values =
        allocated(tensor.name, sizeof(double) * static_cast<double>(count), DeviceRef{}, [&] { return std::vector<double>(count); });
    to_real(bytes.data(), dtype, values.data(), values.size());
    return values;
}

class Checker {
public:
    explicit Checker(const CheckOptions& options)
        : options_(options),
          spec_(read_spec(options.spec)),
          reduction_(parse_reduction(options.reduction)),
          session_(options.session.options()),
          kernel_(session_.get_kernel(
              spec_, {.plan = options.plan, .workspace_limit_bytes = options.memory.plan_limit_bytes(), .num_tokens = options.num_tokens})),
          judge_(spec_.dtype, kRandomLogitDeviation / std::abs(spec_.logit_scale) * std::sqrt(static_cast<double>(spec_.hidden_size))) {}

    int run() {
        const DeviceRef device = kernel_->device_ref();
        layer_ = make_random_layer(spec_, options_.num_tokens,
                                   {.seed = options_.seed, .ignored = options_.ignored, .upstream = true, .reduction = reduction_});
        coverage_ = plan_coverage(spec_, layer_);
        const LayerInputs inputs = upload(spec_, layer_, device);
        outputs_ = make_outputs(spec_, device, options_.num_tokens, reduction_);
        fill_initial_gradients();
        const Scratch scratch("workspace", device, step_workspace_bytes(*kernel_, options_.num_tokens));
        const CallOptions call{.reduction = reduction_};
        run_per_token(inputs, scratch);
        const RetainedMemory retained(*kernel_, options_.num_tokens, options_.memory);
        ForwardArgs forward = forward_args(inputs, outputs_, call);
        BackwardArgs backward = backward_args(inputs, outputs_, call);
        forward.retained = backward.retained = retained.of(outputs_);
        of_exponentials_ = retained.bytes() != 0 && kernel_->device_ref().kind == DeviceKind::cuda;
        run_forward(*kernel_, forward, outputs_, scratch.workspace());
        kernel_->backward(backward, scratch.workspace());
        synchronize(device);
        stop_if_interrupted();
        compare();
        return report();
    }

private:
    /// Accumulation is checked by adding to something.
    void fill_initial_gradients() {
        if (spec_.grad_weight_mode != GradMode::accumulate) return;
        const auto fill = [&](Tensor& tensor, std::vector<double>& initial, std::uint64_t seed) {
            std::vector<std::byte> bytes(tensor.bytes());
            const double deviation = 1.0 / std::max<double>(1.0, static_cast<double>(options_.num_tokens));
            fill_random(bytes.data(), spec_.grad_weight_dtype, bytes.size() / element_bytes(spec_.grad_weight_dtype), deviation, seed);
            tensor.buffer.upload(bytes.data(), bytes.size());
            initial.resize(bytes.size() / element_bytes(spec_.grad_weight_dtype));
            to_real(bytes.data(), spec_.grad_weight_dtype, initial.data(), initial.size());
        };
        fill(outputs_.grad_weight, initial_weight_, options_.seed + 100);
        if (spec_.bias) fill(outputs_.grad_bias, initial_bias_, options_.seed + 101);
    }

    /// Each token's loss, which a sampled reference can be held against whatever the reduction is.
    void run_per_token(const LayerInputs& inputs, const Scratch& scratch) {
        if (!spec_.outputs.loss) return;
        LayerOutputs outputs = outputs_;  // shares the memory; only the losses are its own
        outputs.loss = make_tensor("loss", kernel_->device_ref(), ScalarType::fp32, {options_.num_tokens});
        if (spec_.z_loss != 0) outputs.z_loss = make_tensor("z_loss", kernel_->device_ref(), ScalarType::fp32, {options_.num_tokens});
        run_forward(*kernel_, forward_args(inputs, outputs, {.reduction = Reduction::none}), outputs, scratch.workspace());
        synchronize(kernel_->device_ref());
        token_loss_ = outputs.loss.to_host<float>();
        if (spec_.z_loss != 0) token_z_loss_ = outputs.z_loss.to_host<float>();
    }

    void add_output(const std::string& name, const NormPair& norms) {
        const bool loss = name.ends_with("loss");
        verdicts_.emplace_back(name, loss ? judge_.loss(norms, spec_) : judge_.output(norms));
    }
    void add_gradient(const std::string& name, const NormPair& norms) { verdicts_.emplace_back(name, judge_.gradient(norms)); }

    void compare() {
        ReferenceProblem problem = reference_problem(spec_, layer_);
        problem.reduction = reduction_;
        problem.between_blocks = stop_if_interrupted;
        problem.summation = summation_of(spec_.dtype, kernel_->device_ref().kind == DeviceKind::cuda);
        Reference reference(problem, coverage_.tokens);
        Yardstick yardstick(problem, coverage_.tokens);
        const auto lse = outputs_.lse.to_host<float>();
        const auto entropy = spec_.outputs.entropy ? outputs_.entropy.to_host<float>() : std::vector<float>{};
        if (!coverage_.complete) {
            const auto logprob = spec_.outputs.logprob ? outputs_.logprob.to_host<float>() : std::vector<float>{};
            reference.set_other(lse, entropy, logprob);
            yardstick.set_other(lse, entropy, logprob);
        }
        compare_tokens(reference, yardstick, lse, entropy);
        compare_loss(reference, yardstick);
        compare_grad_hidden(reference, yardstick);
        compare_grad_weight(reference, yardstick);
    }

    void compare_tokens(const Reference& reference, const Yardstick& yardstick, const std::vector<float>& lse,
                        const std::vector<float>& entropy) {
        const auto compare_one = [&](const std::string& name, const std::vector<float>& values, double ReferenceToken::* field) {
            NormPair norms;
            for (std::size_t r = 0; r < reference.tokens().size(); ++r) {
                norms.add(values[static_cast<std::size_t>(reference.tokens()[r])], yardstick.token(r).*field, reference.token(r).*field);
            }
            add_output(name, norms);
        };
        if (spec_.outputs.loss) compare_one("token_loss", token_loss_, &ReferenceToken::loss);
        if (spec_.outputs.loss && spec_.z_loss != 0) compare_one("token_z_loss", token_z_loss_, &ReferenceToken::z_loss);
        compare_one("lse", lse, &ReferenceToken::lse);
        if (spec_.outputs.logprob) compare_one("logprob", outputs_.logprob.to_host<float>(), &ReferenceToken::logprob);
        if (spec_.outputs.entropy) compare_one("entropy", entropy, &ReferenceToken::entropy);
        if (spec_.outputs.log_sum_sq_probs) {
            compare_one("log_sum_sq_probs", outputs_.log_sum_sq_probs.to_host<float>(), &ReferenceToken::log_sum_sq_probs);
        }
        if (spec_.outputs.top1) compare_top1(reference);
        if (spec_.teacher_top_k > 0) compare_teacher_logprobs(reference, yardstick);
        if (spec_.outputs.loss && reduction_ == Reduction::none) compare_one("loss", outputs_.loss.to_host<float>(), &ReferenceToken::loss);
    }

    void compare_teacher_logprobs(const Reference& reference, const Yardstick& yardstick) {
        const auto values = outputs_.teacher_logprobs.to_host<float>();
        const auto top_k = static_cast<std::size_t>(spec_.teacher_top_k);
        NormPair norms;
        for (std::size_t r = 0; r < reference.tokens().size(); ++r) {
            if (reference.ignored(reference.tokens()[r])) continue;
            const float* row = values.data() + static_cast<std::size_t>(reference.tokens()[r]) * top_k;
            for (std::size_t k = 0; k < top_k; ++k) {
                norms.add(row[k], yardstick.token(r).teacher_logprobs[k], reference.token(r).teacher_logprobs[k]);
            }
        }
        add_output("teacher_logprobs", norms);
    }

    /// How far the logits of the classes are below the largest ones, to how far they are known: at most 1.
    void compare_top1(const Reference& reference) {
        const auto top1 = outputs_.top1.to_host<std::int64_t>();
        double worst = 0;
        for (std::size_t r = 0; r < reference.tokens().size(); ++r) {
            const std::int64_t got = top1[static_cast<std::size_t>(reference.tokens()[r])];
            if (got == reference.token(r).top1) continue;
            const bool is_class = reference.token(r).top1 >= 0 && got >= 0 && got < spec_.vocab_size;
            const auto known = is_class ? reference.gap_to_largest(r, got) : Reference::LogitGap{INFINITY, 1};
            worst = std::max(worst, known.gap / known.known_to);
        }
        verdicts_.emplace_back("top1", Verdict{worst, 0, 1});
    }

    struct ReducedLoss {
        double loss = 0;
        double z_loss = 0;
    };
    /// The reference's tokens summed up; tokens that a sample lacks are taken from the kernel.
    template <class AnyReference>
    ReducedLoss reduced(const AnyReference& reference) const {
        std::vector<double> loss(token_loss_.begin(), token_loss_.end());
        std::vector<double> z_loss(token_z_loss_.begin(), token_z_loss_.end());
        z_loss.resize(loss.size());
        for (std::size_t r = 0; r < reference.tokens().size(); ++r) {
            loss[static_cast<std::size_t>(reference.tokens()[r])] = reference.token(r).loss;
            z_loss[static_cast<std::size_t>(reference.tokens()[r])] = reference.token(r).z_loss;
        }
        double cross_entropy = 0;
        double z = 0;
        for (std::size_t i = 0; i < loss.size(); ++i) {
            cross_entropy += loss[i] - z_loss[i];
            z += z_loss[i];
        }
        z /= reference.z_loss_divisor();
        return {cross_entropy / reference.loss_divisor() + z, z};
    }

    void compare_loss(const Reference& reference, const Yardstick& yardstick) {
        if (!spec_.outputs.loss || reduction_ == Reduction::none) return;  // compared token by token
        const ReducedLoss expected = reduced(reference);
        const ReducedLoss other = reduced(yardstick);
        NormPair loss;
        loss.add(outputs_.loss.to_host<float>().front(), static_cast<float>(other.loss), expected.loss);
        add_output("loss", loss);
        if (spec_.z_loss == 0) return;
        NormPair z_loss;
        z_loss.add(outputs_.z_loss.to_host<float>().front(), static_cast<float>(other.z_loss), expected.z_loss);
        add_output("z_loss", z_loss);
    }

    void compare_grad_hidden(const Reference& reference, const Yardstick& yardstick) {
        const auto values = download(outputs_.grad_hidden, grad_hidden_dtype(spec_));
        const auto d = static_cast<std::size_t>(spec_.hidden_size);
        NormPair norms;
        for (std::size_t r = 0; r < reference.tokens().size(); ++r) {
            const double* row = values.data() + static_cast<std::size_t>(reference.tokens()[r]) * d;
            for (std::size_t k = 0; k < d; ++k) norms.add(row[k], yardstick.grad_hidden(r)[k], reference.grad_hidden(r)[k]);
        }
        add_gradient("grad_hidden", norms);
    }

    /// Row by row, as the whole fp64 gradient of a large vocabulary need not fit in memory.
    void compare_grad_weight(const Reference& reference, const Yardstick& yardstick) {
        const auto bytes = outputs_.grad_weight.to_host<std::byte>();
        const auto bias = spec_.bias ? download(outputs_.grad_bias, spec_.grad_weight_dtype) : std::vector<double>{};
        const auto stored = [&](double value) { return stored_value(static_cast<float>(value), spec_.grad_weight_dtype); };
        struct RowNorms {
            NormPair weight, bias;
        };
        std::vector<RowNorms> norms(coverage_.rows.size());  // summed in order, so the error repeats bit for bit
        parallel_blocks(static_cast<std::int64_t>(norms.size()), 16, [&](std::int64_t begin, std::int64_t end) {
            stop_if_interrupted();
            std::vector<double> expected(static_cast<std::size_t>(spec_.hidden_size));
            std::vector<float> other(expected.size());
            for (std::int64_t r = begin; r < end; ++r) {
                const std::int64_t row = coverage_.rows[static_cast<std::size_t>(r)];
                const double expected_bias = reference.grad_weight_row(row, expected);
                const double other_bias = yardstick.grad_weight_row(row, other);
                RowNorms& norm = norms[static_cast<std::size_t>(r)];
                for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
                    const std::size_t at = weight_index(row, k);
                    const double initial = initial_weight_.empty() ? 0.0 : initial_weight_[at];
                    const auto i = static_cast<std::size_t>(k);
                    norm.weight.add(grad_weight_at(bytes, at), stored(initial + other[i]), initial + expected[i]);
                }
                if (bias.empty()) continue;
                const double initial = initial_bias_.empty() ? 0.0 : initial_bias_[static_cast<std::size_t>(row)];
                norm.bias.add(bias[static_cast<std::size_t>(row)], stored(initial + other_bias), initial + expected_bias);
            }
        });
        RowNorms total;
        for (const RowNorms& part : norms) {
            total.weight.add(part.weight);
            total.bias.add(part.bias);
        }
        if (of_exponentials_) {
            verdicts_.emplace_back("grad_weight", judge_.retained_grad_weight(total.weight, options_.num_tokens));
        } else {
            add_gradient("grad_weight", total.weight);
        }
        if (spec_.bias) add_gradient("grad_bias", total.bias);
        if (spec_.padded_vocab_size > spec_.vocab_size) verdicts_.emplace_back("grad_weight_padding", Verdict{padding_error(bytes), 0, 0});
    }

    [[nodiscard]] std::size_t weight_index(std::int64_t row, std::int64_t k) const {
        return static_cast<std::size_t>(spec_.layout == WeightLayout::vocab_major ? row * spec_.hidden_size + k
                                                                                  : k * spec_.padded_vocab_size + row);
    }

    [[nodiscard]] double grad_weight_at(const std::vector<std::byte>& bytes, std::size_t at) const {
        double value = 0;
        to_real(bytes.data() + at * element_bytes(spec_.grad_weight_dtype), spec_.grad_weight_dtype, &value, 1);
        return value;
    }

    /// Rows past the vocabulary: 0 when written, untouched when accumulated into.
    [[nodiscard]] double padding_error(const std::vector<std::byte>& bytes) const {
        double worst = 0;
        for (std::int64_t row = spec_.vocab_size; row < spec_.padded_vocab_size; ++row) {
            for (std::int64_t k = 0; k < spec_.hidden_size; ++k) {
                const std::size_t at = weight_index(row, k);
                const double difference = std::abs(grad_weight_at(bytes, at) - (initial_weight_.empty() ? 0.0 : initial_weight_[at]));
                if (!(difference <= worst)) worst = difference;
            }
        }
        return worst;
    }

    [[nodiscard]] std::string coverage_text() const {
        if (coverage_.complete) return "complete";
        return fmt::format(
            "sampled: {} of {} tokens (token_loss, lse, grad_hidden, …) and {} of {} vocabulary rows (grad_weight, grad_bias; with the "
            "kernel's lse for tokens outside the sample)",
            coverage_.tokens.size(), options_.num_tokens, coverage_.rows.size(), spec_.vocab_size);
    }

    int report() const {
        const bool passed = std::all_of(verdicts_.begin(), verdicts_.end(), [](const auto& v) { return v.second.passed(); });
        if (options_.json) {
            Json outputs = Json::object();
            for (const auto& [name, verdict] : verdicts_) {
                outputs[name] = {{"error", std::isfinite(verdict.error) ? Json(verdict.error) : Json(nullptr)},
                                 {"bound", verdict.bound},
                                 {"yardstick", std::isfinite(verdict.yardstick) ? Json(verdict.yardstick) : Json(nullptr)},
                                 {"passed", verdict.passed()}};
            }
            print_json({{"passed", passed},
                        {"spec", spec_.text()},
                        {"device", kernel_->device().name},
                        {"plan", kernel_->plan().text()},
                        {"num_tokens", options_.num_tokens},
                        {"seed", options_.seed},
                        {"reduction", options_.reduction},
                        {"reference", coverage_text()},
                        {"outputs", outputs}});
        } else {
            fmt::print("{} on {}, {} tokens, against fp64 ({})\n\n", spec_.text(), kernel_->device().name, options_.num_tokens,
                       coverage_text());
            fmt::print("  {:<20} {:>12} {:>12} {:>12}\n", "output", "error", "framework's", "bound");
            for (const auto& [name, verdict] : verdicts_) {
                fmt::print("  {:<20} {:>12.2e} {:>12.2e} {:>12.2e}  {}\n", name, verdict.error, verdict.yardstick, verdict.bound,
                           verdict.passed() ? "ok" : "BEYOND THE BOUND");
            }
            fmt::print("\n{}\n", passed ? "passed" : "FAILED");
        }
        return passed ? kDone : kFailedCheck;
    }

    const CheckOptions& options_;
    Spec spec_;
    Reduction reduction_;
    Session session_;
    std::shared_ptr<const Kernel> kernel_;
    Judge judge_;
    bool of_exponentials_ = false;  ///< forward has retained them
    RandomLayer layer_;
    Coverage coverage_;
    LayerOutputs outputs_;
    std::vector<float> token_loss_, token_z_loss_;
    std::vector<double> initial_weight_, initial_bias_;
    Verdicts verdicts_;
};

}  // namespace

void add_check(CLI::App& app, Action& action) {
    auto options = std::make_shared<CheckOptions>();
    CLI::App* command = app.add_subcommand("check", "Every output and gradient on random inputs against an fp64 reference");
    command->footer(
        "\nExamples:\n  flce check --spec D=256,V=50257,dtype=bf16\n"
        "  flce check --spec D=64,V=1000,dtype=fp32,bias,softcap=30,outputs=loss+lse+entropy --num-tokens 300 --seed 7\n\n"
        "Exit code 1 when an output is further from fp64 than its bound (docs/numerics.md says where bounds come from).");
    command->add_option("--spec", options->spec, kSpecHelp)->required();
    options->session.add_to(*command);
    command->add_option("--plan", options->plan, "canonical plan text instead of the planner's choice");
    options->memory.add_to(*command);
    command->add_option("--num-tokens,-N", options->num_tokens, "rows of hidden")
        ->capture_default_str()
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
    command->add_option("--seed", options->seed, "of the random inputs")->capture_default_str()->check(unsigned_number());
    command->add_option("--reduction", options->reduction, "none, sum, mean or weighted_mean")
        ->capture_default_str()
        ->check(CLI::IsMember({"none", "sum", "mean", "weighted_mean"}));
    command->add_option("--ignored", options->ignored, "fraction of the tokens that are ignored")
        ->capture_default_str()
        ->check(finite_number())
        ->check(CLI::Range(0.0, 1.0));
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return Checker(*options).run(); }; });
}

}  // namespace flce::cli

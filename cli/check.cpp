// flce check: every output and gradient of a kernel on random inputs, against fp64.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <optional>

#include "autotune/output_check.hpp"
#include "cli/command.hpp"
#include "cli/finite_number.hpp"
#include "cli/interrupt.hpp"
#include "cli/retained_memory.hpp"
#include "runtime/layer/number_formats.hpp"

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
          kernel_(session_.get_kernel(spec_, {.plan = options.plan,
                                              .workspace_limit_bytes = options.memory.plan_workspace_limit_bytes(),
                                              .num_tokens = options.num_tokens})) {}

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
        run_forward(*kernel_, forward, outputs_, scratch.workspace());
        kernel_->backward(backward, scratch.workspace());
        synchronize(device);
        stop_if_interrupted();
        compare(retained);
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
        fill(outputs_.grad_weight, written_.initial_weight, options_.seed + 100);
        if (spec_.bias) fill(outputs_.grad_bias, written_.initial_bias, options_.seed + 101);
    }

    /// Each token's loss, which a sampled reference can be held against whatever the reduction is.
    void run_per_token(const LayerInputs& inputs, const Scratch& scratch) {
        if (!spec_.outputs.loss) return;
        LayerOutputs outputs = outputs_;  // shares the memory; only the losses are its own
        outputs.loss = make_tensor("loss", kernel_->device_ref(), ScalarType::fp32, {options_.num_tokens});
        if (spec_.z_loss != 0) outputs.z_loss = make_tensor("z_loss", kernel_->device_ref(), ScalarType::fp32, {options_.num_tokens});
        run_forward(*kernel_, forward_args(inputs, outputs, {.reduction = Reduction::none}), outputs, scratch.workspace());
        synchronize(kernel_->device_ref());
        written_.token_loss = outputs.loss.to_host<float>();
        if (spec_.z_loss != 0) written_.token_z_loss = outputs.z_loss.to_host<float>();
    }

    void compare(const RetainedMemory& retained) {
        ReferenceProblem problem = reference_problem(spec_, layer_);
        problem.reduction = reduction_;
        problem.between_blocks = stop_if_interrupted;
        const bool on_gpu = kernel_->device_ref().kind == DeviceKind::cuda;
        problem.summation = summation_of(spec_.dtype, on_gpu);
        written_.grad_weight = [dtype = spec_.grad_weight_dtype, bytes = outputs_.grad_weight.to_host<std::byte>()](std::size_t at) {
            double value = 0;
            to_real(bytes.data() + at * element_bytes(dtype), dtype, &value, 1);
            return value;
        };
        download_outputs();
        verdicts_ = check_outputs(problem, coverage_, written_, retained.bytes() != 0 && on_gpu);
        if (!is_fp8(spec_)) return;
        problem.spec.fp8 = Fp8Operands::none;
        problem.spec.fp8_dlogits = Fp8Dlogits::e5m2;
        problem.spec.fp8_hidden_scale = problem.spec.fp8_weight_scale = 0;
        to_exact_ = check_outputs(problem, coverage_, written_, false);
    }

    void download_outputs() {
        if (spec_.outputs.loss) written_.loss = outputs_.loss.to_host<float>();
        if (spec_.outputs.loss && spec_.z_loss != 0) written_.z_loss = outputs_.z_loss.to_host<float>();
        written_.lse = outputs_.lse.to_host<float>();
        if (spec_.outputs.logprobs) written_.logprobs = outputs_.logprobs.to_host<float>();
        if (spec_.outputs.entropy) written_.entropy = outputs_.entropy.to_host<float>();
        if (spec_.outputs.log_sum_sq_probs) written_.log_sum_sq_probs = outputs_.log_sum_sq_probs.to_host<float>();
        if (spec_.outputs.top1) written_.top1 = outputs_.top1.to_host<std::int64_t>();
        if (spec_.teacher_top_k > 0) written_.teacher_logprobs = outputs_.teacher_logprobs.to_host<float>();
        written_.grad_hidden = download(outputs_.grad_hidden, grad_hidden_dtype(spec_));
        if (spec_.bias) written_.grad_bias = download(outputs_.grad_bias, spec_.grad_weight_dtype);
    }

    [[nodiscard]] std::string coverage_text() const {
        if (coverage_.complete) return "complete";
        return fmt::format(
            "sampled: {} of {} tokens (token_loss, lse, grad_hidden, …) and {} of {} vocabulary rows (grad_weight, grad_bias; with the "
            "kernel's lse for tokens outside the sample)",
            coverage_.tokens.size(), options_.num_tokens, coverage_.rows.size(), spec_.vocab_size);
    }

    /// With fp8: an output's error to the layer without.
    [[nodiscard]] std::optional<double> error_to_exact(const std::string& name) const {
        const auto found = std::ranges::find(to_exact_, name, &Verdicts::value_type::first);
        return found == to_exact_.end() ? std::nullopt : std::optional(found->second.error);
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
                if (const auto exact = error_to_exact(name)) {
                    outputs[name]["error_to_exact"] = std::isfinite(*exact) ? Json(*exact) : Json(nullptr);
                }
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
            fmt::print("  {:<20} {:>12} {:>12} {:>12}{}\n", "output", "error", "framework's", "bound",
                       is_fp8(spec_) ? "    to the exact layer" : "");
            for (const auto& [name, verdict] : verdicts_) {
                const auto exact = error_to_exact(name);
                fmt::print("  {:<20} {:>12.2e} {:>12.2e} {:>12.2e}{}  {}\n", name, verdict.error, verdict.yardstick, verdict.bound,
                           exact ? fmt::format(" {:>21.2e}", *exact) : "", verdict.passed() ? "ok" : "BEYOND THE BOUND");
            }
            if (is_fp8(spec_))
                fmt::print("\nerror, framework's, bound: to the layer whose operands are rounded to the same numbers of 8 bits\n");
            fmt::print("\n{}\n", passed ? "passed" : "FAILED");
        }
        return passed ? kDone : kFailedCheck;
    }

    const CheckOptions& options_;
    Spec spec_;
    Reduction reduction_;
    Session session_;
    std::shared_ptr<const Kernel> kernel_;
    RandomLayer layer_;
    Coverage coverage_;
    LayerOutputs outputs_;
    WrittenOutputs written_;
    Verdicts verdicts_;
    Verdicts to_exact_;  ///< with fp8: the same of the layer without
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

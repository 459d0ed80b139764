// flce demo: trains the last stage of a small language model with a tied embedding on real text, through kernels from get_kernel.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <stdexcept>

#include "cli/command.hpp"
#include "cli/finite_number.hpp"
#include "cli/interrupt.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "demo/layer.hpp"
#include "demo/model.hpp"
#include "demo/text.hpp"

namespace flce::cli {
namespace {

using demo::ArchitectureReport;
using demo::ContextModel;
using demo::Corpus;
using demo::default_corpus_path;
using demo::GetKernelTimes;
using demo::measure_get_kernel;
using demo::Optimizer;
using demo::OptimizerKind;
using demo::OutputLayer;
using demo::prewarm_architectures;
using demo::read_corpus;
using demo::seconds_since;
using demo::Vocabulary;

struct DemoOptions {
    std::filesystem::path text;
    SessionFlags session;
    std::int64_t steps = 300;
    std::int64_t num_tokens = 512;
    std::int64_t hidden_size = 128;
    std::int64_t context = 4;
    std::int64_t max_vocab = 8192;
    std::string dtype;
    std::string optimizer = "adamw";
    double learning_rate = 0;
    std::uint64_t seed = 1;
    bool skip_architectures = false;
    bool json = false;
};

/// The loss is no finite number any more, and will be none: exit code 1.
class Diverged : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

constexpr std::size_t kMaxTextBytes = std::size_t{8} << 20;
constexpr std::int64_t kBlockTokens = 256;  // consecutive tokens that are trained on, or held out, together
constexpr std::int64_t kHoldOutEvery = 10;
constexpr std::int64_t kHeldOutTokens = 2048;

using Clock = std::chrono::steady_clock;

/// Tokens and the positions to predict: trained on, and held out.
struct Data {
    std::vector<std::int32_t> tokens;
    std::vector<std::int64_t> train, held_out;
    std::int64_t context = 0;

    Data(std::vector<std::int32_t> all, std::int64_t context_tokens) : tokens(std::move(all)), context(context_tokens) {
        for (std::int64_t i = context; i < static_cast<std::int64_t>(tokens.size()); ++i) {
            const bool held = i / kBlockTokens % kHoldOutEvery == kHoldOutEvery - 1;
            // The first tokens of a block look back into the one before: between training and held-out text they are left out.
            if (i % kBlockTokens >= context) (held ? held_out : train).push_back(i);
        }
        if (train.empty() || held_out.empty()) {
            throw UsageError(
                fmt::format("--text: {} tokens are too few; {} are needed at least", tokens.size(), kBlockTokens * kHoldOutEvery));
        }
        const auto stride = std::max<std::size_t>(1, held_out.size() / static_cast<std::size_t>(kHeldOutTokens));
        std::vector<std::int64_t> spread;
        for (std::size_t i = 0; i < held_out.size() && std::ssize(spread) < kHeldOutTokens; i += stride) spread.push_back(held_out[i]);
        held_out = std::move(spread);
    }

    void batch(std::span<const std::int64_t> positions, std::vector<std::int32_t>& contexts, std::vector<std::int32_t>& targets) const {
        contexts.clear();
        targets.clear();
        for (const std::int64_t position : positions) {
            for (std::int64_t k = 1; k <= context; ++k) contexts.push_back(tokens[static_cast<std::size_t>(position - k)]);
            targets.push_back(tokens[static_cast<std::size_t>(position)]);
        }
    }
};

struct Results {
    double first_step_s = 0;  ///< seconds from the start of the command
    double training_s = 0;
    double first_loss = 0;
    double last_loss = 0;
    double first_held_out = 0;
    double held_out = 0;
    OutputLayer::Check check;
    GetKernelTimes times;
    std::vector<ArchitectureReport> architectures;
    std::int64_t compiled = 0;
    std::int64_t compiled_here = 0;
    double total_s = 0;
};

class Demo {
public:
    explicit Demo(const DemoOptions& options)
        : options_(options),
          corpus_(read_corpus(options.text.empty() ? default_corpus_path(executable_path()) : options.text, kMaxTextBytes)),
          vocabulary_(corpus_.text, static_cast<std::size_t>(options.max_vocab)),
          data_(vocabulary_.encode(corpus_.text), options.context),
          session_options_(make_session_options()),
          session_(session_options_),
          spec_(make_spec()) {}

    int run() {
        introduce();
        const auto start = Clock::now();
        kernel_ = session_.get_kernel(spec_);
        first_get_s_ = seconds_since(start);
        results_.compiled_here = session_.statistics().compiled;
        OutputLayer layer(kernel_, std::max<std::int64_t>(options_.num_tokens, std::ssize(data_.held_out)));
        try {
            train(layer);
        } catch (const Diverged& diverged) {
            return report_error(kFailedCheck, diverged.what());
        }
        workspace_bytes_ = kernel_->workspace_bytes(options_.num_tokens);
        note("checking the gradients of the last batch against fp64");
        results_.check = layer.check(hidden_, targets_, stop_if_interrupted);
        note("timing get_kernel");
        results_.times = measure_get_kernel(session_options_, spec_, first_get_s_, results_.compiled_here > 0);
        if (!options_.skip_architectures) {
            note("compiling kernels for GPU architectures, no GPU needed");
            Spec gpu_spec = spec_;
            gpu_spec.dtype = DType::bf16;
            results_.architectures = prewarm_architectures(session_, gpu_spec, stop_if_interrupted);
        }
        results_.compiled = session_.statistics().compiled;
        results_.total_s = seconds_since(begin_);
        if (options_.json) {
            report_json();
        } else {
            report_text();
        }
        return results_.check.passed() ? kDone : kFailedCheck;
    }

private:
    SessionOptions make_session_options() const {
        SessionOptions options = options_.session.options();
        // Less than these small logits would take: the vocabulary is really walked in chunks.
        if (options_.session.workspace.empty()) options.scratch_bytes = 4 << 20;
        return options;
    }

    Spec make_spec() const {
        Spec spec;
        spec.hidden_size = options_.hidden_size;
        spec.vocab_size = vocabulary_.size();
        spec.dtype = DType::fp32;
        if (options_.dtype == "bf16" || (options_.dtype.empty() && session_.device().kind == DeviceKind::cuda)) spec.dtype = DType::bf16;
        if (options_.dtype == "fp16") spec.dtype = DType::fp16;
        spec.grad_weight_dtype = DType::fp32;
        spec.grad_weight_mode = GradMode::accumulate;
        spec.tied = true;
        return spec.normalized();
    }

    static void note(const std::string& text) { fmt::print(stderr, "{}\n", text); }

    void introduce() const {
        note(fmt::format("text        {} ({} file{}, {}): {} tokens, vocabulary of {} words and word pieces", corpus_.origin.string(),
                         corpus_.files, corpus_.files == 1 ? "" : "s", human_bytes(static_cast<double>(corpus_.text.size())),
                         data_.tokens.size(), vocabulary_.size()));
        note(fmt::format("device      {}", session_.device().name));
        note(fmt::format("layer       {}, {} tokens a step, {}", spec_.text(), options_.num_tokens, options_.optimizer));
    }

    /// Mean loss of the held-out tokens, in pieces that the layer has room for.
    double held_out_loss(OutputLayer& layer, ContextModel& model) {
        std::vector<std::int32_t> contexts, targets;
        data_.batch(data_.held_out, contexts, targets);
        std::vector<float> hidden(targets.size() * static_cast<std::size_t>(options_.hidden_size));
        model.forward(layer.embedding(), contexts, hidden);
        return layer.loss(hidden, targets);
    }

    [[nodiscard]] double peak_learning_rate() const {
        return options_.learning_rate > 0 ? options_.learning_rate : options_.optimizer == "sgd" ? 1.0 : 0.01;
    }
    double learning_rate(std::int64_t step) const {
        constexpr double kPi = 3.14159265358979323846;
        const double warm = std::min(1.0, static_cast<double>(step + 1) / 20);
        return peak_learning_rate() * warm *
               (0.55 + 0.45 * std::cos(kPi * static_cast<double>(step) / static_cast<double>(options_.steps)));
    }

    /// `done`: steps before this loss.
    std::string divergence(const char* what, double loss, std::int64_t done) const {
        const char* const range = spec_.dtype == DType::fp16 ? ", or take --dtype bf16 or fp32, whose range is wider" : "";
        return fmt::format("training diverged: the loss of {} is {} after {} of {} steps; lower --lr (it is {}){}", what,
                           std::isnan(loss) ? "not a number" : "infinite", done, options_.steps, peak_learning_rate(), range);
    }

    void train(OutputLayer& layer) {
        ContextModel model({spec_.vocab_size, options_.hidden_size, options_.context}, options_.seed);
        model.initialize_embedding(layer.embedding());
        layer.embedding_changed();
        const auto kind = options_.optimizer == "sgd" ? OptimizerKind::sgd : OptimizerKind::adamw;
        Optimizer embedding_optimizer(kind, layer.embedding().size());
        Optimizer model_optimizer(kind, model.parameters().size());
        std::mt19937_64 random(options_.seed);
        std::vector<std::int32_t> contexts;
        std::vector<std::int64_t> positions(static_cast<std::size_t>(options_.num_tokens));
        hidden_.resize(positions.size() * static_cast<std::size_t>(options_.hidden_size));
        std::vector<float> grad_hidden(hidden_.size());

        results_.first_held_out = results_.held_out = held_out_loss(layer, model);
        const std::int64_t evaluate_every = std::max<std::int64_t>(1, options_.steps / 10);
        const auto start = Clock::now();
        Progress progress("training", options_.steps);
        const auto expect_finite = [&](const char* what, double loss, std::int64_t done) {
            if (std::isfinite(loss)) return;
            progress.finish();
            throw Diverged(divergence(what, loss, done));
        };
        for (std::int64_t step = 0; step < options_.steps; ++step) {
            stop_if_interrupted();
            for (std::int64_t& position : positions) position = data_.train[random() % data_.train.size()];
            data_.batch(positions, contexts, targets_);
            model.forward(layer.embedding(), contexts, hidden_);
            // One gradient buffer for both uses of the table: the kernel adds the output layer's part, backward() the input's.
            std::fill(layer.grad_embedding().begin(), layer.grad_embedding().end(), 0.0F);
            results_.last_loss = layer.loss_and_gradients(hidden_, targets_, grad_hidden);
            expect_finite("a batch", results_.last_loss, step);
            model.backward(grad_hidden, layer.grad_embedding());
            embedding_optimizer.step(layer.embedding(), layer.grad_embedding(), learning_rate(step));
            model_optimizer.step(model.parameters(), model.gradients(), learning_rate(step));
            layer.embedding_changed();
            if (step == 0) {
                results_.first_loss = results_.last_loss;
                results_.first_step_s = seconds_since(begin_);
            }
            if ((step + 1) % evaluate_every == 0 || step + 1 == options_.steps) {
                results_.held_out = held_out_loss(layer, model);
                expect_finite("the held-out text", results_.held_out, step + 1);
            }
            progress.update(step + 1, fmt::format("loss {:.3f}  held out {:.3f}", results_.last_loss, results_.held_out));
        }
        progress.finish();
        results_.training_s = seconds_since(start);
        // The check below wants a batch that the final weights have produced.
        model.forward(layer.embedding(), contexts, hidden_);
    }

    /// Verdict on the gradient that is closer to its bound.
    [[nodiscard]] const Verdict& gradient() const {
        const Verdict& hidden = results_.check.grad_hidden;
        const Verdict& weight = results_.check.grad_weight;
        return hidden.error * weight.bound > weight.error * hidden.bound ? hidden : weight;
    }
    [[nodiscard]] double logits_bytes() const {
        return 4.0 * static_cast<double>(options_.num_tokens) * static_cast<double>(spec_.vocab_size);
    }

    void report_json() const {
        Json architectures = Json::array();
        for (const ArchitectureReport& a : results_.architectures) {
            architectures.push_back({{"name", a.name},
                                     {"compiled", a.compiled},
                                     {"hits", a.hits},
                                     {"seconds", a.seconds},
                                     {"error", a.error.empty() ? Json(nullptr) : Json(a.error)}});
        }
        print_json({{"device", session_.device().name},
                    {"spec", spec_.text()},
                    {"plan", kernel_->plan().text()},
                    {"steps", options_.steps},
                    {"num_tokens", options_.num_tokens},
                    {"text_tokens", data_.tokens.size()},
                    {"first_loss", results_.first_loss},
                    {"last_loss", results_.last_loss},
                    {"first_held_out_loss", results_.first_held_out},
                    {"held_out_loss", results_.held_out},
                    {"gradient_error", gradient().error},
                    {"gradient_error_bound", gradient().bound},
                    {"loss_error", results_.check.loss.error},
                    {"kernels_compiled", results_.compiled},
                    {"get_kernel_cold_s", results_.times.cold_s},
                    {"get_kernel_disk_s", results_.times.disk_s},
                    {"get_kernel_hot_s", results_.times.hot_s},
                    {"cold_note", results_.times.cold_note},
                    {"architectures", architectures},
                    {"workspace_bytes", workspace_bytes_},
                    {"logits_bytes", logits_bytes()},
                    {"first_step_s", results_.first_step_s},
                    {"training_s", results_.training_s},
                    {"total_s", results_.total_s}});
    }

    void report_text() const {
        const auto row = [](const char* label, const std::string& value) { fmt::print("  {:<34} {}\n", label, value); };
        fmt::print("\n");
        row("loss, first and last batch", fmt::format("{:.3f} → {:.3f}", results_.first_loss, results_.last_loss));
        row("loss of held-out text", fmt::format("{:.3f} → {:.3f} (perplexity {:.0f} → {:.1f})", results_.first_held_out, results_.held_out,
                                                 std::exp(results_.first_held_out), std::exp(results_.held_out)));
        const auto verdict = [](const Verdict& v) {
            return fmt::format("{:.1e} (bound {:.1e}){}", v.error, v.bound, v.passed() ? "" : ": FAILED");
        };
        row("gradient of hidden, against fp64", verdict(results_.check.grad_hidden));
        row("gradient of weight, against fp64", verdict(results_.check.grad_weight));
        row("loss, against fp64", verdict(results_.check.loss));
        row("workspace of the kernels", human_bytes(static_cast<double>(workspace_bytes_)));
        row("the logits, had they been kept", fmt::format("{}, and as much for their gradient", human_bytes(logits_bytes())));
        row("get_kernel, cold", fmt::format("{} ({})", human_seconds(results_.times.cold_s), results_.times.cold_note));
        row("get_kernel, from disk", human_seconds(results_.times.disk_s));
        row("get_kernel, from memory", human_seconds(results_.times.hot_s));
        std::string error;
        for (const ArchitectureReport& a : results_.architectures) {
            row(fmt::format("kernels for {}", a.name).c_str(),
                !a.error.empty()  ? (a.error == error ? "not compiled: the same" : "not compiled: " + a.error)
                : a.compiled == 0 ? "from the cache"
                                  : fmt::format("compiled in {}, no GPU needed", human_seconds(a.seconds)));
            error = a.error;
        }
        row("first step after", human_seconds(results_.first_step_s));
        row("training", fmt::format("{} steps in {} ({} a step)", options_.steps, human_seconds(results_.training_s),
                                    human_seconds(results_.training_s / static_cast<double>(options_.steps))));
        row("kernels compiled", results_.compiled == 0 ? "0: everything came from the cache"
                                                       : fmt::format("{}; a second run compiles nothing", results_.compiled));
        row("kernel cache", session_.cache_dir().string());
        row("all of it", human_seconds(results_.total_s));
        if (!results_.check.passed()) fmt::print("\nFAILED: an output is further from fp64 than its bound\n");
    }

    const Clock::time_point begin_ = Clock::now();
    const DemoOptions& options_;
    Corpus corpus_;
    Vocabulary vocabulary_;
    Data data_;
    SessionOptions session_options_;
    Session session_;
    Spec spec_;
    std::shared_ptr<const Kernel> kernel_;
    double first_get_s_ = 0;
    std::size_t workspace_bytes_ = 0;
    std::vector<float> hidden_;  // hidden states of the last batch
    std::vector<std::int32_t> targets_;
    Results results_;
};

}  // namespace

void add_demo(CLI::App& app, Action& action) {
    auto options = std::make_shared<DemoOptions>();
    CLI::App* command =
        app.add_subcommand("demo", "Train the last stage of a small language model on real text, check it against fp64, time get_kernel");
    command->footer(
        "\nThe model: hidden = tanh(embeddings of the last tokens · M + b); the embedding table is the output layer's weight too (tied).\n"
        "Loss and gradients of the output layer come from kernels by get_kernel on the best device there is.\n\n"
        "Examples:\n  flce demo\n  flce demo --text ~/books --steps 500 --optimizer sgd\n  flce demo --device cpu --dtype bf16 --json");
    command->add_option("--text", options->text, "text file, or a folder of them (default: flce's sources or documentation)");
    command->add_option("--steps", options->steps, "training steps")->capture_default_str()->check(CLI::Range(1, 10000000));
    command->add_option("--num-tokens,-N", options->num_tokens, "tokens a step")->capture_default_str()->check(CLI::Range(1, 1 << 20));
    command->add_option("--hidden-size", options->hidden_size, "a multiple of 8")->capture_default_str();
    command->add_option("--context", options->context, "tokens that the next one is predicted from")
        ->capture_default_str()
        ->check(CLI::Range(1, 64));
    command->add_option("--max-vocab", options->max_vocab, "most words and word pieces")
        ->capture_default_str()
        ->check(CLI::Range(256, 1 << 20));
    command->add_option("--dtype", options->dtype, "of hidden and weight: fp32, bf16 or fp16 (default: bf16 on a GPU, fp32 on the CPU)")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    command->add_option("--optimizer", options->optimizer, "adamw or sgd")->capture_default_str()->check(CLI::IsMember({"adamw", "sgd"}));
    command->add_option("--lr", options->learning_rate, "learning rate (default: 0.01 for adamw, 1 for sgd)")
        ->check(finite_number())
        ->check(CLI::PositiveNumber);
    command->add_option("--seed", options->seed, "of initial weights and batches")->capture_default_str()->check(unsigned_number());
    options->session.add_to(*command);
    command->add_flag("--no-architectures", options->skip_architectures, "do not compile for GPU architectures");
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return Demo(*options).run(); }; });
}

}  // namespace flce::cli

// flce bench: time and memory of a kernel, and the floor (the bare GEMMs by the vendor's library) in the same run.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "autotune/buffer_sets.hpp"
#include "autotune/gemm_floor.hpp"
#include "cli/command.hpp"
#include "cli/finite_number.hpp"
#include "cli/interrupt.hpp"
#include "cli/progress.hpp"
#include "cli/retained_memory.hpp"
#include "runtime/layer/layer.hpp"

namespace flce::cli {
namespace {

struct BenchOptions {
    std::string spec;
    SessionFlags session;
    std::string plan;
    MemoryFlags memory;
    std::int64_t num_tokens = 1024;
    int rounds = 0;
    double seconds = 10;
    double ignored = 0;
    std::string frozen;
    bool no_floor = false;
    bool json = false;
};

constexpr std::int64_t kWeightBoundTokens = 256;
constexpr int kMinRounds = 5;
constexpr int kMaxRounds = 50;
constexpr double kShortestSampleMs = 2;  // shorter work is repeated, so that launch and clock overheads do not decide

/// One thing to time: `call(i)` does the i-th repetition, on the buffers of set i.
struct Subject {
    std::string key;
    std::function<void(std::int64_t)> call;
    int repetitions = 1;
    std::vector<double> samples_ms;
};

struct Summary {
    double median = 0;
    double min = 0;
    double spread = 0;  ///< (90th − 10th percentile) / median
};

Summary summarize(std::vector<double> samples) {
    std::sort(samples.begin(), samples.end());
    const auto at = [&](double quantile) {
        const double position = quantile * static_cast<double>(samples.size() - 1);
        const auto low = static_cast<std::size_t>(position);
        const std::size_t high = std::min(low + 1, samples.size() - 1);
        return samples[low] + (position - static_cast<double>(low)) * (samples[high] - samples[low]);
    };
    return {at(0.5), samples.front(), (at(0.9) - at(0.1)) / at(0.5)};
}

/// The floor's own tensors, in its library's dtype.
class Floor {
public:
    Floor(std::unique_ptr<GemmLibrary> library, const Spec& spec, DeviceRef device, std::int64_t num_tokens)
        : library_(std::move(library)) {
        const bool cuda = device.kind == DeviceKind::cuda;
        // Unaligned rows of logits cost cuBLAS several times what the arithmetic does; nobody would run it on them.
        const std::int64_t vocab = cuda ? (spec.vocab_size + 63) / 64 * 64 : spec.vocab_size;
        Spec own = spec;
        own.dtype = library_->dtype() == ScalarType::fp32 ? DType::fp32 : library_->dtype() == ScalarType::bf16 ? DType::bf16 : DType::fp16;
        own.weight_dtype.reset();
        own.weight_format = WeightFormat::numbers;
        own.weight_block = 0;
        own.vocab_size = vocab;
        own.padded_vocab_size = vocab;
        own.bias = own.class_weight = own.class_offset = own.class_groups = own.offset_gradient = false;
        inputs_ = upload(own, make_random_layer(own, num_tokens, {.seed = 3}), device);
        const ScalarType result = cuda ? library_->dtype() : ScalarType::fp32;
        logits_ = make_tensor("logits", device, result, {num_tokens, vocab});
        grad_hidden_ = make_tensor("grad_hidden", device, result, {num_tokens, spec.hidden_size});
        grad_weight_ = make_tensor("grad_weight", device, result, weight_shape(own));
        weight_bytes_ = static_cast<std::size_t>(vocab * spec.hidden_size) * element_bytes(own.dtype);
        operands_ = {num_tokens,
                     spec.hidden_size,
                     vocab,
                     vocab,
                     spec.layout,
                     inputs_.hidden.view.data,
                     inputs_.weight.view.data,
                     logits_.view.data,
                     grad_hidden_.view.data,
                     grad_weight_.view.data};
    }
    void forward() const { floor_forward(*library_, operands_); }
    void backward() const { floor_backward(*library_, operands_); }
    void copy_weight() const { library_->copy(operands_.grad_weight, operands_.weight, weight_bytes_); }
    [[nodiscard]] std::string description() const { return library_->description(); }
    [[nodiscard]] std::int64_t vocab_size() const { return operands_.vocab_size; }

private:
    std::unique_ptr<GemmLibrary> library_;
    LayerInputs inputs_;
    Tensor logits_, grad_hidden_, grad_weight_;
    FloorOperands operands_;
    std::size_t weight_bytes_ = 0;
};

class Bench {
public:
    explicit Bench(const BenchOptions& options)
        : options_(options),
          spec_(read_spec(options.spec)),
          session_(options.session.options()),
          kernel_(session_.get_kernel(spec_, {.plan = options.plan,
                                              .workspace_limit_bytes = options.memory.plan_workspace_limit_bytes(),
                                              .num_tokens = options.num_tokens})),
          device_(kernel_->device_ref()),
          workspace_bytes_(step_workspace_bytes(*kernel_, options.num_tokens)),
          scratch_("workspace", device_, workspace_bytes_),
          retained_(*kernel_, options.num_tokens, options.memory) {}

    int run() {
        make_sets();
        make_floor();
        make_subjects();
        measure();
        report();
        return kDone;
    }

private:
    void make_sets() {
        // A backward without a loss begins with a gradient of the log-probabilities, as policies are trained.
        RandomLayer layer =
            make_random_layer(spec_, options_.num_tokens,
                              {.seed = 1, .ignored = options_.ignored, .upstream = spec_.outputs.logprobs && !spec_.outputs.loss});
        layer.grad_lse.clear();
        layer.grad_entropy.clear();
        sets_ = make_buffer_sets(spec_, layer, kernel_->device(), device_, Turn::forward_or_both);
        if (options_.ignored == 0) return;
        std::vector<std::int64_t> targets(static_cast<std::size_t>(options_.num_tokens));
        for (std::size_t i = 0; i < targets.size(); ++i) targets[i] = static_cast<std::int64_t>(i * 7919) % spec_.vocab_size;
        none_ignored_ = make_tensor("target", device_, ScalarType::int64, {options_.num_tokens}, targets.data());
    }

    void make_floor() {
        if (options_.no_floor) {
            floor_why_ = "not asked for (--no-floor)";
            return;
        }
        if (options_.num_tokens == 0) {
            floor_why_ = "nothing to multiply";
            return;
        }
        constexpr std::int64_t kMaxInt = 0x7fffffff;
        if (std::max({options_.num_tokens, spec_.padded_vocab_size + 64, spec_.hidden_size}) > kMaxInt) {
            floor_why_ = "a dimension does not fit in 32 bits";
            return;
        }
        auto library = load_gemm_library(device_, spec_.dtype, kernel_->device().cpu.cores, &floor_why_);
        if (library == nullptr) return;
        try {
            floor_.emplace(std::move(library), spec_, device_, options_.num_tokens);
        } catch (const DeviceError& e) {
            floor_why_ = fmt::format("the floor's library cannot be set up: {}", e.what());
        } catch (const OutOfMemory& e) {
            floor_why_ = fmt::format("no memory for what the floor needs: {}", e.what());
        }
    }

    /// `keep`: for a backward that follows. `every_token`: none is ignored.
    void forward(std::int64_t i, bool keep, bool every_token = false) const {
        const BufferSet& set = sets_[static_cast<std::size_t>(i) % sets_.size()];
        ForwardArgs args = forward_args(set.inputs, set.outputs, {});
        if (every_token) args.target = none_ignored_.view;
        if (keep) args.retained = retained_.of(set.outputs);
        run_forward(*kernel_, args, set.outputs, scratch_.workspace());
    }
    void backward(std::int64_t i, bool every_token = false) const {
        const BufferSet& set = sets_[static_cast<std::size_t>(i) % sets_.size()];
        BackwardArgs args = backward_args(set.inputs, set.outputs, {});
        if (every_token) args.target = none_ignored_.view;
        args.retained = retained_.of(set.outputs);
        if (options_.frozen == "weight") args.grad_weight = args.grad_bias = {};
        if (options_.frozen == "hidden") args.grad_hidden = {};
        kernel_->backward(args, scratch_.workspace());
    }

    void make_subjects() {
        subjects_.push_back({"forward_ms", [this](std::int64_t i) { forward(i, false); }});
        subjects_.push_back({"forward_backward_ms", [this](std::int64_t i) {
                                 forward(i, true);
                                 backward(i);
                             }});
        if (options_.ignored > 0) {
            subjects_.push_back({"every_token_forward_ms", [this](std::int64_t i) { forward(i, false, true); }});
            subjects_.push_back({"every_token_forward_backward_ms", [this](std::int64_t i) {
                                     forward(i, true, true);
                                     backward(i, true);
                                 }});
        }
        if (!floor_) return;
        subjects_.push_back({"floor_forward_ms", [this](std::int64_t) { floor_->forward(); }});
        subjects_.push_back({"floor_forward_backward_ms", [this](std::int64_t) {
                                 floor_->forward();
                                 floor_->backward();
                             }});
        // Reading the weight takes most of the time with few tokens; a copy reads the weight and writes as much.
        if (options_.num_tokens <= kWeightBoundTokens)
            subjects_.push_back({"floor_copy_ms", [this](std::int64_t) { floor_->copy_weight(); }});
    }

    double time_ms(const Subject& subject) {
        Timer timer(device_);
        timer.start();
        for (int i = 0; i < subject.repetitions; ++i) subject.call(calls_++);
        return timer.stop_ms() / subject.repetitions;
    }

    /// Warm-up, then rounds in which every subject is timed once, so that a change of clocks or temperature meets all of them.
    void measure() {
        double round_ms = 0;
        for (Subject& subject : subjects_) {
            stop_if_interrupted();
            static_cast<void>(time_ms(subject));
            const double once = time_ms(subject);
            if (once < kShortestSampleMs)
                subject.repetitions = static_cast<int>(std::min(1000.0, std::ceil(kShortestSampleMs / std::max(once, 1e-6))));
            round_ms += once * subject.repetitions;
        }
        const int affordable = static_cast<int>(options_.seconds * 1e3 / std::max(round_ms, 1e-3));
        const int rounds = options_.rounds > 0 ? options_.rounds : std::clamp(affordable, kMinRounds, kMaxRounds);
        Progress progress("rounds", rounds);
        for (int round = 0; round < rounds; ++round) {
            for (Subject& subject : subjects_) {
                stop_if_interrupted();
                subject.samples_ms.push_back(time_ms(subject));
            }
            progress.update(round + 1);
        }
        progress.finish();
    }

    [[nodiscard]] const Subject* find(const std::string& key) const {
        const auto found = std::find_if(subjects_.begin(), subjects_.end(), [&](const Subject& s) { return s.key == key; });
        return found == subjects_.end() ? nullptr : &*found;
    }

    /// "…padded" where the floor multiplies more rows than the vocabulary has.
    [[nodiscard]] std::string floor_text() const {
        if (!floor_) return floor_why_;
        if (floor_->vocab_size() == spec_.vocab_size) return floor_->description();
        return fmt::format("{}, V padded to {}", floor_->description(), floor_->vocab_size());
    }

    void report() const {
        if (options_.json) {
            report_json();
        } else {
            report_text();
        }
    }

    void report_json() const {
        Json json{{"spec", spec_.text()},
                  {"device", kernel_->device().name},
                  {"plan", kernel_->plan().text()},
                  {"num_tokens", options_.num_tokens}};
        // These are there in any case.
        for (const char* key : {"forward_ms", "forward_backward_ms", "floor_forward_ms", "floor_forward_backward_ms"}) json[key] = nullptr;
        for (const Subject& subject : subjects_) {
            const std::string& key = subject.key;
            const Summary summary = summarize(subject.samples_ms);
            json[key] = summary.median;
            json[key + "_min"] = summary.min;
            json[key + "_spread"] = summary.spread;
        }
        json["ratio_forward"] = ratio("forward_ms", "floor_forward_ms");
        json["ratio_forward_backward"] = ratio("forward_backward_ms", "floor_forward_backward_ms");
        if (!options_.frozen.empty()) json["frozen"] = options_.frozen;
        if (options_.ignored > 0) {
            json["ignored"] = options_.ignored;
            json["ratio_ignored_forward"] = ratio("forward_ms", "every_token_forward_ms");
            json["ratio_ignored_forward_backward"] = ratio("forward_backward_ms", "every_token_forward_backward_ms");
        }
        if (find("floor_copy_ms") != nullptr) json["share_of_copy_bandwidth"] = share_of_copy_bandwidth();
        json["floor"] = floor_ ? Json(floor_text()) : Json(nullptr);
        json["floor_missing"] = floor_ ? Json(nullptr) : Json(floor_why_);
        json["rounds"] = subjects_.front().samples_ms.size();
        json["buffer_sets"] = sets_.size();
        json["workspace_bytes"] = workspace_bytes_;
        json["retained_bytes"] = retained_.own_bytes();
        json["logits_bytes"] = logits_bytes();
        print_json(json);
    }

    [[nodiscard]] Json ratio(const char* key, const char* floor_key) const {
        const Subject* subject = find(key);
        const Subject* floor = find(floor_key);
        if (floor == nullptr) return nullptr;
        return summarize(subject->samples_ms).median / summarize(floor->samples_ms).median;
    }

    /// Part of the bytes a second that a copy of the weight moves, which forward reads of the weight.
    [[nodiscard]] double share_of_copy_bandwidth() const { return ratio("floor_copy_ms", "forward_ms").get<double>() / 2; }

    /// Bytes that the logits alone would take in the spec's dtype.
    [[nodiscard]] double logits_bytes() const {
        return static_cast<double>(options_.num_tokens) * static_cast<double>(spec_.vocab_size) *
               static_cast<double>(element_bytes(spec_.dtype));
    }

    void report_text() const {
        fmt::print("{} on {}, {} tokens\n{}\n\n", spec_.text(), kernel_->device().name, options_.num_tokens, kernel_->plan().text());
        fmt::print("  {:<32} {:>11} {:>11} {:>8} {:>10} {:>9}\n", "", "median", "min", "spread", "TFLOP/s", "to floor");
        // 10^9 operations: divided by milliseconds, 10^12 a second.
        const double gemm = 2e-9 * static_cast<double>(options_.num_tokens) * static_cast<double>(spec_.hidden_size) *
                            static_cast<double>(spec_.vocab_size);
        for (const Subject& subject : subjects_) {
            if (subject.key == "floor_copy_ms") continue;
            const Summary summary = summarize(subject.samples_ms);
            const bool both = subject.key.find("backward") != std::string::npos;
            const bool is_floor = subject.key.starts_with("floor");
            const bool every_token = subject.key.starts_with("every_token");
            const Json to_floor =
                is_floor ? Json(nullptr) : ratio(subject.key.c_str(), both ? "floor_forward_backward_ms" : "floor_forward_ms");
            fmt::print("  {:<32} {:>8.3f} ms {:>8.3f} ms {:>6.1f} % {:>10.4g} {:>9}\n",
                       fmt::format("{}{}",
                                   is_floor      ? "floor, "
                                   : every_token ? "none ignored, "
                                                 : "",
                                   both ? "forward + backward" : "forward"),
                       summary.median, summary.min, summary.spread * 100, (both ? 3 : 1) * gemm / summary.median,
                       to_floor.is_null() ? "" : fmt::format("{:.2f}×", to_floor.get<double>()));
        }
        if (options_.ignored > 0) {
            fmt::print("\n  {:.0f} % of the tokens ignored: {:.3f} × the time of forward, {:.3f} × that of both\n", options_.ignored * 100,
                       ratio("forward_ms", "every_token_forward_ms").get<double>(),
                       ratio("forward_backward_ms", "every_token_forward_backward_ms").get<double>());
        }
        if (find("floor_copy_ms") != nullptr) {
            fmt::print("\n  forward reads the weight at {:.0f} % of the rate at which it is copied ({:.3f} ms)\n",
                       share_of_copy_bandwidth() * 100, summarize(find("floor_copy_ms")->samples_ms).median);
        }
        fmt::print("\n  floor       {}{}\n", floor_ ? "the bare GEMMs by " : "none: ", floor_text());
        fmt::print("  workspace   {} (the logits alone: {})\n", human_bytes(static_cast<double>(workspace_bytes_)),
                   human_bytes(logits_bytes()));
        if (retained_.bytes() > 0) {
            fmt::print("  retained    {}{}\n", human_bytes(static_cast<double>(retained_.bytes())),
                       retained_.own_bytes() == 0 ? " of grad_weight's memory" : "");
        }
        fmt::print("  {} rounds, interleaved; {} set{} of buffers in turn\n", subjects_.front().samples_ms.size(), sets_.size(),
                   sets_.size() == 1 ? "" : "s");
    }

    const BenchOptions& options_;
    Spec spec_;
    Session session_;
    std::shared_ptr<const Kernel> kernel_;
    DeviceRef device_;
    std::size_t workspace_bytes_;
    Scratch scratch_;
    RetainedMemory retained_;
    std::vector<BufferSet> sets_;
    Tensor none_ignored_;  ///< labels, where the sets' have ignored ones
    std::optional<Floor> floor_;
    std::string floor_why_;
    std::vector<Subject> subjects_;
    std::int64_t calls_ = 0;
};

}  // namespace

void add_bench(CLI::App& app, Action& action) {
    auto options = std::make_shared<BenchOptions>();
    CLI::App* command = app.add_subcommand("bench", "Time, memory, and the floor (bare GEMMs) in the same run");
    command->footer(
        "\nThe floor is the forward GEMM, and the three GEMMs of forward and backward, by cuBLAS on a GPU and by a BLAS library on the "
        "CPU,\n"
        "where one is found. TFLOP/s count 2·N·D·V for forward and 6·N·D·V for both, whatever is recomputed.\n\n"
        "Examples:\n  flce bench --spec D=2048,V=151936,dtype=bf16 --num-tokens 4096\n"
        "  flce bench --spec D=4096,V=128256,dtype=bf16,outputs=logprobs --num-tokens 8192 --frozen weight --workspace-limit 4G\n"
        "  flce bench --spec D=2048,V=50257,dtype=fp32 --device cpu --rounds 5 --json");
    command->add_option("--spec", options->spec, kSpecHelp)->required();
    command->add_option("--num-tokens,-N", options->num_tokens, "rows of hidden")
        ->capture_default_str()
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
    options->session.add_to(*command);
    command->add_option("--plan", options->plan, "canonical plan text instead of the planner's choice");
    options->memory.add_to(*command);
    command->add_option("--ignored", options->ignored, "fraction of the tokens that are ignored, timed beside the same with none")
        ->check(finite_number())
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    command->add_option("--frozen", options->frozen, "weight or hidden: backward is not asked for its gradient (the floor is of all GEMMs)")
        ->check(CLI::IsMember({"weight", "hidden"}));
    command->add_option("--rounds", options->rounds, "measured rounds (default: what --seconds allows, 5 to 50)")
        ->check(CLI::Range(1, 100000));
    command->add_option("--seconds", options->seconds, "time to spend measuring, about")
        ->capture_default_str()
        ->check(finite_number())
        ->check(CLI::Range(0.0, 86400.0));
    command->add_flag("--no-floor", options->no_floor, "do not measure the floor");
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return Bench(*options).run(); }; });
}

}  // namespace flce::cli

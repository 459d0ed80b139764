#include "cli/command.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <new>
#include <span>
#include <sstream>
#include <system_error>

#include "cli/interrupt.hpp"
#include "cli/output.hpp"
#include "cli/unknown_name.hpp"
#include "runtime/scratch_steps.hpp"

namespace flce::cli {
namespace {

/// Details that the library lists on lines of their own follow on the same one.
int fail(int code, std::string_view message) {
    std::string line;
    for (std::size_t i = 0; i < message.size(); ++i) {
        if (message[i] != '\n') {
            line += message[i];
            continue;
        }
        while (i + 1 < message.size() && message[i + 1] == ' ') ++i;
        if (i + 1 < message.size()) line += "; ";
    }
    return report_error(code, line);
}

int run_action(const Action& action) {
    try {
        return action();
    } catch (const Interrupted&) {
        return fail(kInterrupted, "interrupted");
    } catch (const UsageError& e) {
        return fail(kUsage, e.what());
    } catch (const CompileError& e) {  // the compiler's log is worth its lines
        return report_error(exit_code(e.kind()), e.what());
    } catch (const Error& e) {
        return fail(exit_code(e.kind()),
                    e.kind() == ErrorKind::internal ? fmt::format("internal error (please report it): {}", e.what()) : e.what());
    } catch (const std::bad_alloc&) {
        return fail(kEnvironment, "out of memory: fewer tokens (--num-tokens) or a smaller layer need less");
    } catch (const std::system_error& e) {
        if (std::ferror(stdout) == 0) return fail(kEnvironment, e.what());
        return fail(kEnvironment, fmt::format("standard output cannot be written: {}", e.code().message()));
    } catch (const std::exception& e) {
        return fail(kEnvironment, e.what());
    }
}

constexpr const char* kExamples = R"(
Examples:
  flce demo                                                    train on real text, check, time: the tour
  flce run --spec D=2048,V=151936,dtype=bf16,tied --input step.safetensors --out grads.safetensors
  flce check --spec D=256,V=50257,dtype=fp32,softcap=30        every output against fp64
  flce bench --spec D=2048,V=151936,dtype=bf16 --num-tokens 4096 --json
  flce explain --spec D=4096,V=128256,dtype=bf16 --device h100
  flce prewarm --hf-config config.json --device sm_90a         compile for a GPU that is not here
  flce prewarm --manifest kernels.json --out kernels.flcepack  … into one file to ship; --check says what a run would miss
  flce tune --spec D=4096,V=128256,dtype=bf16 --num-tokens 8192    measure plans on this device, keep the best
  flce cache stats                                             what the kernel cache holds and did
  flce info

A spec is "key=value" pairs and bare flags joined by commas, a JSON object with the same keys, or @file.json. Keys: D or hidden_size,
V or vocab_size, padded_vocab_size, dtype (bf16, fp16, fp32, or bfloat16, float16, float32), layout (vocab_major, hidden_major), tied,
weight_dtype (also e4m3, nvfp4), weight_block (128, with e4m3), grad_weight_dtype, grad_weight_mode (write, accumulate), bias,
logit_scale, softcap, label_smoothing, z_loss, class_weight, class_offset, class_groups, offset_gradient, temperature, token_weight,
batch_invariant, dft, teacher_top_k, hard_weight, support,
teacher_hidden_size, divergence_beta, teacher_bias, teacher_logit_scale, teacher_softcap, top_k, fp8 (int8, e4m3),
fp8_dlogits (e5m2, e4m3), fp8_hidden_scale, fp8_weight_scale, outputs (loss+lse+logprobs+entropy+top1+log_sum_sq_probs).

Exit codes: 0 done, 1 a check failed, 2 usage or bad input, 3 environment (device, library, compiler, disk, standard output), 130 ended by
Ctrl-C or SIGTERM.
With --json a command that fails prints {"error": {"exit_code", "message"}}.)";

int run_command_line(int argc, char** argv);

}  // namespace

int exit_code(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::spec:
        case ErrorKind::plan:
        case ErrorKind::argument: return kUsage;
        case ErrorKind::compile:
        case ErrorKind::device:
        case ErrorKind::environment:
        case ErrorKind::internal:
        case ErrorKind::cache_miss: break;
    }
    return kEnvironment;
}

int main(int argc, char** argv) {
    open_missing_streams();
    const std::span<char*> arguments(argv, static_cast<std::size_t>(argc));
    report_errors_as_json(std::ranges::any_of(arguments, [](const char* argument) { return std::string_view(argument) == "--json"; }));
    return finish_output(run_command_line(argc, argv));
}

namespace {

int run_command_line(int argc, char** argv) {
    CLI::App app{"flce: fused linear + cross-entropy kernels, generated for one concrete output layer", "flce"};
    app.footer(kExamples);
    app.require_subcommand(1);
    app.set_version_flag("--version", std::string(version()));
    Action action;
    add_demo(app, action);
    add_run(app, action);
    add_check(app, action);
    add_bench(app, action);
    add_explain(app, action);
    add_prewarm(app, action);
    add_prewarm_worker(app, action);
    add_tune(app, action);
    add_tune_worker(app, action);
    add_cache(app, action);
    add_info(app, action);
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& e) {
        std::ostringstream text;  // not to std::cout, which forgets why it cannot write
        const int code = app.exit(e, text, text);
        std::fputs(text.str().c_str(), stdout);
        return code == 0 ? kDone : kUsage;
    } catch (const CLI::ParseError& e) {
        const std::string unknown = unknown_name(app, {argv + 1, static_cast<std::size_t>(std::max(argc, 1) - 1)});
        return fail(kUsage, unknown.empty() ? fmt::format("{} (flce --help, flce COMMAND --help)", e.what()) : unknown);
    }
    handle_interrupts();
    return run_action(action);
}

}  // namespace

void SessionFlags::add_to(CLI::App& app) {
    app.add_option("--device", device, "cpu, cuda or cuda:I (default: FLCE_DEVICE, else the first CUDA device, else the CPU)");
    app.add_option("--cache-dir", cache_dir, "kernel cache (default: FLCE_CACHE_DIR, else the user's cache directory)");
    app.add_option("--threads", threads, "CPU threads (default: FLCE_NUM_THREADS, else every core)")->check(CLI::Range(0, 4096));
    app.add_option("--workspace", workspace, "most scratch bytes beyond the accumulator of grad_hidden, e.g. 64M");
}

void MemoryFlags::add_to(CLI::App& app, std::string_view default_choice) {
    app.add_option(
        "--workspace-limit", limit,
        "all bytes of a call beyond inputs and gradients, e.g. 2G: the plan is chosen for it, and what it leaves is --retain auto's");
    app.add_option(
        "--retain", retain,
        fmt::format(
            "memory that forward may leave to backward, sparing it logits: none, all (as much as there is a use for), a number of bytes "
            "(256M), grad_weight (that gradient's own memory, before it is written), or auto (what the limit leaves, or grad_weight's "
            "where that is as much) (default: {})",
            default_choice));
}

std::int64_t MemoryFlags::workspace_limit_bytes() const {
    if (limit.empty()) return 0;
    const std::int64_t bytes = parse_bytes("--workspace-limit", limit);
    if (bytes < 1) throw UsageError(fmt::format("--workspace-limit is {}; it must be positive", limit));
    return bytes;
}

std::int64_t MemoryFlags::plan_workspace_limit_bytes() const {
    return limit.empty() && retain == "all" ? kAllMemory : workspace_limit_bytes();
}

std::string MemoryFlags::choice() const {
    if (!retain.empty()) return retain;
    return limit.empty() ? "none" : "auto";
}

void MemoryFlags::check_limit(std::int64_t bytes) const {
    if (const std::int64_t most = workspace_limit_bytes(); most > 0 && bytes > most) {
        throw UsageError(
            fmt::format("--retain {}: with the workspace {} bytes, over the --workspace-limit of {}; auto takes what it leaves", choice(),
                        bytes, most));
    }
}

SessionOptions SessionFlags::options() const {
    SessionOptions options;
    options.device = device;
    options.cache_dir = cache_dir;
    options.threads = threads;
    if (!workspace.empty()) options.scratch_bytes = parse_bytes("--workspace", workspace);
    return options;
}

void print_json(const Json& object) {
    // Invalid UTF-8 can only come from file names, and must not cost the user the results.
    const std::string text = object.dump(2, ' ', false, Json::error_handler_t::replace);
    note_json_object();
    fmt::print("{}\n", text);
    flush_output();
}

Spec read_spec(const std::string& text) {
    try {
        return parse_spec(text);
    } catch (const EnvironmentError& e) {
        throw UsageError(e.what());
    }
}

std::filesystem::path output_file(std::string_view option, const std::filesystem::path& path) {
    std::error_code error;
    const bool linked = std::filesystem::is_symlink(path, error);
    const std::filesystem::path real = linked ? std::filesystem::weakly_canonical(path, error) : path;
    const std::filesystem::file_status status = std::filesystem::status(real, error);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
        throw UsageError(fmt::format("{}: {} is there and is not a regular file", option, path.string()));
    }
    return real;
}

Reduction parse_reduction(std::string_view text) {
    if (text == "none") return Reduction::none;
    if (text == "sum") return Reduction::sum;
    if (text == "mean") return Reduction::mean;
    if (text == "weighted_mean") return Reduction::weighted_mean;
    throw UsageError(fmt::format("--reduction: \"{}\" is not none, sum, mean or weighted_mean", text));
}

std::filesystem::path executable_path() {
    std::error_code error;
    auto path = std::filesystem::read_symlink("/proc/self/exe", error);
    return error ? std::filesystem::path() : path;
}

}  // namespace flce::cli

// flce explain: the plan for a spec on a device (here or not), why, and what it costs. Compiles nothing.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>

#include "cli/command.hpp"
#include "runtime/environment.hpp"
#include "runtime/explained_call.hpp"

namespace flce::cli {
namespace {

struct ExplainOptions {
    std::string spec;
    std::string device;
    std::string workspace;
    std::string plan;
    MemoryFlags memory;
    int threads = 0;
    std::int64_t num_tokens = kTypicalTokens;
    bool json = false;
};

/// Reads --retain like the other commands, but for its default.
void read_retain(const std::string& retain, CallQuestion& question) {
    static const std::map<std::string_view, Keep> names = {
        {"", Keep::automatic}, {"auto", Keep::automatic}, {"none", Keep::nothing}, {"all", Keep::all}, {"grad_weight", Keep::grad_weight}};
    const auto name = names.find(retain);
    question.keep = name == names.end() ? Keep::bytes : name->second;
    if (question.keep == Keep::bytes) question.keep_bytes = parse_bytes("--retain", retain);
}

CallQuestion question_of(const ExplainOptions& options) {
    CallQuestion question{.spec = read_spec(options.spec).normalized(),
                          .device = resolve_device(options.device),
                          .num_tokens = options.num_tokens,
                          .threads = options.threads > 0 ? options.threads : environment().num_threads,
                          .plan = options.plan,
                          .workspace_limit_bytes = options.memory.workspace_limit_bytes()};
    if (!options.workspace.empty()) question.scratch_bytes = parse_bytes("--workspace", options.workspace);
    read_retain(options.memory.retain, question);
    return question;
}

Json to_json(const CallPoint& point) {
    return {{"workspace_bytes", point.workspace_bytes},
            {"strategy", to_string(point.plan.strategy)},
            {"retained_part", point.kept.part},
            {"retained_bytes", point.kept.bytes},
            {"plan", point.plan.text()},
            {"flops", point.forward.flops + point.backward.flops},
            {"forward_ms", point.forward.seconds * 1e3},
            {"backward_ms", point.backward.seconds * 1e3},
            {"forward_backward_ms", point.seconds() * 1e3}};
}

Json to_json(const std::optional<MeasuredTime>& measured) {
    if (!measured) return nullptr;
    return {{"forward_backward_ms", measured->ms},
            {"num_tokens", measured->num_tokens},
            {"candidates", measured->candidates},
            {"record", measured->origin},
            {"other_kernels", measured->other_kernels}};
}

Json to_json(const CallQuestion& question, const ExplainedCall& call) {
    const Spec& spec = question.spec;
    Json json{{"spec", spec.text()}, {"device", question.device.name}, {"num_tokens", question.num_tokens}};
    if (question.device.kind == DeviceKind::cpu) json["threads"] = with_threads(question.device, question.threads).cpu.cores;
    json.update(to_json(call.point));
    json["times"] = "cost model";
    json["guessed"] = call.guessed;
    json["measured"] = to_json(call.measured);
    json["workspace_limit_bytes"] = question.workspace_limit_bytes;
    json["logits_bytes"] =
        static_cast<double>(question.num_tokens) * static_cast<double>(spec.vocab_size) * static_cast<double>(element_bytes(spec.dtype));
    json["curve"] = Json::array();
    for (const CallPoint& point : call.curve) json["curve"].push_back(to_json(point));
    json["plan_source"] = call.choice.source;
    json["reasons"] = call.choice.reasons;
    return json;
}

std::string device_text(const CallQuestion& question) {
    const Device& device = question.device;
    if (device.kind != DeviceKind::cpu) return device.name;
    return fmt::format("{}, {} of {} cores in use", device.name, with_threads(device, question.threads).cpu.cores, device.cpu.cores);
}

/// Measured, else modelled, or guessed where nobody has measured what the model assumes: never something of two of them.
std::string time_text(const ExplainedCall& call) {
    if (call.measured) {
        return fmt::format("measured    forward + backward {:.4g} ms: best of {} candidates, median{}\n            {}\n", call.measured->ms,
                           call.measured->candidates, call.measured->other_kernels ? ", with kernels of another version" : "",
                           call.measured->origin);
    }
    return fmt::format("{}    forward {}, backward {}, forward + backward {}\n", call.guessed ? "guessed " : "modelled",
                       human_seconds(call.point.forward.seconds), human_seconds(call.point.backward.seconds),
                       human_seconds(call.point.seconds()));
}

std::string kept_text(const KeptPart& kept) {
    if (kept.part == 0) return "nothing";
    return fmt::format("{:.1f} % of the vocabulary, in {}", 100 * kept.part,
                       kept.bytes == 0 ? "grad_weight's memory" : human_bytes(static_cast<double>(kept.bytes)) + " of its own");
}

/// The model only says how other limits compare with this call, where there is a measured time.
void print_curve(const ExplainedCall& call) {
    const bool relative = call.measured.has_value();
    fmt::print("\nwhat limits on memory do to the time, {} by the cost model (*: this call)\n    {:>12}  {:>8}  {:>19}  {}\n",
               call.guessed ? "guessed" : "modelled", "workspace", "retained", relative ? "to this call's time" : "forward + backward",
               "vocabulary chunk");
    for (std::size_t i = 0; i < call.curve.size(); ++i) {
        const CallPoint& p = call.curve[i];
        const std::string time = relative ? fmt::format("× {:.2f}", p.seconds() / call.point.seconds()) : human_seconds(p.seconds());
        fmt::print("  {} {:>12}  {:>6.1f} %  {:>{}}  {}{}\n", call.place == i ? '*' : ' ',
                   human_bytes(static_cast<double>(p.workspace_bytes)), 100 * p.kept.part, time, 19, p.plan.vocab_chunk,
                   p.kept.part > 0 && p.kept.bytes == 0 ? "  in grad_weight's memory" : "");
    }
    if (!call.place) {
        fmt::print("  this call, with {}, is not among them: by the model it is no quicker than one with less memory\n",
                   human_bytes(static_cast<double>(call.point.workspace_bytes)));
    }
}

int explain(const ExplainOptions& options) {
    const CallQuestion question = question_of(options);
    const ExplainedCall call = explained_call(question);
    options.memory.check_limit(call.point.workspace_bytes);
    if (options.json) {
        print_json(to_json(question, call));
        return kDone;
    }
    const CallPoint& point = call.point;
    fmt::print("spec        {}\ndevice      {}\nplan        {}\ntokens      {}\n", question.spec.text(), device_text(question),
               point.plan.text(), question.num_tokens);
    fmt::print(
        "workspace   at most {}{}\nretained    {}\n", human_bytes(static_cast<double>(point.workspace_bytes)),
        question.workspace_limit_bytes > 0 ? fmt::format(" of {}", human_bytes(static_cast<double>(question.workspace_limit_bytes))) : "",
        kept_text(point.kept));
    fmt::print("operations  {:.3g}\n{}\nwhy\n", point.forward.flops + point.backward.flops, time_text(call));
    for (const std::string& reason : call.choice.reasons) fmt::print("  {}\n", reason);
    print_curve(call);
    return kDone;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
    auto options = std::make_shared<ExplainOptions>();
    CLI::App* command = app.add_subcommand("explain", "The plan and why, bytes, operations, expected time; for a device here or elsewhere");
    command->footer(
        "\nExamples:\n  flce explain --spec D=2048,V=151936,dtype=bf16,tied\n"
        "  flce explain --spec D=4096,V=128256,dtype=bf16 --device \"NVIDIA H200\" --num-tokens 8192 --workspace 128M --json\n"
        "  flce explain --spec D=4096,V=128256,dtype=bf16 --device h100 --workspace-limit 1G");
    command->add_option("--spec", options->spec, kSpecHelp)->required();
    command->add_option("--device", options->device,
                        "cpu, cuda[:I], or a name: sm_80, sm_90a, h100, \"NVIDIA H200\", x86-64-v4, … (default: this machine's best)");
    command->add_option("--num-tokens,-N", options->num_tokens, "rows of hidden")
        ->capture_default_str()
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 60));
    command->add_option("--workspace", options->workspace, "most scratch bytes beyond the accumulator of grad_hidden, e.g. 64M");
    command->add_option("--plan", options->plan, "explain this plan instead of the planner's choice");
    command->add_option("--threads", options->threads, "CPU threads (default: FLCE_NUM_THREADS, else every core)")
        ->check(CLI::Range(0, 4096));
    options->memory.add_to(*command, "auto, as the Python package does and tuning measures");
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return explain(*options); }; });
}

}  // namespace flce::cli

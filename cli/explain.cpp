// flce explain: the plan for a spec on a device (here or not), why, and what it costs. Compiles nothing.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/command.hpp"
#include "cli/layer.hpp"

namespace flce::cli {
namespace {

struct ExplainOptions {
    std::string spec;
    std::string device;
    std::string workspace;
    std::string plan;
    MemoryFlags memory;
    std::int64_t num_tokens = 4096;
    bool json = false;
};

/// What forward leaves to backward, where the plan can.
struct Kept {
    double part = 0;         ///< of the vocabulary
    std::int64_t bytes = 0;  ///< beside grad_weight's memory
};

/// A plan and what the cost model expects of it.
struct Point {
    Plan plan;
    std::int64_t workspace_bytes = 0;  ///< bound: scratch plus the fp32 accumulator of grad_hidden, plus what is kept
    Kept kept;
    Cost forward;
    Cost backward;
    [[nodiscard]] double seconds() const { return forward.seconds + backward.seconds; }
};

/// Scratch and the fp32 sum of grad_hidden.
std::int64_t workspace_bound(const Spec& spec, const Plan& plan, std::int64_t num_tokens) {
    std::int64_t accumulator = 0;
    std::int64_t workspace = 0;
    if (__builtin_mul_overflow(4 * spec.hidden_size, num_tokens, &accumulator) ||
        __builtin_add_overflow(plan.scratch_bytes, accumulator, &workspace)) {
        throw UsageError(fmt::format("--num-tokens: {} tokens overflow 64-bit sizes", num_tokens));
    }
    return workspace;
}

Point make_point(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens, const Kept& kept = {}) {
    std::int64_t bytes = 0;
    if (__builtin_add_overflow(workspace_bound(spec, plan, num_tokens), kept.bytes, &bytes)) {
        throw UsageError(fmt::format("--num-tokens: {} tokens overflow 64-bit sizes", num_tokens));
    }
    return {plan, bytes, kept, estimate_forward(spec, device, plan, num_tokens, kept.part),
            estimate_backward(spec, device, plan, num_tokens, kept.part)};
}

/// Bytes of the exponentials of `part` of the vocabulary.
std::int64_t exponential_bytes(const Spec& spec, std::int64_t num_tokens, double part) {
    return static_cast<std::int64_t>(part * static_cast<double>(num_tokens) * static_cast<double>(spec.vocab_size) *
                                     static_cast<double>(element_bytes(spec.dtype)));
}

/// The plan for every power of two of scratch from 1 MiB on, as far as more makes it faster; where it keeps exponentials, first nothing, then what
/// grad_weight's memory holds, then eighths of them.
std::vector<Point> make_curve(const Spec& spec, const Device& device, std::int64_t num_tokens) {
    std::vector<Point> curve;
    for (std::int64_t scratch = 1 << 20; scratch <= std::int64_t{4} << 30; scratch *= 2) {
        try {
            const Point point = make_point(spec, device, choose_plan(spec, device, {.scratch_bytes = scratch}), num_tokens);
            if (curve.empty() || point.seconds() < 0.999 * curve.back().seconds()) curve.push_back(point);
            // Beyond the default, memory does more for exponentials.
            if (scratch >= kDefaultScratchBytes && point.plan.strategy == Strategy::retain) break;
        } catch (const PlanError&) {
            continue;  // too little for any plan
        }
    }
    if (curve.empty() || curve.back().plan.strategy != Strategy::retain) return curve;
    const Plan plan = curve.back().plan;
    const double lent = lendable_part(spec, num_tokens);
    if (lent > 0) curve.push_back(make_point(spec, device, plan, num_tokens, {lent, 0}));
    for (int eighths = 1; eighths < 8; ++eighths) {
        const double part = eighths / 8.0;
        curve.push_back(make_point(spec, device, plan, num_tokens, {part, exponential_bytes(spec, num_tokens, part)}));
    }
    const Plan whole =
        choose_plan(spec, device, {.scratch_bytes = plan.scratch_bytes, .limit_bytes = kAllMemory, .num_tokens = num_tokens});
    curve.push_back(make_point(spec, device, whole, num_tokens, {1, exponential_bytes(spec, num_tokens, 1)}));
    return curve;
}

/// --retain, as the other commands have it. Throws UsageError where it is none of the choices, or that memory will not do.
Kept read_kept(const Spec& spec, const Plan& plan, std::int64_t num_tokens, const MemoryFlags& flags) {
    const std::string choice = flags.choice();
    const bool retains = plan.strategy == Strategy::retain;
    const std::int64_t whole = retains ? exponential_bytes(spec, num_tokens, 1) : 0;
    const double lent = retains ? lendable_part(spec, num_tokens) : 0;
    const auto own = [&](std::int64_t bytes) {
        return Kept{whole == 0 ? 0.0 : static_cast<double>(bytes) / static_cast<double>(whole), bytes};
    };
    if (choice == "none") return {};
    if (choice == "auto") {
        const std::int64_t used = workspace_bound(spec, plan, num_tokens);
        const Kept rest = own(std::clamp<std::int64_t>(flags.limit_bytes() - used, 0, whole));
        return rest.part > lent ? rest : Kept{lent, 0};
    }
    if (choice == "grad_weight") {
        if (lent == 0 && num_tokens > 0) {
            throw UsageError(
                fmt::format("--retain grad_weight: {} cannot use that memory (the plan has to retain, the gradient to be written, not "
                            "accumulated into, vocab_major)",
                            plan.text()));
        }
        return {lent, 0};
    }
    const Kept kept = own(choice == "all" ? whole : std::min(whole, parse_bytes("--retain", choice)));
    flags.check_limit(workspace_bound(spec, plan, num_tokens) + kept.bytes);
    return kept;
}

bool same(const Point& a, const Point& b) { return a.plan == b.plan && a.kept.bytes == b.kept.bytes && a.kept.part == b.kept.part; }

/// Where a plan lies on a curve that does not go through it.
void add_point(std::vector<Point>& curve, const Point& point) {
    if (std::ranges::any_of(curve, [&](const Point& p) { return same(p, point); })) return;
    const auto after = std::ranges::find_if(curve, [&](const Point& p) { return p.workspace_bytes > point.workspace_bytes; });
    curve.insert(after, point);
}

Json to_json(const Point& point) {
    return {{"workspace_bytes", point.workspace_bytes},
            {"strategy", to_string(point.plan.strategy)},
            {"retained_part", point.kept.part},
            {"retained_bytes", point.kept.bytes},
            {"plan", point.plan.text()},
            {"flops", point.forward.flops + point.backward.flops},
            {"forward_ms", point.forward.seconds * 1e3},
            {"forward_backward_ms", point.seconds() * 1e3}};
}

int explain(const ExplainOptions& options) {
    const Spec spec = read_spec(options.spec);
    const Device device = resolve_device(options.device);
    PlanRequest request;
    if (!options.workspace.empty()) request.scratch_bytes = parse_bytes("--workspace", options.workspace);
    // What runs here does not matter to it; what it has measured does.
    SessionOptions session_options{.device = "cpu", .scratch_bytes = request.scratch_bytes};
    const std::int64_t limit = options.memory.limit_bytes();
    const PlanChoice choice =
        Session(session_options)
            .choose_plan(
                spec, device,
                {.plan = options.plan, .workspace_limit_bytes = options.memory.plan_limit_bytes(), .num_tokens = options.num_tokens});
    const Plan& plan = choice.plan;
    const Point point = make_point(spec, device, plan, options.num_tokens, read_kept(spec, plan, options.num_tokens, options.memory));
    std::vector<Point> curve = make_curve(spec, device, options.num_tokens);
    add_point(curve, point);
    const auto& reasons = choice.reasons;
    if (options.json) {
        Json json{{"spec", spec.text()}, {"device", device.name}, {"num_tokens", options.num_tokens}};
        json.update(to_json(point));
        json["workspace_limit_bytes"] = limit;
        json["logits_bytes"] =
            static_cast<double>(options.num_tokens) * static_cast<double>(spec.vocab_size) * static_cast<double>(element_bytes(spec.dtype));
        json["curve"] = Json::array();
        for (const Point& p : curve) json["curve"].push_back(to_json(p));
        json["plan_source"] = choice.source;
        json["reasons"] = reasons;
        print_json(json);
        return kDone;
    }
    fmt::print("spec        {}\ndevice      {}\nplan        {}\ntokens      {}\n", spec.text(), device.name, plan.text(),
               options.num_tokens);
    fmt::print("workspace   at most {}{}\n", human_bytes(static_cast<double>(point.workspace_bytes)),
               limit > 0 ? fmt::format(" of {}", human_bytes(static_cast<double>(limit))) : "");
    fmt::print("operations  {:.3g}\n", point.forward.flops + point.backward.flops);
    fmt::print("expected    forward {}, forward + backward {}\n\nwhy\n", human_seconds(point.forward.seconds),
               human_seconds(point.seconds()));
    for (const std::string& reason : reasons) fmt::print("  {}\n", reason);
    fmt::print("\nwhat more or less memory would do (*: this plan)\n    {:>12}  {:>10}  {:>8}  {:>18}  {}\n", "workspace", "strategy",
               "kept", "forward + backward", "vocabulary chunk");
    for (const Point& p : curve) {
        fmt::print("  {} {:>12}  {:>10}  {:>6.1f} %  {:>18}  {}{}\n", same(p, point) ? '*' : ' ',
                   human_bytes(static_cast<double>(p.workspace_bytes)), to_string(p.plan.strategy), 100 * p.kept.part,
                   human_seconds(p.seconds()), p.plan.vocab_chunk, p.kept.part > 0 && p.kept.bytes == 0 ? "  in grad_weight's memory" : "");
    }
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
    command->add_option("--spec", options->spec, "what is computed: key=value,flag,… or @file.json")->required();
    command->add_option("--device", options->device,
                        "cpu, cuda[:I], or a name: sm_80, sm_90a, h100, \"NVIDIA H200\", x86-64-v4, … (default: this machine's best)");
    command->add_option("--num-tokens,-N", options->num_tokens, "rows of hidden")
        ->capture_default_str()
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 60));
    command->add_option("--workspace", options->workspace, "most scratch bytes beyond the accumulator of grad_hidden, e.g. 64M");
    command->add_option("--plan", options->plan, "explain this plan instead of the planner's choice");
    options->memory.add_to(*command);
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return explain(*options); }; });
}

}  // namespace flce::cli

// flce prewarm: compiles kernels into the cache for devices that need not be here.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>

#include "cli/command.hpp"
#include "cli/interrupt.hpp"
#include "cli/progress.hpp"

namespace flce::cli {
namespace {

struct PrewarmOptions {
    std::vector<std::string> specs;
    std::vector<std::filesystem::path> hf_configs;
    std::vector<std::string> devices;
    SessionFlags session;
    bool json = false;
};

struct Item {
    Spec spec;
    std::string device_name;
    Device device;
};

struct Outcome {
    PrewarmResult result;
    double seconds = 0;
    std::string error;
    bool environment = false;  ///< the failure is the environment's
};

/// Every spec for every device; all of them are read before anything is compiled.
std::vector<Item> make_items(const PrewarmOptions& options) {
    std::vector<Spec> specs;
    for (const std::string& text : options.specs) specs.push_back(read_spec(text));
    for (const auto& path : options.hf_configs) specs.push_back(spec_from_hf_config(read_text_file(path)));
    if (specs.empty()) throw UsageError("prewarm needs at least one --spec or --hf-config");
    std::vector<Item> items;
    for (const std::string& name : options.devices) {
        const Device device = resolve_device(name);
        for (const Spec& spec : specs) items.push_back({spec, name, device});
    }
    return items;
}

Outcome prewarm_one(Session& session, const Item& item) {
    Outcome outcome;
    const auto start = std::chrono::steady_clock::now();
    try {
        outcome.result = session.prewarm(item.spec, item.device);
    } catch (const Error& e) {
        if (e.kind() == ErrorKind::spec || e.kind() == ErrorKind::plan) throw;
        outcome.error = e.what();
        outcome.environment = e.kind() == ErrorKind::environment;
    }
    outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return outcome;
}

int prewarm(const PrewarmOptions& options) {
    const auto items = make_items(options);
    SessionOptions session_options = options.session.options();
    if (session_options.device.empty()) session_options.device = "cpu";  // what this session itself would run on does not matter
    Session session(session_options);
    std::vector<Outcome> outcomes;
    Progress progress("prewarm", static_cast<std::int64_t>(items.size()));
    PrewarmResult total;
    std::int64_t failed = 0;
    bool environment = false;
    progress.update(0, items.front().device_name);
    for (const Item& item : items) {
        stop_if_interrupted();
        outcomes.push_back(prewarm_one(session, item));
        const Outcome& outcome = outcomes.back();
        total.compiled += outcome.result.compiled;
        total.hits += outcome.result.hits;
        if (!outcome.error.empty()) {
            ++failed;
            environment = environment || outcome.environment;
            // What is long is said once.
            const bool repeated = outcomes.size() > 1 && outcomes[outcomes.size() - 2].error == outcome.error;
            progress.print(fmt::format("flce: error: {} for {}: {}", item.spec.text(), item.device_name,
                                       repeated ? first_line(outcome.error) : outcome.error));
        }
        progress.update(static_cast<std::int64_t>(outcomes.size()),
                        fmt::format("{} compiled, {} hits, {} failed", total.compiled, total.hits, failed));
    }
    progress.finish();
    if (options.json) {
        Json list = Json::array();
        for (std::size_t i = 0; i < items.size(); ++i) {
            const Outcome& o = outcomes[i];
            list.push_back({{"spec", items[i].spec.text()},
                            {"device", items[i].device_name},
                            {"compiled", o.result.compiled},
                            {"hits", o.result.hits},
                            {"seconds", o.seconds},
                            {"error", o.error.empty() ? Json(nullptr) : Json(o.error)}});
        }
        print_json({{"compiled", total.compiled},
                    {"hits", total.hits},
                    {"failed", failed},
                    {"pack", nullptr},
                    {"cache_dir", session.cache_dir().string()},
                    {"items", list}});
    } else {
        for (std::size_t i = 0; i < items.size(); ++i) {
            const Outcome& o = outcomes[i];
            fmt::print("{:<12} {:<60} {}\n", items[i].device_name, items[i].spec.text(),
                       o.error.empty() ? fmt::format("{} compiled, {} hits, {}", o.result.compiled, o.result.hits, human_seconds(o.seconds))
                                       : "FAILED");
        }
        fmt::print("{} compiled, {} hits, {} failed; cache: {}\n", total.compiled, total.hits, failed, session.cache_dir().string());
    }
    return failed == 0 ? kDone : environment ? kEnvironment : kFailedCheck;
}

}  // namespace

void add_prewarm(CLI::App& app, Action& action) {
    auto options = std::make_shared<PrewarmOptions>();
    CLI::App* command = app.add_subcommand("prewarm", "Compile kernels into the cache, for devices that need not be here");
    command->footer(
        "\nCompiles every spec for every device. CUDA devices need NVRTC (flce info says whether it is found), not a GPU.\n\n"
        "Examples:\n  flce prewarm --spec D=2048,V=151936,dtype=bf16,tied --device sm_80 --device sm_90a\n"
        "  flce prewarm --hf-config Qwen3-1.7B/config.json --device h100 --json");
    command->add_option("--spec", options->specs, "what is computed: key=value,flag,… or @file.json; may be repeated")->take_all();
    command->add_option("--hf-config", options->hf_configs, "a model's config.json (hidden_size, vocab_size, dtype, …); may be repeated")
        ->take_all();
    command->add_option("--device", options->devices, "sm_80, sm_90a, sm_100a, sm_120, h100, x86-64-v4, cpu, …; may be repeated")
        ->required()
        ->take_all();
    command->add_option("--cache-dir", options->session.cache_dir,
                        "kernel cache (default: FLCE_CACHE_DIR, else the user's cache directory)");
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return prewarm(*options); }; });
}

}  // namespace flce::cli

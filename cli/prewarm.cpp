// flce prewarm: compiles kernels into the cache, or into a pack, for devices that need not be here.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <fstream>
#include <optional>

#include "cli/command.hpp"
#include "cli/interrupt.hpp"
#include "cli/prewarm_pack.hpp"
#include "cli/prewarm_requests.hpp"
#include "cli/private_folder.hpp"
#include "cli/progress.hpp"
#include "runtime/workers/worker_pool.hpp"
#include "runtime/workers/worker_room.hpp"

namespace flce::cli {
namespace {

struct PrewarmOptions {
    PrewarmFlags what;
    std::filesystem::path cache_dir;
    std::filesystem::path out;
    std::filesystem::path depfile;
    int jobs = 0;  // 0: as many as there is room for
    bool check = false;
    bool json = false;
};

struct CompiledItem {
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    std::vector<std::string> used;  // keys
    std::string error;
    bool environment = false;  // the failure is the environment's
};

struct Totals {
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    std::int64_t failed = 0;
    bool environment = false;
};

Json request_of(const PrewarmItem& item) {
    return {{"spec", item.spec.text()}, {"device", Json::parse(item.device.json())}, {"plan", item.plan}};
}

CompiledItem outcome_of(const Reply& reply) {
    if (reply.kind != Reply::Kind::answer) {
        const char* const hint = reply.signal == SIGKILL ? ": out of memory? --jobs makes fewer at a time" : "";
        return {.error = fmt::format("its worker {}{}", reply.why, hint), .environment = true};
    }
    const Json& json = reply.answer;
    if (!json.is_object()) return {.error = "its worker's answer cannot be read", .environment = true};
    if (json.contains("error")) {
        const bool environment = static_cast<ErrorKind>(json.value("kind", 0)) == ErrorKind::environment;
        return {.error = json["error"].get<std::string>(), .environment = environment};
    }
    return {json.value("compiled", std::int64_t{0}), json.value("hits", std::int64_t{0}), json.value("used", std::vector<std::string>()),
            "", false};
}

/// Compiles every item in workers, and says how far it is.
class Compilation {
public:
    Compilation(const PrewarmOptions& options, const std::vector<PrewarmItem>& items)
        : options_(options), items_(items), outcomes_(items.size()), progress_("prewarm", static_cast<std::int64_t>(items.size())) {
        if (!options.out.empty()) entries_.emplace("prewarm");
    }

    void run() {
        std::vector<Json> requests;
        for (const PrewarmItem& item : items_) requests.push_back(request_of(item));
        std::vector<std::string> arguments{"prewarm-worker"};
        if (!options_.cache_dir.empty()) arguments.insert(arguments.end(), {"--cache-dir", options_.cache_dir.string()});
        if (entries_) arguments.insert(arguments.end(), {"--entries", entries_->path().string()});
        WorkerPool pool({.command = {kThisProgram, std::move(arguments)}, .workers = workers()});
        show();
        const bool complete = pool.run(requests, {.done = [this](std::size_t i, const Reply& reply) { done(i, outcome_of(reply)); },
                                                  .tick = [this] { show(); },
                                                  .stop = interrupted});
        if (!complete) throw Interrupted();
        progress_.finish();
        for (std::size_t i = 0; i < items_.size(); ++i) report_failure(i);
    }

    /// Where the pack is, if one was asked for and everything is in it.
    [[nodiscard]] std::optional<std::filesystem::path> write_pack() const {
        if (!entries_ || totals_.failed > 0) return std::nullopt;
        std::vector<std::vector<std::string>> used;
        for (const CompiledItem& outcome : outcomes_) used.push_back(outcome.used);
        (void)write_prewarm_pack(options_.out, entries_->path(), items_, used);
        return options_.out;
    }

    [[nodiscard]] const Totals& totals() const { return totals_; }
    [[nodiscard]] const CompiledItem& outcome(std::size_t item) const { return outcomes_[item]; }

private:
    [[nodiscard]] std::size_t workers() {
        const int cores = resolve_device("cpu").cpu.cores;
        const std::int64_t memory = available_memory_bytes();
        const std::size_t room = worker_count(cores, memory, items_.size());
        const std::size_t chosen = options_.jobs > 0 ? std::min(static_cast<std::size_t>(options_.jobs), items_.size()) : room;
        progress_.print(fmt::format("prewarm: {} kernel sets, {} at a time ({} cores, {} of memory available, about {} a worker)",
                                    items_.size(), chosen, cores, human_bytes(static_cast<double>(memory)),
                                    human_bytes(static_cast<double>(kWorkerBytes))));
        return chosen;
    }

    void done(std::size_t item, CompiledItem outcome) {
        totals_.compiled += outcome.compiled;
        totals_.hits += outcome.hits;
        if (!outcome.error.empty()) {
            ++totals_.failed;
            totals_.environment = totals_.environment || outcome.environment;
            progress_.print(fmt::format("prewarm: {} for {} failed", items_[item].spec.text(), items_[item].device_name));
        }
        outcomes_[item] = std::move(outcome);
        ++done_;
        show();
    }

    void show() { progress_.update(done_, fmt::format("{} compiled, {} hits, {} failed", totals_.compiled, totals_.hits, totals_.failed)); }

    /// What is long is said once.
    void report_failure(std::size_t item) const {
        const std::string& error = outcomes_[item].error;
        if (error.empty()) return;
        const auto same = [&](const CompiledItem& other) { return other.error == error; };
        const auto here = outcomes_.begin() + static_cast<std::ptrdiff_t>(item);
        const bool repeated = std::any_of(outcomes_.begin(), here, same);
        fmt::print(stderr, "flce: error: {} for {} with plan {}: {}\n", items_[item].spec.text(), items_[item].device_name,
                   items_[item].plan, repeated ? first_line(error) : error);
    }

    const PrewarmOptions& options_;
    const std::vector<PrewarmItem>& items_;
    std::vector<CompiledItem> outcomes_;
    std::optional<PrivateFolder> entries_;  // in which workers leave those that they used
    Progress progress_;
    Totals totals_;
    std::int64_t done_ = 0;
};

/// Kernel sets that were compiled and that a run would miss after all: the directory is refused, full, off, or smaller than they are.
std::size_t count_not_kept(Session& session, const std::vector<PrewarmItem>& items, const Compilation& compilation) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
        if (!compilation.outcome(i).error.empty()) continue;
        if (!session.missing(items[i].spec, items[i].device, {.plan = items[i].plan}).empty()) ++count;
    }
    return count;
}

/// For the build that a pack is a part of: the files that it is made from, as Make and Ninja read it.
void write_depfile(const PrewarmOptions& options) {
    const auto escaped = [](const std::filesystem::path& path) {
        std::string text;
        for (const char c : std::filesystem::absolute(path).lexically_normal().string()) {
            if (c == ' ' || c == '#' || c == '\\') text += '\\';
            if (c == '$') text += '$';
            text += c;
        }
        return text;
    };
    std::string text = escaped(options.out) + ":";
    for (const auto& file : prewarm_files(options.what)) text += fmt::format(" \\\n  {}", escaped(file));
    std::ofstream file(options.depfile);
    if (!(file << text << '\n').flush()) throw EnvironmentError(fmt::format("{} cannot be written", options.depfile.string()));
}

int compile(const PrewarmOptions& options, Session& session, const std::vector<PrewarmItem>& items) {
    Compilation compilation(options, items);
    compilation.run();
    const auto pack = compilation.write_pack();
    if (!options.depfile.empty()) write_depfile(options);
    const Totals& total = compilation.totals();
    const std::size_t not_kept = options.out.empty() ? count_not_kept(session, items, compilation) : 0;
    if (options.json) {
        Json list = Json::array();
        for (std::size_t i = 0; i < items.size(); ++i) {
            const CompiledItem& o = compilation.outcome(i);
            list.push_back({{"spec", items[i].spec.text()},
                            {"device", items[i].device_name},
                            {"plan", items[i].plan},
                            {"compiled", o.compiled},
                            {"hits", o.hits},
                            {"error", o.error.empty() ? Json(nullptr) : Json(o.error)}});
        }
        print_json({{"compiled", total.compiled},
                    {"hits", total.hits},
                    {"failed", total.failed},
                    {"not_kept", not_kept},
                    {"pack", pack ? Json(pack->string()) : Json(nullptr)},
                    {"cache_dir", session.cache_dir().string()},
                    {"items", list}});
    } else {
        for (std::size_t i = 0; i < items.size(); ++i) {
            const CompiledItem& o = compilation.outcome(i);
            fmt::print("{:<12} {:<60} {}\n", items[i].device_name, items[i].spec.text(),
                       o.error.empty() ? fmt::format("{} compiled, {} hits", o.compiled, o.hits) : "FAILED");
        }
        fmt::print("{} compiled, {} hits, {} failed; {}: {}\n", total.compiled, total.hits, total.failed, pack ? "pack" : "cache",
                   pack ? pack->string() : session.cache_dir().string());
    }
    if (total.failed > 0 && !options.out.empty()) fmt::print(stderr, "flce: {} is not written: kernels failed\n", options.out.string());
    if (not_kept > 0) {
        const std::string where = session.cache_dir().empty() ? "the local cache is off" : session.cache_dir().string();
        fmt::print(stderr,
                   "flce: error: {} of {} kernel sets have been compiled, but no cache keeps them ({}); a run would compile them again\n",
                   not_kept, items.size(), where);
    }
    if (total.failed == 0) return not_kept == 0 ? kDone : kEnvironment;
    return total.environment ? kEnvironment : kFailedCheck;
}

int check(const PrewarmOptions& options, Session& session, const std::vector<PrewarmItem>& items) {
    Json missing = Json::array();
    for (const PrewarmItem& item : items) {
        if (session.missing(item.spec, item.device, {.plan = item.plan}).empty()) continue;
        missing.push_back({{"spec", item.spec.text()}, {"device", item.device_name}, {"plan", item.plan}});
    }
    const std::size_t hits = items.size() - missing.size();
    if (options.json) {
        print_json({{"compiled", 0}, {"hits", hits}, {"failed", 0}, {"pack", nullptr}, {"missing", missing}});
    } else {
        for (const Json& item : missing) {
            fmt::print("missing: {} for {}, plan {}\n", item.at("spec").get<std::string>(), item.at("device").get<std::string>(),
                       item.at("plan").get<std::string>());
        }
        fmt::print("{} of {} kernel sets are there\n", hits, items.size());
    }
    return missing.empty() ? kDone : kFailedCheck;
}

int prewarm(PrewarmOptions options) {
    if (options.check && !options.out.empty()) throw UsageError("--check compiles nothing, so that --out has nothing to write");
    if (!options.out.empty()) options.out = output_file("--out", options.out);
    if (!options.out.empty() && !std::filesystem::is_directory(std::filesystem::absolute(options.out).parent_path())) {
        throw UsageError(fmt::format("--out: there is no folder for {}", options.out.string()));
    }
    if (!options.depfile.empty() && options.out.empty()) throw UsageError("--depfile says what --out is made from, which is not there");
    // What this session itself would run on does not matter. A check answers for a run in this environment, strict where that is.
    Session session({.device = "cpu", .cache_dir = options.cache_dir, .strict = options.check ? std::optional<bool>() : false});
    const auto items = prewarm_items(session, prewarm_requests(options.what));
    return options.check ? check(options, session, items) : compile(options, session, items);
}

constexpr const char* kFooter = R"(
Compiles every spec for every device, with every limit and every number of tokens: all that get_kernel of a session there asks for with these. CUDA
devices need NVRTC (flce info says whether it is found), not a GPU.

A manifest is a JSON object with lists; relative paths begin at its folder; what it leaves out is taken from the options above:
  {"specs": ["D=2048,V=151936,dtype=bf16,tied"], "hf_configs": ["qwen3/config.json"], "devices": ["sm_90a", "sm_80"],
   "num_tokens": [4096, 8192], "workspace_limits": ["2G", 0]}

Examples:
  flce prewarm --spec D=2048,V=151936,dtype=bf16,tied --device sm_80 --device sm_90a
  flce prewarm --hf-config Qwen3-1.7B/config.json --device h100 --num-tokens 8192 --workspace-limit 2G --workspace-limit 0
  flce prewarm --hf-config Qwen3-1.7B/config.json --autocast bf16 --device h100
  flce prewarm --manifest kernels.json --out kernels.flcepack
  FLCE_NO_DISK_CACHE=1 FLCE_CACHE_PACKS=kernels.flcepack flce prewarm --manifest kernels.json --check

Exit codes: 0 done; 1 kernels failed, or with --check are missing; 2 usage or bad input; 3 no compiler, a worker died,
or no cache keeps what was compiled; 130 interrupted.)";

}  // namespace

void add_prewarm(CLI::App& app, Action& action) {
    auto options = std::make_shared<PrewarmOptions>();
    PrewarmFlags& what = options->what;
    CLI::App* command = app.add_subcommand("prewarm", "Compile kernels into the cache or a pack, for devices that need not be here");
    command->footer(kFooter);
    command->add_option("--spec", what.specs, std::string(kSpecHelp) + "; may be repeated")->take_all();
    command
        ->add_option(
            "--hf-config", what.hf_configs,
            "a model's config.json (hidden_size, vocab_size, dtype, …); of tied weights the kernels that add to a gradient and those that "
            "write one; may be repeated")
        ->take_all();
    command
        ->add_option(
            "--autocast", what.autocast,
            "bf16 or fp16: runs of --hf-config's models with parameters in fp32 under autocast, as Trainer(bf16=True) has them, instead "
            "of config.json's dtype; may be repeated")
        ->take_all();
    command->add_option("--manifest", what.manifests, "a JSON file that lists specs, configs, devices, limits (below); may be repeated")
        ->take_all();
    command->add_option("--device", what.devices, "sm_80, sm_90a, sm_100a, sm_120, h100, x86-64-v4, cpu, …; may be repeated")->take_all();
    command->add_option("--num-tokens", what.num_tokens, "tokens of a call; may be repeated (default: any number)")->take_all();
    command
        ->add_option("--workspace-limit", what.workspace_limits,
                     "most bytes beyond inputs and gradients that a call may take, e.g. 2G; 0: none; may be repeated (default: 0)")
        ->take_all();
    command
        ->add_option("--workspace", what.scratch,
                     "most scratch bytes beyond the accumulator of grad_hidden, e.g. 64M; may be repeated (default: a session's)")
        ->take_all();
    command->add_option("--plan", what.plan, "this plan instead of the planner's choice");
    command->add_option("--cache-dir", options->cache_dir, "kernel cache (default: FLCE_CACHE_DIR, else the user's cache directory)");
    command->add_option("--out", options->out, "also write what these kernels use, and nothing else, as one pack");
    command->add_option("--depfile", options->depfile, "also write the files that --out is made from, as Make and Ninja read them");
    command->add_flag("--check", options->check, "compile nothing; exit code 1 if a run would miss one of these, which is named");
    command->add_option("--jobs", options->jobs, "worker processes (default: as many as cores and memory have room for)")
        ->check(CLI::Range(1, 1024));
    command->add_flag("--json", options->json, "one JSON object on stdout");
    command->callback([options, &action] { action = [options] { return prewarm(*options); }; });
}

}  // namespace flce::cli

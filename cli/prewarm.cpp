// flce prewarm: compiles kernels into the cache, or into a pack, for devices that need not be here.
#include "flce/prewarm.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <optional>

#include "cli/command.hpp"
#include "cli/interrupt.hpp"
#include "cli/progress.hpp"
#include "prewarm/requests.hpp"
#include "prewarm/worker.hpp"
#include "runtime/workers/worker_room.hpp"

namespace flce::cli {
namespace {

struct PrewarmFlags {
    std::vector<std::string> specs;
    std::vector<std::filesystem::path> hf_configs;
    std::vector<std::string> autocast;
    std::vector<std::filesystem::path> manifests;
    std::vector<std::string> devices;
    std::vector<std::int64_t> num_tokens;
    std::vector<std::string> workspace_limits;
    std::vector<std::string> scratch;
    std::string plan;
    std::filesystem::path cache_dir;
    std::filesystem::path out;
    std::filesystem::path depfile;
    int jobs = 0;  // 0: as many as there is room for
    bool check = false;
    bool json = false;
};

PrewarmWants wants_of(const PrewarmFlags& flags) {
    PrewarmWants wants{.hf_configs = flags.hf_configs,
                       .autocast = flags.autocast,
                       .manifests = flags.manifests,
                       .devices = flags.devices,
                       .num_tokens = flags.num_tokens,
                       .plan = flags.plan};
    for (const std::string& text : flags.specs) wants.specs.push_back(read_spec(text));
    for (const std::int64_t tokens : flags.num_tokens) {
        if (tokens < 0) throw UsageError(fmt::format("--num-tokens is {}; allowed are 0 and more", tokens));
    }
    for (const std::string& limit : flags.workspace_limits) wants.workspace_limits.push_back(parse_bytes("--workspace-limit", limit));
    for (const std::string& bytes : flags.scratch) wants.scratch_bytes.push_back(parse_bytes("--workspace", bytes));
    const bool has_layers = !flags.specs.empty() || !flags.hf_configs.empty();
    if (has_layers && flags.devices.empty()) throw UsageError("prewarm needs at least one --device");
    if (!has_layers && flags.manifests.empty()) throw UsageError("prewarm needs at least one --spec, --hf-config or --manifest");
    return wants;
}

/// The bar on stderr.
class PrewarmBar {
public:
    [[nodiscard]] PrewarmListener listener() {
        return {.begin = [this](const PrewarmRoom& room) { begin(room); },
                .progress = [this](const PrewarmProgress& at) { update(at); },
                .failed =
                    [this](const PrewarmItem& item) {
                        if (bar_) bar_->print(fmt::format("prewarm: {} for {} failed", item.spec.text(), item.device_name));
                    },
                .stop = interrupted};
    }
    void finish() {
        if (bar_) bar_->finish();
    }

private:
    void begin(const PrewarmRoom& room) {
        bar_.emplace("prewarm", static_cast<std::int64_t>(room.sets));
        bar_->print(fmt::format("prewarm: {} kernel sets, {} at a time ({} cores, {} of memory available, about {} a worker)", room.sets,
                                room.workers, room.cores, human_bytes(static_cast<double>(room.memory_bytes)),
                                human_bytes(static_cast<double>(kWorkerBytes))));
    }
    void update(const PrewarmProgress& at) {
        if (!bar_) return;
        bar_->update(static_cast<std::int64_t>(at.done), fmt::format("{} compiled, {} hits, {} failed", at.compiled, at.hits, at.failed));
    }

    std::optional<Progress> bar_;
};

/// Reports errors on stderr; long texts are printed once.
void report_failures(const PrewarmReport& report) {
    for (auto done = report.items.begin(); done != report.items.end(); ++done) {
        if (done->error.empty()) continue;
        const auto same = [&](const PrewarmedItem& other) { return other.error == done->error; };
        const bool repeated = std::any_of(report.items.begin(), done, same);
        fmt::print(stderr, "flce: error: {} for {} with plan {}: {}\n", done->item.spec.text(), done->item.device_name, done->item.plan,
                   repeated ? first_line(done->error) : done->error);
    }
}

/// Writes the files that the pack is made from, as Make and Ninja read them, for the build that the pack is a part of.
void write_depfile(const PrewarmFlags& flags) {
    std::vector<std::filesystem::path> files = flags.hf_configs;
    for (const std::string& spec : flags.specs) {
        if (spec.starts_with('@')) files.emplace_back(spec.substr(1));
    }
    for (const auto& manifest : flags.manifests) std::ranges::copy(manifest_files(manifest), std::back_inserter(files));
    const auto escaped = [](const std::filesystem::path& path) {
        std::string text;
        for (const char c : std::filesystem::absolute(path).lexically_normal().string()) {
            if (c == ' ' || c == '#' || c == '\\') text += '\\';
            if (c == '$') text += '$';
            text += c;
        }
        return text;
    };
    std::string text = escaped(flags.out) + ":";
    for (const auto& file : files) text += fmt::format(" \\\n  {}", escaped(file));
    std::ofstream file(flags.depfile);
    if (!(file << text << '\n').flush()) throw EnvironmentError(fmt::format("{} cannot be written", flags.depfile.string()));
}

void print_report(const PrewarmReport& report) {
    for (const PrewarmedItem& done : report.items) {
        fmt::print("{:<12} {:<60} {}\n", done.item.device_name, done.item.spec.text(),
                   done.error.empty() ? fmt::format("{} compiled, {} hits", done.compiled, done.hits) : "FAILED");
    }
    fmt::print("{} compiled, {} hits, {} failed; {}: {}\n", report.compiled, report.hits, report.failed, report.pack ? "pack" : "cache",
               report.pack ? report.pack->string() : report.cache_dir.string());
}

int compile(const PrewarmFlags& flags) {
    PrewarmBar bar;
    const PrewarmReport report = flce::prewarm(
        {.wants = wants_of(flags), .cache_dir = flags.cache_dir, .pack = flags.out, .jobs = flags.jobs, .command = kThisProgram},
        bar.listener());
    if (report.stopped) throw Interrupted();
    bar.finish();
    report_failures(report);
    if (!flags.depfile.empty()) write_depfile(flags);
    if (flags.json) {
        print_json(Json::parse(report.json()));
    } else {
        print_report(report);
    }
    if (report.failed > 0 && !flags.out.empty()) fmt::print(stderr, "flce: {} is not written: kernels failed\n", flags.out.string());
    if (report.not_kept > 0) {
        const std::string where = report.cache_dir.empty() ? "the local cache is off" : report.cache_dir.string();
        fmt::print(stderr,
                   "flce: error: {} of {} kernel sets have been compiled, but no cache keeps them ({}); a run would compile them again\n",
                   report.not_kept, report.items.size(), where);
    }
    if (report.failed == 0) return report.not_kept == 0 ? kDone : kEnvironment;
    const bool environment = std::ranges::any_of(report.items, &PrewarmedItem::environment);
    return environment ? kEnvironment : kFailedCheck;
}

int check(const PrewarmFlags& flags) {
    const MissingReport report = flce::missing(wants_of(flags), flags.cache_dir);
    const std::size_t hits = report.sets - report.missing.size();
    if (flags.json) {
        print_json(Json::parse(report.json()));
    } else {
        for (const PrewarmItem& item : report.missing) {
            fmt::print("missing: {} for {}, plan {}\n", item.spec.text(), item.device_name, item.plan);
        }
        fmt::print("{} of {} kernel sets are there\n", hits, report.sets);
    }
    return report.missing.empty() ? kDone : kFailedCheck;
}

int prewarm(PrewarmFlags flags) {
    if (flags.check && !flags.out.empty()) throw UsageError("--check compiles nothing, so that --out has nothing to write");
    if (!flags.out.empty()) flags.out = output_file("--out", flags.out);
    if (!flags.out.empty() && !std::filesystem::is_directory(std::filesystem::absolute(flags.out).parent_path())) {
        throw UsageError(fmt::format("--out: there is no folder for {}", flags.out.string()));
    }
    if (!flags.depfile.empty() && flags.out.empty()) throw UsageError("--depfile says what --out is made from, which is not there");
    return flags.check ? check(flags) : compile(flags);
}

constexpr const char* kFooter = R"(
Compiles every spec for every device, with every limit and every number of tokens: all that get_kernel of a session there
asks for. CUDA devices need NVRTC (flce info says whether it is found), not a GPU.

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
    auto flags = std::make_shared<PrewarmFlags>();
    CLI::App* command = app.add_subcommand("prewarm", "Compile kernels into the cache or a pack, for devices that need not be here");
    command->footer(kFooter);
    command->add_option("--spec", flags->specs, std::string(kSpecHelp) + "; may be repeated")->take_all();
    command
        ->add_option(
            "--hf-config", flags->hf_configs,
            "a model's config.json (hidden_size, vocab_size, dtype, …); of tied weights the kernels that add to a gradient and those that "
            "write one; may be repeated")
        ->take_all();
    command
        ->add_option(
            "--autocast", flags->autocast,
            "bf16 or fp16: runs of --hf-config's models with parameters in fp32 under autocast, as Trainer(bf16=True) has them, instead "
            "of config.json's dtype; may be repeated")
        ->take_all();
    command->add_option("--manifest", flags->manifests, "a JSON file that lists specs, configs, devices, limits (below); may be repeated")
        ->take_all();
    command->add_option("--device", flags->devices, "sm_80, sm_90a, sm_100a, sm_120, h100, x86-64-v4, cpu, …; may be repeated")->take_all();
    command->add_option("--num-tokens", flags->num_tokens, "tokens of a call; may be repeated (default: any number)")->take_all();
    command
        ->add_option("--workspace-limit", flags->workspace_limits,
                     "most bytes beyond inputs and gradients that a call may take, e.g. 2G; 0: none; may be repeated (default: 0)")
        ->take_all();
    command
        ->add_option("--workspace", flags->scratch,
                     "most scratch bytes beyond the accumulator of grad_hidden, e.g. 64M; may be repeated (default: a session's)")
        ->take_all();
    command->add_option("--plan", flags->plan, "this plan instead of the planner's choice");
    command->add_option("--cache-dir", flags->cache_dir, "kernel cache (default: FLCE_CACHE_DIR, else the user's cache directory)");
    command->add_option("--out", flags->out, "also write what these kernels use, and nothing else, as one pack");
    command->add_option("--depfile", flags->depfile, "also write the files that --out is made from, as Make and Ninja read them");
    command->add_flag("--check", flags->check, "compile nothing; exit code 1 if a run would miss one of these, which is named");
    command->add_option("--jobs", flags->jobs, "worker processes (default: as many as cores and memory have room for)")
        ->check(CLI::Range(1, 1024));
    command->add_flag("--json", flags->json, "one JSON object on stdout");
    command->callback([flags, &action] { action = [flags] { return prewarm(*flags); }; });
}

void add_prewarm_worker(CLI::App& app, Action& action) {
    struct WorkerFlags {
        std::filesystem::path cache_dir;
        std::filesystem::path entries;
    };
    auto flags = std::make_shared<WorkerFlags>();
    CLI::App* command = app.add_subcommand(kPrewarmWorker, "a worker of flce prewarm");
    command->group("");  // hidden, since people do not call it
    command->add_option("--cache-dir", flags->cache_dir);
    command->add_option("--entries", flags->entries);
    command->callback(
        [flags, &action] { action = [flags] { return serve_prewarm(flags->cache_dir, flags->entries) ? kDone : kEnvironment; }; });
}

}  // namespace flce::cli

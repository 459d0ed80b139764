// flce tune: measures plans on this device and keeps the best; shows, compares and merges what has been measured.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <optional>

#include "autotune/compile_candidates.hpp"
#include "autotune/tune_json.hpp"
#include "autotune/tune_worker.hpp"
#include "cli/finite_number.hpp"
#include "cli/interrupt.hpp"
#include "cli/output.hpp"
#include "cli/progress.hpp"
#include "cli/tune_flags.hpp"
#include "cli/tune_records.hpp"

namespace flce::cli {
namespace {

/// The line of seconds, candidates and the best time on stderr, one for each search.
class TuneBar {
public:
    void update(const TuneProgress& at) {
        if (at.candidates == 0 && at.elapsed_s == 0) begin(at);
        if (bar_) bar_->update(std::llround(std::min(at.elapsed_s, at.budget_s)), tuning_note(at.candidates, at.best_ms));
    }
    void finish() {
        if (bar_) bar_->finish();
        bar_.reset();
    }

private:
    void begin(const TuneProgress& at) {
        finish();
        bar_.emplace("tune", std::llround(std::ceil(at.budget_s)), Progress::Options{.unit = "s", .bar_columns = 16});
        bar_->print(fmt::format("tune: {}, {} tokens, at most {:.4g} s", at.spec, at.num_tokens, at.budget_s));
    }

    std::optional<Progress> bar_;
};

void report(const Tuned& tuned) {
    constexpr std::size_t kShown = 12;
    fmt::print("{}", record_table(named(tuned), kShown));
    const Record& record = tuned.record;
    fmt::print("\n  {} candidates, {} measured now, {} compiled, {}{}\n", record.candidates.size(), tuned.result.measured, tuned.compiled,
               human_seconds(tuned.seconds), tuned.result.complete ? "" : "; stopped before the search's end");
    const auto first = record.candidates.find(tuned.result.default_plan);
    if (!tuned.result.best_plan.empty() && first != record.candidates.end()) {
        fmt::print("  the cost model's first choice takes {:.3f} times the best\n",
                   first->second.median_ms() / record.candidates.at(tuned.result.best_plan).median_ms());
    }
    flush_output();
}

int run_tuner(const TuneFlags& flags) {
    TuneBar progress;
    Tuner tuner(flags.options(), flags.workers(),
                {.progress = [&](const TuneProgress& at) { progress.update(at); },
                 .warning =
                     [&](const std::string& text) {
                         progress.finish();
                         fmt::print(stderr, "flce: warning: {}\n", text);
                     },
                 .tuned =
                     [&](const Tuned& tuned) {
                         progress.finish();
                         if (!flags.json) report(tuned);
                     },
                 .stop = interrupted});
    tuner.run();
    progress.finish();
    if (flags.json) print_json(tune_report_json(tuner));
    std::vector<NamedRecord> records;
    for (const Tuned& tuned : tuner.tuned()) records.push_back(named(tuned));
    write_report(flags, records, &tuner.device());
    for (const UntunedLayer& item : tuner.untuned()) {
        fmt::print(stderr, "flce: error: {} at {} tokens is not tuned: {}\n", item.spec.text(), item.num_tokens, item.why);
    }
    if (interrupted()) throw Interrupted();
    if (!tuner.untuned().empty()) return exit_code(tuner.untuned().front().kind);
    const auto failed = [](const Tuned& tuned) { return tuned.result.best_plan.empty(); };
    return std::ranges::any_of(tuner.tuned(), failed) ? kFailedCheck : kDone;
}

int compile_only(const TuneFlags& flags) {
    std::optional<Progress> bar;
    const auto progress = [&](std::size_t done, std::size_t all) {
        if (!bar) bar.emplace("compile", static_cast<std::int64_t>(all));
        if (done > 0) bar->update(static_cast<std::int64_t>(done));
    };
    const CompiledCandidates result = compile_candidates(flags.options(), flags.workers().command, progress, interrupted);
    if (bar) bar->finish();
    if (!result.complete) throw Interrupted();
    if (flags.json) {
        print_json({{"candidates", result.candidates}, {"compiled", result.compiled}, {"failed", result.failed}});
    } else {
        fmt::print("{} candidates compiled or found, {} failed; {} compiled\n", result.candidates - result.failed, result.failed,
                   result.compiled);
    }
    return result.failed == 0 ? kDone : kFailedCheck;
}

int tune(TuneFlags flags) {
    if (!flags.report.empty()) {
        if (flags.report.extension() != ".json")
            throw UsageError("--report names a .json file; the page beside it has its name with .html");
        flags.report = output_file("--report", flags.report);
    }
    if (flags.compile_only) return compile_only(flags);
    if (!flags.diff.empty()) return diff_records(flags);
    if (!flags.merge.empty()) return merge_records(flags);
    if (flags.shows) return show_records(flags);
    return run_tuner(flags);
}

void add_layer_options(CLI::App& command, TuneFlags& flags) {
    command.add_option("--spec", flags.specs, std::string(kSpecHelp) + "; may be repeated")->take_all();
    command
        .add_option("--hf-config", flags.hf_configs,
                    "a model's config.json; tied weights are two layers, gradient added and written; may be repeated")
        ->take_all();
    command.add_flag("--all-layers", flags.all_layers, "the bf16 layers of the eight models whose records ship with flce");
    command
        .add_option("--num-tokens,-N", flags.num_tokens,
                    "rows of hidden, rounded to the nearest of 64, 256, 1024, 2048, … 65536; may be repeated (default: 4096)")
        ->take_all()
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
    flags.session.add_to(command);
    command.add_option("--workspace-limit", flags.limit, "tune for a limit on workspace and what forward retains together, e.g. 2G");
    command
        .add_option("--retain", flags.retain, "auto: forward leaves to backward what grad_weight's memory or the limit has room for; none")
        ->capture_default_str()
        ->check(CLI::IsMember({"auto", "none"}));
}

void add_search_options(CLI::App& command, TuneFlags& flags) {
    command.add_option("--plan", flags.plans, "a further candidate; may be repeated")->take_all();
    command.add_option("--candidates-file", flags.candidates_file, "further candidates, a plan a line; # begins a comment");
    command.add_option("--budget-s", flags.budget_s, "seconds for each spec and number of tokens")
        ->capture_default_str()
        ->check(finite_number())
        ->check(CLI::Range(0.1, 86400.0));
    command
        .add_option("--candidate-timeout-s", flags.candidate_timeout_s,
                    "a candidate that gives no answer for so long, or for a quarter of the budget, hangs")
        ->capture_default_str()
        ->check(finite_number())
        ->check(CLI::Range(0.1, 86400.0));
    command
        .add_option(
            "--coordinates", flags.coordinates,
            "what to vary: grad_weight, grad_hidden, forward, dlogits, lent, chunk, raster, algorithms; blocks, block_m, … (default: all)")
        ->delimiter(',');
    command.add_option("--exhaustive", flags.exhaustive, "instead of descending, measure that many combinations")
        ->check(CLI::Range(std::int64_t{1}, static_cast<std::int64_t>(kMaxRecordCandidates)));
    command.add_flag("--compile-only", flags.compile_only,
                     "compile what a search can ask for into the cache and stop; --device may be one that is not here");
    command.add_option("--worker", flags.worker, "")->take_all()->group("");
    command.add_flag("--always-graphs", flags.always_graphs, "")->group("");
    command.add_flag("--always-rates", flags.always_rates, "")->group("");
}

/// Returns --show, which is there without values too.
const CLI::Option* add_record_options(CLI::App& command, TuneFlags& flags) {
    command.add_option("--records-dir", flags.records_dir,
                       "where records are kept (default: FLCE_RECORDS_DIR, else \"records\" in the cache directory)");
    command.add_option("--commit", flags.commit, "kept with the measurements, to tell later what was measured");
    command.add_flag("--fresh", flags.fresh, "measure everything again and replace the record");
    CLI::Option* show = command.add_option("--show", flags.show, "print records: files, or directories of them (default: the user's)");
    show->expected(0, -1);
    command.add_option("--diff", flags.diff, "compare two records")->expected(2);
    CLI::Option* merge = command.add_option("--merge", flags.merge, "merge records: files, or directories of them")->expected(1, -1);
    command.add_option("--out", flags.out, "where --merge writes: a .json file or a directory (a measured record goes to --records-dir)")
        ->needs(merge);
    command.add_option(
        "--report", flags.report,
        "write what was tuned, or --show's records, to this .json file, which --show and --merge read, and as a page beside it");
    command.add_flag("--json", flags.json, "one JSON object on stdout");
    return show;
}

}  // namespace

void add_tune(CLI::App& app, Action& action) {
    auto flags = std::make_shared<TuneFlags>();
    CLI::App* command = app.add_subcommand("tune", "Measure plans on this device and keep the best; show, compare and merge records");
    command->footer(
        "\nEvery candidate is checked before it is timed, in a process of its own: one that hangs or crashes is recorded as such. What has "
        "been "
        "measured is kept,\nso a second run measures only what is new. Sessions take the best plan of the record whose number of tokens is "
        "nearest.\n\n"
        "Examples:\n  flce tune --spec D=4096,V=128256,dtype=bf16 --num-tokens 4096 --num-tokens 8192\n"
        "  flce tune --hf-config Qwen3-1.7B/config.json --budget-s 30\n"
        "  flce tune --all-layers --report my-gpu.json\n"
        "  flce tune --show ~/.cache/flce/records\n  flce tune --diff before.json after.json\n  flce tune --merge node1/ node2/ --out "
        "team/");
    add_layer_options(*command, *flags);
    add_search_options(*command, *flags);
    const CLI::Option* show = add_record_options(*command, *flags);
    command->callback([flags, show, &action] {
        flags->shows = show->count() > 0;
        std::erase(flags->show, std::filesystem::path());  // an option without values leaves an empty path
        action = [flags] { return tune(*flags); };
    });
}

void add_tune_worker(CLI::App& app, Action& action) {
    CLI::App* command = app.add_subcommand(kTuneWorker, "")->group("");
    command->callback([&action] {
        action = [] {
            TuneWorker worker;
            return serve_requests([&](const Json& request) { return worker.serve(request); }) ? kDone : kEnvironment;
        };
    });
}

}  // namespace flce::cli

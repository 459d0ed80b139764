// flce tune: measures plans on this device and keeps the best; shows, compares and merges what has been measured.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <sstream>

#include "autotune/search.hpp"
#include "autotune/search_space.hpp"
#include "cli/finite_number.hpp"
#include "cli/interrupt.hpp"
#include "cli/output.hpp"
#include "cli/tune_measure.hpp"
#include "cli/tune_options.hpp"
#include "cli/tuning_run.hpp"
#include "records/record_store.hpp"
#include "runtime/environment.hpp"

namespace flce::cli {
namespace {

struct Tuned {
    NamedRecord named;
    SearchResult result;
    double seconds = 0;
    std::size_t processes = 0;  ///< that candidates ran in
    std::int64_t compiled = 0;  ///< kernels and launchers that no cache had
};

/// A spec and number of tokens that could not be tuned.
struct Untuned {
    Spec spec;
    std::int64_t num_tokens = 0;
    std::string why;
    int exit_code = kDone;
};

std::vector<Plan> extra_plans(const TuneOptions& options) {
    std::vector<Plan> plans;
    for (const std::string& text : options.plans) plans.push_back(parse_plan(text));
    if (options.candidates_file.empty()) return plans;
    std::istringstream lines(read_text_file(options.candidates_file));
    for (std::string line; std::getline(lines, line);) {
        line.erase(line.find_last_not_of(" \t\r") + 1);
        if (!line.empty() && !line.starts_with('#')) plans.push_back(parse_plan(line));
    }
    return plans;
}

class Tuner {
public:
    explicit Tuner(const TuneOptions& options)
        : options_(options),
          session_options_(options.session.options()),
          session_(measuring_options()),
          store_({.directory = options.records_dir.empty() ? session_.records_dir() : options.records_dir, .shipped = false}),
          extra_(extra_plans(options)) {
        if (store_.places().directory.empty())
            throw UsageError("there is no directory for records: give --records-dir or set FLCE_RECORDS_DIR");
        limit_bytes_ = limit_bytes_of(options);
        check_coordinates(options, session_.device().kind);
        if (options.commit.size() > kMaxGivenTextBytes)
            throw UsageError(fmt::format("--commit has {} bytes; at most {} are kept", options.commit.size(), kMaxGivenTextBytes));
    }

    int run() {
        const auto specs = specs_of(options_);
        const auto tokens = tokens_of(options_);
        bool failed = false;
        for (const Spec& spec : specs) {
            for (const std::int64_t n : tokens) {
                if (interrupted()) break;
                if (!tune_or_note(spec, n)) continue;
                failed = failed || tuned_.back().result.best_plan.empty();
                if (!options_.json) report(tuned_.back());
            }
        }
        if (options_.json) report_json();
        write_html();
        for (const Untuned& item : untuned_) {
            fmt::print(stderr, "flce: error: {} at {} tokens is not tuned: {}\n", item.spec.text(), item.num_tokens, item.why);
        }
        if (interrupted()) throw Interrupted();
        if (!untuned_.empty()) return untuned_.front().exit_code;
        return failed ? kFailedCheck : kDone;
    }

private:
    /// What is wrong with one layer is no reason not to tune the others.
    bool tune_or_note(const Spec& spec, std::int64_t num_tokens) {
        try {
            tuned_.push_back(tune(spec, num_tokens));
            return true;
        } catch (const Error& error) {
            untuned_.push_back({spec, num_tokens, first_line(error.what()), exit_code(error.kind())});
        } catch (const std::bad_alloc&) {
            untuned_.push_back({spec, num_tokens, "out of memory", kEnvironment});
        }
        return false;
    }

    /// Of the session that says what there is; plans in use do not matter to it.
    [[nodiscard]] SessionOptions measuring_options() const {
        SessionOptions options = session_options_;
        options.use_records = true;  // for the directory's name
        return options;
    }

    /// As a session counts them: those asked for, or FLCE_NUM_THREADS.
    [[nodiscard]] int threads() const { return session_options_.threads > 0 ? session_options_.threads : environment().num_threads; }

    /// A test's, of a CPU too: whoever refuses graphs has been asked for one.
    [[nodiscard]] bool refuses_graphs() const {
        return std::ranges::any_of(options_.inject, [](const std::string& fault) { return fault.starts_with("refuse-graph@"); });
    }

    /// What is known of it, and this run's place in it.
    Record begin_record(const RecordKey& key, const TuningRun& run, const std::string& id) {
        Record record{.key = key};
        if (!options_.fresh) record = store_.find(key).value_or(record);
        if (!record.runs.empty()) {
            const std::string change = provenance_change(record.runs.rbegin()->second, run);
            if (!change.empty())
                fmt::print(stderr, "flce: warning: earlier times may not compare ({}); --fresh measures all again\n", change);
        }
        record.runs[id] = run;
        return record;
    }

    Tuned tune(const Spec& spec, std::int64_t num_tokens) {
        const Device& device = session_.device();
        SearchOptions search_options{.request = plan_request(options_, session_, spec, device, num_tokens),
                                     .extra = extra_,
                                     .only = options_.coordinates,
                                     .exhaustive = static_cast<std::size_t>(options_.exhaustive)};
        for (const Plan& plan : extra_) {
            if (const auto reason = illegal_reason(spec, device, plan))
                throw PlanError(fmt::format("plan \"{}\": {}", plan.text(), *reason));
        }
        const PlanRequest call{
            .scratch_bytes = search_options.request.scratch_bytes, .limit_bytes = limit_bytes_, .num_tokens = num_tokens};
        RecordKey key = record_key(spec, device, call, options_.retain, threads());
        const TuningRun run = provenance(device, options_.commit);
        search_options.run = run_id(run);
        TuneTarget target{.spec = spec,
                          .device = device,
                          .session = session_options_,
                          .num_tokens = key.request.num_tokens,
                          .limit_bytes = limit_bytes_,
                          .retain = options_.retain == "auto",
                          .graphs = device.kind == DeviceKind::cuda || refuses_graphs(),
                          .budget_s = options_.budget_s,
                          .candidate_timeout_s = options_.candidate_timeout_s,
                          .warm_up_s = device.kind == DeviceKind::cuda ? 1.0 : 0.0,
                          .inject = options_.inject};
        target.session.scratch_bytes = call.scratch_bytes;
        MeasuredSearch searched = measured_search(target, search_options, [&](std::string_view policy) {
            key.policy = policy;
            return begin_record(key, run, search_options.run);
        });
        Tuned tuned{.result = std::move(searched.result),
                    .seconds = searched.seconds,
                    .processes = searched.processes,
                    .compiled = searched.compiled};
        keep(spec, searched.record, search_options.run, tuned);
        return tuned;
    }

    void keep(const Spec& spec, Record& record, const std::string& run, Tuned& tuned) {
        // A run that measured nothing leaves no trace.
        const auto measured = [&](const auto& entry) { return entry.second.times_ms.contains(run); };
        if (std::ranges::none_of(record.candidates, measured)) record.runs.erase(run);
        std::filesystem::path file = store_.places().directory / record.key.file();
        if (options_.fresh && !record.candidates.empty()) {
            file = store_.replace(record);
        } else if (!record.candidates.empty()) {
            file = store_.save(record);
        }
        tuned.named = {file.string(), std::move(record), spec.text()};
    }

    void report(const Tuned& tuned) const {
        constexpr std::size_t kShown = 12;
        fmt::print("{}", record_table(tuned.named, kShown));
        const Record& record = tuned.named.record;
        fmt::print("\n  {} candidates, {} measured now, {} compiled, {}{}\n", record.candidates.size(), tuned.result.measured,
                   tuned.compiled, human_seconds(tuned.seconds), tuned.result.complete ? "" : "; stopped before the search's end");
        const auto first = record.candidates.find(tuned.result.default_plan);
        if (!tuned.result.best_plan.empty() && first != record.candidates.end()) {
            fmt::print("  the cost model's first choice takes {:.3f} times the best\n",
                       first->second.median_ms() / record.candidates.at(tuned.result.best_plan).median_ms());
        }
        flush_output();
    }

    void report_json() const {
        Json items = Json::array();
        std::size_t candidates = 0;
        std::size_t measured = 0;
        for (const Tuned& tuned : tuned_) {
            Json item = record_summary(tuned.named);
            const auto& all = tuned.named.record.candidates;
            item["measured"] = tuned.result.measured;
            item["complete"] = tuned.result.complete;
            item["combinations"] = tuned.result.combinations;
            item["seconds"] = tuned.seconds;
            item["processes"] = tuned.processes;
            item["compiled"] = tuned.compiled;
            item["default_plan"] = tuned.result.default_plan;
            const auto first = all.find(tuned.result.default_plan);
            const bool timed = first != all.end() && first->second.sample_count() > 0;
            item["default_ms"] = timed ? Json(first->second.median_ms()) : Json(nullptr);
            std::map<std::string, int> outcomes;
            for (const auto& [plan, candidate] : all) ++outcomes[std::string(to_string(candidate.outcome))];
            item["outcomes"] = outcomes;
            candidates += all.size();
            measured += tuned.result.measured;
            items.push_back(std::move(item));
        }
        Json json = Json::object();
        if (items.size() == 1) {
            json = items.front();
        } else {
            json = {{"candidates", candidates}, {"measured", measured}, {"best_plan", nullptr}, {"best_ms", nullptr}, {"record", nullptr}};
        }
        json["items"] = std::move(items);
        if (!untuned_.empty()) {
            Json& list = json["errors"] = Json::array();
            for (const Untuned& item : untuned_) {
                list.push_back({{"spec", item.spec.text()}, {"num_tokens", item.num_tokens}, {"error", item.why}});
            }
        }
        print_json(json);
    }

    void write_html() const {
        std::vector<NamedRecord> records;
        for (const Tuned& tuned : tuned_) records.push_back(tuned.named);
        cli::write_html(options_, records);
    }

    const TuneOptions& options_;
    SessionOptions session_options_;
    Session session_;
    RecordStore store_;
    std::vector<Plan> extra_;
    std::int64_t limit_bytes_ = 0;
    std::vector<Tuned> tuned_;
    std::vector<Untuned> untuned_;
};

int tune(const TuneOptions& options) {
    if (options.compile_only) return compile_candidates(options);
    if (!options.diff.empty()) return diff_records(options);
    if (!options.merge.empty()) return merge_records(options);
    if (options.shows) return show_records(options);
    return Tuner(options).run();
}

void add_layer_options(CLI::App& command, TuneOptions& options) {
    command.add_option("--spec", options.specs, std::string(kSpecHelp) + "; may be repeated")->take_all();
    command
        .add_option("--hf-config", options.hf_configs,
                    "a model's config.json; tied weights are two layers, gradient added and written; may be repeated")
        ->take_all();
    command
        .add_option("--num-tokens,-N", options.num_tokens,
                    "rows of hidden, rounded to the nearest of 64, 256, 1024, 2048, … 65536; may be repeated (default: 4096)")
        ->take_all()
        ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
    options.session.add_to(command);
    command.add_option("--workspace-limit", options.limit, "tune for a limit on workspace and what forward retains together, e.g. 2G");
    command
        .add_option("--retain", options.retain,
                    "auto: forward leaves to backward what grad_weight's memory or the limit has room for; none")
        ->capture_default_str()
        ->check(CLI::IsMember({"auto", "none"}));
}

void add_search_options(CLI::App& command, TuneOptions& options) {
    command.add_option("--plan", options.plans, "a further candidate; may be repeated")->take_all();
    command.add_option("--candidates-file", options.candidates_file, "further candidates, a plan a line; # begins a comment");
    command.add_option("--budget-s", options.budget_s, "seconds for each spec and number of tokens")
        ->capture_default_str()
        ->check(finite_number())
        ->check(CLI::Range(0.1, 86400.0));
    command
        .add_option("--candidate-timeout-s", options.candidate_timeout_s,
                    "a candidate that gives no answer for so long, or for a quarter of the budget, hangs")
        ->capture_default_str()
        ->check(finite_number())
        ->check(CLI::Range(0.1, 86400.0));
    command
        .add_option("--coordinates", options.coordinates,
                    "what to vary: grad_weight, grad_hidden, forward, dlogits, chunk, raster; blocks, block_m, … (default: all)")
        ->delimiter(',');
    command.add_option("--exhaustive", options.exhaustive, "instead of descending, measure that many combinations")
        ->check(CLI::Range(std::int64_t{1}, static_cast<std::int64_t>(kMaxRecordCandidates)));
    command.add_flag("--compile-only", options.compile_only,
                     "compile what a search can ask for into the cache and stop; --device may be one that is not here");
    command.add_option("--inject", options.inject, "")->take_all()->group("");
}

/// Returns --show, which is there without values too.
const CLI::Option* add_record_options(CLI::App& command, TuneOptions& options) {
    command.add_option("--records-dir", options.records_dir,
                       "where records are kept (default: FLCE_RECORDS_DIR, else \"records\" in the cache directory)");
    command.add_option("--commit", options.commit, "kept with the measurements, to tell later what was measured");
    command.add_flag("--fresh", options.fresh, "measure everything again and replace the record");
    CLI::Option* show = command.add_option("--show", options.show, "print records: files, or directories of them (default: the user's)");
    show->expected(0, -1);
    command.add_option("--diff", options.diff, "compare two records")->expected(2);
    CLI::Option* merge = command.add_option("--merge", options.merge, "merge records: files, or directories of them")->expected(1, -1);
    command.add_option("--out", options.out, "where --merge writes: a .json file or a directory (a measured record goes to --records-dir)")
        ->needs(merge);
    command.add_option("--html", options.html, "write a report of what was tuned, or of --show's records, to this file");
    command.add_flag("--json", options.json, "one JSON object on stdout");
    return show;
}

}  // namespace

void add_tune(CLI::App& app, Action& action) {
    auto options = std::make_shared<TuneOptions>();
    CLI::App* command = app.add_subcommand("tune", "Measure plans on this device and keep the best; show, compare and merge records");
    command->footer(
        "\nEvery candidate is checked before it is timed, in a process of its own: one that hangs or crashes is recorded as such. What has "
        "been "
        "measured is kept,\nso a second run measures only what is new. Sessions take the best plan of the record whose number of tokens is "
        "nearest.\n\n"
        "Examples:\n  flce tune --spec D=4096,V=128256,dtype=bf16 --num-tokens 4096 --num-tokens 8192\n"
        "  flce tune --hf-config Qwen3-1.7B/config.json --budget-s 30 --html report.html\n"
        "  flce tune --show ~/.cache/flce/records\n  flce tune --diff before.json after.json\n  flce tune --merge node1/ node2/ --out "
        "team/");
    add_layer_options(*command, *options);
    add_search_options(*command, *options);
    const CLI::Option* show = add_record_options(*command, *options);
    command->callback([options, show, &action] {
        options->shows = show->count() > 0;
        std::erase(options->show, std::filesystem::path());  // what an option without values leaves
        action = [options] { return tune(*options); };
    });
}

}  // namespace flce::cli

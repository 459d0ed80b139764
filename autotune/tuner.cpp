#include "autotune/tuner.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "autotune/provenance.hpp"
#include "autotune/search_space.hpp"
#include "generator/planner.hpp"
#include "runtime/environment.hpp"
#include "runtime/kernel_factory.hpp"
#include "runtime/session.hpp"
#include "runtime/text.hpp"
#include "runtime/workers/worker_process.hpp"

namespace flce {
namespace {

/// Options of the session that knows the device and the directory of records; it chooses no plan.
SessionOptions session_options(const TuneOptions& options) {
    SessionOptions session = options.session;
    session.use_records = true;  // for the directory's name
    return session;
}

/// Threads as a session counts them: those asked for, or FLCE_NUM_THREADS.
int threads_of(const TuneOptions& options) { return options.session.threads > 0 ? options.session.threads : environment().num_threads; }

/// Not NaN either.
void check_seconds(const char* name, double seconds) {
    if (seconds >= 0.1 && seconds <= 86400) return;
    throw ArgumentError(fmt::format("{} is {}; allowed are 0.1 to 86400 seconds", name, seconds));
}

}  // namespace

std::vector<std::int64_t> tuned_tokens(const TuneOptions& options) {
    std::vector<std::int64_t> tokens;
    for (const std::int64_t n : options.num_tokens) {
        if (std::ranges::find(tokens, token_bucket(n)) == tokens.end()) tokens.push_back(token_bucket(n));
    }
    if (tokens.empty()) tokens.push_back(kTypicalTokens);
    return tokens;
}

PlanRequest tuned_request(const TuneOptions& options, Session& session, const Spec& spec, const Device& device, std::int64_t num_tokens) {
    PlanRequest request{.scratch_bytes = options.session.scratch_bytes, .num_tokens = num_tokens};
    const std::int64_t limit = options.workspace_limit_bytes;
    if (limit == 0) return request;
    if (options.retain) request.workspace_limit_bytes = limit;
    const KernelOptions call{.workspace_limit_bytes = limit, .num_tokens = num_tokens};
    request.scratch_bytes = session.choose_plan(spec, device, call).plan.scratch_bytes;
    return request;
}

void check_coordinates(const TuneOptions& options, DeviceKind kind) {
    const auto names = coordinate_names(kind);
    for (const std::string& name : options.coordinates) {
        if (std::ranges::find(names, name) != names.end()) continue;
        throw ArgumentError(
            fmt::format("coordinates: there is no \"{}\"; plans for this device differ in {}", name, fmt::join(names, ", ")));
    }
}

Tuner::Tuner(TuneOptions options, TunerWorkers workers, TunerListener listener)
    : options_(std::move(options)),
      workers_(std::move(workers)),
      listener_(std::move(listener)),
      session_(session_options(options_)),
      device_(session_.device()),
      store_({.directory = options_.records_dir.empty() ? session_.records_dir() : options_.records_dir, .shipped = false}) {
    if (store_.places().directory.empty()) throw ArgumentError("there is no directory for records: name one, or set FLCE_RECORDS_DIR");
    check_seconds("budget_s", options_.budget_s);
    check_seconds("candidate_timeout_s", options_.candidate_timeout_s);
    if (options_.exhaustive > kMaxRecordCandidates) {
        throw ArgumentError(
            fmt::format("exhaustive is {}; at most {} combinations can be measured", options_.exhaustive, kMaxRecordCandidates));
    }
    check_coordinates(options_, device_.kind);
    if (options_.commit.size() > kMaxGivenTextBytes) {
        throw ArgumentError(fmt::format("commit has {} bytes; at most {} are kept", options_.commit.size(), kMaxGivenTextBytes));
    }
}

void Tuner::run() {
    store_.check_room();  // before minutes are spent on what could not be kept
    measure_device();
    for (const Spec& spec : options_.specs) {
        for (const std::int64_t num_tokens : tuned_tokens(options_)) {
            if (stopped()) return;
            tune_or_note(spec, num_tokens);
        }
    }
}

/// In a process of its own, as candidates are: what hangs there is a warning here, and rates stay assumed.
void Tuner::measure_device() {
    if (device_.kind != DeviceKind::cuda || (has_measured_rates(device_) && !workers_.always_rates)) return;
    constexpr double kSeconds = 1;
    constexpr std::chrono::milliseconds kPatience{30'000};
    std::string why;
    try {
        WorkerProcess worker(workers_.command);
        const Json request{
            {"op", "rates"}, {"device", device_.json()}, {"ordinal", SessionAccess::device_ref(session_).index}, {"seconds", kSeconds}};
        const Reply reply = worker.ask(request, kPatience, listener_.stop);
        if (reply.kind == Reply::Kind::answer && reply.answer.contains("device")) {
            device_ = parse_device_json(reply.answer.at("device").get<std::string>());
            return;
        }
        why = reply.kind == Reply::Kind::answer ? first_line(reply.answer.value("error", "the answer cannot be read")) : reply.why;
    } catch (const Error& error) {
        why = first_line(error.what());
    }
    if (listener_.warning) listener_.warning(fmt::format("rates of {} are assumed, not measured: {}", device_.name, why));
}

void Tuner::tune_or_note(const Spec& spec, std::int64_t num_tokens) {
    try {
        tuned_.push_back(tune(spec, num_tokens));
    } catch (const Error& error) {
        untuned_.push_back({spec, num_tokens, first_line(error.what()), error.kind()});
        return;
    } catch (const std::bad_alloc&) {
        untuned_.push_back({spec, num_tokens, "out of memory", ErrorKind::environment});
        return;
    }
    if (listener_.tuned) listener_.tuned(tuned_.back());
}

/// The key's record with all that is known, and with this run in it.
Record Tuner::begin_record(const RecordKey& key, const TuningRun& run, const std::string& id) {
    Record record{.key = key};
    if (!options_.fresh) record = store_.find(key).value_or(record);
    if (!record.runs.empty() && listener_.warning) {
        const std::string change = provenance_change(record.runs.rbegin()->second, run);
        if (!change.empty()) {
            listener_.warning(fmt::format("earlier times may not compare ({}); measuring afresh measures all again", change));
        }
    }
    record.runs[id] = run;
    return record;
}

TuneTarget Tuner::target(const Spec& spec, std::int64_t num_tokens, std::int64_t scratch_bytes) const {
    const Device& device = device_;
    const bool on_gpu = device.kind == DeviceKind::cuda;
    TuneTarget target{.spec = spec,
                      .device = device,
                      .session = options_.session,
                      .worker = workers_.command,
                      .num_tokens = num_tokens,
                      .workspace_limit_bytes = options_.workspace_limit_bytes,
                      .retain = options_.retain,
                      .graphs = on_gpu || workers_.always_graphs,
                      .budget_s = options_.budget_s,
                      .candidate_timeout_s = options_.candidate_timeout_s,
                      .warm_up_s = on_gpu ? 1.0 : 0.0};
    target.session.scratch_bytes = scratch_bytes;
    return target;
}

Tuned Tuner::tune(const Spec& spec, std::int64_t num_tokens) {
    const Device& device = device_;
    SearchOptions search_options{.request = tuned_request(options_, session_, spec, device, num_tokens),
                                 .extra = options_.plans,
                                 .library_version = device.kind == DeviceKind::cuda ? cublaslt_version() : 0,
                                 .only = options_.coordinates,
                                 .exhaustive = options_.exhaustive};
    if (device.gpu.measured.mma_flops > 0) {  // sessions know no measured rates
        search_options.default_plan =
            seed_plans(spec, session_.device(), search_options.request, 1, search_options.library_version).front();
    }
    for (const Plan& plan : options_.plans) {
        if (const auto reason = illegal_reason(spec, device, plan)) throw PlanError(fmt::format("plan \"{}\": {}", plan.text(), *reason));
    }
    const PlanRequest call{.scratch_bytes = search_options.request.scratch_bytes,
                           .workspace_limit_bytes = options_.workspace_limit_bytes,
                           .num_tokens = num_tokens};
    RecordKey key = record_key(spec, device, call, options_.retain ? kRetainedAutomatically : kNothingRetained, threads_of(options_));
    const TuningRun run = provenance(device, options_.commit);
    search_options.run = run_id(run);
    const TuneListener listener{.progress = listener_.progress, .warning = listener_.warning, .stop = listener_.stop};
    MeasuredSearch searched =
        measured_search(target(spec, key.request.num_tokens, call.scratch_bytes), search_options, listener, [&](std::string_view policy) {
            key.policy = policy;
            return begin_record(key, run, search_options.run);
        });
    Tuned tuned{.spec = spec,
                .record = std::move(searched.record),
                .result = std::move(searched.result),
                .seconds = searched.seconds,
                .processes = searched.processes,
                .compiled = searched.compiled};
    keep(search_options.run, tuned);
    return tuned;
}

void Tuner::keep(const std::string& run, Tuned& tuned) {
    Record& record = tuned.record;
    // A run that measured nothing leaves no trace.
    const auto measured = [&](const auto& entry) { return entry.second.times_ms.contains(run); };
    if (std::ranges::none_of(record.candidates, measured)) record.runs.erase(run);
    tuned.file = store_.places().directory / record.key.file();
    if (record.candidates.empty()) return;
    tuned.file = options_.fresh ? store_.replace(record) : store_.save(record);
}

}  // namespace flce

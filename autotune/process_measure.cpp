#include "autotune/process_measure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "runtime/text.hpp"
#include "runtime/workers/worker_room.hpp"

namespace flce {
namespace {

// Shares of the budget that are left for the last rounds: at least, and at most where the rounds need more.
constexpr double kLeastFinalShare = 0.15;
constexpr double kMostFinalShare = 0.5;
constexpr double kFinalMargin = 1.25;
/// A device that has waited for a check or a compiler is soon as it was.
constexpr double kResume_s = 0.05;
/// Shares of the budget that one candidate may take, compiled or run, before it hangs.
constexpr double kCompileShare = 0.5;
constexpr double kRunShare = 0.25;
constexpr double kLeastPatience_s = 0.1;
constexpr double kLeastStart_s = 5;
/// Compiling a plan's kernels takes longer than running them.
constexpr double kCompileToRun = 4;

std::chrono::milliseconds milliseconds(double seconds) { return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3)); }

std::chrono::milliseconds compile_patience(const TuneTarget& target) {
    return milliseconds(std::max(kLeastPatience_s, std::min(kCompileToRun * target.candidate_timeout_s, kCompileShare * target.budget_s)));
}

}  // namespace

Json compile_request(const Spec& spec, const Device& device, const Plan& plan, const std::filesystem::path& cache_dir) {
    return {{"op", "compile"},
            {"spec", spec.text()},
            {"device", device.json()},
            {"cache_dir", path_in_request(cache_dir)},
            {"plan", plan.text()}};
}

WorkerPool make_compile_pool(const WorkerCommand& worker, std::chrono::milliseconds patience) {
    constexpr std::size_t kMost = 8;
    const int half = static_cast<int>(std::thread::hardware_concurrency() / 2);
    return WorkerPool({.command = worker, .workers = worker_count(half, available_memory_bytes(), kMost), .timeout = patience});
}

ProcessMeasure::ProcessMeasure(const TuneTarget& target, const TuneListener& listener)
    : target_(target), listener_(listener), compilers_(make_compile_pool(target.worker, compile_patience(target))) {
    report({});
}

double ProcessMeasure::elapsed_s() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

bool ProcessMeasure::stop() {
    stopped_ = stopped_ || (listener_.stop && listener_.stop());
    return stopped_ || elapsed_s() >= target_.budget_s;
}

bool ProcessMeasure::nearly_over() {
    const double share = kFinalMargin * sample_s() * static_cast<double>(reserved_samples_) / target_.budget_s;
    return stop() || elapsed_s() >= (1 - std::clamp(share, kLeastFinalShare, kMostFinalShare)) * target_.budget_s;
}

void ProcessMeasure::progress(const std::string& /*stage*/, std::size_t candidates, std::size_t /*measurements*/, double best_ms) {
    report({.elapsed_s = elapsed_s(), .candidates = candidates, .best_ms = best_ms});
}

void ProcessMeasure::report(TuneProgress progress) const {
    if (!listener_.progress) return;
    progress.spec = target_.spec.text();
    progress.num_tokens = target_.num_tokens;
    progress.budget_s = target_.budget_s;
    listener_.progress(progress);
}

Json ProcessMeasure::open_request() const {
    return {{"op", "open"},
            {"spec", target_.spec.text()},
            {"device", target_.session.device},
            {"cache_dir", path_in_request(target_.session.cache_dir)},
            {"threads", target_.session.threads},
            {"scratch_bytes", target_.session.scratch_bytes},
            {"num_tokens", target_.num_tokens},
            {"workspace_limit_bytes", target_.workspace_limit_bytes},
            {"retain", target_.retain},
            {"graphs", target_.graphs}};
}

double ProcessMeasure::patience_s() const {
    return std::min(target_.candidate_timeout_s, std::max(kLeastPatience_s, kRunShare * target_.budget_s));
}

void ProcessMeasure::start() {
    worker_ = std::make_unique<WorkerProcess>(target_.worker);
    ++processes_;
    warm_ = false;
    // Tensors of gigabytes are made here; that is no candidate's fault.
    const Reply reply = worker_->ask(open_request(), milliseconds(std::max(kLeastStart_s, target_.budget_s - elapsed_s())), listener_.stop);
    if (reply.kind == Reply::Kind::stopped) {
        stopped_ = true;
        throw MeasureStopped();
    }
    std::string why = reply.why;
    if (reply.kind == Reply::Kind::answer) {
        if (!reply.answer.contains("error")) {
            started_ = true;
            return;
        }
        why = first_line(reply.answer["error"].get<std::string>());
    }
    worker_->kill();
    if (!started_) throw EnvironmentError(fmt::format("the tuning worker does not start: {}", why));
    if (!stop()) warn(fmt::format("the tuning worker does not start again: {}", why));
    throw MeasureStopped();
}

void ProcessMeasure::warn(const std::string& text) const {
    if (listener_.warning) listener_.warning(text);
}

Measured ProcessMeasure::ask(const Json& request, Json& answer) {
    if (worker_ == nullptr || !worker_->alive()) start();
    const double left = std::max(0.0, target_.budget_s - elapsed_s());
    Reply reply = worker_->ask(request, milliseconds(std::min(left, patience_s())), listener_.stop);
    switch (reply.kind) {
        case Reply::Kind::stopped: stopped_ = true; throw MeasureStopped();
        case Reply::Kind::timed_out:
            if (left < patience_s()) throw MeasureStopped();
            return {.outcome = Outcome::hung, .why = reply.why};
        case Reply::Kind::died: return {.outcome = Outcome::faulted, .why = reply.why};
        case Reply::Kind::answer: break;
    }
    answer = std::move(reply.answer);
    if (!answer.is_object()) {
        worker_->kill();
        return {.outcome = Outcome::faulted, .why = "the worker's answer cannot be read"};
    }
    if (!answer.contains("error")) return {};
    const auto kind = static_cast<ErrorKind>(answer["kind"].get<int>());
    const std::string why = first_line(answer["error"].get<std::string>());
    if (kind != ErrorKind::device) return {.outcome = Outcome::failed, .why = why};
    // An illegal access or the like: nothing else can run in that process any more.
    worker_->kill();
    return {.outcome = Outcome::faulted, .why = why};
}

Measured ProcessMeasure::check(const Plan& plan) {
    if (const auto found = uncompiled_.find(plan.text()); found != uncompiled_.end()) return found->second;
    Json answer;
    Measured measured = ask({{"op", "check"}, {"plan", plan.text()}}, answer);
    if (measured.outcome != Outcome::ok) return measured;
    compiled_ += answer["compiled"].get<std::int64_t>();
    measured.workspace_bytes = answer["workspace_bytes"].get<std::int64_t>();
    measured.retained_bytes = answer["retained_bytes"].get<std::int64_t>();
    measured.why = answer["wrong"].get<std::string>();
    if (measured.why.empty()) return measured;
    measured.outcome = Outcome::wrong;
    worker_->kill();  // a kernel that writes wrong results may have written over other memory
    return measured;
}

void ProcessMeasure::expect_graphs(const Json& answer) const {
    auto why = answer.at("graphs_refused").get<std::string>();
    if (target_.graphs && !why.empty()) throw GraphsRefused(first_line(why));
}

Measured ProcessMeasure::resume(const Plan& plan) {
    if (target_.warm_up_s <= 0) return {};
    if (worker_ == nullptr || !worker_->alive()) start();
    Json answer;
    const double seconds = std::min(warm_ ? kResume_s : target_.warm_up_s, patience_s() / 2);
    Measured measured = ask({{"op", "warm"}, {"plan", plan.text()}, {"seconds", seconds}}, answer);
    if (measured.outcome != Outcome::ok) return measured;
    expect_graphs(answer);
    warm_ = true;
    return measured;
}

Measured ProcessMeasure::time(const Plan& plan) {
    Json answer;
    const double begin_s = elapsed_s();
    Measured measured = ask({{"op", "time"}, {"plan", plan.text()}}, answer);
    if (measured.outcome != Outcome::ok) return measured;
    expect_graphs(answer);
    if (sampled_.insert(plan.text()).second) {
        first_sample_s_ = elapsed_s() - begin_s;
    } else {
        sampling_s_ += elapsed_s() - begin_s;
        ++samples_;
    }
    measured.ms = answer["ms"].get<double>();
    return measured;
}

/// A kernel that several plans share is compiled once, by the first request for it.
void ProcessMeasure::prepare(std::span<const Plan> plans) {
    std::vector<Json> requests;
    for (const Plan& plan : plans) requests.push_back(compile_request(target_.spec, target_.device, plan, target_.session.cache_dir));
    // A plan that cannot be compiled reports so itself when it is run; a plan whose compiler gives no answer must not be run at all.
    const auto done = [&](std::size_t request, const Reply& reply) {
        if (reply.kind == Reply::Kind::answer && reply.answer.contains("compiled"))
            compiled_ += reply.answer["compiled"].get<std::int64_t>();
        if (reply.kind != Reply::Kind::timed_out && reply.kind != Reply::Kind::died) return;
        const Outcome outcome = reply.kind == Reply::Kind::timed_out ? Outcome::hung : Outcome::faulted;
        uncompiled_[plans[request].text()] = {.outcome = outcome, .why = fmt::format("its compiler: {}", reply.why)};
    };
    // Plans that are not compiled when the last rounds have to begin are not asked for; the first plan of all is.
    const auto give_up = [this] { return started_ ? nearly_over() : stop(); };
    if (!compilers_.run(requests, {.done = done, .stop = give_up}) && stop()) throw MeasureStopped();
}

MeasuredSearch measured_search(TuneTarget target, const SearchOptions& options, const TuneListener& listener,
                               const std::function<Record(std::string_view policy)>& begin) {
    MeasuredSearch before;
    for (;;) {
        MeasuredSearch searched{.record = begin(target.graphs ? kGraphMeasurementPolicy : kLaunchMeasurementPolicy)};
        ProcessMeasure measure(target, listener);
        try {
            searched.result = search(target.spec, target.device, options, measure, searched.record);
            searched.seconds = before.seconds + measure.elapsed_s();
            searched.processes = before.processes + measure.processes();
            searched.compiled = before.compiled + measure.compiled();
            return searched;
        } catch (const GraphsRefused& refused) {
            if (listener.warning) {
                listener.warning(
                    fmt::format("samples are timed without CUDA graphs, all of them, for a record of their own: {}", refused.what()));
            }
        }
        before.seconds += measure.elapsed_s();
        before.processes += measure.processes();
        before.compiled += measure.compiled();
        target.graphs = false;
        target.budget_s = std::max(0.0, target.budget_s - measure.elapsed_s());
    }
}

}  // namespace flce

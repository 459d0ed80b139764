#include "runtime/plan_choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "cache/log.hpp"
#include "flce/error.hpp"
#include "generator/cuda/common/cuda_path.hpp"
#include "generator/planner.hpp"

namespace flce {
namespace {

/// Whether the query may be answered with a plan of this path.
bool allows(const PlanQuery& query, PlanPath path) {
    if (path == PlanPath::cpu) return true;
    if (query.path && *query.path != path) return false;
    return !(query.without_library && cuda_path(path).calls_library);
}

/// A record's plan as a call can have it. The record may have been measured with other scratch: its tiles hold, the bytes are the call's.
struct Usable {
    std::optional<Plan> plan;
    std::string why;          ///< reason why the plan cannot be used; empty: the query is for other paths
    bool for_memory = false;  ///< whether the plan would be legal with the scratch that it was measured with
};

Usable usable_plan(const PlanQuery& query, const std::string& text) {
    try {
        const Plan measured = parse_plan(text);
        if (!allows(query, measured.path)) return {};
        Plan plan = measured;
        plan.scratch_bytes = query.request.scratch_bytes;
        const auto reason = illegal_reason(query.spec, query.device, plan);
        if (!reason) return {.plan = plan};
        const bool for_memory = !illegal_reason(query.spec, query.device, measured);
        return {.why = fmt::format("its plan \"{}\" is not legal: {}", text, *reason), .for_memory = for_memory};
    } catch (const PlanError& error) {
        return {.why = error.what()};
    }
}

/// The first candidate that the query allows.
Plan modelled(const PlanQuery& query) {
    const bool on_gpu = query.device.kind == DeviceKind::cuda;
    if (on_gpu && query.path) {
        const std::vector<Plan> plans = path_plans(query.spec, query.device, *query.path, query.request);
        if (!plans.empty() && allows(query, *query.path)) return plans.front();
        const Reason problem = cuda_path(*query.path).problem(query.spec, query.device, Strategy::recompute);
        throw PlanError(fmt::format("FLCE_PATH is {}, which has no plan for {} on {}: {}", to_string(*query.path), query.spec.text(),
                                    query.device.name, problem.value_or("nothing legal with this scratch, or no cuBLASLt")));
    }
    for (const Plan& plan : candidate_plans(query.spec, query.device, query.request)) {
        if (allows(query, plan.path)) return plan;
    }
    throw PlanError(fmt::format("no plan for {} on {} without cuBLASLt", query.spec.text(), query.device.name));
}

/// Warns once in a process for each record and reason: a session asks for every number of tokens.
void warn_once(const std::string& origin, const std::string& why) {
    static std::mutex mutex;
    static auto& said = *new std::set<std::string>();
    const std::string message = fmt::format("the best of tuning record {} is not used: {}", origin, why);
    const std::lock_guard lock(mutex);
    constexpr std::size_t kMost = 1024;
    if (said.size() < kMost && said.insert(message).second) logger().warn("{}", message);
}

std::string record_source(const RecordedPlan& recorded, const std::string& plan) {
    return fmt::format("measured: {} of {} at {} tokens{} ({})", plan == recorded.best() ? "best" : "best usable one", recorded.candidates,
                       recorded.key.request.num_tokens, recorded.other_kernels ? ", with kernels of another version" : "", recorded.origin);
}

MeasuredTime time_of(const RecordedPlan& recorded, double ms) {
    return {.ms = ms,
            .num_tokens = recorded.key.request.num_tokens,
            .candidates = recorded.candidates,
            .origin = recorded.origin,
            .other_kernels = recorded.other_kernels};
}

/// Memory with which plans were compared.
OwnMemory own_memory_of(const PlanQuery& query, const RecordKey& key) {
    return key.retained == "none" ? OwnMemory::none : own_memory(query.spec, query.device, key.request);
}

/// Whether the record was measured before kernels could retain, for a layer that may retain now: the plans that it compared are not all
/// that there are.
bool is_outdated(const PlanQuery& query, const RecordedPlan& recorded) {
    if (!recorded.other_kernels) return false;
    const auto may_retain = [&](const RecordedPlan::Timed& timed) {
        return timed.plan.find(fmt::format(":{},", to_string(Strategy::retain))) != std::string::npos;
    };
    return std::ranges::none_of(recorded.plans, may_retain) && modelled(query).strategy == Strategy::retain;
}

/// The best legal plan of the nearest record that has any, else the cost model's.
PlanAnswer measured_or_modelled(const PlanQuery& query, RecordStore& records) {
    const RecordKey wanted = record_key(query.spec, query.device, query.request, kRetainedAutomatically, query.threads);
    const OwnMemory own = own_memory_of(query, wanted);
    PlanAnswer answer;
    for (const RecordedPlan& recorded : records.plans(wanted)) {
        if (own_memory_of(query, recorded.key) != own) continue;  // a record with other memory has measured something else
        if (is_outdated(query, recorded)) continue;
        for (const RecordedPlan::Timed& timed : recorded.plans) {
            const Usable usable = usable_plan(query, timed.plan);
            if (usable.plan) {
                answer.plan = *usable.plan;
                answer.source = record_source(recorded, timed.plan);
                const bool same_call = recorded.key.request == wanted.request && recorded.key.retained == wanted.retained;
                if (same_call && usable.plan->text() == timed.plan) answer.measured = time_of(recorded, timed.median_ms);
                return answer;
            }
            if (timed.plan != recorded.best() || usable.why.empty()) continue;
            if (usable.for_memory) {
                answer.passed_over.push_back(fmt::format("the best of tuning record {} needs more scratch than this call's {} bytes: {}",
                                                         recorded.origin, query.request.scratch_bytes, usable.why));
            } else {
                warn_once(recorded.origin, usable.why);
            }
        }
    }
    answer.plan = modelled(query);
    const std::string of_path =
        query.path && query.device.kind == DeviceKind::cuda ? fmt::format(" of {} (FLCE_PATH)", to_string(*query.path)) : "";
    answer.source = answer.passed_over.empty() ? "the cost model's first choice" + of_path + ": there is no record of measurements"
                                               : "the cost model's first choice: no plan that was measured fits this call's memory";
    return answer;
}

/// One plan for every call of a batch-invariant spec, whatever its number of tokens, its scratch and its limit: bits follow from tiles.
PlanAnswer invariant_answer(const PlanQuery& query, RecordStore& records) {
    PlanQuery typical = query;
    typical.request = {};
    typical.request.num_tokens = kTypicalTokens;
    PlanAnswer answer = measured_or_modelled(typical, records);
    answer.plan.scratch_bytes = query.request.scratch_bytes;
    if (const auto reason = illegal_reason(query.spec, query.device, answer.plan)) {
        throw PlanError(fmt::format("batch_invariant: {} on {} has one plan, \"{}\", for every call, and it is not legal here: {}",
                                    query.spec.text(), query.device.name, answer.plan.text(), *reason));
    }
    answer.source += "; batch_invariant: the same for every number of tokens and every limit";
    return answer;
}

PlanAnswer explicit_answer(const PlanQuery& query) {
    PlanAnswer answer{.plan = parse_plan(query.plan), .source = "given by the caller, not chosen"};
    if (const auto reason = illegal_reason(query.spec, query.device, answer.plan)) {
        throw PlanError(
            fmt::format("plan \"{}\" is not legal for {} on {}: {}", query.plan, query.spec.text(), query.device.name, *reason));
    }
    return answer;
}

}  // namespace

Device with_threads(Device device, int threads) {
    if (device.kind == DeviceKind::cpu && threads > 0) device.cpu.cores = std::min(device.cpu.cores, threads);
    return device;
}

std::optional<MeasuredTime> measured_time(const PlanQuery& query, const Plan& plan, std::string_view retained, RecordStore& records) {
    const RecordKey wanted = record_key(query.spec, query.device, query.request, retained, query.threads);
    const std::string text = plan.text();
    for (const RecordedPlan& recorded : records.plans(wanted)) {  // plans of this version's kernels come first
        if (recorded.key.request != query.request || recorded.key.retained != retained) continue;
        const auto timed = std::ranges::find(recorded.plans, text, &RecordedPlan::Timed::plan);
        if (timed != recorded.plans.end()) return time_of(recorded, timed->median_ms);
    }
    return std::nullopt;
}

PlanAnswer plan_for(const PlanQuery& query, RecordStore& records) {
    if (query.request.scratch_bytes <= 0)
        throw PlanError(fmt::format("scratch_bytes is {}; it must be positive", query.request.scratch_bytes));
    if (!query.plan.empty()) return explicit_answer(query);
    if (query.spec.batch_invariant) return invariant_answer(query, records);
    return measured_or_modelled(query, records);
}

std::vector<std::string> answer_reasons(const PlanQuery& query, const PlanAnswer& answer) {
    std::vector<std::string> reasons = plan_reasons(query.spec, query.device, answer.plan, query.request);
    reasons.insert(reasons.begin(), "plan: " + answer.source);
    reasons.insert(reasons.end(), answer.passed_over.begin(), answer.passed_over.end());
    return reasons;
}

std::string time_reason(const PlanQuery& query, const PlanAnswer& answer) {
    const std::int64_t tokens = token_bucket(query.request.num_tokens);
    if (answer.measured) {
        return fmt::format("measured at {} tokens: forward + backward {:.4g} ms, best of {}", tokens, answer.measured->ms,
                           answer.measured->candidates);
    }
    const Device device = with_threads(query.device, query.threads);
    const Cost forward = estimate_forward(query.spec, device, answer.plan, tokens);
    const Cost backward = estimate_backward(query.spec, device, answer.plan, tokens);
    return fmt::format("{} at {} tokens{}: forward {:.3g} ms, backward {:.3g} ms, forward + backward {:.3g} ms ({:.3g} and {:.3g} Gflop)",
                       has_measured_rates(device) ? "modelled" : "guessed", tokens,
                       answer.plan.strategy == Strategy::retain ? ", everything retained" : "", 1e3 * forward.seconds,
                       1e3 * backward.seconds, 1e3 * (forward.seconds + backward.seconds), 1e-9 * forward.flops, 1e-9 * backward.flops);
}

}  // namespace flce

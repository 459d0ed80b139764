#include "runtime/plan_choice.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "cache/log.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

/// A record's plan may have been measured with other scratch than the call's: its tiles hold, the bytes are the call's.
std::optional<Plan> usable_plan(const PlanQuery& query, const std::string& text, std::string& why) {
    try {
        Plan plan = parse_plan(text);
        plan.scratch_bytes = query.scratch_bytes;
        if (auto reason = illegal_reason(query.spec, query.device, plan)) {
            why = fmt::format("its plan \"{}\" is not legal: {}", text, *reason);
            return std::nullopt;
        }
        return plan;
    } catch (const PlanError& error) {
        why = error.what();
        return std::nullopt;
    }
}

/// Once for each record and reason of the process: a session asks for every number of tokens.
void warn_once(const std::string& origin, const std::string& why) {
    static std::mutex mutex;
    static auto& said = *new std::set<std::string>();
    const std::string message = fmt::format("the best of tuning record {} is not used: {}", origin, why);
    const std::lock_guard lock(mutex);
    constexpr std::size_t kMost = 1024;
    if (said.size() < kMost && said.insert(message).second) logger().warn("{}", message);
}

std::string record_source(const RecordedPlan& recorded) {
    return fmt::format("measured: best of {} at {} tokens{} ({})", recorded.candidates, recorded.key.num_tokens,
                       recorded.other_kernels ? ", with kernels of another version" : "", recorded.origin);
}

MeasuredTime time_of(const RecordedPlan& recorded, double ms) {
    return {.ms = ms,
            .num_tokens = recorded.key.num_tokens,
            .candidates = recorded.candidates,
            .origin = recorded.origin,
            .other_kernels = recorded.other_kernels};
}

PlanRequest request_of(const PlanQuery& query) {
    return {.scratch_bytes = query.scratch_bytes, .limit_bytes = query.limit_bytes, .num_tokens = query.num_tokens};
}

/// What plans were compared for.
PlanRequest request_of(const RecordKey& key) {
    const bool retains = key.memory.retained != "none";
    return {.scratch_bytes = key.memory.scratch_bytes, .limit_bytes = retains ? key.memory.limit_bytes : 0, .num_tokens = key.num_tokens};
}

std::optional<PlanAnswer> recorded_answer(const PlanQuery& query, RecordStore& records) {
    const RecordKey wanted = record_key(query.spec, query.device, query.num_tokens,
                                        {.scratch_bytes = query.scratch_bytes, .limit_bytes = query.limit_bytes}, query.threads);
    const bool apart = retains_apart(query.spec, query.device, request_of(wanted));
    for (const RecordedPlan& recorded : records.plans(wanted)) {
        if (retains_apart(query.spec, query.device, request_of(recorded.key)) != apart) continue;  // it has measured something else
        for (const RecordedPlan::Timed& timed : recorded.plans) {
            std::string why;
            auto plan = usable_plan(query, timed.plan, why);
            if (plan) {
                PlanAnswer answer{.plan = *plan, .source = record_source(recorded)};
                const bool same_call = recorded.key.num_tokens == wanted.num_tokens && recorded.key.memory == wanted.memory;
                if (same_call && plan->text() == timed.plan) answer.measured = time_of(recorded, timed.median_ms);
                return answer;
            }
            if (timed.plan == recorded.best()) warn_once(recorded.origin, why);
        }
    }
    return std::nullopt;
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

std::optional<MeasuredTime> measured_time(const PlanQuery& query, const Plan& plan, const TunedMemory& memory, RecordStore& records) {
    const RecordKey wanted = record_key(query.spec, query.device, query.num_tokens, memory, query.threads);
    const std::string text = plan.text();
    for (const RecordedPlan& recorded : records.plans(wanted)) {  // those of this version's kernels come first
        if (recorded.key.num_tokens != query.num_tokens || recorded.key.memory != memory) continue;
        const auto timed = std::ranges::find(recorded.plans, text, &RecordedPlan::Timed::plan);
        if (timed != recorded.plans.end()) return time_of(recorded, timed->median_ms);
    }
    return std::nullopt;
}

PlanAnswer plan_for(const PlanQuery& query, RecordStore& records) {
    if (query.scratch_bytes <= 0) throw PlanError(fmt::format("scratch_bytes is {}; it must be positive", query.scratch_bytes));
    if (!query.plan.empty()) return explicit_answer(query);
    if (auto recorded = recorded_answer(query, records)) return std::move(*recorded);
    return {.plan = choose_plan(query.spec, query.device, request_of(query)),
            .source = "the cost model's first choice: there is no record of measurements"};
}

std::vector<std::string> answer_reasons(const PlanQuery& query, const PlanAnswer& answer) {
    std::vector<std::string> reasons = plan_reasons(query.spec, query.device, answer.plan, request_of(query));
    reasons.insert(reasons.begin(), "plan: " + answer.source);
    return reasons;
}

std::string time_reason(const PlanQuery& query, const PlanAnswer& answer) {
    const std::int64_t tokens = token_bucket(query.num_tokens);
    if (answer.measured) {
        return fmt::format("measured at {} tokens: forward + backward {:.4g} ms, best of {}", tokens, answer.measured->ms,
                           answer.measured->candidates);
    }
    const Device device = with_threads(query.device, query.threads);
    const Cost forward = estimate_forward(query.spec, device, answer.plan, tokens);
    const Cost backward = estimate_backward(query.spec, device, answer.plan, tokens);
    return fmt::format(
        "modelled at {} tokens{}: forward {:.3g} ms, backward {:.3g} ms, forward + backward {:.3g} ms ({:.3g} and {:.3g} Gflop)", tokens,
        answer.plan.strategy == Strategy::retain ? ", everything retained" : "", 1e3 * forward.seconds, 1e3 * backward.seconds,
        1e3 * (forward.seconds + backward.seconds), 1e-9 * forward.flops, 1e-9 * backward.flops);
}

}  // namespace flce

#include "runtime/plan_choice.hpp"

#include <fmt/format.h>

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

std::string record_source(const RecordedPlan& recorded, double median_ms) {
    return fmt::format("measured: best of {} at {} tokens, {:.4g} ms forward and backward{} ({})", recorded.candidates,
                       recorded.key.num_tokens, median_ms, recorded.other_kernels ? ", with kernels of another version" : "",
                       recorded.origin);
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
            if (plan) return PlanAnswer{.plan = *plan, .source = record_source(recorded, timed.median_ms)};
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
    const std::int64_t tokens = token_bucket(query.num_tokens);
    const Cost forward = estimate_forward(query.spec, query.device, answer.plan, tokens);
    const Cost backward = estimate_backward(query.spec, query.device, answer.plan, tokens);
    reasons.push_back(fmt::format("expected at {} tokens: forward {:.3g} ms, backward {:.3g} ms ({:.3g} and {:.3g} Gflop)", tokens,
                                  1e3 * forward.seconds, 1e3 * backward.seconds, 1e-9 * forward.flops, 1e-9 * backward.flops));
    return reasons;
}

}  // namespace flce

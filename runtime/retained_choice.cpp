#include "runtime/retained_choice.hpp"

#include <algorithm>

#include "generator/planner.hpp"

namespace flce {
namespace {

constexpr double kLeastWorkCpu = 0x1p24;  ///< kLeastRetainedWork of a CPU

/// Part of all that there is a use for: less is not worth memory of its own.
constexpr double kLeastPart = 0.02;

constexpr std::size_t kAlignment = 16;

double least_work(const Plan& plan, const RetainOptions& options) {
    if (options.least_work > 0) return static_cast<double>(options.least_work);
    return plan.path == PlanPath::cpu ? kLeastWorkCpu : kLeastRetainedWork;
}

/// Bytes that the limit leaves beside the workspace.
std::size_t left_by_limit(const RetainedRoom& room, std::int64_t workspace_limit_bytes) {
    const auto limit = static_cast<std::size_t>(workspace_limit_bytes);
    return limit > room.workspace ? std::min(room.most, (limit - room.workspace) / kAlignment * kAlignment) : 0;
}

/// Bytes that keeping a whole vocabulary takes: fp32 logits on a CPU, exponentials of the spec's dtype on a GPU.
double whole_bytes(const Spec& spec, const Plan& plan, std::int64_t num_tokens) {
    return static_cast<double>(num_tokens) * static_cast<double>(spec.vocab_size) * static_cast<double>(retained_logit_bytes(spec, plan));
}

double grad_weight_bytes(const Spec& spec) {
    return static_cast<double>(spec.vocab_size) * static_cast<double>(spec.hidden_size) *
           static_cast<double>(element_bytes(spec.grad_weight_dtype));
}

}  // namespace

Retained choose_retained(const Spec& spec, const Plan& plan, std::int64_t num_tokens, const RetainedRoom& room,
                         const RetainOptions& options) {
    const double work = static_cast<double>(num_tokens) * static_cast<double>(spec.hidden_size) * static_cast<double>(spec.vocab_size);
    if (room.most == 0 || work < least_work(plan, options)) return {};
    const double least = kLeastPart * static_cast<double>(room.most);
    std::size_t own = options.workspace_limit_bytes > 0
                          ? left_by_limit(room, options.workspace_limit_bytes)
                          : std::min(room.most, static_cast<std::size_t>(unlimited_own_bytes(spec)) / kAlignment * kAlignment);
    if (static_cast<double>(own) < least) own = 0;
    const std::size_t lendable = options.retain_in_grad_weight ? room.lendable : 0;
    const bool own_holds_more = static_cast<double>(own) > static_cast<double>(std::min(room.most, lendable)) + least;
    // grad_weight's memory is one block short of everything, and logits that are computed again come last, for both gradients: then the sum
    // of grad_hidden over ranks has nothing to hide under.
    const bool hides_sum = is_shard(spec) && plan.path != PlanPath::cpu && own == room.most;
    if (lendable > 0 && !own_holds_more && !hides_sum) return {nullptr, lendable, RetainedPlace::grad_weight};
    return {nullptr, own, RetainedPlace::own};
}

KeptPart lent_part(const Spec& spec, const Plan& plan, std::int64_t num_tokens) {
    if (!retains(plan) || spec.support || (has_teacher_head(spec) && plan.path == PlanPath::cpu)) return {};
    if (plan.path != PlanPath::cpu) return {lendable_part(spec, plan, num_tokens), 0};  // in elements of the spec's dtype
    if (!may_lend_grad_weight(spec) || num_tokens <= 0) return {};
    return {std::min(1.0, grad_weight_bytes(spec) / whole_bytes(spec, plan, num_tokens)), 0};
}

KeptPart own_part(const Spec& spec, const Plan& plan, std::int64_t num_tokens, double bytes) {
    const double whole = retains(plan) ? whole_bytes(spec, plan, num_tokens) : 0;
    if (whole <= 0 || bytes <= 0) return {};
    const double kept = std::min(bytes, whole);
    return {kept / whole, static_cast<std::int64_t>(std::min(kept, 0x1p62))};
}

KeptPart kept_by_default(const Spec& spec, const Plan& plan, std::int64_t num_tokens, std::int64_t workspace_bytes,
                         std::int64_t workspace_limit_bytes) {
    if (!retains(plan)) return {};
    const KeptPart lent = lent_part(spec, plan, num_tokens);
    const RetainedRoom room{.most = static_cast<std::size_t>(std::min(whole_bytes(spec, plan, num_tokens), 0x1p62)),
                            .lendable = lent.part > 0 ? static_cast<std::size_t>(grad_weight_bytes(spec)) : 0,
                            .workspace = static_cast<std::size_t>(workspace_bytes)};
    const Retained chosen = choose_retained(spec, plan, num_tokens, room, {.workspace_limit_bytes = workspace_limit_bytes});
    return chosen.place == RetainedPlace::grad_weight ? lent : own_part(spec, plan, num_tokens, static_cast<double>(chosen.bytes));
}

}  // namespace flce

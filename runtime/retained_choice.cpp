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

}  // namespace flce

// The planner's knowledge beside its choice: for the library's parts and the command, not for callers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flce/plan.hpp"

namespace flce {

/// Whether forward can leave anything to backward with such a plan: exponentials on a GPU, logits on a CPU.
[[nodiscard]] constexpr bool retains(const Plan& plan) noexcept { return plan.path == PlanPath::cpu || plan.strategy == Strategy::retain; }

/// Bytes that a plan which retains() keeps of one logit: fp32 on a CPU, its exponential in the spec's dtype on a GPU, or with fp8 in 8 bits
/// and two orders, of which a frozen weight without a bias needs one.
[[nodiscard]] inline std::int64_t retained_logit_bytes(const Spec& spec, const Plan& plan) noexcept {
    if (spec.support) return 0;
    if (has_teacher_head(spec)) return plan.path == PlanPath::cpu ? 0 : 4;  // logits of both heads, or none
    if (plan.path == PlanPath::cpu) return 4;
    return is_fp8(spec) && is_quantized(spec) && !spec.bias ? 1 : static_cast<std::int64_t>(element_bytes(spec.dtype));
}

/// Tokens whose list has room in every scratch that has a list at all.
inline constexpr std::int64_t kTokensInScratch = 1 << 18;
/// Bytes of a workspace that grow with its tokens, beside scratch_bytes: grad_hidden's sum in fp32, where that is not grad_hidden itself,
/// and what a list of tokens takes beyond its place in the scratch. With support dz of each place and its way through a sort as well.
/// Absent: they overflow, or num_tokens is negative.
[[nodiscard]] std::optional<std::int64_t> workspace_of_tokens(const Spec& spec, std::int64_t num_tokens) noexcept;
/// The largest num_tokens whose workspace_of_tokens is at most `bytes`, which is 0 or more; for a 16-bit dtype or support.
[[nodiscard]] std::int64_t tokens_with_workspace(const Spec& spec, std::int64_t bytes) noexcept;

/// Whether exponentials may lie in grad_weight's memory until it is written: it is not added to, and its rows are the vocabulary's.
[[nodiscard]] bool may_lend_grad_weight(const Spec& spec) noexcept;

/// The part of a call's exponentials that grad_weight's memory holds: 0 (none, or no tokens) to 1.
[[nodiscard]] double lendable_part(const Spec& spec, std::int64_t num_tokens) noexcept;
/// Part of what forward leaves with `plan` for which that memory has room. A mixture's logits lie beside the lent tile of both heads.
[[nodiscard]] double lendable_part(const Spec& spec, const Plan& plan, std::int64_t num_tokens) noexcept;

/// Memory of its own that a call without a limit may fill with retained exponentials. For a shard: as much as the whole layer's weight
/// gradient takes, and 1/32 more for the numbers beside exponentials; R ranks then retain R times as many tokens as that gradient's memory
/// holds on one. Else 0.
[[nodiscard]] std::int64_t unlimited_own_bytes(const Spec& spec) noexcept;

/// Multiply-adds of one GEMM (N·D·V) below which the launches for retaining cost a GPU more than retaining spares (on an H100 up to 2^34 or
/// 2^35).
inline constexpr double kLeastRetainedWork = 0x1p35;

/// Memory of its own that a call has for its exponentials.
enum class OwnMemory {
    none,  ///< nothing is retained, or in grad_weight's memory
    part,  ///< part of the exponentials, where grad_weight's memory is not lent and the limit has room for no more
    all,   ///< all exponentials; grad_weight's memory is not lent, since it does not hold (nearly) all, or the layer is a shard
};
/// The choice that Kernel::choose_retained will make, where a plan of the device may retain.
[[nodiscard]] OwnMemory own_memory(const Spec& spec, const Device& device, const PlanRequest& request);
/// Whether own_memory is OwnMemory::all. grad_weight's tiles may then be any.
[[nodiscard]] bool retains_apart(const Spec& spec, const Device& device, const PlanRequest& request);

/// Legal candidates of one path, best expected first, whether or not the planner prefers the path on the device; none where the path cannot
/// express `spec` there. Throws SpecError.
[[nodiscard]] std::vector<Plan> path_plans(const Spec& spec, const Device& device, PlanPath path, const PlanRequest& request = {});

/// The least scratch with which candidate_plans has a plan; absent where no scratch is enough. Throws SpecError.
[[nodiscard]] std::optional<std::int64_t> smallest_scratch_bytes(const Spec& spec, const Device& device);

/// Whether the cost model's rates were measured on such a device: on every CPU, on GPUs of Hopper (H100, H200), and on a GPU whose
/// MeasuredRates are there. Rates of all other GPUs are assumed.
[[nodiscard]] bool has_measured_rates(const Device& device) noexcept;

/// Reasons for `plan`, which is in use on `device`: a line each for the device's limits, the plan's rank among the candidates, and every
/// refusal.
[[nodiscard]] std::vector<std::string> plan_reasons(const Spec& spec, const Device& device, const Plan& plan,
                                                    const PlanRequest& request = {});

}  // namespace flce

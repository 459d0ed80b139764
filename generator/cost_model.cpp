// Expected time of a pass: the larger of its arithmetic and its memory traffic. Good enough to order candidates and to say roughly how long
// a pass takes; measured times are the tuner's.
#include <optional>

#include "flce/plan.hpp"
#include "generator/cpu/cost.hpp"
#include "generator/cuda/common/cuda_path.hpp"

namespace flce {
namespace {

double retained_part(const Plan& plan, std::optional<double> asked) {
    if (plan.path == PlanPath::cpu) return asked.value_or(0.0);
    return plan.strategy == Strategy::retain ? asked.value_or(1.0) : 0.0;
}

}  // namespace

Cost estimate_forward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens, std::optional<double> retained) {
    if (num_tokens <= 0) return {};
    const auto n = static_cast<double>(num_tokens);
    const double part = retained_part(plan, retained);
    if (plan.path == PlanPath::cpu) return cpu_forward_cost(spec, device, plan, n, part);
    return cuda_path(plan.path).forward_cost(spec, device, plan, n, part);
}

Cost estimate_backward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens, std::optional<double> retained) {
    if (num_tokens <= 0) return {};
    const auto n = static_cast<double>(num_tokens);
    const double part = retained_part(plan, retained);
    if (plan.path == PlanPath::cpu) return cpu_backward_cost(spec, device, plan, n, part);
    return cuda_path(plan.path).backward_cost(spec, device, plan, n, part);
}

}  // namespace flce

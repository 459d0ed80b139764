#include "tests/support/targets.hpp"

#include <cstdlib>
#include <string_view>
#include <vector>

#include "generator/planner.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce::test {
namespace {

std::string_view variable(const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? value : "";
}

std::string find_skip_reason(Target target) {
    const std::string_view chosen = variable("FLCE_TEST_DEVICE");
    if (!chosen.empty() && chosen.starts_with("cuda") != (target == Target::gpu)) return "FLCE_TEST_DEVICE is " + std::string(chosen);
    if (target == Target::cpu) return {};
    std::string why;
    return cuda_devices(&why).empty() ? "no GPU: " + why : std::string();
}

Session& session_on(Target target) {
    const auto make = [](Target which) {
        const std::string_view chosen = variable("FLCE_TEST_DEVICE");
        SessionOptions options;
        options.device = which == Target::cpu ? "cpu" : chosen.empty() ? "cuda" : std::string(chosen);
        options.cache_dir = variable("FLCE_TEST_CACHE");
        options.disk_cache = !options.cache_dir.empty();
        return Session(options);
    };
    if (target == Target::cpu) {
        static Session cpu = make(Target::cpu);
        return cpu;
    }
    static Session gpu = make(Target::gpu);
    return gpu;
}

}  // namespace

const char* to_string(Target target) { return target == Target::cpu ? "Cpu" : "Gpu"; }

const std::string& skip_reason(Target target) {
    static const std::string cpu = find_skip_reason(Target::cpu);
    static const std::string gpu = find_skip_reason(Target::gpu);
    return target == Target::cpu ? cpu : gpu;
}

std::shared_ptr<const Kernel> kernel_on(Target target, const Spec& spec, const std::string& plan) {
    std::string text = plan.empty() ? std::string(variable("FLCE_TEST_PLAN")) : plan;
    if (const std::string_view path = variable("FLCE_TEST_PATH"); text.empty() && !path.empty() && target == Target::gpu) {
        for (const PlanPath known :
             {PlanPath::cuda_sm80, PlanPath::cuda_sm90a, PlanPath::cuda_lt, PlanPath::cuda_fp8, PlanPath::cuda_fp8_sm89}) {
            if (to_string(known) == path) text = plan_on_path(spec, known);
        }
    }
    if (text.empty()) return session_on(target).get_kernel(spec);
    // A plan from outside is for one path and some shapes; everything else keeps its own.
    const bool legal = !illegal_reason(spec.normalized(), device_of(target), parse_plan(text));
    return session_on(target).get_kernel(spec, {.plan = legal || !plan.empty() ? text : std::string()});
}

std::string plan_on_path(const Spec& spec, PlanPath path) {
    const std::vector<Plan> plans = path_plans(spec, device_of(Target::gpu), path);
    return plans.empty() ? std::string() : plans.front().text();
}

const Device& device_of(Target target) { return session_on(target).device(); }

}  // namespace flce::test

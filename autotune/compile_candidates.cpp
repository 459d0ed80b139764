#include "autotune/compile_candidates.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>

#include "autotune/search_space.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

/// Plans that a search for such a call asks for first, with launchers; then plans that have the other kernels.
std::vector<Plan> plans_of_search(const TuneOptions& options, const Spec& spec, const Device& device, const PlanRequest& request) {
    std::vector<Plan> plans = seed_plans(spec, device, request, SearchOptions{}.seeds, cublaslt_version());
    const Plan first = plans.front();
    for (const Coordinate& coordinate : coordinates(spec, device, first, options.coordinates)) {
        std::ranges::copy(coordinate.plans, std::back_inserter(plans));
    }
    std::ranges::copy(covering_plans(spec, device, first, options.coordinates), std::back_inserter(plans));
    return plans;
}

std::vector<Json> compile_requests(const TuneOptions& options, const Device& device) {
    // The session chooses plans for `device`, which need not be here; its own device does not matter.
    Session session({.device = "cpu", .scratch_bytes = options.session.scratch_bytes});
    std::vector<Json> requests;
    for (const Spec& spec : options.specs) {
        std::set<std::string> asked;
        for (const std::int64_t num_tokens : tuned_tokens(options)) {
            const PlanRequest request = tuned_request(options, session, spec, device, num_tokens);
            for (const Plan& plan : plans_of_search(options, spec, device, request)) {
                if (asked.insert(plan.text()).second) {
                    requests.push_back(compile_request(spec, device, plan, options.session.cache_dir));
                }
            }
        }
    }
    return requests;
}

}  // namespace

CompiledCandidates compile_candidates(const TuneOptions& options, const WorkerCommand& worker,
                                      const std::function<void(std::size_t done, std::size_t all)>& progress,
                                      const std::function<bool()>& stop) {
    const Device device = resolve_device(options.session.device);
    check_coordinates(options, device.kind);
    const std::vector<Json> requests = compile_requests(options, device);
    CompiledCandidates result{.candidates = requests.size()};
    if (progress) progress(0, requests.size());
    std::size_t done = 0;
    const auto on_done = [&](std::size_t, const Reply& reply) {
        const bool good = reply.kind == Reply::Kind::answer && reply.answer.contains("compiled");
        result.failed += good ? 0 : 1;
        result.compiled += good ? reply.answer["compiled"].get<std::int64_t>() : 0;
        if (progress) progress(++done, requests.size());
    };
    constexpr std::chrono::minutes kPatience{10};
    result.complete = make_compile_pool(worker, kPatience).run(requests, {.done = on_done, .stop = stop});
    return result;
}

}  // namespace flce

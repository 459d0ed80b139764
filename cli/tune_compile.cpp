// flce tune --compile-only: kernels of what a search asks for, in the cache before it does.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "autotune/search.hpp"
#include "autotune/search_space.hpp"
#include "cli/interrupt.hpp"
#include "cli/tune_measure.hpp"
#include "cli/tune_options.hpp"

namespace flce::cli {

namespace {

/// Plans that a search for such a call asks for first, with launchers; then plans that have the other kernels.
std::vector<Plan> plans_of_search(const TuneOptions& options, const Spec& spec, const Device& device, const PlanRequest& request) {
    std::vector<Plan> plans = seed_plans(spec, device, request, SearchOptions{}.seeds);
    const Plan first = plans.front();
    for (const Coordinate& coordinate : coordinates(spec, device, first, options.coordinates)) {
        std::ranges::copy(coordinate.plans, std::back_inserter(plans));
    }
    std::ranges::copy(covering_plans(spec, device, first, options.coordinates), std::back_inserter(plans));
    return plans;
}

std::vector<Json> requests_of(const TuneOptions& options, const Device& device) {
    const SessionOptions given = options.session.options();
    Session session({.device = "cpu", .scratch_bytes = given.scratch_bytes});  // what it chooses for need not be here
    std::vector<Json> requests;
    for (const Spec& spec : specs_of(options)) {
        std::set<std::string> asked;
        for (const std::int64_t num_tokens : tokens_of(options)) {
            const PlanRequest request = plan_request(options, session, spec, device, num_tokens);
            for (const Plan& plan : plans_of_search(options, spec, device, request)) {
                if (asked.insert(plan.text()).second) requests.push_back(compile_request(spec, device, plan, given.cache_dir));
            }
        }
    }
    return requests;
}

}  // namespace

int compile_candidates(const TuneOptions& options) {
    const Device device = resolve_device(options.session.device);
    check_coordinates(options, device.kind);
    const std::vector<Json> requests = requests_of(options, device);
    Progress progress("compile", static_cast<std::int64_t>(requests.size()));
    std::int64_t done = 0;
    std::int64_t compiled = 0;
    std::size_t failed = 0;
    const auto on_done = [&](std::size_t, const Reply& reply) {
        const bool good = reply.kind == Reply::Kind::answer && reply.answer.contains("compiled");
        failed += good ? 0 : 1;
        compiled += good ? reply.answer["compiled"].get<std::int64_t>() : 0;
        progress.update(++done);
    };
    constexpr std::chrono::minutes kPatience{10};
    const bool complete = make_compile_pool(kPatience).run(requests, {.done = on_done, .stop = interrupted});
    progress.finish();
    if (!complete) throw Interrupted();
    if (options.json) {
        print_json({{"candidates", requests.size()}, {"compiled", compiled}, {"failed", failed}});
    } else {
        fmt::print("{} candidates compiled or found, {} failed; {} compiled\n", requests.size() - failed, failed, compiled);
    }
    return failed == 0 ? kDone : kFailedCheck;
}

}  // namespace flce::cli

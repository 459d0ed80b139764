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

int compile_candidates(const TuneOptions& options) {
    const Device device = resolve_device(options.session.device);
    check_coordinates(options, device.kind);
    const SessionOptions session = options.session.options();
    std::vector<Json> requests;
    for (const Spec& spec : specs_of(options)) {
        const PlanRequest request{.scratch_bytes = session.scratch_bytes};
        const std::vector<Plan> seeds = seed_plans(spec, device, request, SearchOptions{}.seeds);
        std::vector<Plan> plans = seeds;
        // What a search asks for first, with launchers; then what has the other kernels.
        for (const Coordinate& coordinate : coordinates(spec, device, seeds.front(), options.coordinates)) {
            std::ranges::copy(coordinate.plans, std::back_inserter(plans));
        }
        std::ranges::copy(covering_plans(spec, device, seeds.front(), options.coordinates), std::back_inserter(plans));
        std::set<std::string> asked;
        for (const Plan& plan : plans) {
            if (asked.insert(plan.text()).second) requests.push_back(compile_request(spec, device, plan, session.cache_dir));
        }
    }
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

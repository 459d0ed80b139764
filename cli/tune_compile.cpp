// flce tune --compile-only: kernels of what a search asks for, in the cache before it does.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

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
        std::vector<Plan> plans = seed_plans(spec, device, request, SearchOptions{}.seeds);
        for (const Coordinate& coordinate : coordinates(spec, device, plans.front(), options.coordinates)) {
            std::ranges::copy(coordinate.plans, std::back_inserter(plans));
        }
        for (const Plan& plan : plans) requests.push_back(compile_request(spec, device, plan, session.cache_dir));
    }
    Progress progress("compile", static_cast<std::int64_t>(requests.size()));
    std::int64_t done = 0;
    std::size_t failed = 0;
    const auto on_done = [&](std::size_t, const Reply& reply) {
        failed += reply.kind != Reply::Kind::answer || reply.answer.contains("error") ? 1 : 0;
        progress.update(++done);
    };
    constexpr std::chrono::minutes kPatience{10};
    const bool complete = make_compile_pool(kPatience).run(requests, {.done = on_done, .stop = interrupted});
    progress.finish();
    if (!complete) throw Interrupted();
    if (options.json) {
        print_json({{"candidates", requests.size()}, {"failed", failed}});
    } else {
        fmt::print("{} candidates compiled or found, {} failed\n", requests.size() - failed, failed);
    }
    return failed == 0 ? kDone : kFailedCheck;
}

}  // namespace flce::cli

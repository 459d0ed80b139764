// The C ABI's flce_prewarm_sets and flce_missing_sets.
#include "flce/flce.h"
#include "flce/prewarm.hpp"
#include "runtime/c_api_call.hpp"
#include "runtime/options_json.hpp"

namespace flce {
namespace {

PrewarmWants wants_of(OptionsReader& given) {
    PrewarmWants wants{.specs = given.specs("specs")};
    for (const std::string& path : given.texts("hf_configs")) wants.hf_configs.emplace_back(path);
    wants.autocast = given.texts("autocast");
    for (const std::string& path : given.texts("manifests")) wants.manifests.emplace_back(path);
    wants.devices = given.texts("devices");
    wants.num_tokens = given.integers("num_tokens");
    wants.workspace_limits = given.integers("workspace_limits");
    wants.scratch_bytes = given.integers("scratch_bytes");
    wants.plan = given.text("plan");
    return wants;
}

PrewarmListener listener_of(const flce_job& job) {
    PrewarmListener listener;
    if (job.progress != nullptr) {
        listener.progress = [job](const PrewarmProgress& at) {
            const Json json{{"sets", at.sets}, {"done", at.done}, {"compiled", at.compiled}, {"hits", at.hits}, {"failed", at.failed}};
            job.progress(job.user, json.dump().c_str());
        };
    }
    if (job.stop != nullptr) listener.stop = [job] { return job.stop(job.user) != 0; };
    return listener;
}

}  // namespace
}  // namespace flce

using namespace flce;  // NOLINT(google-build-using-namespace): the definitions below are C names

flce_status flce_prewarm_sets(const char* options, const flce_job* job) {
    return c_api_call([&] {
        const flce_job known = job_of(job);
        OptionsReader given(options == nullptr ? "{}" : options);
        PrewarmOptions wanted{.wants = wants_of(given), .cache_dir = given.text("cache_dir"), .pack = given.text("pack")};
        wanted.jobs = static_cast<int>(given.integer("jobs"));
        wanted.command = given.text("command");
        given.finish();
        const PrewarmReport report = prewarm(wanted, listener_of(known));
        if (known.report != nullptr) known.report(known.user, report.json().c_str());
    });
}

flce_status flce_missing_sets(const char* options, const flce_job* job) {
    return c_api_call([&] {
        const flce_job known = job_of(job);
        OptionsReader given(options == nullptr ? "{}" : options);
        const PrewarmWants wants = wants_of(given);
        const std::string cache_dir = given.text("cache_dir");
        given.finish();
        const MissingReport report = missing(wants, cache_dir);
        if (known.report != nullptr) known.report(known.user, report.json().c_str());
    });
}

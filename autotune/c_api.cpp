// The C ABI's flce_tune.
#include <algorithm>
#include <iterator>

#include "flce/flce.h"
#include "flce/tune.hpp"
#include "runtime/c_api_call.hpp"
#include "runtime/hf_config.hpp"
#include "runtime/options_json.hpp"

namespace flce {
namespace {

TuneOptions tune_options_of(const char* json) {
    OptionsReader given(json == nullptr ? "{}" : json);
    TuneOptions options{.specs = given.specs("specs")};
    for (Spec& spec : options.specs) spec = spec.normalized();
    for (const std::string& path : given.texts("hf_configs")) {
        for (const Spec& spec : read_hf_config(path)) options.specs.push_back(spec.normalized());
    }
    if (given.flag("all_layers", false)) std::ranges::copy(well_known_layers(), std::back_inserter(options.specs));
    options.num_tokens = given.integers("num_tokens");
    options.session.device = given.text("device");
    options.session.cache_dir = given.text("cache_dir");
    options.session.threads = static_cast<int>(given.integer("threads"));
    options.session.scratch_bytes = given.integer("scratch_bytes", kDefaultScratchBytes);
    options.workspace_limit_bytes = given.integer("workspace_limit_bytes");
    options.retain = given.flag("retain", options.retain);
    for (const std::string& plan : given.texts("plans")) options.plans.push_back(parse_plan(plan));
    options.budget_s = given.number("budget_s", options.budget_s);
    options.candidate_timeout_s = given.number("candidate_timeout_s", options.candidate_timeout_s);
    options.coordinates = given.texts("coordinates");
    options.exhaustive = static_cast<std::size_t>(given.integer("exhaustive"));
    options.records_dir = given.text("records_dir");
    options.commit = given.text("commit");
    options.fresh = given.flag("fresh", false);
    options.command = given.text("command");
    given.finish();
    return options;
}

Json progress_json(const TuneProgress& at) {
    return {{"spec", at.spec},         {"num_tokens", at.num_tokens}, {"elapsed_s", at.elapsed_s},
            {"budget_s", at.budget_s}, {"candidates", at.candidates}, {"best_ms", at.best_ms > 0 ? Json(at.best_ms) : Json(nullptr)}};
}

TuneListener listener_of(const flce_job& job) {
    TuneListener listener;
    if (job.progress != nullptr) {
        listener.progress = [job](const TuneProgress& at) { job.progress(job.user, progress_json(at).dump().c_str()); };
    }
    if (job.warning != nullptr) {
        listener.warning = [job](const std::string& text) { job.warning(job.user, text.c_str()); };
    }
    if (job.stop != nullptr) listener.stop = [job] { return job.stop(job.user) != 0; };
    return listener;
}

}  // namespace
}  // namespace flce

using namespace flce;  // NOLINT(google-build-using-namespace): the definitions below are C names

flce_status flce_tune(const char* options, const flce_job* job) {
    return c_api_call([&] {
        const flce_job known = job_of(job);
        const TuneReport report = tune(tune_options_of(options), listener_of(known));
        if (known.report != nullptr) known.report(known.user, report.json.c_str());
    });
}

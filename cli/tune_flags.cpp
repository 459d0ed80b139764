#include "cli/tune_flags.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "autotune/tune_worker.hpp"
#include "runtime/hf_config.hpp"
#include "runtime/workers/worker_command.hpp"

namespace flce::cli {
namespace {

std::vector<Spec> specs_of(const TuneFlags& flags) {
    std::vector<Spec> specs;
    for (const std::string& text : flags.specs) specs.push_back(read_spec(text).normalized());
    for (const auto& path : flags.hf_configs) {
        for (const Spec& spec : read_hf_config(path)) specs.push_back(spec.normalized());
    }
    if (flags.all_layers) std::ranges::copy(well_known_layers(), std::back_inserter(specs));
    if (specs.empty()) throw UsageError("tune needs at least one --spec or --hf-config, or --all-layers (or --show, --diff, --merge)");
    return specs;
}

std::vector<Plan> plans_of(const TuneFlags& flags) {
    std::vector<Plan> plans;
    for (const std::string& text : flags.plans) plans.push_back(parse_plan(text));
    if (flags.candidates_file.empty()) return plans;
    std::istringstream lines(read_text_file(flags.candidates_file));
    for (std::string line; std::getline(lines, line);) {
        line.erase(line.find_last_not_of(" \t\r") + 1);
        if (!line.empty() && !line.starts_with('#')) plans.push_back(parse_plan(line));
    }
    return plans;
}

}  // namespace

TuneOptions TuneFlags::options() const {
    return {.specs = specs_of(*this),
            .num_tokens = num_tokens,
            .session = session.options(),
            .workspace_limit_bytes = limit.empty() ? 0 : parse_bytes("--workspace-limit", limit),
            .retain = retain == "auto",
            .plans = plans_of(*this),
            .budget_s = budget_s,
            .candidate_timeout_s = candidate_timeout_s,
            .coordinates = coordinates,
            .exhaustive = static_cast<std::size_t>(exhaustive),
            .records_dir = records_dir,
            .commit = commit,
            .fresh = fresh};
}

TunerWorkers TuneFlags::workers() const {
    if (worker.empty()) return {worker_command(kThisProgram, kTuneWorker), always_graphs, always_rates};
    return {{worker.front(), {worker.begin() + 1, worker.end()}}, always_graphs, always_rates};
}

}  // namespace flce::cli

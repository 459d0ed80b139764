#include "cli/tune_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "autotune/search_space.hpp"

namespace flce::cli {

std::vector<Spec> specs_of(const TuneOptions& options) {
    std::vector<Spec> specs;
    for (const std::string& text : options.specs) specs.push_back(read_spec(text).normalized());
    for (const auto& path : options.hf_configs) {
        for (const Spec& spec : read_hf_config(path)) specs.push_back(spec.normalized());
    }
    if (specs.empty()) throw UsageError("tune needs at least one --spec or --hf-config (or --show, --diff, --merge)");
    return specs;
}

std::vector<std::int64_t> tokens_of(const TuneOptions& options) {
    std::vector<std::int64_t> tokens;
    for (const std::int64_t n : options.num_tokens) {
        if (std::ranges::find(tokens, token_bucket(n)) == tokens.end()) tokens.push_back(token_bucket(n));
    }
    if (tokens.empty()) tokens.push_back(kTypicalTokens);
    return tokens;
}

std::int64_t limit_bytes_of(const TuneOptions& options) {
    return options.limit.empty() ? 0 : parse_bytes("--workspace-limit", options.limit);
}

PlanRequest plan_request(const TuneOptions& options, Session& session, const Spec& spec, const Device& device, std::int64_t num_tokens) {
    const std::int64_t limit = limit_bytes_of(options);
    PlanRequest request{.scratch_bytes = options.session.options().scratch_bytes, .num_tokens = num_tokens};
    if (limit == 0) return request;
    if (options.retain == "auto") request.limit_bytes = limit;
    const KernelOptions call{.workspace_limit_bytes = limit, .num_tokens = num_tokens};
    request.scratch_bytes = session.choose_plan(spec, device, call).plan.scratch_bytes;
    return request;
}

void check_coordinates(const TuneOptions& options, DeviceKind kind) {
    const auto names = coordinate_names(kind);
    for (const std::string& name : options.coordinates) {
        if (std::ranges::find(names, name) != names.end()) continue;
        throw UsageError(
            fmt::format("--coordinates: there is no \"{}\"; plans for this device differ in {}", name, fmt::join(names, ", ")));
    }
}

}  // namespace flce::cli

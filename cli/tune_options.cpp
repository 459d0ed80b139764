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

void check_coordinates(const TuneOptions& options, DeviceKind kind) {
    const auto names = coordinate_names(kind);
    for (const std::string& name : options.coordinates) {
        if (std::ranges::find(names, name) != names.end()) continue;
        throw UsageError(
            fmt::format("--coordinates: there is no \"{}\"; plans for this device differ in {}", name, fmt::join(names, ", ")));
    }
}

}  // namespace flce::cli

#include "runtime/hf_config.hpp"

#include <fmt/format.h>

#include "flce/error.hpp"
#include "runtime/text.hpp"

namespace flce {

std::vector<Spec> read_hf_config(const std::filesystem::path& path) {
    try {
        const Spec spec = spec_from_hf_config(read_text_file(path));
        if (!spec.tied) return {spec};
        Spec written = spec;
        written.tied = false;
        written.grad_weight_mode = GradMode::write;
        return {spec, written};
    } catch (const SpecError& error) {
        throw ArgumentError(fmt::format("{}: {}", path.string(), error.what()));
    }
}

}  // namespace flce

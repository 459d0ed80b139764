#include "prewarm/requests.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>

#include "runtime/hf_config.hpp"
#include "runtime/json.hpp"
#include "runtime/session.hpp"
#include "runtime/text.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

constexpr DType kAutocastDtypes[] = {DType::bf16, DType::fp16};

/// parse_spec, to which a file that cannot be read is a mistake of the manifest.
Spec read_spec_text(const std::string& text) {
    try {
        return parse_spec(text);
    } catch (const EnvironmentError& error) {
        throw ArgumentError(error.what());
    }
}

// One product: all specs for all devices, with all limits and numbers of tokens.
struct Product {
    std::vector<Spec> specs;
    std::vector<std::string> devices;
    std::vector<std::int64_t> num_tokens;
    std::vector<std::int64_t> limits;
    std::vector<std::string> autocast;  ///< dtypes that hf_configs' models are computed in instead
};

/// The layer where parameters are fp32 and autocast multiplies in `name`, whatever dtype config.json was saved in.
Spec under_autocast(Spec spec, std::string_view name) {
    const auto* const dtype = std::ranges::find(kAutocastDtypes, name, [](DType known) { return to_string(known); });
    if (dtype == std::end(kAutocastDtypes)) throw ArgumentError(fmt::format("autocast: \"{}\" is not bf16 or fp16", name));
    spec.dtype = *dtype;
    spec.weight_dtype = spec.grad_weight_dtype = DType::fp32;
    return spec.normalized();
}

/// Adds the file's specs, in the file's own dtype without `autocast`.
void add_hf_config(const fs::path& path, const std::vector<std::string>& autocast, std::vector<Spec>& specs) {
    for (const Spec& spec : read_hf_config(path)) {
        if (autocast.empty()) specs.push_back(spec);
        for (const std::string& dtype : autocast) specs.push_back(under_autocast(spec, dtype));
    }
}

class Manifest {
public:
    explicit Manifest(const fs::path& path) : path_(path), root_(parse_json(read_text_file(path))) {
        if (root_.is_discarded()) bad("is not JSON");
        if (!root_.is_object()) bad("is not a JSON object");
        for (const auto& [key, value] : root_.items()) {
            if (key != "specs" && key != "hf_configs" && key != "devices" && key != "num_tokens" && key != "workspace_limits" &&
                key != "autocast") {
                bad(fmt::format("has the key \"{}\"; allowed are specs, hf_configs, autocast, devices, num_tokens, workspace_limits", key));
            }
            if (!value.is_array()) bad(fmt::format("\"{}\" is not a list", key));
        }
    }

    [[nodiscard]] std::vector<fs::path> files() const {
        std::vector<fs::path> files{path_};
        for (const Json& config : list("hf_configs")) files.push_back(beside(text("hf_configs", config)));
        for (const Json& spec : list("specs")) {
            if (spec.is_string() && spec.get<std::string>().starts_with('@')) files.push_back(beside(spec.get<std::string>().substr(1)));
        }
        return files;
    }

    [[nodiscard]] Product product(const Product& flags) const {
        Product product;
        for (const Json& spec : list("specs")) product.specs.push_back(this->spec(spec));
        for (const Json& dtype : list("autocast")) product.autocast.push_back(text("autocast", dtype));
        if (!root_.contains("autocast")) product.autocast = flags.autocast;
        for (const Json& config : list("hf_configs")) add_hf_config(beside(text("hf_configs", config)), product.autocast, product.specs);
        for (const Json& device : list("devices")) product.devices.push_back(text("devices", device));
        for (const Json& tokens : list("num_tokens")) product.num_tokens.push_back(number("num_tokens", tokens));
        for (const Json& limit : list("workspace_limits")) {
            product.limits.push_back(limit.is_string()
                                         ? parse_bytes(fmt::format("{}: workspace_limits", path_.string()), limit.get<std::string>())
                                         : number("workspace_limits", limit));
        }
        if (!root_.contains("devices")) product.devices = flags.devices;
        if (!root_.contains("num_tokens")) product.num_tokens = flags.num_tokens;
        if (!root_.contains("workspace_limits")) product.limits = flags.limits;
        if (product.specs.empty()) bad("names no spec: it needs \"specs\" or \"hf_configs\"");
        if (product.devices.empty()) bad("names no device: it needs \"devices\", or devices beside it");
        return product;
    }

private:
    [[noreturn]] void bad(const std::string& what) const { throw ArgumentError(fmt::format("{}: {}", path_.string(), what)); }
    [[nodiscard]] Json list(const char* key) const { return root_.value(key, Json::array()); }
    [[nodiscard]] fs::path beside(const fs::path& path) const { return path_.parent_path() / path; }

    [[nodiscard]] std::string text(const char* key, const Json& value) const {
        if (!value.is_string()) bad(fmt::format("{} in \"{}\" is not text", value.dump(), key));
        return value.get<std::string>();
    }
    [[nodiscard]] std::int64_t number(const char* key, const Json& value) const {
        if (!value.is_number_integer() || value.get<double>() < 0 || value.get<double>() >= 0x1p63) {
            bad(fmt::format("{} in \"{}\" is not a whole number of 0 or more", value.dump(), key));
        }
        return value.get<std::int64_t>();
    }
    [[nodiscard]] Spec spec(const Json& value) const {
        try {
            if (value.is_object()) return parse_spec_json(value.dump());
            const std::string given = text("specs", value);
            return given.starts_with('@') ? read_spec_text("@" + beside(given.substr(1)).string()) : read_spec_text(given);
        } catch (const SpecError& error) {
            throw SpecError(fmt::format("{}: {}", path_.string(), error.what()));
        }
    }

    fs::path path_;
    Json root_;
};

Product product_of(const PrewarmWants& wants) {
    Product product{.specs = wants.specs,
                    .devices = wants.devices,
                    .num_tokens = wants.num_tokens,
                    .limits = wants.workspace_limits,
                    .autocast = wants.autocast};
    for (const auto& path : wants.hf_configs) add_hf_config(path, product.autocast, product.specs);
    for (const std::int64_t tokens : product.num_tokens) {
        if (tokens < 0) throw ArgumentError(fmt::format("num_tokens is {}; allowed are 0 and more", tokens));
    }
    return product;
}

template <class T>
std::vector<T> or_default(std::vector<T> values) {
    if (values.empty()) values.emplace_back();
    return values;
}

/// Calls from C++ and C without a limit need not say how many tokens they have.
std::vector<std::int64_t> tokens_of(const Product& product, std::int64_t limit) {
    std::vector<std::int64_t> tokens = or_default(product.num_tokens);
    if (limit == 0 && std::ranges::find(tokens, 0) == tokens.end()) tokens.push_back(0);
    return tokens;
}

void add_requests(const Product& product, const PrewarmWants& wants, std::vector<PrewarmRequest>& requests) {
    for (const std::string& name : product.devices) {
        const Device device = resolve_device(name);
        for (const Spec& spec : product.specs) {
            for (const std::int64_t scratch_bytes : or_default(wants.scratch_bytes)) {
                for (const std::int64_t limit : or_default(product.limits)) {
                    for (const std::int64_t tokens : tokens_of(product, limit)) {
                        requests.push_back(
                            {spec,
                             name,
                             device,
                             {.plan = wants.plan, .scratch_bytes = scratch_bytes, .workspace_limit_bytes = limit, .num_tokens = tokens},
                             product.num_tokens.empty()});
                    }
                }
            }
        }
    }
}

}  // namespace

std::vector<PrewarmRequest> prewarm_requests(const PrewarmWants& wants) {
    const Product own = product_of(wants);
    std::vector<PrewarmRequest> requests;
    if (!own.specs.empty()) {
        if (own.devices.empty()) throw ArgumentError("prewarm needs at least one device");
        add_requests(own, wants, requests);
    }
    for (const fs::path& path : wants.manifests) add_requests(Manifest(path).product(own), wants, requests);
    if (requests.empty()) throw ArgumentError("prewarm needs at least one spec, hf_config or manifest");
    return requests;
}

std::vector<fs::path> manifest_files(const fs::path& manifest) { return Manifest(manifest).files(); }

std::vector<PrewarmItem> prewarm_items(Session& session, const std::vector<PrewarmRequest>& requests) {
    std::vector<PrewarmItem> items;
    std::set<std::tuple<std::string, std::string, std::string>> seen;
    for (const PrewarmRequest& request : requests) {
        const Spec spec = request.spec.normalized();
        const auto plans = request.any_tokens ? SessionAccess::plans_for_any_tokens(session, spec, request.device, request.options)
                                              : std::vector{SessionAccess::plan(session, spec, request.device, request.options)};
        for (const Plan& plan : plans) {
            if (!seen.emplace(spec.text(), request.device.json(), plan.text()).second) continue;
            items.push_back({spec, request.device_name, request.device, plan.text()});
        }
    }
    return items;
}

}  // namespace flce

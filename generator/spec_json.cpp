#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "flce/error.hpp"
#include "flce/spec.hpp"
#include "generator/json_object.hpp"
#include "generator/spec_keys.hpp"

namespace flce {
namespace {

using nlohmann::json;

/// The value of a JSON key as the text form would write it; the JSON type has to be the key's own.
std::string entry_value(const std::string& key, const json& value) {
    auto refuse = [&](std::string_view allowed) { throw SpecError(fmt::format("spec: {} = {}: must be {}", key, value.dump(), allowed)); };
    switch (spec_key_kind(key)) {
        case SpecKeyKind::integer:
            if (!value.is_number_integer()) refuse("an integer");
            break;
        case SpecKeyKind::real:
            if (!value.is_number()) refuse("a number");
            break;
        case SpecKeyKind::flag:
            if (!value.is_boolean()) refuse("true or false");
            break;
        case SpecKeyKind::word:
            if (!value.is_string()) refuse("a string");
            return value.get<std::string>();
        case SpecKeyKind::words: {
            std::string joined;
            if (value.is_string()) return value.get<std::string>();
            if (!value.is_array()) refuse("an array of strings");
            for (const json& item : value) {
                if (!item.is_string()) refuse("an array of strings");
                joined += (joined.empty() ? "" : "+") + item.get<std::string>();
            }
            return joined;
        }
    }
    return value.dump();
}

/// Looks keys up where Hugging Face keeps them: in text_config of a multimodal model first, then at the top.
class HfConfig {
public:
    explicit HfConfig(const json& config) : config_(config), text_(config) {
        if (const auto nested = config.find("text_config"); nested != config.end() && nested->is_object()) text_ = *nested;
    }

    /// The first of `names` that is there and not null, else nullptr.
    [[nodiscard]] const json* find(std::initializer_list<std::string_view> names) const {
        for (const json* level : {&text_, &config_}) {
            for (const std::string_view name : names) {
                const auto found = level->find(name);
                if (found != level->end() && !found->is_null()) return &*found;
            }
        }
        return nullptr;
    }

    [[nodiscard]] std::int64_t size(std::initializer_list<std::string_view> names) const {
        const json* value = find(names);
        const std::string_view name = *names.begin();
        if (value == nullptr) throw SpecError(fmt::format("config: {} is missing (also looked for in text_config)", name));
        if (!value->is_number_integer()) throw SpecError(fmt::format("config: {} = {}: must be an integer", name, value->dump()));
        if (value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
            throw SpecError(fmt::format("config: {} = {}: must fit in 64 bits", name, value->dump()));
        }
        return value->get<std::int64_t>();
    }

    [[nodiscard]] double number(std::string_view name, double absent) const {
        const json* value = find({name});
        if (value == nullptr) return absent;
        if (!value->is_number()) throw SpecError(fmt::format("config: {} = {}: must be a number", name, value->dump()));
        return value->get<double>();
    }

    [[nodiscard]] bool flag(std::string_view name, bool absent) const {
        const json* value = find({name});
        if (value == nullptr) return absent;
        if (!value->is_boolean()) throw SpecError(fmt::format("config: {} = {}: must be true or false", name, value->dump()));
        return value->get<bool>();
    }

    [[nodiscard]] std::string model_type() const {
        const json* value = find({"model_type"});
        return value != nullptr && value->is_string() ? value->get<std::string>() : "";
    }

private:
    const json& config_;
    json text_;
};

DType hf_dtype(const HfConfig& config) {
    const json* value = config.find({"dtype", "torch_dtype"});
    if (value == nullptr) return DType::fp32;  // what Hugging Face means by no dtype
    if (const auto dtype = parse_dtype(value->is_string() ? value->get<std::string>() : "")) return *dtype;
    throw SpecError(fmt::format("config: dtype = {}: must be bfloat16, float16 or float32", value->dump()));
}

/// Models that scale their logits do so under different names; Granite's is a divisor.
double hf_logit_scale(const HfConfig& config) {
    const double divisor = config.number("logits_scaling", 1.0);
    if (divisor == 0.0) throw SpecError("config: logits_scaling = 0: must not be 0 (logits are divided by it)");
    return config.number("logit_scale", 1.0) * config.number("lm_head_multiplier", 1.0) / divisor;
}

/// Model types whose output layer has a bias, which no key of their configuration says.
bool hf_bias(const HfConfig& config) {
    const std::string type = config.model_type();
    return type == "phi" || type == "gptj" || type == "codegen";
}

}  // namespace

std::string Spec::json() const {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (const SpecEntry& entry : spec_entries(*this)) {
        const std::string key(entry.key);
        const char* const end = entry.value.data() + entry.value.size();
        switch (entry.kind) {
            case SpecKeyKind::flag: object[key] = true; break;
            case SpecKeyKind::word: object[key] = entry.value; break;
            case SpecKeyKind::integer: {
                std::int64_t number = 0;
                std::from_chars(entry.value.data(), end, number);
                object[key] = number;
                break;
            }
            case SpecKeyKind::real: {
                double number = 0;
                std::from_chars(entry.value.data(), end, number);
                object[key] = number;
                break;
            }
            case SpecKeyKind::words: {
                auto names = nlohmann::ordered_json::array();
                for (std::size_t at = 0; at <= entry.value.size();) {
                    const std::size_t plus = std::min(entry.value.find('+', at), entry.value.size());
                    if (plus > at) names.push_back(entry.value.substr(at, plus - at));
                    at = plus + 1;
                }
                object[key] = names;
                break;
            }
        }
    }
    return object.dump();
}

Spec parse_spec_json(std::string_view text) {
    const json object = parse_json_object<SpecError>(text, "spec");
    SpecBuilder builder;
    for (const auto& [key, value] : object.items()) builder.set(key, entry_value(key, value));
    return builder.finish();
}

Spec spec_from_hf_config(std::string_view text) {
    const json object = parse_json_object<SpecError>(text, "config");
    const HfConfig config(object);
    Spec spec;
    spec.hidden_size = config.size({"hidden_size", "n_embd", "d_model"});
    spec.vocab_size = config.size({"vocab_size"});
    spec.dtype = hf_dtype(config);
    spec.grad_weight_dtype = spec.dtype;
    spec.tied = config.flag("tie_word_embeddings", true);  // Hugging Face's default
    spec.grad_weight_mode = spec.tied ? GradMode::accumulate : GradMode::write;
    spec.logit_scale = hf_logit_scale(config);
    spec.softcap = config.number("final_logit_softcapping", 0.0);
    spec.bias = hf_bias(config);
    return spec.normalized();
}

}  // namespace flce

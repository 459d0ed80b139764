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
            if (value.is_boolean() && value.get<bool>() && !bare_value(key).empty()) return std::string(bare_value(key));
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

}  // namespace flce

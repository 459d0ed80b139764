#include "runtime/options_json.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "flce/error.hpp"

namespace flce {
namespace {

[[noreturn]] void refuse(const std::string& key, const Json& value, const char* allowed) {
    throw ArgumentError(
        fmt::format("\"{}\" is {}; it must be {}", key, value.dump(-1, ' ', false, Json::error_handler_t::replace), allowed));
}

std::int64_t integer_of(const std::string& key, const Json& value) {
    if (!value.is_number_integer()) refuse(key, value, "a whole number");
    return value.get<std::int64_t>();
}

std::string text_of(const std::string& key, const Json& value) {
    if (!value.is_string()) refuse(key, value, "text");
    return value.get<std::string>();
}

}  // namespace

OptionsReader::OptionsReader(std::string_view json) : root_(parse_json(json)) {
    if (!root_.is_object()) throw ArgumentError("options are not a JSON object");
}

const Json* OptionsReader::find(const std::string& key) {
    read_.insert(key);
    const auto found = root_.find(key);
    return found == root_.end() || found->is_null() ? nullptr : &*found;
}

const Json& OptionsReader::list(const std::string& key) {
    static const Json empty = Json::array();
    const Json* const value = find(key);
    if (value == nullptr) return empty;
    if (!value->is_array()) refuse(key, *value, "a list");
    return *value;
}

std::string OptionsReader::text(const std::string& key) {
    const Json* const value = find(key);
    return value == nullptr ? std::string() : text_of(key, *value);
}

std::int64_t OptionsReader::integer(const std::string& key, std::int64_t fallback) {
    const Json* const value = find(key);
    return value == nullptr ? fallback : integer_of(key, *value);
}

double OptionsReader::number(const std::string& key, double fallback) {
    const Json* const value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_number()) refuse(key, *value, "a number");
    return value->get<double>();
}

bool OptionsReader::flag(const std::string& key, bool fallback) {
    const Json* const value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
}

std::vector<std::string> OptionsReader::texts(const std::string& key) {
    std::vector<std::string> values;
    for (const Json& value : list(key)) values.push_back(text_of(key, value));
    return values;
}

std::vector<std::int64_t> OptionsReader::integers(const std::string& key) {
    std::vector<std::int64_t> values;
    for (const Json& value : list(key)) values.push_back(integer_of(key, value));
    return values;
}

std::vector<Spec> OptionsReader::specs(const std::string& key) {
    std::vector<Spec> specs;
    for (const Json& value : list(key)) {
        specs.push_back(value.is_object() ? parse_spec_json(value.dump()) : parse_spec(text_of(key, value)));
    }
    return specs;
}

void OptionsReader::finish() const {
    for (const auto& [key, value] : root_.items()) {
        if (!read_.contains(key))
            throw ArgumentError(fmt::format("there is no option \"{}\"; options are {}", key, fmt::join(read_, ", ")));
    }
}

}  // namespace flce

#include "generator/json_object.hpp"

#include <fmt/format.h>

#include <set>
#include <vector>

namespace flce {

std::string read_json_object(std::string_view text, nlohmann::json& object) {
    using nlohmann::json;
    // The library keeps the last of repeated keys without a word.
    std::vector<std::set<std::string>> seen;
    std::string repeated;
    auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
        const auto level = static_cast<std::size_t>(depth);
        if (event == json::parse_event_t::object_start) {
            seen.resize(level + 1);
            seen[level].clear();
        } else if (event == json::parse_event_t::key && repeated.empty() && !seen[level - 1].insert(parsed.get<std::string>()).second) {
            repeated = parsed.get<std::string>();
        }
        return true;
    };
    try {
        object = json::parse(text, watch);
    } catch (const json::exception& error) {
        return fmt::format("not valid JSON: {}", error.what());
    }
    if (!object.is_object()) return fmt::format("must be a JSON object, not {}", object.type_name());
    if (!repeated.empty()) return fmt::format("key '{}' is given twice; each key may be given once", repeated);
    return "";
}

}  // namespace flce

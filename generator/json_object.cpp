#include "generator/json_object.hpp"

#include <fmt/format.h>

#include <set>
#include <vector>

namespace flce {
namespace {

/// Readers of these objects nest a few levels. The library copies and prints values by recursion, for which deep values would take the
/// stack.
constexpr std::size_t kMostLevels = 32;

}  // namespace

std::string read_json_object(std::string_view text, nlohmann::json& object) {
    using nlohmann::json;
    // The library keeps the last of repeated keys without a word.
    std::vector<std::set<std::string>> seen;
    std::string repeated;
    bool too_deep = false;
    auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
        const auto level = static_cast<std::size_t>(depth);
        too_deep = too_deep || level > kMostLevels;
        if (too_deep) return false;  // refused input takes no memory
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
    if (too_deep) return fmt::format("nested more than {} levels deep", kMostLevels);
    if (!object.is_object()) return fmt::format("must be a JSON object, not {}", object.type_name());
    if (!repeated.empty()) return fmt::format("key '{}' is given twice; each key may be given once", repeated);
    return "";
}

}  // namespace flce

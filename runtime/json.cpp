#include "runtime/json.hpp"

namespace flce {

Json parse_json(std::string_view text) {
    constexpr int kMostLevels = 32;
    return Json::parse(text, [](int depth, Json::parse_event_t, Json&) { return depth <= kMostLevels; }, false);
}

}  // namespace flce

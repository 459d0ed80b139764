// JSON as the library's parts exchange and print it.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace flce {

using Json = nlohmann::ordered_json;

/// JSON of any origin, without values nested more than 32 levels deep: values are copied and printed by recursion. A discarded value where
/// the text is not JSON.
[[nodiscard]] Json parse_json(std::string_view text);

}  // namespace flce

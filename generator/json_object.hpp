// JSON text that has to be an object without repeated keys.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace flce {

/// Reads `text` into `object`. Returns an empty string, or the fault of `text`.
[[nodiscard]] std::string read_json_object(std::string_view text, nlohmann::json& object);

/// Throws ErrorType naming `what` and its fault.
template <class ErrorType>
[[nodiscard]] nlohmann::json parse_json_object(std::string_view text, std::string_view what) {
    nlohmann::json object;
    const std::string problem = read_json_object(text, object);
    if (!problem.empty()) throw ErrorType(std::string(what) + ": " + problem);
    return object;
}

}  // namespace flce

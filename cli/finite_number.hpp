// A check for options that are numbers: CLI11's own ranges let NaN through, which is on neither side of a bound.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <string>

namespace flce::cli {

[[nodiscard]] inline CLI::Validator finite_number() {
    return CLI::Validator(
        [](std::string& text) {
            double value = 0;
            return CLI::detail::lexical_cast(text, value) && std::isfinite(value) ? "" : text + " is not a finite number";
        },
        "");
}

}  // namespace flce::cli

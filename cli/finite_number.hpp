// Checks for options that are numbers: CLI11's own ranges let NaN through, which is on neither side of a bound, and it reads -1 as the
// greatest unsigned number.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <system_error>

namespace flce::cli {

[[nodiscard]] inline CLI::Validator finite_number() {
    return CLI::Validator(
        [](std::string& text) {
            double value = 0;
            return CLI::detail::lexical_cast(text, value) && std::isfinite(value) ? "" : text + " is not a finite number";
        },
        "");
}

/// Checks for an unsigned number of 64 bits.
[[nodiscard]] inline CLI::Validator unsigned_number() {
    return CLI::Validator(
        [](std::string& text) {
            std::uint64_t value = 0;
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
            const bool whole = error == std::errc() && end == text.data() + text.size();
            return whole ? "" : text + " is not a whole number from 0 to 18446744073709551615";
        },
        "");
}

}  // namespace flce::cli

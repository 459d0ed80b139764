#include "runtime/text.hpp"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>
#include <system_error>

#include "flce/error.hpp"

namespace flce {

std::int64_t parse_bytes(std::string_view option, std::string_view text) {
    const auto bad = [&] {
        return ArgumentError(fmt::format("{}: \"{}\" is not a number of bytes (examples: 1048576, 64M, 2G)", option, text));
    };
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || !(value >= 0)) throw bad();
    std::string_view suffix = text.substr(static_cast<std::size_t>(end - text.data()));
    double factor = 1;
    if (!suffix.empty()) {
        constexpr std::string_view kUnits = "KMGT";
        const std::size_t unit = kUnits.find(static_cast<char>(std::toupper(static_cast<unsigned char>(suffix.front()))));
        if (unit != std::string_view::npos) {
            factor = std::ldexp(1.0, 10 * (static_cast<int>(unit) + 1));
            suffix.remove_prefix(1);
        }
        if (!suffix.empty() && suffix != "B" && suffix != "iB") throw bad();
    }
    if (value * factor >= 0x1p63) throw bad();
    return static_cast<std::int64_t>(value * factor);
}

std::string human_bytes(double bytes) {
    constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (std::abs(bytes) >= 1024 && unit < 4) {
        bytes /= 1024;
        ++unit;
    }
    return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string human_seconds(double seconds) {
    if (seconds < 1e-6) return fmt::format("{:.0f} ns", seconds * 1e9);
    if (seconds < 1e-3) return fmt::format("{:.3g} µs", seconds * 1e6);
    if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
    return fmt::format("{:.2f} s", seconds);
}

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

std::string read_text_file(const std::filesystem::path& path) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) throw ArgumentError(fmt::format("{}: is a directory", path.string()));
    std::ifstream file(path, std::ios::binary);
    if (!file) throw ArgumentError(fmt::format("{}: cannot be opened", path.string()));
    std::ostringstream text;
    text << file.rdbuf();
    if (file.bad()) throw ArgumentError(fmt::format("{}: cannot be read", path.string()));
    return std::move(text).str();
}

}  // namespace flce

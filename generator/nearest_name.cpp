#include "generator/nearest_name.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <vector>

namespace flce {
namespace {

constexpr std::size_t kLongest = 64;  // longer texts are not names

std::string letters_and_digits(std::string_view name) {
    std::string result;
    for (const char c : name.substr(0, kLongest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (std::isalnum(byte) != 0) result += static_cast<char>(std::tolower(byte));
    }
    return result;
}

/// Damerau and Levenshtein's distance: letters changed, left out, put in, and neighbours exchanged.
std::size_t distance(const std::string& a, const std::string& b) {
    std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
    for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
    for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
    for (std::size_t i = 1; i <= a.size(); ++i) {
        for (std::size_t j = 1; j <= b.size(); ++j) {
            const std::size_t changed = a[i - 1] == b[j - 1] ? 0 : 1;
            d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + changed});
            const bool exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (exchanged) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
        }
    }
    return d[a.size()][b.size()];
}

}  // namespace

std::string nearest_name(std::string_view asked, std::span<const std::string> names) {
    const std::string wanted = letters_and_digits(asked);
    if (wanted.empty()) return {};
    std::string best;
    std::size_t least = kLongest;
    for (const std::string& name : names) {
        const std::string known = letters_and_digits(name);
        std::size_t off = distance(wanted, known);
        if (off > std::max(wanted.size(), known.size()) / 3) {
            if (wanted.size() < 3 || known.find(wanted) == std::string::npos) continue;
            off = kLongest - 1;  // after everything that is spelled nearly so
        }
        if (off >= least) continue;
        least = off;
        best = name;
    }
    return best;
}

std::string suggestion(std::string_view asked, std::span<const std::string> names) {
    const std::string nearest = nearest_name(asked, names);
    return nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest);
}

}  // namespace flce

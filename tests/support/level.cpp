#include "tests/support/level.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flce::test {

Level level() {
    static const Level chosen = [] {
        const char* value = std::getenv("FLCE_TEST_LEVEL");
        const std::string_view name = value != nullptr && *value != '\0' ? value : "full";
        if (name == "quick") return Level::quick;
        if (name == "full") return Level::full;
        if (name == "nightly") return Level::nightly;
        throw std::invalid_argument("FLCE_TEST_LEVEL is " + std::string(name) + ": quick, full or nightly");
    }();
    return chosen;
}

const char* level_reason(Level from) {
    if (level() >= from) return "";
    return from == Level::full ? "from full on: FLCE_TEST_LEVEL=full" : "from nightly on: FLCE_TEST_LEVEL=nightly";
}

}  // namespace flce::test

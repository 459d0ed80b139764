// How much of a suite runs: FLCE_TEST_LEVEL is quick (make test), full (.ci/run, and a binary run by hand) or nightly. Each level has the
// cases of the ones before it.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

namespace flce::test {

enum class Level : std::uint8_t { quick, full, nightly };

/// The level of this run.
[[nodiscard]] Level level();

/// Why a case of `from` does not run at this level; empty where it does.
[[nodiscard]] const char* level_reason(Level from);

/// Whether combination `index` of a matrix meets shape (or option) number `turn` in quick: every `every`-th does, others the next shape.
[[nodiscard]] constexpr bool is_turn(std::size_t index, std::size_t every, std::size_t turn) { return (index + turn) % every == 0; }

/// Whether it does in this run: in full every second shape too, in nightly all of them.
[[nodiscard]] inline bool has_turn(std::size_t index, std::size_t every, std::size_t turn) {
    return level() == Level::nightly || is_turn(index, every, turn) || (level() == Level::full && is_turn(index, 2, turn));
}

}  // namespace flce::test

/// First line of a test that runs from a level on: FLCE_FROM_LEVEL(Level::full), or what a parameter says.
#define FLCE_FROM_LEVEL(from)                                                               \
    if (const char* flce_reason = ::flce::test::level_reason(from); *flce_reason != '\0') { \
        GTEST_SKIP() << flce_reason;                                                        \
    }

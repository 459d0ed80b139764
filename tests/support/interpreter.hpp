// Interpreter of launch programs: launches and memsets of one call, one after another, without a device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "generator/launch_program.hpp"

namespace flce::test {

/// A tensor map with the values that its fields have in one call.
struct InterpretedMap {
    std::uint32_t offset = 0;
    std::uint32_t box_rows = 0;
    std::uint32_t element_bytes = 0;
    std::int64_t address = 0;
    std::int64_t columns = 0;
    std::int64_t rows = 0;
    std::int64_t row_bytes = 0;
    std::int64_t blocks = 0;
    std::int64_t block_bytes = 0;
    friend bool operator==(const InterpretedMap&, const InterpretedMap&) = default;
};
/// A launch with the values that its fields have in one call.
struct InterpretedLaunch {
    int kernel = 0;
    std::array<std::int64_t, 3> grid{};
    std::vector<std::byte> params;  ///< zeros where the maps go
    std::vector<InterpretedMap> maps;
};

/// A product by the library with the values that its fields have in one call.
struct InterpretedGemm {
    GemmKind kind;
    std::int64_t m = 0;
    std::int64_t n = 0;
    std::int64_t k = 0;
    std::int64_t a = 0;
    std::int64_t lda = 0;
    std::int64_t b = 0;
    std::int64_t ldb = 0;
    std::int64_t result = 0;
    std::int64_t ld = 0;
    bool adds = false;
    std::int64_t factors = 0;
    std::int64_t workspace = 0;
};

/// Calls `on_launch` for every launch (grid, parameter block) and `on_memset` for every memset, in order, leaving out empty ones: the
/// reference meaning of a program. `on_gemm`: for every product by the library; without it, InternalError where there is one.
void interpret(const LaunchProgram& program, const CallSlots& slots, const std::function<void(const InterpretedLaunch&)>& on_launch,
               const std::function<void(std::int64_t address, std::int64_t bytes)>& on_memset,
               const std::function<void(const InterpretedGemm&)>& on_gemm = {});

}  // namespace flce::test

// The launches of a pass as the interpreter of launch programs makes them, kept for a test to look at.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "generator/call_slots.hpp"
#include "generator/cuda_program.hpp"
#include "tests/support/interpreter.hpp"

namespace flce::test {

/// A launch, and the kernel that it is of.
struct Recorded {
    std::string kernel;
    InterpretedLaunch launch;
    template <class Params>
    [[nodiscard]] Params params() const {
        Params p;
        EXPECT_GE(launch.params.size(), sizeof(Params));  // a path's own struct extends the common one
        std::memcpy(&p, launch.params.data(), sizeof p);
        return p;
    }
};

/// What a pass launches, in order, and what it sets to 0: bytes by address.
struct Launched {
    std::vector<Recorded> launches;
    std::map<std::int64_t, std::int64_t> memsets;
    [[nodiscard]] auto begin() const { return launches.begin(); }
    [[nodiscard]] auto end() const { return launches.end(); }
    [[nodiscard]] int count(const std::string& kernel) const {
        int n = 0;
        for (const Recorded& r : launches) n += r.kernel == "flce_" + kernel ? 1 : 0;
        return n;
    }
};

inline Launched run(const CudaProgram& program, const LaunchProgram& pass, const CallSlots& slots) {
    Launched result;
    interpret(
        pass, slots,
        [&](const InterpretedLaunch& launch) {
            result.launches.push_back({program.kernels[static_cast<std::size_t>(launch.kernel)].name, launch});
        },
        [&](std::int64_t at, std::int64_t bytes) { result.memsets[at] += bytes; });
    return result;
}

}  // namespace flce::test

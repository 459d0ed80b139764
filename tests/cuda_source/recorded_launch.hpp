// The launches of a pass as the interpreter of launch programs makes them, kept for a test to look at.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
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

/// Launches of a pass, in order, and memory that it sets to 0: bytes by address.
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

/// A call with a made-up address, far from all others, for every tensor but `absent`.
inline CallSlots made_up_call(std::int64_t num_tokens, std::initializer_list<Slot> absent) {
    constexpr std::int64_t kStep = std::int64_t{1} << 44;
    CallSlots slots{};
    const auto set = [&](Slot slot, std::int64_t value) { slots[static_cast<std::size_t>(slot)] = value; };
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(Slot::num_tokens); ++i) set(static_cast<Slot>(i), (i + 1) * kStep);
    for (const Slot slot : {Slot::num_valid, Slot::grad_entropy, Slot::retained, Slot::retained_bytes, Slot::retained_in_grad_weight}) {
        set(slot, 0);
    }
    for (const Slot slot : absent) set(slot, 0);
    set(Slot::workspace, 100 * kStep);
    set(Slot::num_tokens, num_tokens);
    set(Slot::target_bits, 64);
    set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::mean));
    return slots;
}

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

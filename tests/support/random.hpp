// Random numbers by counter: element i of a stream does not depend on the others, so streams fill in parallel and stay the same for ever.
#pragma once

#include <cstdint>

namespace flce::test {

struct Stream {
    std::uint64_t key = 0;

    /// SplitMix64 over key and index.
    [[nodiscard]] std::uint64_t bits(std::uint64_t index) const {
        std::uint64_t x = key * 0xd1342543de82ef95ULL + index * 0x9e3779b97f4a7c15ULL + 0x632be59bd9b4e019ULL;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
        return x ^ (x >> 31);
    }
    /// A number in [0, 1).
    [[nodiscard]] double uniform(std::uint64_t index) const { return static_cast<double>(bits(index) >> 11) * 0x1p-53; }
    /// A number in [0, count).
    [[nodiscard]] std::int64_t below(std::uint64_t index, std::int64_t count) const {
        return static_cast<std::int64_t>(uniform(index) * static_cast<double>(count));
    }
    /// Mean 0, variance 1, nearly normal: the sum of four uniform numbers.
    [[nodiscard]] float normal(std::uint64_t index) const {
        const std::uint64_t b = bits(index);
        const auto sum = static_cast<std::int64_t>((b & 0xffffU) + ((b >> 16) & 0xffffU) + ((b >> 32) & 0xffffU) + (b >> 48)) - 131070;
        return static_cast<float>(sum) * (1.7320508F / 65536.0F);
    }
};

}  // namespace flce::test

#include <algorithm>
#include <array>

#include "flce/plan.hpp"

namespace flce {
namespace {

constexpr std::array<std::int64_t, 9> kBuckets = {64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536};

}  // namespace

std::span<const std::int64_t> token_buckets() noexcept { return kBuckets; }

std::int64_t token_bucket(std::int64_t num_tokens) noexcept {
    if (num_tokens <= 0) return kTypicalTokens;
    const auto next = std::ranges::lower_bound(kBuckets, num_tokens);
    if (next == kBuckets.begin()) return kBuckets.front();
    if (next == kBuckets.end()) return kBuckets.back();
    // Below the geometric mean of its neighbours, or on it, the smaller one is nearer.
    const std::int64_t below = *(next - 1);
    return num_tokens * num_tokens <= below * *next ? below : *next;
}

}  // namespace flce

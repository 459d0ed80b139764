#include "runtime/scratch_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "flce/error.hpp"
#include "flce/plan.hpp"
#include "generator/planner.hpp"

namespace flce {

std::int64_t most_useful_scratch(std::int64_t num_tokens) {
    constexpr std::int64_t kOfAny = 256LL << 20;
    constexpr std::int64_t kOfToken = 4096 * 2;  // columns of two bytes
    return std::max(kOfAny, kOfToken * token_bucket(num_tokens));
}

std::int64_t round_down_to_step(std::int64_t bytes) {
    const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(bytes)));
    return bytes - power >= power / 2 ? power + power / 2 : power;
}

std::int64_t round_up_to_step(std::int64_t bytes) {
    const std::int64_t below = round_down_to_step(bytes);
    if (below == bytes) return bytes;
    const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(bytes)));
    return below == power && power > 1 ? power + power / 2 : 2 * power;
}

std::optional<std::int64_t> smallest_limit_bytes(const Spec& spec, const Device& device, std::int64_t num_tokens) {
    const auto scratch = smallest_scratch_bytes(spec, device);
    const auto of_tokens = workspace_of_tokens(spec, num_tokens);
    if (!scratch || !of_tokens) return std::nullopt;
    std::int64_t limit = 0;
    if (__builtin_add_overflow(*of_tokens, round_up_to_step(*scratch), &limit)) return std::nullopt;
    return limit;
}

std::string limit_too_small(std::int64_t workspace_limit_bytes, std::int64_t smallest_bytes, std::string_view what) {
    return fmt::format(
        "the workspace limit of {} bytes (workspace_limit_bytes, --workspace-limit) is too small for {}: the smallest that works is {}",
        workspace_limit_bytes, what, smallest_bytes);
}

std::int64_t scratch_room(const Spec& spec, std::int64_t workspace_limit_bytes, std::int64_t num_tokens) {
    if (workspace_limit_bytes < 0)
        throw PlanError(fmt::format("workspace_limit_bytes is {}; it must be positive, or 0 for none", workspace_limit_bytes));
    if (num_tokens < 0) throw ArgumentError(fmt::format("num_tokens is {}; it must be 0 or more", num_tokens));
    const auto of_tokens = workspace_of_tokens(spec, num_tokens);
    if (!of_tokens) {
        throw ArgumentError(fmt::format("num_tokens is {}; {} of them overflow 64-bit sizes", num_tokens, spec.hidden_size));
    }
    if (workspace_limit_bytes <= *of_tokens) {
        throw PlanError(fmt::format("workspace_limit_bytes is {}; {} tokens take {} bytes for the sum of grad_hidden alone, and scratch",
                                    workspace_limit_bytes, num_tokens, *of_tokens));
    }
    return workspace_limit_bytes - *of_tokens;
}

std::vector<std::int64_t> representative_tokens(const Spec& spec, std::int64_t workspace_limit_bytes, std::int64_t scratch_bytes) {
    std::vector<std::int64_t> tokens{0, 1};
    const auto buckets = token_buckets();
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        tokens.push_back(buckets[i]);
        if (i + 1 == buckets.size()) break;
        // Number of tokens at which one bucket ends and the next begins.
        const auto boundary = static_cast<std::int64_t>(std::sqrt(static_cast<double>(buckets[i]) * static_cast<double>(buckets[i + 1])));
        for (const std::int64_t near : {boundary - 1, boundary, boundary + 1}) tokens.push_back(near);
    }
    if (workspace_limit_bytes > 0 && spec.dtype != DType::fp32) {
        // Room shrinks with every token; the last number of tokens that leaves a step whole, and the first that does not.
        const auto add = [&](std::int64_t step) {
            if (step > workspace_limit_bytes) return;
            const std::int64_t last = tokens_with_workspace(spec, workspace_limit_bytes - step);
            tokens.push_back(last);
            if (workspace_of_tokens(spec, last + 1)) tokens.push_back(last + 1);  // a possible number of tokens
        };
        const std::int64_t most = std::max(scratch_bytes, most_useful_scratch(buckets.back()));
        for (std::int64_t step = round_down_to_step(std::min(most, workspace_limit_bytes)); step > 1; step = round_down_to_step(step - 1))
            add(step);
        add(scratch_bytes);
    }
    std::ranges::sort(tokens);
    tokens.erase(std::ranges::unique(tokens).begin(), tokens.end());
    return tokens;
}

}  // namespace flce

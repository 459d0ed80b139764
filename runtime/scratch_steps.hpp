// Limits on memory in steps, so that limits that differ a little share kernels.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"
#include "flce/spec.hpp"

namespace flce {

/// Scratch beyond which wider chunks gain nothing: a sum of grad_hidden is gone through once a chunk, whose columns become fewer where
/// tokens are many.
[[nodiscard]] std::int64_t most_useful_scratch(std::int64_t num_tokens);
inline constexpr std::int64_t kAllMemory = std::int64_t{1} << 40;  ///< limit for as much memory as there is a use for

/// The largest of 1, 1½, 2, 3, 4, 6, … that is no more than `bytes`, which is positive.
[[nodiscard]] std::int64_t round_down_to_step(std::int64_t bytes);

/// The smallest of these steps that is no less than `bytes`, which is positive.
[[nodiscard]] std::int64_t round_up_to_step(std::int64_t bytes);

/// Scratch under a limit on everything beyond inputs and gradients: workspace_of_tokens takes some of the limit. Throws PlanError where
/// nothing is left, ArgumentError for a bad num_tokens.
[[nodiscard]] std::int64_t scratch_room(const Spec& spec, std::int64_t workspace_limit_bytes, std::int64_t num_tokens);

/// The smallest workspace_limit_bytes with which a call over num_tokens tokens has a plan of the planner's; absent where no limit is
/// enough, or where sizes overflow.
[[nodiscard]] std::optional<std::int64_t> smallest_limit_bytes(const Spec& spec, const Device& device, std::int64_t num_tokens);
/// One sentence for people: the limit is too small, and how much is enough.
[[nodiscard]] std::string limit_too_small(std::int64_t workspace_limit_bytes, std::int64_t smallest_bytes, std::string_view what);

/// Numbers of tokens that stand for all: every other has the token bucket of one of them, and with a limit (0: none) the step of its room
/// too, where that is not beyond both `scratch_bytes` and most_useful_scratch. Ascending, from 0, which stands for "not known".
[[nodiscard]] std::vector<std::int64_t> representative_tokens(const Spec& spec, std::int64_t workspace_limit_bytes,
                                                              std::int64_t scratch_bytes);

}  // namespace flce

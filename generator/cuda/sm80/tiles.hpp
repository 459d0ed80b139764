// The tiles that the planner considers for cuda_sm80: the one table to edit when a measurement says otherwise.
#pragma once

#include <span>

#include "generator/cuda/common/cuda_path.hpp"

namespace flce::sm80 {

/// Candidates for a dtype, not yet checked against any device.
[[nodiscard]] std::span<const TileCandidate> tile_candidates(DType dtype) noexcept;

/// Share of the device's dense rate that mma.sync can reach: all of it up to sm_89 and on sm_120; sm_90 and sm_100 keep their full rate for
/// instructions of their own.
[[nodiscard]] double mma_sync_share(int compute_capability) noexcept;

}  // namespace flce::sm80

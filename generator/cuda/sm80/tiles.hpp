// The tiles that the planner considers for cuda_sm80: the one table to edit when a measurement says otherwise.
#pragma once

#include <span>

#include "generator/cuda/common/cuda_path.hpp"

namespace flce::sm80 {

/// Candidates for a dtype, not yet checked against any device.
[[nodiscard]] std::span<const TileCandidate> tile_candidates(DType dtype) noexcept;

/// Share of the device's dense rate that this path's kernels keep up with mma.sync. Measured on Hopper, which keeps its full rate for
/// instructions of its own. Elsewhere it is assumed that mma.sync has the dense rate from registers (0.3 of it on sm_100, sm_103 and
/// sm_110), and that kernels lose as much of it as on Hopper.
[[nodiscard]] double mma_sync_share(int compute_capability) noexcept;

}  // namespace flce::sm80

// The tiles that the planner considers for path cuda_sm80: the one table to edit when a measurement says otherwise.
#pragma once

#include <span>

#include "flce/plan.hpp"

namespace flce {

struct TileCandidate {
    GemmTile tile;
    double efficiency;       ///< share of the mma.sync peak that the main loop reaches with whole waves and a long K; orders the candidates
    double grad_weight = 0;  ///< the same of grad_weight, where exponentials are retained; 0: as the others
};

/// Candidates for a dtype, not yet checked against any device.
[[nodiscard]] std::span<const TileCandidate> tile_candidates_sm80(DType dtype);

/// Share of the device's dense rate that mma.sync can reach: all of it up to sm_89 and on sm_120; sm_90 and sm_100 keep their full rate for
/// instructions of their own.
[[nodiscard]] double mma_sync_share(int compute_capability);

}  // namespace flce

// The tiles that the planner considers for path cuda_sm90a: the one table to edit when a measurement says otherwise.
#pragma once

#include <span>

#include "generator/tiles_sm80.hpp"

namespace flce {

/// Candidates, not yet checked against any device. Their efficiency is the share of the rate below.
[[nodiscard]] std::span<const TileCandidate> tile_candidates_sm90();

/// Share of the device's dense rate that wgmma keeps up at the chip's power limit, with operands from L2.
inline constexpr double kWgmmaShare = 0.76;

}  // namespace flce

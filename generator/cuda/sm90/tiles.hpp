// The tiles that the planner considers for cuda_sm90a: the one table to edit when a measurement says otherwise.
#pragma once

#include <span>

#include "generator/cuda/common/cuda_path.hpp"

namespace flce::sm90 {

/// Candidates, not yet checked against any device. Their efficiency is the share of the rate below.
[[nodiscard]] std::span<const TileCandidate> tile_candidates() noexcept;

/// Share of the device's dense rate that wgmma keeps up at the chip's power limit, with operands from L2.
inline constexpr double kWgmmaShare = 0.76;

}  // namespace flce::sm90

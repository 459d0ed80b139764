// What sources ask of a plan's path.
#pragma once

#include "generator/cuda/common/cuda_path.hpp"
#include "generator/cuda/sm90/rules.hpp"

namespace flce {

using sm90::few_tokens_tile;
using sm90::joins_chunks;
using sm90::kClusterBlocks;
using sm90::takes_turns;

}  // namespace flce

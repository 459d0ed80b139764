// The blocks that the planner considers for the CPU: the one table to edit when a measurement says otherwise.
#pragma once

#include <span>

#include "flce/plan.hpp"

namespace flce {

struct CpuBlockCandidate {
    CpuPlan blocks;     ///< bf16_dot is left to the planner
    double efficiency;  ///< share of the vector units' peak on a large GEMM; orders the candidates
};

/// Candidates for every vector width, not yet checked against any device.
[[nodiscard]] std::span<const CpuBlockCandidate> block_candidates_cpu();

}  // namespace flce

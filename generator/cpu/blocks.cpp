#include "generator/cpu/blocks.hpp"

#include <array>

namespace flce {
namespace {

// vector_bits, bf16_dot, micro_m, micro_n, block_m, block_n, block_k
constexpr std::array kBlocks = {
    CpuBlockCandidate{{512, false, 12, 32, 516, 192, 384}, 0.92}, CpuBlockCandidate{{512, false, 14, 32, 504, 224, 384}, 0.91},
    CpuBlockCandidate{{512, false, 12, 32, 192, 96, 256}, 0.85},  CpuBlockCandidate{{256, false, 6, 16, 288, 192, 256}, 0.90},
    CpuBlockCandidate{{256, false, 6, 16, 96, 96, 256}, 0.85},    CpuBlockCandidate{{128, false, 8, 12, 288, 192, 256}, 0.90},
    CpuBlockCandidate{{128, false, 8, 12, 96, 96, 256}, 0.86},    CpuBlockCandidate{{128, false, 4, 8, 256, 128, 256}, 0.85},
    CpuBlockCandidate{{128, false, 4, 8, 64, 64, 128}, 0.80},
};

}  // namespace

std::span<const CpuBlockCandidate> block_candidates_cpu() { return kBlocks; }

}  // namespace flce

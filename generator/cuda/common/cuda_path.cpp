#include "generator/cuda/common/cuda_path.hpp"

#include <fmt/format.h>

namespace flce {

double CudaPath::tile_efficiency(const Spec& spec, GemmRole role, const GemmTile& tile) const {
    for (const TileCandidate& candidate : tiles(spec.dtype)) {
        if (candidate.tile != tile) continue;
        return role == GemmRole::grad_weight && candidate.grad_weight > 0 ? candidate.grad_weight : candidate.efficiency;
    }
    const TileWarps grid = warps(tile);
    const double warp_m = static_cast<double>(tile.block_m) / grid.m;
    const double warp_n = static_cast<double>(tile.block_n) / grid.n;
    const double reuse = warp_m * warp_n / (warp_m + warp_n);  // 32 for 64 × 64
    return 0.9 * reuse / (reuse + 8.0);
}

CudaPath::Reason oldest_gpu_problem(const Device& device) {
    const int capability = device.gpu.compute_capability;
    if (capability >= 80) return std::nullopt;
    return fmt::format("compute capability {}.{}: cuda_sm80 needs 8.0 or newer (mma.sync on bf16, cp.async)", capability / 10,
                       capability % 10);
}

CudaPath::Reason smem_problem(const Device& device, std::int64_t smem_bytes) {
    if (smem_bytes <= device.gpu.smem_per_block_bytes) return std::nullopt;
    return fmt::format("needs {} bytes of shared memory a block, {} offers {}", smem_bytes, device.gpu.arch,
                       device.gpu.smem_per_block_bytes);
}

int partial_fields(const Spec& spec) {
    const Outputs& outputs = spec.outputs;
    return 2 + (outputs.entropy ? 1 : 0) + (spec.label_smoothing > 0 ? 1 : 0) + (outputs.log_sum_sq_probs ? 1 : 0) + (outputs.top1 ? 1 : 0);
}

}  // namespace flce

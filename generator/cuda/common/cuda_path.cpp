#include "generator/cuda/common/cuda_path.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "generator/planner.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/common/params.cuh"

namespace flce {

bool CudaPath::is_own_of(const Device& device) const {
    return std::ranges::find(own_capabilities, device.gpu.compute_capability) != own_capabilities.end();
}

bool CudaPath::is_preferred(const Spec& spec, const Device& device) const {
    if (spec.support || gathers) return spec.support && gathers;
    if (is_fp8(spec) || eight_bits) return is_fp8(spec) && eight_bits && is_own_of(device);
    if (has_teacher_head(spec)) return calls_library;
    if (spec.top_k > 0 && calls_library) return true;
    return is_own_of(device) && spec.hidden_size >= least_hidden_size;
}

bool CudaPath::is_considered(const Spec& spec, const Device& device) const {
    if (this != cuda_paths().front()) return is_preferred(spec, device);
    const auto is_eight_bits = [&](const CudaPath* own) { return own->eight_bits && own->is_own_of(device); };
    return !is_fp8(spec) || std::ranges::none_of(cuda_paths(), is_eight_bits);
}

bool CudaPath::has(Strategy strategy) const { return std::ranges::find(strategies, strategy) != strategies.end(); }

bool CudaPath::can_retain(const Spec& spec, const Device& device) const {
    return has(Strategy::retain) && !problem(spec, device, Strategy::retain);
}

TileWarps CudaPath::warps(const GemmTile& tile) const {
    const auto known = std::ranges::find(schedules, tile.schedule, &ScheduleWarps::schedule);
    return known != schedules.end() ? known->warps : TileWarps{tile.warps_m, tile.warps_n};
}

GemmTile CudaPath::with_warps(GemmTile tile, TileWarps warps) const {
    const auto known = std::ranges::find(schedules, warps, &ScheduleWarps::warps);
    if (known != schedules.end()) {
        tile.schedule = known->schedule;
    } else {
        tile.warps_m = warps.m;
        tile.warps_n = warps.n;
    }
    return tile;
}

std::span<const GemmTile> no_lent_tiles(const Spec& /*spec*/) { return {}; }

Reason no_lent_tile_problem(const Spec& /*spec*/, const GemmTile& tile) {
    if (tile == GemmTile{}) return std::nullopt;
    return std::string("only cuda_lt has logits in grad_weight's memory");
}

Reason oldest_gpu_problem(const Device& device) {
    const int capability = device.gpu.compute_capability;
    if (capability >= 80) return std::nullopt;
    return fmt::format("compute capability {}.{}: cuda_sm80 needs 8.0 or newer (mma.sync on bf16, cp.async)", capability / 10,
                       capability % 10);
}

Reason smem_problem(const Device& device, std::int64_t smem_bytes) {
    if (smem_bytes <= device.gpu.smem_per_block_bytes) return std::nullopt;
    return fmt::format("needs {} bytes of shared memory a block, {} offers {}", smem_bytes, device.gpu.arch,
                       device.gpu.smem_per_block_bytes);
}

double tile_efficiency(std::span<const TileCandidate> table, GemmRole role, const GemmTile& tile, TileWarps warps) {
    for (const TileCandidate& candidate : table) {
        if (candidate.tile != tile) continue;
        return role == GemmRole::grad_weight && candidate.grad_weight > 0 ? candidate.grad_weight : candidate.efficiency;
    }
    const double warp_m = static_cast<double>(tile.block_m) / warps.m;
    const double warp_n = static_cast<double>(tile.block_n) / warps.n;
    const double reuse = warp_m * warp_n / (warp_m + warp_n);  // 32 for 64 × 64
    return 0.9 * reuse / (reuse + 8.0);
}

bool takes_library(const Spec& spec) { return has_teacher_head(spec) || spec.top_k > 0; }

Reason teacher_head_problem(const Spec& spec, std::string_view path) {
    if (!has_teacher_head(spec)) return std::nullopt;
    return fmt::format("teacher_hidden_size={}: {} has one head's logits at a time; a divergence runs on cuda_lt and on CPUs",
                       spec.teacher_hidden_size, path);
}

Reason support_problem(const Spec& spec, std::string_view path) {
    if (!spec.support) return std::nullopt;
    return fmt::format("support: {} walks the whole vocabulary; a softmax over a token's ids runs on cuda_gather and on CPUs", path);
}

Reason fp8_problem(const Spec& spec, std::string_view path) {
    if (!is_fp8(spec)) return std::nullopt;
    return fmt::format(
        "fp8: runs on CPUs, on Hopper (cuda_fp8) and on GPUs of sm_89, sm_120 and sm_121 (cuda_fp8_sm89); {} has no products "
        "of 8 bits; leave fp8 out",
        path);
}

Reason quantized_problem(const Spec& spec, std::string_view path) {
    if (!is_quantized(spec) || (spec.teacher_top_k == 0 && spec.top_k == 0)) return std::nullopt;
    const bool named = spec.teacher_top_k > 0;
    return fmt::format("{}={} with weight_dtype={}: {} {}; that runs on CPUs", named ? "teacher_top_k" : "top_k",
                       named ? spec.teacher_top_k : spec.top_k, to_string(spec.weight_format), path,
                       named ? "reads single rows of the weight, which have to be numbers" : "lists classes of a weight of numbers");
}

Reason retain_problem(const Spec& spec) {
    if (spec.top_k > 0) return std::string("retain: exponentials take the place of the logits that a top_k looks at");
    if (spec.batch_invariant)
        return std::string("retain: how much is retained depends on the number of tokens, and batch_invariant asks for the same bits");
    if (spec.class_offset) return std::string("retain: references and derivatives of exponentials know nothing of classes' offsets");
    if (spec.class_groups) return std::string("retain: references of exponentials know nothing of classes that a row's group rules out");
    if (rounds_weight(spec)) return std::string("retain: references are single rows of the weight, which is rounded a stretch at a time");
    if (spec.dtype != DType::bf16) return fmt::format("retain: exponentials have bf16's range, not {}'s", to_string(spec.dtype));
    if (spec.softcap != 0.0 && spec.label_smoothing > 0) {
        return std::string(
            "retain: label smoothing's gradient under a softcap is no product of a number of the token and one of the class");
    }
    return std::nullopt;
}

bool smooths_retained(const Spec& spec, const Plan& plan) { return plan.strategy == Strategy::retain && spec.label_smoothing > 0; }

bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight, int cluster) {
    return may_lend_grad_weight(spec) && kRetainedColumns % (cluster * grad_weight.block_m) == 0;
}

int partial_fields(const Spec& spec) {
    if (has_teacher_head(spec)) return sizeof(DivergenceSums) / sizeof(float);
    const Outputs& outputs = spec.outputs;
    return 2 + (outputs.entropy ? 1 : 0) + (spec.label_smoothing > 0 ? 1 : 0) + (outputs.log_sum_sq_probs ? 1 : 0) + (outputs.top1 ? 1 : 0);
}

}  // namespace flce

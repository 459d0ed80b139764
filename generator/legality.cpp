// Legality of plans: the rules of every path, each with its reason.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "flce/plan.hpp"
#include "generator/cpu/layout.hpp"
#include "generator/cpu/rules.hpp"
#include "generator/cuda/common/cuda_path.hpp"

namespace flce {
namespace {

Reason cuda_reason(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaPath& path = cuda_path(plan.path);
    if (auto reason = path.problem(spec, device, plan.strategy)) return reason;
    if (!path.has(plan.strategy)) return fmt::format("{}: {} keeps nothing", to_string(plan.strategy), path.name);
    const CudaPlan& cuda = plan.cuda;
    const std::array<std::tuple<const char*, GemmRole, const GemmTile*>, 4> tiles = {{
        {"forward", forward_role(plan), &cuda.forward},
        {"dlogits", GemmRole::dlogits, &cuda.dlogits},
        {"grad_hidden", GemmRole::grad_hidden, &cuda.grad_hidden},
        {"grad_weight", GemmRole::grad_weight, &cuda.grad_weight},
    }};
    for (const auto& [name, role, tile] : tiles) {
        const TileWarps warps = path.warps(*tile);
        for (const int part : {tile->block_m, tile->block_n, tile->block_k, tile->stages, warps.m, warps.n}) {
            if (part <= 0 || part > 4096) return fmt::format("{}: every number of a tile must be from 1 to 4096, not {}", name, part);
        }
        if (auto reason = path.tile_problem(spec, device, role, *tile)) return fmt::format("{}: {}", name, *reason);
    }
    if (auto reason = path.lent_tile_problem(spec, cuda.lent)) return fmt::format("lent: {}", *reason);
    if (cuda.raster < 1 || cuda.raster > 1024) return fmt::format("raster={}: must be from 1 to 1024 tile rows", cuda.raster);
    for (const auto& [name, unit] : {std::pair{"dlogits' block_n", cuda.dlogits.block_n},
                                     {"grad_weight's block_m", cuda.grad_weight.block_m},
                                     {"grad_hidden's block_k", cuda.grad_hidden.block_k}}) {
        if (plan.vocab_chunk % unit != 0) return fmt::format("chunk={}: must be a multiple of {} = {}", plan.vocab_chunk, name, unit);
    }
    return std::nullopt;
}

}  // namespace

std::optional<std::string> illegal_reason(const Spec& any_spec, const Device& device, const Plan& plan) {
    const Spec spec = any_spec.normalized();
    const bool on_gpu = plan.path != PlanPath::cpu;
    if (on_gpu != (device.kind == DeviceKind::cuda)) {
        return fmt::format("path {} does not run on {}, a {}", to_string(plan.path), device.name,
                           device.kind == DeviceKind::cuda ? "GPU" : "CPU");
    }
    if (!on_gpu && plan.strategy == Strategy::retain) return std::string("strategy retain: the CPU's plans retain under recompute");
    // Effective chunks are cut to the vocabulary anyway; the bound keeps every size in a plan meaningful and small.
    constexpr std::int64_t kMostChunk = 1 << 20;
    if (plan.vocab_chunk < 1 || plan.vocab_chunk > kMostChunk)
        return fmt::format("chunk={}: must be from 1 to {}", plan.vocab_chunk, kMostChunk);
    constexpr std::int64_t kMostScratch = 1LL << 50;
    if (plan.scratch_bytes < 0 || plan.scratch_bytes > kMostScratch) {
        return fmt::format("scratch={}: must be from 0 to {} bytes", plan.scratch_bytes, kMostScratch);
    }
    if (auto reason = on_gpu ? cuda_reason(spec, device, plan) : cpu_plan_problem(spec, device, plan)) return reason;
    const std::int64_t least = on_gpu ? cuda_path(plan.path).least_scratch_bytes(spec, plan) : cpu_least_scratch_bytes(spec, plan);
    if (plan.scratch_bytes < least) return fmt::format("scratch={}: this plan needs at least {} bytes", plan.scratch_bytes, least);
    return std::nullopt;
}

}  // namespace flce

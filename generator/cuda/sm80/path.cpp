#include "generator/cuda/sm80/path.hpp"

#include <fmt/format.h>

#include <array>

#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/cuda/sm80/backward_program.hpp"
#include "generator/cuda/sm80/forward_program.hpp"
#include "generator/cuda/sm80/layout.hpp"
#include "generator/cuda/sm80/rules.hpp"
#include "generator/cuda/sm80/source.hpp"
#include "generator/cuda/sm80/tiles.hpp"

namespace flce {
namespace {

class PathSm80 final : public CudaPath {
public:
    PlanPath id() const noexcept override { return PlanPath::cuda_sm80; }
    std::string_view name() const noexcept override { return "cuda_sm80"; }
    std::string_view instruction() const noexcept override { return "mma.sync"; }
    bool is_own_of(const Device& /*device*/) const noexcept override { return false; }

    Reason problem(const Spec& spec, const Device& device) const override {
        if (spec.batch_invariant) {
            return fmt::format("batch_invariant: {} divides sums by the number of tokens; it needs the CPU, or a Hopper GPU and bf16",
                               name());
        }
        return oldest_gpu_problem(device);
    }
    Reason retain_problem(const Spec& /*spec*/) const override { return fmt::format("retain: {} keeps nothing", name()); }
    bool defers_hidden(const Spec& /*spec*/, const Plan& /*plan*/) const override { return false; }
    Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) const override {
        return sm80::tile_problem(spec, device, role, tile);
    }

    std::span<const Strategy> strategies() const noexcept override {
        static constexpr std::array kStrategies = {Strategy::recompute};
        return kStrategies;
    }
    std::span<const TileCandidate> tiles(DType dtype) const noexcept override { return sm80::tile_candidates(dtype); }
    TileWarps warps(const GemmTile& tile) const noexcept override { return {tile.warps_m, tile.warps_n}; }
    GemmTile with_warps(GemmTile tile, TileWarps warps) const noexcept override {
        tile.warps_m = warps.m;
        tile.warps_n = warps.n;
        return tile;
    }

    KernelBlock block(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) const override {
        return sm80::block(spec, device, role, tile);
    }

    double rate_share(const Device& device) const noexcept override { return sm80::mma_sync_share(device.gpu.compute_capability); }
    double epilogue_depth(const Spec& /*spec*/, GemmRole role, const GemmTile& /*tile*/, double blocks_per_sm) const override {
        const double depth = role == GemmRole::grad_hidden || role == GemmRole::grad_weight ? 120.0 : 300.0;
        return depth * (blocks_per_sm > 1 ? 0.4 : 1.0);  // another block on the SM hides most of it
    }
    Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double /*retained*/) const override {
        return chunked_backward_cost(*this, spec, device, plan, num_tokens);
    }

    bool lists_tokens() const noexcept override { return false; }
    int segment_tiles(const Spec& /*spec*/, const Plan& /*plan*/) const override { return 0; }
    std::int64_t least_segment_bytes(const Spec& /*spec*/, const Plan& /*plan*/) const override { return 0; }
    std::int64_t stretch_quantum(const Spec& /*spec*/, const Plan& plan) const override { return plan.cuda.forward.block_n; }
    ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan) const override {
        return sm80::forward_rows(spec, device, plan);
    }
    BackwardNeeds backward_needs(const Spec& /*spec*/, const Plan& /*plan*/) const override { return {}; }
    int rows_of_bias_partial(const Plan& plan) const override { return plan.cuda.dlogits.block_m; }
    Expr whole_chunk(const Spec& /*spec*/, const Device& /*device*/, const Plan& /*plan*/, const Expr& widest,
                     std::int64_t /*quantum*/) const override {
        return widest;
    }
    Expr sum_rows(const Spec& /*spec*/, const Device& /*device*/, const Plan& /*plan*/) const override { return slot(Slot::num_tokens); }
    bool joins_chunks(const Spec& /*spec*/, const Device& /*device*/, const Plan& /*plan*/) const override { return false; }
    JoinedChunks joined_chunks(const Spec& /*spec*/, const Device& /*device*/, const Plan& /*plan*/,
                               const BackwardLayout& /*layout*/) const override {
        return {};
    }
    bool lends_grad_weight(const Spec& /*spec*/, const GemmTile& /*grad_weight*/) const override { return false; }

    CudaSource source(const Spec& spec, const Device& device, const Plan& plan) const override { return sm80::source(spec, device, plan); }
    LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                  const ForwardLayout& layout) const override {
        return sm80::forward_program(spec, device, plan, source, layout);
    }
    LaunchProgram backward_program(const Spec& spec, const Device& /*device*/, const Plan& plan, const CudaSource& source,
                                   const BackwardLayout& layout) const override {
        return sm80::backward_program(spec, plan, source, layout);
    }
};

}  // namespace

const CudaPath& path_sm80() {
    static const PathSm80 path;
    return path;
}

}  // namespace flce

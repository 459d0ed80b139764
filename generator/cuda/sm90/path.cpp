#include "generator/cuda/sm90/path.hpp"

#include <array>

#include "generator/cuda/sm90/backward_program.hpp"
#include "generator/cuda/sm90/cost.hpp"
#include "generator/cuda/sm90/forward_program.hpp"
#include "generator/cuda/sm90/layout.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "generator/cuda/sm90/source.hpp"
#include "generator/cuda/sm90/tiles.hpp"

namespace flce {
namespace {

constexpr TileWarps kTurnsWarps{4, 1};
constexpr TileWarps kTogetherWarps{8, 1};

class PathSm90 final : public CudaPath {
public:
    PlanPath id() const noexcept override { return PlanPath::cuda_sm90a; }
    std::string_view name() const noexcept override { return "cuda_sm90a"; }
    std::string_view instruction() const noexcept override { return "wgmma"; }
    bool is_own_of(const Device& device) const noexcept override { return device.gpu.compute_capability == 90; }

    Reason problem(const Spec& spec, const Device& device) const override { return sm90::problem(spec, device); }
    Reason retain_problem(const Spec& spec) const override { return sm90::retain_problem(spec); }
    bool defers_hidden(const Spec& spec, const Plan& plan) const override { return sm90::defers_hidden(spec, plan); }
    Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) const override {
        return sm90::tile_problem(spec, device, role, tile);
    }

    std::span<const Strategy> strategies() const noexcept override {
        static constexpr std::array kStrategies = {Strategy::retain, Strategy::recompute};
        return kStrategies;
    }
    std::span<const TileCandidate> tiles(DType /*dtype*/) const noexcept override { return sm90::tile_candidates(); }
    TileWarps warps(const GemmTile& tile) const noexcept override {
        if (tile.schedule == TileSchedule::warp_grid) return {tile.warps_m, tile.warps_n};
        return sm90::takes_turns(tile) ? kTurnsWarps : kTogetherWarps;
    }
    GemmTile with_warps(GemmTile tile, TileWarps warps) const noexcept override {
        if (warps == kTurnsWarps || warps == kTogetherWarps) {
            tile.schedule = warps == kTurnsWarps ? TileSchedule::by_turns : TileSchedule::together;
        } else {  // no schedule: tile_problem says so
            tile.warps_m = warps.m;
            tile.warps_n = warps.n;
        }
        return tile;
    }

    KernelBlock block(const Spec& spec, const Device& /*device*/, GemmRole role, const GemmTile& tile) const override {
        return sm90::block(spec, role, tile);
    }

    double rate_share(const Device& /*device*/) const noexcept override { return sm90::kWgmmaShare; }
    double epilogue_depth(const Spec& /*spec*/, GemmRole role, const GemmTile& tile, double /*blocks_per_sm*/) const override {
        // depth of grad_weight from retained exponentials, also where the gradient is added to: the first old values come while the tile is
        // multiplied
        const double depth = role == GemmRole::grad_weight ? 256.0 : role == GemmRole::grad_hidden ? 120.0 : 300.0;
        return depth * (sm90::takes_turns(tile) ? 0.1 : 1.0);  // the other warpgroup's turn hides most of it
    }
    Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained) const override {
        return sm90::backward_cost(spec, device, plan, num_tokens, retained);
    }

    bool lists_tokens() const noexcept override { return true; }
    int segment_tiles(const Spec& spec, const Plan& plan) const override { return sm90::segment_tiles(spec, plan.cuda.forward); }
    std::int64_t least_segment_bytes(const Spec& spec, const Plan& plan) const override { return sm90::least_segment_bytes(spec, plan); }
    std::int64_t stretch_quantum(const Spec& spec, const Plan& plan) const override { return sm90::stretch_quantum(spec, plan); }
    ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan) const override {
        return sm90::forward_rows(spec, device, plan);
    }
    BackwardNeeds backward_needs(const Spec& spec, const Plan& plan) const override { return sm90::backward_needs(spec, plan); }
    int rows_of_bias_partial(const Plan& /*plan*/) const override { return 64; }
    Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const Expr& widest, std::int64_t quantum) const override {
        return sm90::whole_chunk(spec, device, plan, widest, quantum);
    }
    Expr sum_rows(const Spec& spec, const Device& device, const Plan& plan) const override { return sm90::sum_rows(spec, device, plan); }
    bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan) const override {
        return sm90::joins_chunks(spec, device, plan);
    }
    JoinedChunks joined_chunks(const Spec& spec, const Device& device, const Plan& plan, const BackwardLayout& layout) const override {
        return sm90::joined_chunks(spec, device, plan, layout);
    }
    bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight) const override {
        return sm90::lends_grad_weight(spec, grad_weight);
    }

    CudaSource source(const Spec& spec, const Device& device, const Plan& plan) const override { return sm90::source(spec, device, plan); }
    LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                  const ForwardLayout& layout) const override {
        return sm90::forward_program(spec, device, plan, source, layout);
    }
    LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                   const BackwardLayout& layout) const override {
        return sm90::backward_program(spec, device, plan, source, layout);
    }
};

}  // namespace

const CudaPath& path_sm90() {
    static const PathSm90 path;
    return path;
}

}  // namespace flce

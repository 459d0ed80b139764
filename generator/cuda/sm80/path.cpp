#include "generator/cuda/sm80/path.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/cuda/sm80/backward_program.hpp"
#include "generator/cuda/sm80/forward_program.hpp"
#include "generator/cuda/sm80/rules.hpp"
#include "generator/cuda/sm80/tiles.hpp"
#include "templates/common/params.cuh"

namespace flce {
namespace {

/// The number of splits that finishes first: whole waves of blocks, and splits of nearly the same number of tiles.
Expr choose_splits(const Expr& row_blocks, std::int64_t capacity, std::int64_t tiles, std::int64_t most_blocks) {
    Expr best = Expr(1);
    Expr best_time = ceil_div(row_blocks, capacity) * tiles;
    for (std::int64_t waves = 1; waves <= 4; ++waves) {
        const std::int64_t blocks = std::min(waves * capacity, most_blocks);
        const Expr splits = min(max(floor_div(blocks, row_blocks), 1), tiles);
        const Expr time = ceil_div(splits * row_blocks, capacity) * ceil_div(tiles, splits);
        const Expr better = less(time, best_time);
        best = select(better, splits, best);
        best_time = min(time, best_time);
        if (blocks == most_blocks) break;
    }
    return best;
}

/// Only a rounded weight needs scratch beside the partial sums.
std::int64_t most_partial_bytes(const Spec& spec, const Plan& plan) {
    return rounds_weight(spec) ? partial_bytes(plan) : kForwardPartialBytes;
}

std::int64_t field_bytes(const Spec& spec) { return std::int64_t{4} * partial_fields(spec); }

class PathSm80 final : public CudaPath {
public:
    PlanPath id() const noexcept override { return PlanPath::cuda_sm80; }
    std::string_view name() const noexcept override { return "cuda_sm80"; }
    std::string_view instruction() const noexcept override { return "mma.sync"; }
    bool is_own_of(const Device& /*device*/) const noexcept override { return false; }

    Reason problem(const Spec& /*spec*/, const Device& device) const override { return oldest_gpu_problem(device); }
    Reason retain_problem(const Spec& /*spec*/) const override { return fmt::format("retain: {} keeps nothing", name()); }
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
    std::int64_t stretch_quantum(const Spec& /*spec*/, const Plan& plan) const override { return plan.cuda.forward.block_n; }
    ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan) const override {
        const GemmTile& tile = plan.cuda.forward;
        const Expr n = slot(Slot::num_tokens);
        const std::int64_t wave_rows = capacity(spec, device, tile) * tile.block_m;
        const std::int64_t most_rows = most_partial_bytes(spec, plan) / field_bytes(spec);
        const std::int64_t rows = most_rows > wave_rows ? multiple_below(most_rows, wave_rows) : most_rows;
        ForwardRows f;
        f.rows = multiple_above(rows, std::max<int>(kRowThreads, tile.block_m));
        f.partials = splits_of(spec, device, plan, min(n, f.rows)) * round_up(min(n, f.rows), 32);
        return f;
    }
    ForwardGrid forward_grid(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) const override {
        // The last launch of several has fewer rows, but partial sums as far apart as the others', for no more parts.
        const Expr first_rows = min(slot(Slot::num_tokens), forward_rows(spec, device, plan).rows);
        return {min(splits_of(spec, device, plan, rows), splits_of(spec, device, plan, first_rows))};
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

    LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                  const ForwardLayout& layout) const override {
        return sm80::forward_program(spec, device, plan, source, layout);
    }
    LaunchProgram backward_program(const Spec& spec, const Device& /*device*/, const Plan& plan, const CudaSource& source,
                                   const BackwardLayout& layout) const override {
        return sm80::backward_program(spec, plan, source, layout);
    }

private:
    static Expr splits_of(const Spec& spec, const Device& device, const Plan& plan, const Expr& rows) {
        const GemmTile& tile = plan.cuda.forward;
        const std::int64_t most_blocks = std::max<std::int64_t>(most_partial_bytes(spec, plan) / field_bytes(spec) / tile.block_m, 1);
        return choose_splits(max(ceil_div(rows, tile.block_m), 1), capacity(spec, device, tile), forward_tiles(spec, plan, tile),
                             most_blocks);
    }
    /// Blocks that run at once.
    static std::int64_t capacity(const Spec& spec, const Device& device, const GemmTile& tile) {
        return std::int64_t{device.gpu.sm_count} * sm80::block(spec, device, GemmRole::forward, tile).per_sm;
    }
};

}  // namespace

const CudaPath& path_sm80() {
    static const PathSm80 path;
    return path;
}

}  // namespace flce

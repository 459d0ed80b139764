#include "generator/cuda/sm90/path.hpp"

#include <array>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "templates/common/params.cuh"

namespace flce {
namespace sm90 {
namespace {

constexpr std::array kCapabilities = {90};
constexpr std::array kStrategies = {Strategy::retain, Strategy::recompute};
constexpr std::array kSchedules = {ScheduleWarps{TileSchedule::by_turns, {4, 1}}, ScheduleWarps{TileSchedule::together, {8, 1}}};

std::span<const TileCandidate> tiles(DType /*dtype*/) { return tile_candidates(); }

double rate_share(const Device& /*device*/) { return wgmma_share(); }

CudaProgram generate(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaSource kernels = source(spec, device, plan);
    const ForwardLayoutSm90 forward = forward_layout(spec, device, plan);
    const BackwardLayoutSm90 backward = backward_layout(spec, device, plan);
    CudaProgram program = program_of(spec, kernels);
    program.forward = forward_program(spec, device, plan, kernels, forward);
    program.forward_workspace_bytes = forward.total;
    program.backward = backward_program(spec, device, plan, kernels, backward);
    program.backward_workspace_bytes = backward.total;
    program.retained_bytes = forward.retained.most;
    program.lendable_bytes = forward.retained.lendable;
    program.defers_hidden = defers_hidden(spec, plan);
    return program;
}

}  // namespace
}  // namespace sm90

constinit const CudaPath kPathSm90{
    .id = PlanPath::cuda_sm90a,
    .name = "cuda_sm90a",
    .instruction = "wgmma",
    .own_capabilities = sm90::kCapabilities,
    .least_hidden_size = 0,
    .strategies = sm90::kStrategies,
    .schedules = sm90::kSchedules,
    .grad_weight_cluster = sm90::kClusterBlocks,
    .retained_columns = kRetainedColumns,
    .gathers = false,
    .calls_library = false,
    .problem = sm90::problem,
    .tile_problem = sm90::tile_problem,
    .lent_tile_problem = no_lent_tile_problem,
    .least_scratch_bytes = sm90::least_scratch_bytes,
    .tiles = sm90::tiles,
    .lent_tiles = no_lent_tiles,
    .rate_share = sm90::rate_share,
    .tile_rate = sm90::tile_rate,
    .forward_cost = gpu_forward_cost,
    .backward_cost = sm90::backward_cost,
    .generate = sm90::generate,
};

}  // namespace flce

#include "generator/cuda/gather/path.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "generator/chunk_cost.hpp"
#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "templates/gather/params.cuh"

namespace flce {
namespace gather {
namespace {

constexpr std::string_view kName = "cuda_gather";
constexpr std::array kStrategies = {Strategy::recompute};
// Kernels have no tiles of a plan's.
constexpr std::array kTiles = {TileCandidate{{1, 1, 1, 1, 1, 1}, 1.0}};

Reason problem(const Spec& spec, const Device& device, Strategy strategy) {
    if (!spec.support) return fmt::format("{} reads a token's ids alone; without support the vocabulary is walked by other paths", kName);
    if (auto reason = quantized_problem(spec, kName)) return reason;
    if (strategy == Strategy::retain) return std::string("retain: a softmax over a token's ids leaves nothing to backward");
    return oldest_gpu_problem(device);
}

Reason tile_problem(const Spec& /*spec*/, const Device& /*device*/, GemmRole /*role*/, const GemmTile& tile) {
    if (tile != kTiles.front().tile) return fmt::format("{} has no tiles: every number is 1", kName);
    return std::nullopt;
}

std::span<const TileCandidate> tile_candidates(DType /*dtype*/) { return kTiles; }

double rate_share(const Device& /*device*/) { return 1.0; }

TileRate tile_rate(const Spec& /*spec*/, const Device& /*device*/, GemmRole /*role*/, const GemmTile& /*tile*/) {
    return {.blocks_per_sm = 1, .efficiency = 1.0, .epilogue_depth = 0};
}

/// Cost of `passes` over the rows of all places, of `launches` and of further bytes.
Cost cost_of(const Spec& spec, const Device& device, double num_tokens, double passes, double launches, double bytes) {
    const double row = static_cast<double>(spec.hidden_size) * static_cast<double>(element_bytes(weight_dtype(spec)));
    const double places = num_tokens * spec.teacher_top_k;
    Cost cost{.flops = passes * 2 * places * static_cast<double>(spec.hidden_size), .bytes = passes * places * row + bytes};
    cost.seconds = cost.bytes / device.gpu.bandwidth_bytes_per_s + launches * launch_seconds(device);
    return cost;
}

Cost forward_cost(const Spec& spec, const Device& device, const Plan& /*plan*/, double num_tokens, double /*retained*/) {
    return cost_of(spec, device, num_tokens, 1, 3, 0);
}

Cost backward_cost(const Spec& spec, const Device& device, const Plan& /*plan*/, double num_tokens, double /*retained*/) {
    const double gradient = spec.grad_weight_mode == GradMode::write
                                ? static_cast<double>(spec.vocab_size) * static_cast<double>(spec.hidden_size) *
                                      static_cast<double>(element_bytes(spec.grad_weight_dtype))
                                : 0;
    return cost_of(spec, device, num_tokens, 2, 10, gradient + 48 * num_tokens * spec.teacher_top_k);
}

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    KernelWriter writer(spec, device, plan, {.header = "gather/kernels.cuh", .segment_tiles = 1, .tells_falls = false});
    writer.rows(KernelRole::gather_forward, "GatherForwardParams");
    writer.row_kernels();
    writer.rows(KernelRole::gather_hidden, "GatherHiddenParams");
    writer.rows(KernelRole::sort_counts, "GatherSortParams");
    writer.rows(KernelRole::sort_sums, "GatherSortParams");
    writer.rows(KernelRole::sort_places, "GatherSortParams");
    writer.rows(KernelRole::gather_weight, "GatherWeightParams");
    writer.rows(KernelRole::gather_joints, "GatherWeightParams");
    return std::move(writer).finish();
}

CudaProgram generate(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaSource kernels = source(spec, device, plan);
    const ForwardLayout forward = forward_layout(spec);
    const BackwardLayoutGather backward = backward_layout(spec);
    CudaProgram program = program_of(spec, kernels);
    program.forward = forward_program(spec, plan, kernels, forward);
    program.forward_workspace_bytes = forward.total;
    program.backward = backward_program(spec, plan, kernels, backward);
    program.backward_workspace_bytes = backward.total;
    return program;
}

}  // namespace
}  // namespace gather

constinit const CudaPath kPathGather{
    .id = PlanPath::cuda_gather,
    .name = gather::kName,
    .instruction = "fma",
    .own_capabilities = {},
    .least_hidden_size = 0,
    .strategies = gather::kStrategies,
    .schedules = {},
    .grad_weight_cluster = 1,
    .retained_columns = kRetainedColumns,
    .gathers = true,
    .calls_library = false,
    .problem = gather::problem,
    .tile_problem = gather::tile_problem,
    .lent_tile_problem = no_lent_tile_problem,
    .least_scratch_bytes = gather::least_scratch_bytes,
    .tiles = gather::tile_candidates,
    .lent_tiles = no_lent_tiles,
    .rate_share = gather::rate_share,
    .tile_rate = gather::tile_rate,
    .forward_cost = gather::forward_cost,
    .backward_cost = gather::backward_cost,
    .generate = gather::generate,
};

}  // namespace flce

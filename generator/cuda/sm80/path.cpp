#include "generator/cuda/sm80/path.hpp"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "generator/cuda/common/gemm_cost.hpp"
#include "templates/common/params.cuh"

namespace flce {
namespace sm80 {
namespace {

constexpr std::string_view kName = "cuda_sm80";
constexpr std::array kStrategies = {Strategy::retain, Strategy::recompute};

Reason problem(const Spec& spec, const Device& device, Strategy strategy) {
    if (spec.batch_invariant) {
        return fmt::format("batch_invariant: {} divides sums by the number of tokens; it needs the CPU, or a Hopper GPU and bf16", kName);
    }
    if (auto reason = oldest_gpu_problem(device)) return reason;
    if (auto reason = teacher_head_problem(spec, kName)) return reason;
    if (auto reason = support_problem(spec, kName)) return reason;
    if (auto reason = fp8_problem(spec, kName)) return reason;
    if (auto reason = quantized_problem(spec, kName)) return reason;
    if (spec.top_k > 0)
        return fmt::format("top_k={}: {} keeps no lists of classes; a top_k runs on cuda_lt and on CPUs", spec.top_k, kName);
    return strategy == Strategy::retain ? retain_problem(spec) : std::nullopt;
}

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    KernelWriter writer(spec, device, plan, {.header = "sm80/kernels.cuh"});
    const auto gemm = [&](KernelRole kernel, GemmRole role, const GemmTile& t, const std::string& params, const char* stated) {
        const std::string type =
            fmt::format("Tile<{}, {}, {}, {}, {}, {}>", t.block_m, t.block_n, t.block_k, t.stages, t.warps_m, t.warps_n);
        writer.gemm({kernel, params, std::string(to_string(kernel)), stated, type, block(spec, device, role, t)});
    };
    const bool retains = plan.strategy == Strategy::retain;
    const std::string retain = retains ? "Retain" : "";
    const CudaPlan& tiles = plan.cuda;
    gemm(KernelRole::forward, forward_role(plan), tiles.forward, rounds_weight(spec) ? "ForwardStretchParams" : retain + "ForwardParams",
         "ForwardBlock");
    writer.row_kernels();
    gemm(KernelRole::dlogits, GemmRole::dlogits, tiles.dlogits, "DlogitsParams", "DlogitsBlock");
    gemm(KernelRole::grad_hidden, GemmRole::grad_hidden, tiles.grad_hidden, retain + "GradHiddenParams", "GradHiddenBlock");
    gemm(KernelRole::grad_weight, GemmRole::grad_weight, tiles.grad_weight, retain + "GradWeightParams", "GradWeightBlock");
    if (retains) {
        writer.rows(KernelRole::references, "ReferencesParams");
        writer.rows(KernelRole::retained_rows, "RetainedRowsParams");
        if (spec.bias) writer.rows(KernelRole::retained_bias, "RetainedBiasParams");
    }
    if (smooths_retained(spec, plan)) {
        writer.rows(KernelRole::smoothing_sums, "SmoothingSumsParams");
        writer.rows(KernelRole::smoothing_totals, "SmoothingTotalsParams");
    }
    writer.option_kernels();
    return std::move(writer).finish();
}

CudaProgram generate(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaSource kernels = source(spec, device, plan);
    const ForwardLayoutSm80 forward = forward_layout(spec, device, plan);
    const BackwardLayoutSm80 backward = backward_layout(spec, plan);
    CudaProgram program = program_of(spec, kernels);
    program.forward = forward_program(spec, device, plan, kernels, forward);
    program.forward_workspace_bytes = forward.total;
    program.backward = backward_program(spec, plan, kernels, backward);
    program.backward_workspace_bytes = backward.total;
    program.retained_bytes = forward.retained.most;
    program.lendable_bytes = forward.retained.lendable;
    return program;
}

}  // namespace
}  // namespace sm80

constinit const CudaPath kPathSm80{
    .id = PlanPath::cuda_sm80,
    .name = sm80::kName,
    .instruction = "mma.sync",
    .own_capabilities = {},
    .least_hidden_size = 0,
    .strategies = sm80::kStrategies,
    .schedules = {},
    .grad_weight_cluster = 1,
    .retained_columns = kRetainedColumns,
    .gathers = false,
    .calls_library = false,
    .problem = sm80::problem,
    .tile_problem = sm80::tile_problem,
    .lent_tile_problem = no_lent_tile_problem,
    .least_scratch_bytes = sm80::least_scratch_bytes,
    .tiles = sm80::tile_candidates,
    .lent_tiles = no_lent_tiles,
    .rate_share = sm80::rate_share,
    .tile_rate = sm80::tile_rate,
    .forward_cost = gpu_forward_cost,
    .backward_cost = sm80::backward_cost,
    .generate = sm80::generate,
};

}  // namespace flce

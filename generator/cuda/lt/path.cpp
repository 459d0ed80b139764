#include "generator/cuda/lt/path.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "generator/cuda/common/forward_steps.hpp"
#include "templates/common/divergence_math.cuh"
#include "templates/lt/params.cuh"

namespace flce {
namespace lt {
namespace {

constexpr std::string_view kName = "cuda_lt";
constexpr std::array kStrategies = {Strategy::retain, Strategy::recompute};
// Architectures whose own tensor-core instruction no other path has.
constexpr std::array kOwnCapabilities = {100, 103, 110};

Reason problem(const Spec& spec, const Device& device, Strategy strategy) {
    if (spec.batch_invariant) {
        return fmt::format("batch_invariant: {}'s products depend on the number of tokens; it needs the CPU, or a Hopper GPU and bf16",
                           kName);
    }
    if (spec.dtype == DType::fp32 && !takes_library(spec)) {
        return fmt::format("dtype=fp32: {} multiplies 16-bit operands; fp32 runs on cuda_sm80", kName);
    }
    // The library's quick kernels read 16 bytes. A teacher's weight has no padding, but in a shard.
    for (const std::int64_t row : {spec.padded_vocab_size, has_teacher_head(spec) ? teacher_head(spec).padded_vocab_size : 0}) {
        if (spec.layout != WeightLayout::hidden_major || row % 8 == 0) continue;
        return fmt::format("layout=hidden_major with rows of {}: {} needs rows of a multiple of 8; others run on cuda_sm80", row, kName);
    }
    if (auto reason = support_problem(spec, kName)) return reason;
    if (auto reason = fp8_problem(spec, kName)) return reason;
    if (auto reason = quantized_problem(spec, kName)) return reason;
    if (auto reason = oldest_gpu_problem(device)) return reason;
    if (strategy != Strategy::retain) return std::nullopt;
    if (has_teacher_head(spec) && spec.dtype != DType::fp32) return std::nullopt;
    if (has_teacher_head(spec)) return std::string("retain: both heads' logits are retained in fp16, which has not fp32's digits");
    if (spec.label_smoothing > 0) {
        return fmt::format("retain: gradients of exponentials lack label smoothing's terms, which {}'s products cannot subtract", kName);
    }
    return retain_problem(spec);
}

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    const bool retains = plan.strategy == Strategy::retain;
    const bool overlaps = device.gpu.compute_capability >= 90;
    KernelWriter writer(spec, device, plan,
                        {.header = "lt/kernels.cuh", .overlaps = overlaps, .retained_columns = kLtRetainedColumns, .tells_falls = false});
    const auto of_sums = [&](KernelRole role, const char* params, const char* stated, int blocks_per_sm) {
        writer.gemm({role,
                     params,
                     std::string(to_string(role)),
                     stated,
                     "LtTile",
                     {.threads = kLtThreads, .per_sm = blocks_per_sm},
                     "Problem",
                     overlaps});
    };
    const auto of_heads = [&](KernelRole role, const char* params, const char* stated, const char* function = nullptr,
                              int blocks_per_sm = 2) {
        writer.gemm({role,
                     params,
                     function != nullptr ? function : std::string(to_string(role)),
                     stated,
                     "LtTile",
                     {.threads = kLtThreads, .per_sm = blocks_per_sm},
                     "Problem, Teacher",
                     overlaps});
    };
    if (has_teacher_head(spec)) {
        of_heads(KernelRole::divergence_sums, "LtDivergenceParams", "DivergenceSumsBlock");
        if (divergence_form(spec.divergence_beta) == kMixture) {
            of_heads(KernelRole::divergence_mixture, "LtDivergenceParams", "MixtureBlock");
        }
        if (has_heads_launches(spec, device, plan)) {
            write_heads_kernels(writer, spec);
            const bool mixes = divergence_form(spec.divergence_beta) == kMixture;
            if (retains && mixes) of_heads(KernelRole::divergence_pairs, "LtDivergenceParams", "PairsBlock");
        }
    } else {
        of_sums(KernelRole::forward, "LtForwardParams", "ForwardBlock", 2);
    }
    writer.top_classes(KernelWriter::Waits::before);
    writer.row_kernels();
    if (has_teacher_head(spec)) {
        of_heads(KernelRole::dlogits, "LtDivergenceDlogitsParams", "DivergenceDlogits", "divergence_dlogits");
        if (retains) of_heads(KernelRole::divergence_retained, "LtDivergenceDlogitsParams", "RetainedDlogits");
        if (may_keep_gradients(spec, plan)) of_heads(KernelRole::divergence_gradients, "PairRowsParams", "PairGradients", nullptr, 4);
    } else {
        of_sums(KernelRole::dlogits, "LtDlogitsParams", "LtDlogits", 2);
    }
    writer.rows(KernelRole::gather_rows, "GatherRowsParams");
    writer.rows(KernelRole::finish_hidden, "LtFinishHiddenParams");
    if (may_keep_gradients(spec, plan)) writer.rows(KernelRole::divergence_scales, "DivergenceScalesParams");
    writer.rows(KernelRole::finish_weight, "LtFinishWeightParams");
    if (retains && !has_teacher_head(spec)) {
        writer.rows(KernelRole::references, "ReferencesParams");
        writer.rows(KernelRole::retained_rows, "RetainedRowsParams");
        writer.rows(KernelRole::scaled_hidden, "LtScaledHiddenParams");
        if (spec.bias) writer.rows(KernelRole::retained_bias, "RetainedBiasParams");
        of_sums(KernelRole::stale_sums, "LtStaleParams", "StaleRowsBlock", 1);
        of_sums(KernelRole::stale_rows, "LtStaleParams", "StaleRowsBlock", 1);
    }
    writer.option_kernels();
    return std::move(writer).finish();
}

CudaProgram generate(const Spec& spec, const Device& device, const Plan& plan) {
    const CudaSource kernels = source(spec, device, plan);
    const ForwardLayoutLt forward = forward_layout(spec, plan);
    const BackwardLayoutLt backward = backward_layout(spec, plan);
    CudaProgram program = program_of(spec, kernels);
    program.forward = (has_teacher_head(spec) ? divergence_program : forward_program)(spec, device, plan, kernels, forward);
    program.forward_workspace_bytes = forward.total;
    if (retained_heads(spec, plan).lendable.constant() == nullptr) {
        const ForwardLayoutLt lent = lent_forward_layout(spec, plan);
        LaunchProgram wide = divergence_program(spec, device, with_lent_tile(plan), kernels, lent);
        program.forward.body = {{If{is_lent(), std::move(wide.body)}}, {If{!is_lent(), std::move(program.forward.body)}}};
        program.forward_workspace_bytes = max(forward.total, lent.total);
    }
    if (has_heads_launches(spec, device, plan)) {
        const ForwardLayoutLt layout = heads_layout(spec, device);
        LaunchProgram joined = heads_program(spec, device, plan, kernels, layout);
        const Expr takes = less(kFewHeadsRows, slot(Slot::num_tokens));
        program.forward.body = {{If{takes, std::move(joined.body)}}, {If{!takes, std::move(program.forward.body)}}};
        program.forward.variable_count = std::max(program.forward.variable_count, joined.variable_count);
        program.forward_workspace_bytes = select(takes, layout.total, program.forward_workspace_bytes);
    }
    program.backward = backward_program(spec, device, plan, kernels, backward);
    program.backward_workspace_bytes = backward.total;
    const RetainedHeads heads = retained_heads(spec, plan);
    program.retained_bytes = has_teacher_head(spec) ? heads.most : forward.retained.most;
    program.lendable_bytes = has_teacher_head(spec) ? heads.lendable : forward.retained.lendable;
    return program;
}

}  // namespace
}  // namespace lt

constinit const CudaPath kPathLt{
    .id = PlanPath::cuda_lt,
    .name = lt::kName,
    .instruction = "cuBLASLt",
    .own_capabilities = lt::kOwnCapabilities,
    // Sums of few products are held to fp32's last place, and a library does not say how it adds.
    .least_hidden_size = kLongSum,
    .strategies = lt::kStrategies,
    .schedules = {},
    .grad_weight_cluster = 1,
    .retained_columns = kLtRetainedColumns,
    .gathers = false,
    .calls_library = true,
    .problem = lt::problem,
    .tile_problem = lt::tile_problem,
    .lent_tile_problem = lt::lent_tile_problem,
    .least_scratch_bytes = lt::least_scratch_bytes,
    .tiles = lt::tile_candidates,
    .lent_tiles = lt::lent_tiles,
    .rate_share = lt::rate_share,
    .tile_rate = lt::tile_rate,
    .forward_cost = lt::forward_cost,
    .backward_cost = lt::backward_cost,
    .generate = lt::generate,
};

}  // namespace flce

#include <fmt/format.h>

#include "generator/cuda/sm90/path.hpp"
#include "generator/cuda/sm90/rules.hpp"
#include "templates/common/params.cuh"

namespace flce::sm90 {
namespace {

std::string tile_type(const GemmTile& tile, int cluster = kClusterBlocks) {
    return fmt::format("TileSm90<{}, {}, {}, {}, {}>", tile.block_m, tile.block_n, tile.stages, cluster, takes_turns(tile));
}

std::string grad_weight_params(const Spec& spec, const Plan& plan) {
    const char* params = smooths_retained(spec, plan) ? "SmoothedGradWeightSm90Params" : "GradWeightSm90Params";
    return sums_retained_bias(spec, plan) ? fmt::format("WithScaledBias<flce::{}>", params) : params;
}

}  // namespace

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    const int segment = segment_tiles(spec, plan.cuda.forward);
    KernelWriter writer(spec, device, plan,
                        {.header = "sm90/kernels.cuh",
                         .overlaps = true,
                         .lists_rows = true,
                         .segment_tiles = segment,
                         .stretches = spec.top_k > 0,
                         .picks_named = picks_named(spec),
                         .tells_falls = spec.top_k == 0});
    // `name`: name of the type that states kSmemBytes and kThreads. `params`: name of the parameters.
    const auto gemm = [&](KernelRole kernel, GemmRole role, const GemmTile& tile, std::string_view name, std::string_view params,
                          std::string_view function) {
        writer.gemm({kernel, fmt::format("{}Sm90Params", params), fmt::format("{}_sm90", function), fmt::format("{}Sm90", name),
                     tile_type(tile), block(spec, role, tile)});
    };
    const char* forward_params = rounds_weight(spec) || spec.top_k > 0 ? "ForwardStretchSm90Params" : "ForwardSm90Params";
    const auto forward = [&](KernelRole kernel, const ForwardShape& shape) {
        const bool picks = picks_named(spec) && kernel == KernelRole::forward;
        std::string problem = shape.role == forward_role(plan) ? "Problem" : "flce::Unretained<Problem>";
        if (picks) problem = fmt::format("flce::PicksNamed<{}>", problem);
        writer.gemm({kernel, picks ? fmt::format("WithNamed<flce::{}>", forward_params) : forward_params, "forward_sm90", "ForwardSm90",
                     tile_type(shape.tile, shape.cluster), forward_block(spec, shape), problem});
    };
    const bool retains = plan.strategy == Strategy::retain;
    const std::string smoothed = smooths_retained(spec, plan) ? "Smoothed" : "";
    const CudaPlan& tiles = plan.cuda;
    forward(KernelRole::forward, forward_shape(plan));
    forward(KernelRole::forward_few, few_tokens_shape(spec, plan));
    writer.top_classes(KernelWriter::Waits::before_it_calls);
    if (picks_named(spec)) writer.rows(KernelRole::named_tiles, "NamedTilesParams");
    writer.row_kernels();
    gemm(KernelRole::dlogits, GemmRole::dlogits, tiles.dlogits, "Dlogits", "Dlogits", "dlogits");
    gemm(KernelRole::grad_hidden, GemmRole::grad_hidden, tiles.grad_hidden, "GradHidden", smoothed + "GradHidden", "grad_hidden");
    writer.gemm({KernelRole::grad_weight, grad_weight_params(spec, plan), "grad_weight_sm90", "GradWeightSm90",
                 tile_type(tiles.grad_weight), block(spec, GemmRole::grad_weight, tiles.grad_weight),
                 sums_bias(spec, tiles.grad_weight) ? "flce::SumsBias<Problem>" : "Problem"});
    if (joins_chunks(spec, device, plan)) {
        const auto joined = [&](KernelRole kernel, std::string_view name, std::string_view function) {
            const char* plain = rounds_weight(spec) ? "RoundedChunksSm90Params" : "BackwardChunksSm90Params";
            const std::string params = spec.bias ? fmt::format("WithGradBias<flce::{}>", plain) : plain;
            writer.gemm({kernel, params, fmt::format("{}_sm90", function), fmt::format("{}Sm90", name), tile_type(tiles.dlogits),
                         block(spec, GemmRole::backward_chunks, tiles.dlogits)});
        };
        if (!is_quantized(spec)) joined(KernelRole::backward_chunks, "BackwardChunks", "backward_chunks");
        joined(KernelRole::hidden_chunks, "HiddenChunks", "hidden_chunks");
    }
    writer.rows(KernelRole::gather_rows, "GatherRowsParams");
    writer.rows(KernelRole::scatter_rows, "ScatterRowsParams", kRowThreads, KernelWriter::Waits::itself);
    if (retains) {
        writer.rows(KernelRole::references, "ReferencesParams", kRowThreads, KernelWriter::Waits::itself);
        writer.rows(KernelRole::retained_rows, "RetainedRowsParams");
        if (spec.bias) writer.rows(KernelRole::retained_bias, "RetainedBiasParams");
    }
    if (retains && is_shard(spec)) writer.rows(KernelRole::make_room, "MakeRoomParams", 32);
    if (!smoothed.empty()) {
        writer.rows(KernelRole::smoothing_sums, "SmoothingSumsParams");
        writer.rows(KernelRole::smoothing_totals, "SmoothingTotalsParams");
    }
    writer.option_kernels();
    return std::move(writer).finish();
}

}  // namespace flce::sm90

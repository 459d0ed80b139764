#include "generator/cuda/sm80/source.hpp"

#include <fmt/format.h>

#include "generator/cuda/sm80/rules.hpp"

namespace flce::sm80 {
namespace {

std::string tile_type(const GemmTile& tile) {
    return fmt::format("Tile<{}, {}, {}, {}, {}, {}>", tile.block_m, tile.block_n, tile.block_k, tile.stages, tile.warps_m, tile.warps_n);
}

}  // namespace

CudaSource source(const Spec& spec, const Device& device, const Plan& plan) {
    KernelWriter writer(spec, device, plan, "sm80/kernels.cuh");
    const auto gemm = [&](KernelRole kernel, GemmRole role, const GemmTile& tile, const char* params, const char* function,
                          const char* stated) {
        writer.gemm({kernel, params, function, stated, tile_type(tile), block(spec, device, role, tile)});
    };
    const char* forward_params = rounds_weight(spec) ? "ForwardStretchParams" : "ForwardParams";
    const CudaPlan& tiles = plan.cuda;
    gemm(KernelRole::forward, GemmRole::forward, tiles.forward, forward_params, "forward", "ForwardBlock");
    writer.row_kernels();
    gemm(KernelRole::dlogits, GemmRole::dlogits, tiles.dlogits, "DlogitsParams", "dlogits", "DlogitsBlock");
    gemm(KernelRole::grad_hidden, GemmRole::grad_hidden, tiles.grad_hidden, "GradHiddenParams", "grad_hidden", "GradHiddenBlock");
    gemm(KernelRole::grad_weight, GemmRole::grad_weight, tiles.grad_weight, "GradWeightParams", "grad_weight", "GradWeightBlock");
    writer.option_kernels();
    return std::move(writer).finish();
}

}  // namespace flce::sm80

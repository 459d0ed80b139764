#include "generator/cuda/source.hpp"

#include <fmt/format.h>

#include "flce/error.hpp"
#include "generator/cuda/common/transform_source.hpp"
#include "generator/cuda/tile_rules.hpp"
#include "templates/common/params.cuh"

namespace flce {
namespace {

std::string_view element_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return "flce::Bf16";
        case DType::fp16: return "flce::Fp16";
        case DType::fp32: return "float";
    }
    throw InternalError("element_type: unknown dtype");
}

std::string problem_struct(const Spec& spec, const Plan& plan) {
    const std::string math = spec.dtype == DType::fp32 ? "flce::PreciseMath" : "flce::FastMath";
    std::string text = "struct Problem {\n";
    text += fmt::format("    using Element = {};\n", element_type(spec.dtype));
    text += fmt::format("    using GradWeight = {};\n", element_type(spec.grad_weight_dtype));
    text += fmt::format("    using Math = {};\n", math);
    text += fmt::format("    enum : int {{ hidden_size = {} }};\n", spec.hidden_size);
    text += fmt::format("    enum : int {{ vocab_size = {} }};\n", spec.vocab_size);
    text += fmt::format("    enum : long long {{ padded_vocab_size = {} }};\n", spec.padded_vocab_size);
    text += fmt::format("    enum : bool {{ hidden_major = {} }};\n", spec.layout == WeightLayout::hidden_major);
    text += fmt::format("    enum : bool {{ bias = {} }};\n", spec.bias);
    text += fmt::format("    enum : bool {{ class_weight = {} }};\n", spec.class_weight);
    text += fmt::format("    enum : bool {{ label_smoothing = {} }};\n", spec.label_smoothing > 0);
    text += fmt::format("    enum : bool {{ entropy = {} }};\n", spec.outputs.entropy);
    text += fmt::format("    enum : bool {{ accumulate = {} }};\n", spec.grad_weight_mode == GradMode::accumulate);
    text += fmt::format("    enum : bool {{ retain = {} }};\n", plan.strategy == Strategy::retain);
    text += fmt::format("    enum : bool {{ lists_rows = {} }};\n", plan.path == PlanPath::cuda_sm90a);
    text += fmt::format("    enum : bool {{ rounds_weight = {} }};\n", rounds_weight(spec));
    text += fmt::format("    enum : int {{ raster = {} }};\n", plan.cuda.raster);
    text += "    static __device__ __forceinline__ flce::Logit transform(float x, const float* p) {\n";
    text += transform_source(spec, math, "        ");
    text += "    }\n};\n\n";
    return text;
}

/// The template of templates/ that states what a kernel takes, without its path.
std::string_view kernel_struct(GemmRole role) {
    switch (role) {
        case GemmRole::forward:
        case GemmRole::forward_retain: return "Forward";
        case GemmRole::dlogits: return "Dlogits";
        case GemmRole::grad_hidden: return "GradHidden";
        case GemmRole::grad_weight: return "GradWeight";
        case GemmRole::chunks: return "BackwardChunks";
    }
    throw InternalError("kernel_struct: unknown role");
}

/// Collects kernels, and for each the extern "C" function that instantiates it: GEMM kernels in units of their own, the small ones in the
/// first.
class Kernels {
public:
    Kernels(CudaSource& source, std::string configuration) : source_(source), configuration_(std::move(configuration)) {
        source_.units = {{configuration_, {}}};
    }

    /// `params` is the name of the parameter block without "Params", `function` the template's.
    void gemm(const Spec& spec, const Device& device, PlanPath path, GemmRole role, const GemmTile& tile, KernelRole kernel,
              std::string_view params, std::string_view function, int cluster_blocks) {
        const bool sm90 = path == PlanPath::cuda_sm90a;
        const std::string type = sm90 ? fmt::format("flce::TileSm90<{}, {}, {}, {}, {}>", tile.block_m, tile.block_n, tile.stages,
                                                    cluster_blocks, takes_turns(tile))
                                      : fmt::format("flce::Tile<{}, {}, {}, {}, {}, {}>", tile.block_m, tile.block_n, tile.block_k,
                                                    tile.stages, tile.warps_m, tile.warps_n);
        KernelBlock block = cuda_path(path).block(spec, device, role, tile);
        if (sm90) block.cluster = cluster_blocks;
        const std::string_view suffix = sm90 ? "_sm90" : "";
        source_.units.push_back({configuration_, {}});
        add(source_.units.back(), kernel, fmt::format("{}{}Params", params, sm90 ? "Sm90" : ""),
            fmt::format("flce::{}{}<Problem, {}>(p)", function, suffix, type), block);
        const std::string stated = fmt::format("flce::{}{}<Problem, {}>", kernel_struct(role), sm90 ? "Sm90" : "Block", type);
        source_.units.back().source +=
            fmt::format("static_assert({0}::kSmemBytes == {1} && {0}::kThreads == {2}, \"as the host has it\");\n", stated,
                        block.smem_bytes, block.threads);
    }

    void simple(KernelRole kernel, std::string_view params, std::string_view function, int threads) {
        add(source_.units.front(), kernel, params, fmt::format("flce::{}<Problem>(p)", function), {threads, 1, 0, 1});
    }

private:
    void add(CudaUnit& unit, KernelRole kernel, std::string_view params, const std::string& body, const KernelBlock& block) {
        const std::string symbol = fmt::format("flce_{}", to_string(kernel));
        const std::string cluster = block.cluster > 1 ? fmt::format(" __cluster_dims__({}, 1, 1)", block.cluster) : "";
        unit.source +=
            fmt::format("extern \"C\" __global__ void __launch_bounds__({}, {}){} {}(const __grid_constant__ flce::{} p) {{\n    {};\n}}\n",
                        block.threads, block.per_sm, cluster, symbol, params, body);
        unit.kernels.push_back(
            {symbol, static_cast<std::uint32_t>(block.threads), static_cast<std::uint32_t>(block.smem_bytes), block.cluster > 1});
        source_.add(kernel, unit.kernels.back());
    }

    CudaSource& source_;
    std::string configuration_;
};

}  // namespace

bool zeroes_columns(const Spec& spec) {
    return spec.layout == WeightLayout::hidden_major && spec.padded_vocab_size > spec.vocab_size &&
           spec.grad_weight_mode == GradMode::write;
}

int CudaSource::kernel(KernelRole role) const {
    const int number = numbers_.at(static_cast<std::size_t>(role));
    if (number == 0) throw InternalError(fmt::format("no kernel {} in the program", to_string(role)));
    return number - 1;
}

void CudaSource::add(KernelRole role, const KernelEntry& entry) {
    kernels.push_back(entry);
    numbers_.at(static_cast<std::size_t>(role)) = static_cast<int>(kernels.size());
}

CudaSource cuda_source(const Spec& spec, const Device& device, const Plan& plan) {
    CudaSource source;
    const std::string_view header = plan.path == PlanPath::cuda_sm90a ? "sm90/kernels.cuh" : "sm80/kernels.cuh";
    source.options = {"--gpu-architecture=" + device.gpu.arch, "--std=c++17"};
    Kernels kernels(source, fmt::format("#include \"flce/{}\"\n\n", header) + problem_struct(spec, plan));
    const auto gemm = [&](GemmRole role, const GemmTile& tile, KernelRole kernel, std::string_view params, std::string_view function,
                          int cluster_blocks = kClusterBlocks) {
        kernels.gemm(spec, device, plan.path, role, tile, kernel, params, function, cluster_blocks);
    };
    const std::string_view forward_params = rounds_weight(spec) ? "ForwardStretch" : "Forward";
    gemm(forward_role(plan), plan.cuda.forward, KernelRole::forward, forward_params, "forward");
    if (plan.path == PlanPath::cuda_sm90a) {
        gemm(forward_role(plan), few_tokens_tile(spec), KernelRole::forward_few, forward_params, "forward", 1);
    }
    kernels.simple(KernelRole::row_outputs, "RowOutputsParams", "row_outputs_kernel", kOutputThreads);
    kernels.simple(KernelRole::reduce_loss, "ReduceLossParams", "reduce_loss", kReduceThreads);
    kernels.simple(KernelRole::prepare, "PrepareParams", "prepare", kReduceThreads);
    kernels.simple(KernelRole::row_coefficients, "RowCoefficientsParams", "row_coefficients_kernel", kRowThreads);
    gemm(GemmRole::dlogits, plan.cuda.dlogits, KernelRole::dlogits, "Dlogits", "dlogits");
    gemm(GemmRole::grad_hidden, plan.cuda.grad_hidden, KernelRole::grad_hidden, "GradHidden", "grad_hidden");
    gemm(GemmRole::grad_weight, plan.cuda.grad_weight, KernelRole::grad_weight, "GradWeight", "grad_weight");
    if (joins_chunks(spec, device, plan)) {
        gemm(GemmRole::chunks, plan.cuda.dlogits, KernelRole::backward_chunks, "BackwardChunks", "backward_chunks");
    }
    if (plan.path == PlanPath::cuda_sm90a) {
        kernels.simple(KernelRole::gather_rows, "GatherRowsParams", "gather_rows", kRowThreads);
        kernels.simple(KernelRole::scatter_rows, "ScatterRowsParams", "scatter_rows", kRowThreads);
    }
    if (plan.strategy == Strategy::retain) {
        kernels.simple(KernelRole::references, "ReferencesParams", "references", kRowThreads);
        kernels.simple(KernelRole::retained_rows, "RetainedRowsParams", "retained_rows", kRowThreads);
    }
    if (rounds_weight(spec)) {
        kernels.simple(KernelRole::round_weight, "RoundWeightParams", "round_weight", kRowThreads);
        kernels.simple(KernelRole::merge_stretch, "MergeStretchParams", "merge_stretch", kRowThreads);
    }
    if (spec.bias) kernels.simple(KernelRole::grad_bias, "GradBiasParams", "grad_bias", kRowThreads);
    if (zeroes_columns(spec)) kernels.simple(KernelRole::zero_columns, "ZeroColumnsParams", "zero_columns", kRowThreads);
    return source;
}

}  // namespace flce

// A path: one family of GPU kernels (templates/<path>/) and what the host has to know of it (generator/cuda/<path>/). The planner, the
// tuner, legality, the cost model and texts of plans ask the path of a plan. They never ask which path it is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

/// Role of a tile among a plan's GEMMs. The role decides the contents of shared memory beside the operands. `backward_chunks`: the three
/// GEMMs of backward in one launch.
enum class GemmRole : std::uint8_t { forward, forward_retain, dlogits, grad_hidden, grad_weight, backward_chunks };

/// Role of the plan's forward tile.
[[nodiscard]] inline GemmRole forward_role(const Plan& plan) {
    return plan.strategy == Strategy::retain ? GemmRole::forward_retain : GemmRole::forward;
}

/// A tile that the planner considers.
struct TileCandidate {
    GemmTile tile;
    double efficiency;  ///< share of CudaPath::rate_share that the main loop reaches with whole waves and a long sum; orders the candidates
    double grad_weight = 0;  ///< efficiency of grad_weight where exponentials are retained; 0: `efficiency`
};

/// The grid of warps that multiplies one tile: the last two numbers of a tile in a plan's text.
struct TileWarps {
    int m = 0;
    int n = 0;
    friend bool operator==(const TileWarps&, const TileWarps&) = default;
};

/// Grid of warps that stands for a schedule in a plan's text.
struct ScheduleWarps {
    TileSchedule schedule{};
    TileWarps warps;
};

/// Resources of an SM that one block of a kernel takes.
struct KernelBlock {
    int threads = 0;
    int per_sm = 1;               ///< blocks that an SM holds at a time
    std::int64_t smem_bytes = 0;  ///< dynamic shared memory
    int cluster = 1;              ///< blocks along x that stand in a cluster
};

/// Speed of a GEMM's kernel with a tile.
struct TileRate {
    int blocks_per_sm = 1;
    double efficiency = 0;      ///< tile_efficiency
    double epilogue_depth = 0;  ///< depth of sum that takes as long as filling the pipeline and the epilogue add to a tile
};

/// Why not; std::nullopt: it can.
using Reason = std::optional<std::string>;

/// A path's facts and functions. Functions are references, so that a path without one of them does not compile.
struct CudaPath {
    PlanPath id;
    std::string_view name;                   ///< name in texts of plans and in messages: "cuda_sm80"
    std::string_view instruction;            ///< instruction that multiplies: "mma.sync"
    std::string_view runs_on = "every GPU";  ///< where a plan may be asked for that the planner does not take by itself
    std::span<const int> own_capabilities;   ///< compute capabilities of the architectures that the path is made for
    std::int64_t least_hidden_size;          ///< hidden size from which the planner prefers the path there
    std::span<const Strategy> strategies;    ///< strategies in the order in which the planner considers them
    /// Schedules of tiles, of which a plan's text has the warps. Warps that stand for no schedule are the grid of TileSchedule::warp_grid.
    std::span<const ScheduleWarps> schedules;
    int grad_weight_cluster;  ///< blocks along M that write a tile of grad_weight together
    int retained_columns;     ///< columns of a block of retained exponentials
    bool gathers;             ///< whether kernels read the weight's rows of a spec's ids alone: for specs with `support`, and no others
    bool eight_bits = false;  ///< whether products are of numbers in 8 bits: for specs with fp8, and no others
    bool calls_library;       ///< whether launch programs have products by cuBLASLt, and tiles are what one of its calls computes

    /// Why the path cannot express `spec` with `strategy` or run on `device`, whatever the tiles.
    Reason (&problem)(const Spec& spec, const Device& device, Strategy strategy);
    /// Why the kernel of `role` cannot be instantiated with `tile`, or cannot run on `device`.
    Reason (&tile_problem)(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
    /// Why a layer cannot have `tile` as CudaPlan::lent; zeros are legal everywhere.
    Reason (&lent_tile_problem)(const Spec& spec, const GemmTile& tile);
    /// Least scratch_bytes for which the workspace keeps its bound.
    std::int64_t (&least_scratch_bytes)(const Spec& spec, const Plan& plan);

    /// Candidates for a dtype, not yet checked against any device.
    std::span<const TileCandidate> (&tiles)(DType dtype);
    /// Candidates of CudaPlan::lent, the planner's choice first; none: nothing of `spec` lies there.
    std::span<const GemmTile> (&lent_tiles)(const Spec& spec);
    /// Share of the device's dense tensor-core rate that the path's instruction can reach.
    double (&rate_share)(const Device& device);
    TileRate (&tile_rate)(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile);
    /// Cost of forward over `num_tokens`, and of backward; `retained` is the part of the vocabulary, 0 to 1, whose exponentials forward
    /// leaves.
    Cost (&forward_cost)(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);
    Cost (&backward_cost)(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);

    /// Lays out the workspace, and makes sources and launch programs: generate_cuda.
    CudaProgram (&generate)(const Spec& spec, const Device& device, const Plan& plan);

    /// Whether the path is made for the device.
    [[nodiscard]] bool is_own_of(const Device& device) const;
    /// Whether the planner prefers the path for a layer on the device.
    [[nodiscard]] bool is_preferred(const Spec& spec, const Device& device) const;
    /// Whether the planner takes the path for a layer unasked: the first path of the table, and those that it prefers. A layer with
    /// products in 8 bits is nothing to the first path where the device has a path for such layers.
    [[nodiscard]] bool is_considered(const Spec& spec, const Device& device) const;
    [[nodiscard]] bool has(Strategy strategy) const;
    /// Whether the path can retain exponentials of `spec` on `device`.
    [[nodiscard]] bool can_retain(const Spec& spec, const Device& device) const;
    [[nodiscard]] TileWarps warps(const GemmTile& tile) const;
    /// `tile` with these warps.
    [[nodiscard]] GemmTile with_warps(GemmTile tile, TileWarps warps) const;
};

/// CudaPath::lent_tiles and lent_tile_problem of a path without such tiles.
[[nodiscard]] std::span<const GemmTile> no_lent_tiles(const Spec& spec);
[[nodiscard]] Reason no_lent_tile_problem(const Spec& spec, const GemmTile& tile);

/// All paths, the one that runs everywhere first.
[[nodiscard]] std::span<const CudaPath* const> cuda_paths() noexcept;
/// Throws InternalError for a path that is no GPU's.
[[nodiscard]] const CudaPath& cuda_path(PlanPath path);
/// The device's own path; null where it has none, or where that cannot express `spec`.
[[nodiscard]] const CudaPath* own_cuda_path(const Spec& spec, const Device& device);

/// Why a GPU is too old for every path.
[[nodiscard]] Reason oldest_gpu_problem(const Device& device);
/// Why a block that needs so much shared memory cannot run.
[[nodiscard]] Reason smem_problem(const Device& device, std::int64_t smem_bytes);

/// Share of CudaPath::rate_share that a tile reaches: the table's where it has the tile, else what the reuse of operands by `warps`
/// suggests.
[[nodiscard]] double tile_efficiency(std::span<const TileCandidate> table, GemmRole role, const GemmTile& tile, TileWarps warps);

/// Whether a layer may be left to whole products by a library: where both heads' are needed at once, or lists of classes are kept.
[[nodiscard]] bool takes_library(const Spec& spec);
/// Why a path that has the logits of one head at a time cannot run `spec`. `path`: its name.
[[nodiscard]] Reason teacher_head_problem(const Spec& spec, std::string_view path);
/// Why a path that walks the vocabulary cannot run `spec`. `path`: its name.
[[nodiscard]] Reason support_problem(const Spec& spec, std::string_view path);
/// Why a path whose products are of 16 bits or more has no kernels for the spec.
[[nodiscard]] Reason fp8_problem(const Spec& spec, std::string_view path);
/// Why a path whose kernels read codes in stretches alone does not run a spec with a teacher_top_k or a top_k and a quantised weight.
[[nodiscard]] Reason quantized_problem(const Spec& spec, std::string_view path);
/// Why no path can retain exponentials of `spec`.
[[nodiscard]] Reason retain_problem(const Spec& spec);
/// Whether gradients of retained exponentials lack label smoothing's terms, which their kernels' epilogues subtract.
[[nodiscard]] bool smooths_retained(const Spec& spec, const Plan& plan);
/// Whether retained exponentials may lie in grad_weight's memory: grad_weight is written in the vocabulary's order, and blocks of
/// exponentials are whole tiles of grad_weight, of which `cluster` blocks write one.
[[nodiscard]] bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight, int cluster);

/// Numbers that a token's forward needs of each part of the vocabulary: the maximum, the sum of exponentials, and what outputs and options
/// add.
[[nodiscard]] int partial_fields(const Spec& spec);

}  // namespace flce

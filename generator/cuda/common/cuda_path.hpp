// A path: one family of GPU kernels (templates/<path>/) and what the host has to know of it (generator/cuda/<path>/). The planner, the
// tuner, legality, the cost model, sources and layouts ask the path of a plan. They never ask which path it is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/workspace.hpp"

namespace flce {

struct CudaSource;

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

/// Resources of an SM that one block of a kernel takes.
struct KernelBlock {
    int threads = 0;
    int per_sm = 1;               ///< blocks that an SM holds at a time
    std::int64_t smem_bytes = 0;  ///< dynamic shared memory
    int cluster = 1;              ///< blocks along x that stand in a cluster
};

class CudaPath {
public:
    using Reason = std::optional<std::string>;  ///< why not; std::nullopt: it can

    CudaPath() = default;
    CudaPath(const CudaPath&) = delete;
    CudaPath& operator=(const CudaPath&) = delete;
    virtual ~CudaPath() = default;

    [[nodiscard]] virtual PlanPath id() const noexcept = 0;
    /// Name in texts of plans and in messages: "cuda_sm80".
    [[nodiscard]] virtual std::string_view name() const noexcept = 0;
    /// The instruction that multiplies: "mma.sync".
    [[nodiscard]] virtual std::string_view instruction() const noexcept = 0;
    /// Whether the path is made for the device's architecture. The planner prefers it there, and considers it nowhere else.
    [[nodiscard]] virtual bool is_own_of(const Device& device) const noexcept = 0;

    // Legality.

    /// Why the path cannot express `spec` or run on `device`, whatever the tiles.
    [[nodiscard]] virtual Reason problem(const Spec& spec, const Device& device) const = 0;
    /// Why nothing of `spec` can be retained from forward to backward.
    [[nodiscard]] virtual Reason retain_problem(const Spec& spec) const = 0;
    /// Why the kernel of `role` cannot be instantiated with `tile`, or cannot run on `device`.
    [[nodiscard]] virtual Reason tile_problem(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) const = 0;

    /// Whether a backward in stages reads hidden in the last one alone where forward has retained everything.
    [[nodiscard]] virtual bool defers_hidden(const Spec& spec, const Plan& plan) const = 0;

    // Candidates.

    /// Strategies in the order in which the planner considers them.
    [[nodiscard]] virtual std::span<const Strategy> strategies() const noexcept = 0;
    /// Candidates for a dtype, not yet checked against any device.
    [[nodiscard]] virtual std::span<const TileCandidate> tiles(DType dtype) const noexcept = 0;
    [[nodiscard]] virtual TileWarps warps(const GemmTile& tile) const noexcept = 0;
    /// `tile` with these warps.
    [[nodiscard]] virtual GemmTile with_warps(GemmTile tile, TileWarps warps) const noexcept = 0;

    // Resources of kernels.

    [[nodiscard]] virtual KernelBlock block(const Spec& spec, const Device& device, GemmRole role, const GemmTile& tile) const = 0;

    // Costs of kernels.

    /// Share of the device's dense tensor-core rate that the path's instruction can reach.
    [[nodiscard]] virtual double rate_share(const Device& device) const noexcept = 0;
    /// Share of that rate that a tile reaches: the table's where it has the tile, else what its warps' reuse of operands suggests.
    [[nodiscard]] double tile_efficiency(const Spec& spec, GemmRole role, const GemmTile& tile) const;
    /// Depth of sum that takes as long as filling the pipeline and the epilogue add to a tile.
    [[nodiscard]] virtual double epilogue_depth(const Spec& spec, GemmRole role, const GemmTile& tile, double blocks_per_sm) const = 0;
    /// Cost of backward over `num_tokens`; `retained` is the part of the vocabulary, 0 to 1, whose exponentials forward has left.
    [[nodiscard]] virtual Cost backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens,
                                             double retained) const = 0;

    // Layout of the workspace.

    /// Whether kernels may leave ignored tokens out by a list of the others.
    [[nodiscard]] virtual bool lists_tokens() const noexcept = 0;
    /// Tiles of forward that are summed up apart from all others, with batch_invariant.
    [[nodiscard]] virtual int segment_tiles(const Spec& spec, const Plan& plan) const = 0;
    /// Bytes of forward's partial sums for as few rows as a launch may have, with batch_invariant.
    [[nodiscard]] virtual std::int64_t least_segment_bytes(const Spec& spec, const Plan& plan) const = 0;
    /// Columns of the vocabulary that stretches of forward are multiples of.
    [[nodiscard]] virtual std::int64_t stretch_quantum(const Spec& spec, const Plan& plan) const = 0;
    [[nodiscard]] virtual ForwardRows forward_rows(const Spec& spec, const Device& device, const Plan& plan) const = 0;
    [[nodiscard]] virtual BackwardNeeds backward_needs(const Spec& spec, const Plan& plan) const = 0;
    /// Tokens whose gradients dlogits adds up to one partial sum of a bias's.
    [[nodiscard]] virtual int rows_of_bias_partial(const Plan& plan) const = 0;
    /// Vocabulary rows of a chunk for all tokens at once: at most `widest`, in multiples of `quantum` and no less than one.
    [[nodiscard]] virtual Expr whole_chunk(const Spec& spec, const Device& device, const Plan& plan, const Expr& widest,
                                           std::int64_t quantum) const = 0;
    /// Rows of grad_hidden's sum: as many as tokens, or more where parts of the sum are made beside each other.
    [[nodiscard]] virtual Expr sum_rows(const Spec& spec, const Device& device, const Plan& plan) const = 0;
    /// Whether the three GEMMs of all chunks may be one launch.
    [[nodiscard]] virtual bool joins_chunks(const Spec& spec, const Device& device, const Plan& plan) const = 0;
    /// Condition under which chunks of `layout`, whose chunk sizes are set, are joined in one launch, and the memory for that.
    [[nodiscard]] virtual JoinedChunks joined_chunks(const Spec& spec, const Device& device, const Plan& plan,
                                                     const BackwardLayout& layout) const = 0;
    /// Whether retained exponentials may lie in grad_weight's memory: grad_weight is written in the vocabulary's order, and blocks of
    /// exponentials are whole tiles of grad_weight.
    [[nodiscard]] virtual bool lends_grad_weight(const Spec& spec, const GemmTile& grad_weight) const = 0;

    // Compiled code and launches.

    [[nodiscard]] virtual CudaSource source(const Spec& spec, const Device& device, const Plan& plan) const = 0;
    [[nodiscard]] virtual LaunchProgram forward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                                        const ForwardLayout& layout) const = 0;
    [[nodiscard]] virtual LaunchProgram backward_program(const Spec& spec, const Device& device, const Plan& plan, const CudaSource& source,
                                                         const BackwardLayout& layout) const = 0;
};

/// All paths, the one that runs everywhere first.
[[nodiscard]] std::span<const CudaPath* const> cuda_paths() noexcept;
/// Throws InternalError for a path that is no GPU's.
[[nodiscard]] const CudaPath& cuda_path(PlanPath path);
/// The device's own path; null where it has none, or where that cannot express `spec`.
[[nodiscard]] const CudaPath* own_cuda_path(const Spec& spec, const Device& device);

/// Why a GPU is too old for every path.
[[nodiscard]] CudaPath::Reason oldest_gpu_problem(const Device& device);
/// Why a block that needs so much shared memory cannot run.
[[nodiscard]] CudaPath::Reason smem_problem(const Device& device, std::int64_t smem_bytes);

/// Numbers that a token's forward needs of each part of the vocabulary: the maximum, the sum of exponentials, and what outputs and options
/// add.
[[nodiscard]] int partial_fields(const Spec& spec);

}  // namespace flce

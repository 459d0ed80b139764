// Plan: how a Spec is computed on a Device. Plain data with a canonical text, so any choice can be read in a log, overridden and replayed.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"
#include "flce/spec.hpp"

namespace flce {

/// Family of kernels that runs the plan. cuda_sm80 is the generic tensor-core path (mma.sync, cp.async) of sm_80 and everything newer,
/// cuda_sm90a Hopper's own (wgmma, tensor copies, clusters) for 16-bit dtypes. cuda_lt has its products, of a stretch of the vocabulary at
/// a time, made by the vendor's cuBLASLt, on every GPU for 16-bit dtypes. cuda_gather reads single rows of the weight, on every GPU for
/// specs with `support`. cuda_fp8 is Hopper's for specs with fp8, cuda_fp8_sm89 that of sm_89, sm_120 and sm_121.
enum class PlanPath : std::uint8_t { cpu, cuda_sm80, cuda_sm90a, cuda_lt, cuda_gather, cuda_fp8, cuda_fp8_sm89 };

/// recompute keeps nothing of size [N, V]: backward computes the logits again, a vocabulary chunk at a time (8·N·V·D operations). retain
/// leaves exponentials of the first part of the vocabulary, as much as the call's Retained holds, to backward: (8 − 2f)·N·V·D operations
/// where that part is the fraction f of the vocabulary.
enum class Strategy : std::uint8_t { recompute, retain };

/// How the warps of a block share its tiles. cuda_sm80: a tile for the whole block, whose warps stand in a warps_m × warps_n grid.
/// cuda_sm90a: two warpgroups multiply, by turns (each has tiles of its own, in a plan's text "4x1") or together (each has half of every
/// tile, "8x1").
enum class TileSchedule : std::uint8_t { warp_grid, by_turns, together };

/// One tensor-core GEMM's tiling: a block computes block_m × block_n, and `stages` slices of block_k are in flight through shared memory.
/// On cuda_sm90a blocks stand in clusters of two along M. On cuda_lt forward's and dlogits' tiles are what one call of the library
/// computes: block_m tokens and block_n columns of the vocabulary; the other numbers are 1.
struct GemmTile {
    int block_m = 0;
    int block_n = 0;
    int block_k = 0;
    int stages = 0;
    int warps_m = 0;  ///< the grid of warps, where that is the schedule
    int warps_n = 0;
    TileSchedule schedule = TileSchedule::warp_grid;
    friend bool operator==(const GemmTile&, const GemmTile&) = default;
};

/// Products that cuBLASLt makes.
struct LibraryPlan {
    int version = 0;  ///< version of the library that has the algorithms (130100 is 13.1.0); another is asked for its favourites. 0: any
    // Algorithms, as the library lists them for a product, its favourite is number 0.
    int logits = 0;
    int grad_hidden = 0;
    int grad_weight = 0;
    friend bool operator==(const LibraryPlan&, const LibraryPlan&) = default;
};

struct CudaPlan {
    GemmTile forward{};      ///< logits tile of the forward pass: M tokens, N vocabulary, K hidden
    GemmTile dlogits{};      ///< recomputed logits and their gradient: M tokens, N vocabulary, K hidden
    GemmTile grad_hidden{};  ///< M tokens, N hidden, K vocabulary
    GemmTile grad_weight{};  ///< M vocabulary, N hidden, K tokens
    int raster = 8;          ///< tile rows that walk together over the other dimension, so that one operand stays in L2
    LibraryPlan library{};   ///< meaningful for path == cuda_lt
    GemmTile lent{};         ///< logits tile of cuda_lt in grad_weight's memory, of a divergence: tokens, vocabulary; zeros: none there
    friend bool operator==(const CudaPlan&, const CudaPlan&) = default;
};

/// Register block, cache blocks and instruction use of the CPU's packed-panel GEMM.
struct CpuPlan {
    int vector_bits = 0;
    bool bf16_dot = false;  ///< pack bf16 pairs and use VDPBF16PS
    int micro_m = 0;        ///< rows of the register block
    int micro_n = 0;        ///< columns, a multiple of the vector's floats
    int block_m = 0;        ///< rows of A packed at a time (stay in L2)
    int block_n = 0;        ///< columns of B packed at a time
    int block_k = 0;        ///< depth of a packed panel
    friend bool operator==(const CpuPlan&, const CpuPlan&) = default;
};

struct Plan {
    PlanPath path = PlanPath::cpu;
    Strategy strategy = Strategy::recompute;
    std::int64_t vocab_chunk = 0;  ///< most vocabulary rows whose logit gradients exist at once; fewer where N is large (see scratch_bytes)
    /// Bound of everything but dH's fp32 accumulator: workspace ≤ scratch_bytes + 4·N·D, and 8 bytes for each token above 262,144.
    std::int64_t scratch_bytes = 0;
    CudaPlan cuda{};  ///< meaningful for path == cuda_*
    CpuPlan cpu{};    ///< meaningful for path == cpu
    friend bool operator==(const Plan&, const Plan&) = default;

    /// Canonical text: path, strategy and every key of that path, for example
    /// "cuda_sm80:recompute,chunk=16384,scratch=67108864,forward=128x256x32x3/2x4,…,raster=8" (tiles are block_m x block_n x block_k x
    /// stages / warps_m x warps_n), "cuda_lt:retain,chunk=…,scratch=…,forward=4096x2048,dlogits=4096x2048,cublaslt=0,algorithms=0/0/0"
    /// (with ",lent=4096x4096" behind it where logits may lie in grad_weight's memory) or
    /// "cpu:recompute,vector=512,bf16_dot=0,micro=14x32,block=…,chunk=…,scratch=…".
    /// parse_plan reads the text back to an equal Plan.
    [[nodiscard]] std::string text() const;
    /// A JSON object as text, with the same keys after "path" and "strategy"; parse_plan_json reads it back.
    [[nodiscard]] std::string json() const;
};

/// Whether logits of both heads may lie in grad_weight's memory with such a plan, until backward writes it.
[[nodiscard]] constexpr bool has_lent_tile(const Plan& plan) noexcept { return plan.cuda.lent.block_n > 0; }

/// Throws PlanError for an unknown, repeated or missing key and for a bad value.
[[nodiscard]] Plan parse_plan(std::string_view text);
[[nodiscard]] Plan parse_plan_json(std::string_view json);

[[nodiscard]] std::string_view to_string(PlanPath path) noexcept;
[[nodiscard]] std::string_view to_string(Strategy strategy) noexcept;

/// Why `plan` cannot run `spec` on `device`; std::nullopt when it can. Legality is decided here alone: the planner, the tuner and overrides
/// all ask this function. Throws SpecError where `spec` itself is not legal.
[[nodiscard]] std::optional<std::string> illegal_reason(const Spec& spec, const Device& device, const Plan& plan);

/// Scratch that every plan may use beside 4·N·D bytes and long lists of tokens, and the default of a session.
inline constexpr std::int64_t kDefaultScratchBytes = 64LL << 20;

/// Number of tokens that a kernel is planned for where the call's is not known.
inline constexpr std::int64_t kTypicalTokens = 4096;
/// Numbers of tokens at which plans are tuned, ascending. A number between two buckets takes the plan of the nearest.
[[nodiscard]] std::span<const std::int64_t> token_buckets() noexcept;
/// The nearest of token_buckets by ratio, the smaller of two that are equally near; kTypicalTokens for 0 and less, which stand for a number
/// not known.
[[nodiscard]] std::int64_t token_bucket(std::int64_t num_tokens) noexcept;

/// Memory and size of a call, as far as its plan depends on them. Sessions choose plans, the tuner searches and records are kept by this.
struct PlanRequest {
    /// Most bytes beyond dH's accumulator; below the smallest legal amount is a PlanError.
    std::int64_t scratch_bytes = kDefaultScratchBytes;
    std::int64_t workspace_limit_bytes = 0;  ///< limit on workspace and retained memory together; 0: none
    std::int64_t num_tokens = 0;             ///< tokens of the call; 0: not known
    friend bool operator==(const PlanRequest&, const PlanRequest&) = default;
};

/// All legal candidate plans, best expected first (by the cost model for the architecture: all products of an architecture share a choice
/// and so their kernels); never empty. Throws SpecError, and PlanError as choose_plan does.
[[nodiscard]] std::vector<Plan> candidate_plans(const Spec& spec, const Device& device, const PlanRequest& request = {});

/// The first of candidate_plans. Throws PlanError with the reasons when there is none.
[[nodiscard]] Plan choose_plan(const Spec& spec, const Device& device, const PlanRequest& request = {});

/// Expected cost of a pass over num_tokens tokens, by the cost model.
struct Cost {
    double flops = 0;
    double bytes = 0;  ///< moved to and from memory
    double seconds = 0;
};
/// `retained`: the part of the vocabulary, 0 to 1, whose exponentials (a CPU's plan: logits) forward leaves to backward; a GPU's plan whose
/// strategy is not retain leaves nothing. Absent: the part with which candidates are compared: everything where the strategy is retain,
/// else nothing. A CPU's time is that of device.cpu.cores threads.
[[nodiscard]] Cost estimate_forward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens,
                                    std::optional<double> retained = std::nullopt);
[[nodiscard]] Cost estimate_backward(const Spec& spec, const Device& device, const Plan& plan, std::int64_t num_tokens,
                                     std::optional<double> retained = std::nullopt);

}  // namespace flce

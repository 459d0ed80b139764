// Expected time of a path's GEMMs: the larger of the arithmetic, in whole waves of tiles, and of the memory traffic.
#pragma once

#include <optional>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "generator/cuda/common/cuda_path.hpp"

namespace flce {

struct GemmSize {
    double m, n, k;
};

/// Seconds that a launch costs beside the work of its blocks: measured on the GPU, or 4 µs, as on H100 and H200.
[[nodiscard]] double launch_seconds(const Device& device);

class GemmCost {
public:
    GemmCost(const Spec& spec, const Device& device, const Plan& plan);

    /// `bytes`: moved to and from memory.
    [[nodiscard]] double seconds(GemmRole role, const GemmTile& tile, const GemmSize& size, double bytes) const;
    /// Operand bytes of a pass over all logits: the hidden rows of a raster group stay in L2 while the weight streams past them.
    [[nodiscard]] double logits_bytes(const GemmTile& tile, double num_tokens, double vocab_size) const;

private:
    const CudaPath& path_;
    const Spec& spec_;
    const Device& device_;
    const Plan& plan_;
    double rate_;  ///< operations a second
};

[[nodiscard]] Cost gpu_forward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);
/// Backward with the three GEMMs of each chunk one after the other.
[[nodiscard]] Cost chunked_backward_cost(const Spec& spec, const Device& device, const Plan& plan, double num_tokens);
/// Backward of the `retained` part of the vocabulary, 0 to 1: two plain GEMMs over its exponentials.
class RetainedGemms {
public:
    RetainedGemms(const Spec& spec, const Device& device, const Plan& plan, double num_tokens, double retained);
    [[nodiscard]] Cost cost() const;

    double gemm_flops;    ///< operations of one GEMM
    double exponentials;  ///< bytes
    double gradient;      ///< bytes of grad_weight that are moved
    // A path's choices.
    bool adds_up_bias = false;                  ///< whether grad_bias takes no pass over the exponentials of its own
    std::optional<double> grad_weight_seconds;  ///< instead of GemmCost's

private:
    const Spec& spec_;
    const Device& device_;
    const Plan& plan_;
    double tokens_;
    double columns_;
};
/// Cost where the `retained` part of the vocabulary costs `kept` and all of it would cost `again`.
[[nodiscard]] Cost mixed(const Cost& again, const Cost& kept, double retained);
/// Vocabulary rows of a chunk, as scratch allows: the gradients of a column's logits and its rounded weights have to fit.
[[nodiscard]] double gpu_chunk_rows(const Spec& spec, const Plan& plan, double num_tokens);
/// Adds the pass that rounds the weight, where the spec's is rounded.
void add_rounding(const Spec& spec, const Device& device, Cost& cost);

}  // namespace flce

// The output layer of the demo's model, run by kernels from get_kernel, and what the demo reports in the end.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "autotune/judge.hpp"
#include "autotune/reference.hpp"
#include "flce/flce.hpp"
#include "runtime/layer/layer.hpp"

namespace flce::demo {

[[nodiscard]] double seconds_since(std::chrono::steady_clock::time_point start);

/// The tied output layer: embedding table and its gradient in fp32 on the host, as the model below and the optimizer want them; on a GPU,
/// or in a narrower dtype, mirrored for the kernels. Loss, dL/dhidden and dL/dweight come from the kernel alone.
class OutputLayer {
public:
    OutputLayer(std::shared_ptr<const Kernel> kernel, std::int64_t max_tokens);

    [[nodiscard]] std::span<float> embedding() { return embedding_; }
    [[nodiscard]] std::span<float> grad_embedding() { return grad_embedding_; }

    /// Mean loss of the tokens.
    double loss(std::span<const float> hidden, std::span<const std::int32_t> targets);
    /// Computes the loss, and writes dL/dhidden into grad_hidden and adds dL/dweight to grad_embedding().
    double loss_and_gradients(std::span<const float> hidden, std::span<const std::int32_t> targets, std::span<float> grad_hidden);
    /// Tells that the embedding has changed; to be called whenever it has.
    void embedding_changed();

    /// Loss, dL/dhidden and dL/dweight of these tokens against fp64.
    struct Check {
        Verdict loss;
        Verdict grad_hidden;
        Verdict grad_weight;
        [[nodiscard]] bool passed() const { return loss.passed() && grad_hidden.passed() && grad_weight.passed(); }
    };
    /// `between_blocks` is called now and then; an exception ends the work.
    Check check(std::span<const float> hidden, std::span<const std::int32_t> targets, const std::function<void()>& between_blocks);

    [[nodiscard]] std::size_t workspace_bytes() const { return workspace_bytes_; }

private:
    [[nodiscard]] LayerInputs inputs(std::int64_t num_tokens) const;
    [[nodiscard]] LayerOutputs outputs(std::int64_t num_tokens) const;
    /// Room for a pass over that number of tokens. Fewer tokens may need more than max_tokens do.
    [[nodiscard]] Workspace workspace(std::int64_t num_tokens);
    void put(Tensor& tensor, std::span<const float> values) const;
    void get(const Tensor& tensor, DType dtype, std::span<float> values) const;
    void forward(std::span<const float> hidden, std::span<const std::int32_t> targets);
    double read_loss() const;

    std::shared_ptr<const Kernel> kernel_;
    DeviceRef device_;
    bool direct_;  ///< the kernel reads and writes the fp32 arrays themselves
    std::size_t workspace_bytes_;
    Scratch scratch_;
    Tensor hidden_, weight_, target_, loss_, lse_, grad_hidden_, grad_weight_;
    std::vector<float> embedding_storage_, grad_storage_;
    std::span<float> embedding_, grad_embedding_;
};

/// How long get_kernel takes from nothing, from disk and from memory.
struct GetKernelTimes {
    double cold_s = 0;
    double disk_s = 0;
    double hot_s = 0;
    std::string cold_note;  ///< where cold was measured
};
[[nodiscard]] GetKernelTimes measure_get_kernel(const SessionOptions& options, const Spec& spec, double first_s, bool first_compiled);

/// Kernels for GPU architectures, compiled without a GPU.
struct ArchitectureReport {
    std::string name;
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    double seconds = 0;
    std::string error;  ///< why not
};
[[nodiscard]] std::vector<ArchitectureReport> prewarm_architectures(Session& session, const Spec& spec,
                                                                    const std::function<void()>& between_blocks);

}  // namespace flce::demo

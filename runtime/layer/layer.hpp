// The tensors of one output layer on one device: owned memory for every argument of forward and backward, and the calls made from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "flce/buffer.hpp"
#include "flce/flce.hpp"
#include "runtime/layer/out_of_memory.hpp"

namespace flce {

/// Memory and its view. An absent tensor has an absent view.
struct Tensor {
    std::string name;  ///< name for messages
    Buffer buffer;
    TensorView view{};

    [[nodiscard]] std::size_t bytes() const;
    template <class T>
    [[nodiscard]] std::vector<T> to_host() const {
        auto host = allocated(name, static_cast<double>(bytes()), DeviceRef{}, [&] { return std::vector<T>(bytes() / sizeof(T)); });
        buffer.download(host.data(), bytes());
        return host;
    }
};

[[nodiscard]] ScalarType scalar_type(DType dtype);

/// Uninitialised. An empty shape is a scalar. Throws OutOfMemory naming it.
[[nodiscard]] Tensor make_tensor(const std::string& name, DeviceRef device, ScalarType dtype, const std::vector<std::int64_t>& shape);
/// Makes a tensor with contents; `host` holds exactly the tensor's bytes.
[[nodiscard]] Tensor make_tensor(const std::string& name, DeviceRef device, ScalarType dtype, const std::vector<std::int64_t>& shape,
                                 const void* host);

/// Element types of the weight and of a quantised one's scales in memory, and the scales' shape.
[[nodiscard]] ScalarType weight_type(const Spec& spec);
[[nodiscard]] ScalarType scale_type(const Spec& spec);
[[nodiscard]] std::vector<std::int64_t> weight_scale_shape(const Spec& spec);

/// Shape of the weight and of its gradient in memory. Of a teacher's head: weight_shape(teacher_head(spec)).
[[nodiscard]] std::vector<std::int64_t> weight_shape(const Spec& spec);

struct LayerInputs {
    std::int64_t num_tokens = 0;
    Tensor hidden, weight, weight_scale, weight_tensor_scale, bias, class_weight, class_offset, class_group, row_group, target, temperature,
        token_weight;
    Tensor teacher_ids, teacher_probs;
    Tensor teacher_hidden, teacher_weight, teacher_bias;
    Tensor grad_loss, grad_lse, grad_logprobs, grad_entropy;  ///< absent: 1 for the loss if the spec has it, 0 for the rest
};

struct LayerOutputs {
    Tensor loss, z_loss, lse, logprobs, entropy, top1, log_sum_sq_probs, teacher_logprobs;
    Tensor teacher_lse, teacher_entropy, student_divergence;
    Tensor top_logprobs, top_ids;
    Tensor grad_hidden, grad_weight, grad_bias;
    /// A shard's outputs. The shard is the first of as many as the whole vocabulary has, and the others have found nothing: partial_sums is
    /// the beginning of all_partial_sums.
    Tensor partial_sums, all_partial_sums, target_class_weight, class_weight_total;
};

/// Everything that `spec` computes, no grad_weight of a quantised weight; gradients that are accumulated into start at 0. Throws SpecError
/// for a shard with padding.
[[nodiscard]] LayerOutputs make_outputs(const Spec& spec, DeviceRef device, std::int64_t num_tokens, Reduction reduction);

struct CallOptions {
    Reduction reduction = Reduction::mean;
    std::int64_t ignore_index = -100;
};

[[nodiscard]] ForwardArgs forward_args(const LayerInputs& inputs, const LayerOutputs& outputs, const CallOptions& options);
/// Kernel::forward, and of a shard Kernel::merge after it. `args` are forward_args of these outputs, or of some of them.
void run_forward(const Kernel& kernel, const ForwardArgs& args, const LayerOutputs& outputs, Workspace workspace, Stream stream = {});
/// Bytes that any pass of a step needs.
[[nodiscard]] std::size_t step_workspace_bytes(const Kernel& kernel, std::int64_t num_tokens);
[[nodiscard]] BackwardArgs backward_args(const LayerInputs& inputs, const LayerOutputs& outputs, const CallOptions& options);

/// Scratch memory, aligned as kernels want it.
class Scratch {
public:
    /// `name`: "workspace", "retained". Throws OutOfMemory naming it.
    Scratch(std::string_view name, DeviceRef device, std::size_t bytes);
    [[nodiscard]] Workspace workspace() const;

private:
    Buffer buffer_;
    std::size_t bytes_;
};

/// Kernel::choose_retained, of which `data` is still to be set, under a limit on it and the workspace together (0: none). Throws PlanError
/// where the workspace alone is over the limit.
[[nodiscard]] Retained automatic_retained(const Kernel& kernel, std::int64_t num_tokens, std::int64_t workspace_limit_bytes);

/// Standard deviation of random logits, before a softcap.
inline constexpr double kRandomLogitDeviation = 2.0;

/// Random tensors on the host: logits of that deviation, some rows ignored where that is asked for.
struct RandomLayer {
    std::int64_t num_tokens = 0;
    std::vector<std::byte> hidden, weight, bias;  ///< spec dtype
    std::vector<std::byte> weight_scale;          ///< and weight_tensor_scale: of a quantised weight
    float weight_tensor_scale = 1;
    std::vector<std::byte> teacher_hidden, teacher_weight, teacher_bias;  ///< inputs of a teacher's head, if the spec has one
    std::vector<float> class_weight, class_offset;
    std::vector<std::int32_t> class_group, row_group;  ///< groups of a few classes each, some below 0
    std::vector<std::int64_t> target;
    std::vector<float> temperature;                                       ///< temperatures from ½ to 2
    std::vector<float> token_weight;                                      ///< about 1, a few below 0
    std::vector<std::int64_t> teacher_ids;                                ///< [N, K], a few equal ones, some -1
    std::vector<float> teacher_probs;                                     ///< [N, K], of a token at most 1 together
    std::vector<float> grad_loss, grad_lse, grad_logprobs, grad_entropy;  ///< empty: absent
};

struct RandomOptions {
    std::uint64_t seed = 0;
    std::int64_t ignore_index = -100;
    double ignored = 0.0;                      ///< fraction of the rows
    double deviation = kRandomLogitDeviation;  ///< standard deviation of logits, before a softcap
    bool upstream = false;  ///< gradients for every output that the spec offers, and for each token's loss with reduction none
    Reduction reduction = Reduction::mean;
};

/// Throws OutOfMemory naming the tensor.
[[nodiscard]] RandomLayer make_random_layer(const Spec& spec, std::int64_t num_tokens, const RandomOptions& options);
[[nodiscard]] LayerInputs upload(const Spec& spec, const RandomLayer& layer, DeviceRef device);

/// `count` near-normal numbers (mean 0, the given standard deviation), equal for equal seeds on every machine.
void fill_random(std::byte* to, DType dtype, std::size_t count, double deviation, std::uint64_t seed);

}  // namespace flce

// The demo's language model below its output layer, in fp32 on the host: the embeddings of the last few tokens, mixed by a matrix, through
// tanh. The embedding table is the output layer's weight as well (tied); its logits, loss and gradients are the kernels' business.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flce::demo {

struct ModelShape {
    std::int64_t vocab_size = 0;
    std::int64_t hidden_size = 0;
    std::int64_t context = 0;  ///< tokens that the next token is predicted from
};

/// hidden = tanh(concatenate(E[x₁] … E[x_k]) · M + b).
class ContextModel {
public:
    ContextModel(const ModelShape& shape, std::uint64_t seed);

    /// E and its gradient live with the output layer; the rest is here.
    void initialize_embedding(std::span<float> embedding) const;
    /// contexts: [N, k] tokens, the latest first. Writes hidden [N, D].
    void forward(std::span<const float> embedding, std::span<const std::int32_t> contexts, std::span<float> hidden);
    /// Sets the gradients of M and b from dL/dhidden of the last forward, and adds to the embedding's.
    void backward(std::span<const float> grad_hidden, std::span<float> grad_embedding);

    /// M and b in one array, and their gradients.
    [[nodiscard]] std::span<float> parameters() { return parameters_; }
    [[nodiscard]] std::span<const float> gradients() const { return gradients_; }

private:
    ModelShape shape_;
    std::uint64_t seed_;
    std::vector<float> parameters_, gradients_;
    std::vector<std::int32_t> contexts_;
    std::vector<float> inputs_;   // [N, k·D]
    std::vector<float> outputs_;  // [N, D]: hidden
};

enum class OptimizerKind { adamw, sgd };

/// AdamW, or SGD with momentum, over one flat array.
class Optimizer {
public:
    Optimizer(OptimizerKind kind, std::size_t count);
    void step(std::span<float> parameters, std::span<const float> gradients, double learning_rate);

private:
    OptimizerKind kind_;
    std::int64_t steps_ = 0;
    std::vector<float> first_, second_;
};

/// c[m,n] = a[m,k] · b[k,n], row-major, on every core; each element's sum is taken in order of k.
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c);
[[nodiscard]] std::vector<float> transposed(std::int64_t rows, std::int64_t columns, const float* from);

}  // namespace flce::demo

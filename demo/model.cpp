#include "demo/model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/layer/layer.hpp"
#include "runtime/layer/parallel_blocks.hpp"

namespace flce::demo {
namespace {

constexpr std::int64_t kRows = 4;  // rows of a register block
constexpr std::int64_t kColumns = 8;

void fill(std::span<float> values, double deviation, std::uint64_t seed) {
    fill_random(reinterpret_cast<std::byte*>(values.data()), DType::fp32, values.size(), deviation, seed);
}

/// Four numbers in a register, wherever this is compiled for. Left to itself the compiler vectorises the blocks below across p, with three
/// shuffles for every multiplication.
using Lanes [[gnu::vector_size(16)]] = float;
constexpr std::int64_t kLanes = sizeof(Lanes) / sizeof(float);
static_assert(kColumns % kLanes == 0);

/// One register block of `multiply`: kRows × kColumns.
void multiply_full_block(std::int64_t n, std::int64_t k, const float* a, const float* b, float* c) {
    Lanes sums[kRows][kColumns / kLanes] = {};
    for (std::int64_t p = 0; p < k; ++p) {
        Lanes row[kColumns / kLanes];
        std::memcpy(row, b + p * n, sizeof row);
        for (std::int64_t r = 0; r < kRows; ++r) {
            for (std::int64_t j = 0; j < kColumns / kLanes; ++j) sums[r][j] += a[r * k + p] * row[j];
        }
    }
    for (std::int64_t r = 0; r < kRows; ++r) std::memcpy(c + r * n, sums[r], sizeof sums[r]);
}

/// Multiplies a block at the ragged ends, where there are fewer rows or columns.
void multiply_block(std::int64_t rows, std::int64_t columns, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c) {
    for (std::int64_t r = 0; r < rows; ++r) {
        float sums[kColumns] = {};
        for (std::int64_t p = 0; p < k; ++p) {
            for (std::int64_t j = 0; j < columns; ++j) sums[j] += a[r * k + p] * b[p * n + j];
        }
        std::copy_n(sums, columns, c + r * n);
    }
}

}  // namespace

void multiply(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* b, float* c) {
    parallel_blocks(m, 8 * kRows, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t j = 0; j < n; j += kColumns) {
            for (std::int64_t i = begin; i < end; i += kRows) {
                const std::int64_t rows = std::min(kRows, end - i);
                const std::int64_t columns = std::min(kColumns, n - j);
                if (rows == kRows && columns == kColumns) {
                    multiply_full_block(n, k, a + i * k, b + j, c + i * n + j);
                } else {
                    multiply_block(rows, columns, n, k, a + i * k, b + j, c + i * n + j);
                }
            }
        }
    });
}

std::vector<float> transposed(std::int64_t rows, std::int64_t columns, const float* from) {
    std::vector<float> to(static_cast<std::size_t>(rows * columns));
    constexpr std::int64_t kTile = 32;
    for (std::int64_t i0 = 0; i0 < rows; i0 += kTile) {
        for (std::int64_t j0 = 0; j0 < columns; j0 += kTile) {
            for (std::int64_t i = i0; i < std::min(rows, i0 + kTile); ++i) {
                for (std::int64_t j = j0; j < std::min(columns, j0 + kTile); ++j)
                    to[static_cast<std::size_t>(j * rows + i)] = from[i * columns + j];
            }
        }
    }
    return to;
}

ContextModel::ContextModel(const ModelShape& shape, std::uint64_t seed) : shape_(shape), seed_(seed) {
    const std::int64_t inputs = shape.context * shape.hidden_size;
    parameters_.resize(static_cast<std::size_t>((inputs + 1) * shape.hidden_size));
    gradients_.resize(parameters_.size());
    const auto matrix = std::span(parameters_).first(static_cast<std::size_t>(inputs * shape.hidden_size));
    fill(matrix, 1.0 / std::sqrt(static_cast<double>(inputs)), seed + 1);
}

void ContextModel::initialize_embedding(std::span<float> embedding) const { fill(embedding, 0.1, seed_ + 2); }

void ContextModel::forward(std::span<const float> embedding, std::span<const std::int32_t> contexts, std::span<float> hidden) {
    const std::int64_t d = shape_.hidden_size;
    const std::int64_t k = shape_.context;
    const std::int64_t n = static_cast<std::int64_t>(contexts.size()) / k;
    contexts_.assign(contexts.begin(), contexts.end());
    inputs_.resize(static_cast<std::size_t>(n * k * d));
    for (std::size_t i = 0; i < contexts.size(); ++i) {
        std::copy_n(embedding.data() + contexts[i] * d, d, inputs_.data() + static_cast<std::int64_t>(i) * d);
    }
    multiply(n, d, k * d, inputs_.data(), parameters_.data(), hidden.data());
    const float* bias = parameters_.data() + k * d * d;
    parallel_blocks(n, 64, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            for (std::int64_t j = 0; j < d; ++j) {
                float& h = hidden[static_cast<std::size_t>(i * d + j)];
                h = std::tanh(h + bias[j]);
            }
        }
    });
    outputs_.assign(hidden.begin(), hidden.end());
}

void ContextModel::backward(std::span<const float> grad_hidden, std::span<float> grad_embedding) {
    const std::int64_t d = shape_.hidden_size;
    const std::int64_t k = shape_.context;
    const std::int64_t n = static_cast<std::int64_t>(contexts_.size()) / k;
    std::vector<float> grad(grad_hidden.size());
    for (std::size_t i = 0; i < grad.size(); ++i) grad[i] = grad_hidden[i] * (1.0F - outputs_[i] * outputs_[i]);
    const auto inputs_t = transposed(n, k * d, inputs_.data());
    multiply(k * d, d, n, inputs_t.data(), grad.data(), gradients_.data());
    float* grad_bias = gradients_.data() + k * d * d;
    std::fill_n(grad_bias, d, 0.0F);
    for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < d; ++j) grad_bias[j] += grad[static_cast<std::size_t>(i * d + j)];
    }
    const auto matrix_t = transposed(k * d, d, parameters_.data());
    std::vector<float> grad_inputs(inputs_.size());
    multiply(n, k * d, d, grad.data(), matrix_t.data(), grad_inputs.data());
    for (std::size_t i = 0; i < contexts_.size(); ++i) {  // in order: two equal tokens add up the same way every time
        float* row = grad_embedding.data() + contexts_[i] * d;
        const float* from = grad_inputs.data() + static_cast<std::int64_t>(i) * d;
        for (std::int64_t j = 0; j < d; ++j) row[j] += from[j];
    }
}

Optimizer::Optimizer(OptimizerKind kind, std::size_t count)
    : kind_(kind), first_(count), second_(kind == OptimizerKind::adamw ? count : 0) {}

void Optimizer::step(std::span<float> parameters, std::span<const float> gradients, double learning_rate) {
    ++steps_;
    const auto rate = static_cast<float>(learning_rate);
    constexpr float kMomentum = 0.9F;
    constexpr float kSecondDecay = 0.98F;
    constexpr float kWeightDecay = 0.01F;
    const auto first_correction = static_cast<float>(1.0 / (1.0 - std::pow(kMomentum, steps_)));
    const auto second_correction = static_cast<float>(1.0 / (1.0 - std::pow(kSecondDecay, steps_)));
    parallel_blocks(static_cast<std::int64_t>(parameters.size()), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
            const float g = gradients[i];
            if (kind_ == OptimizerKind::sgd) {
                first_[i] = kMomentum * first_[i] + g;
                parameters[i] -= rate * first_[i];
                continue;
            }
            first_[i] = kMomentum * first_[i] + (1.0F - kMomentum) * g;
            second_[i] = kSecondDecay * second_[i] + (1.0F - kSecondDecay) * g * g;
            const float update = first_[i] * first_correction / (std::sqrt(second_[i] * second_correction) + 1e-8F);
            parameters[i] -= rate * (update + kWeightDecay * parameters[i]);
        }
    });
}

}  // namespace flce::demo

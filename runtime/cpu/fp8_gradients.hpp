// Gradients of an FP8 head on the CPU: what is done to tiles before and behind products of exponentials in 8 bits.
#pragma once

#include <cstdint>
#include <functional>

#include "runtime/cpu/passes.hpp"

namespace flce {

/// A chunk of the vocabulary for a block of tokens.
struct Fp8Step {
    Fp8Row* rows;  ///< rows of the block
    std::int64_t token;
    std::int64_t count;  ///< tokens
    std::int64_t vocab;
    bool first_chunk;  ///< first chunk of the vocabulary, for these tokens
    bool first_block;  ///< first block of tokens, for this chunk
};

class Fp8Gradients {
public:
    /// `weight_sum`, `hidden_sum`: memory of CpuBackwardLayout, with label smoothing.
    Fp8Gradients(const CpuContext& context, const CpuCall& call, float* weight_sum, float* hidden_sum);

    /// Finds powers of two for the operands of both products, of the whole weight and of all tokens' hidden states times their factors, and
    /// label smoothing's sums. `row_of`: a token's row, for the first columns.
    void find_powers(const std::function<GradRow(std::int64_t)>& row_of);
    [[nodiscard]] Fp8Row row(const GradRow& row) const;
    /// The weight as operand of grad_hidden. Targets' rows are rounded as all others: a difference would be a class's in every step.
    [[nodiscard]] Fp8Numbers weight(std::int64_t first) const;
    [[nodiscard]] int hidden_power() const { return hidden_power_; }  ///< q, of hidden's operands of grad_weight

    /// Exponentials become numbers of 8 bits, and the gradients of the targets' logits go to their rows.
    void round_tile(float* tile, const Fp8Step& step, const TileRange& range) const;
    /// grad_bias of a tile's columns.
    void sum_columns(const float* tile, const Fp8Step& step, const TileRange& range, float* sums) const;
    /// Products of codes become gradients, and the targets' terms and label smoothing's are added.
    void finish_hidden(float* tile, const Fp8Step& step, const TileRange& range) const;
    /// Finishes classes [range.row, range.row + range.rows) of the chunk. Targets' terms come token by token.
    void finish_weight(float* tile, const Fp8Step& step, const TileRange& range) const;

private:
    [[nodiscard]] bool smooths() const { return spec_.label_smoothing > 0; }
    /// Loads a class's numbers, of weight(), from hidden dimension `d` on.
    void load_class(std::int64_t column, std::int64_t d, std::int64_t count, float* to) const;
    /// r of a row that is not ignored.
    [[nodiscard]] float factor_of(const GradRow& row) const;
    /// Times a class's weight, what the gradients of a row's logits are less by; 0 of an ignored row.
    [[nodiscard]] float smoothing_of(const GradRow& row) const;

    const CpuContext& context_;
    const CpuCall& call_;
    const Spec& spec_;
    const std::int64_t element_;
    const std::int64_t ld_;    ///< from one row of a tile to the next
    float* const weight_sum_;  ///< [D]: Σ c_j·weight[j]
    float* const hidden_sum_;  ///< [D]: Σ smoothing_i·hidden[i]
    int weight_power_ = 0;
    int hidden_power_ = 0;
};

}  // namespace flce

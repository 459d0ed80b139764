// The truth of an FP8 head: its numbers of 8 bits by definition, everything else in fp64. Shares nothing with the library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/compare.hpp"

namespace flce::test {

/// How far a right kernel may be from the truth beyond the roundings of fp32.
struct Fp8Tolerance {
    /// Octaves by which a row's exponentials may lie lower than those whose sum is known, and a token's hidden states times its factor than
    /// the truth's: what is subnormal then has larger roundings.
    int octaves = 0;
    double sum_roundoff = 0x1p-24;         ///< error of one addition to a sum of products of 8 bits, relative to the sum so far
    std::int64_t longest_sum = INT64_MAX;  ///< terms of a gradient that are added with sum_roundoff, at most
    bool stores_twice = false;  ///< whether the weight's gradients are rounded to their dtype before the targets' terms are added, too
    [[nodiscard]] bool cuts_off() const { return sum_roundoff > 0x1p-24; }
};
[[nodiscard]] Fp8Tolerance fp8_tolerance(bool on_gpu);

/// Shards of the vocabulary from class 0 on, and the dtype of the parts of grad_hidden that they make. None: the layer is whole.
struct Fp8Shards {
    std::vector<Shard> of;
    DType grad_hidden_dtype = DType::fp32;
};

/// A row of numbers as the logits' operands have it: codes times the row's scale. `given`: the spec's scale of the operand, or 0.
[[nodiscard]] std::vector<double> dequantised_rows(const Spec& spec, double given, const std::vector<float>& rows);

/// The weight as the logits' operands have it, [V, D].
[[nodiscard]] std::vector<double> dequantised_weight(const Problem& problem);

/// Gradients, and for each number the most that a right kernel's differs by. Codes near a tie may be either one.
struct Fp8Truth {
    std::vector<double> grad_hidden, grad_weight, grad_bias;
    std::vector<double> hidden_limit, weight_limit, bias_limit;
    std::vector<double> logit_sizes;                         ///< [N]: the most that |products| of a logit of the token add up to
    double hidden_ties = 0, weight_ties = 0, bias_ties = 0;  ///< Euclidean norms of the limits' part by codes that are near a tie
    double hidden_norm = 0;                                  ///< Euclidean norm of all shards' parts of grad_hidden
};
/// `lse`, `logprobs` (with dft), `entropy` (where it has a gradient): what forward has written, which backward reads.
[[nodiscard]] Fp8Truth fp8_truth(const Problem& problem, const std::vector<float>& lse, const std::vector<float>& logprobs,
                                 const std::vector<double>& entropy, const Fp8Tolerance& tolerance, const Fp8Shards& shards = {});

/// Judges a whole problem's outputs; empty when everything passed.
[[nodiscard]] std::string fp8_failures(const Problem& problem, const KernelOutputs& got, const std::vector<float>& lse,
                                       const std::vector<float>& logprobs, const Fp8Tolerance& tolerance, const Fp8Shards& shards = {});

}  // namespace flce::test

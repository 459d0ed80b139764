// The truth: losses and gradients in fp64 on the CPU, each gradient written from the definition of the output that it belongs to.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/support/problem.hpp"

namespace flce::test {

/// Results for a Selection, in its order. Gradients are plain (nothing accumulated). Per-token outputs are not reduced, 0 where ignored.
struct Result {
    std::vector<double> loss;  ///< [tokens], cross entropy + z-loss of each token
    std::vector<double> z_loss;
    std::vector<double> lse;
    std::vector<double> logprobs;
    std::vector<double> entropy;
    std::vector<double> log_sum_sq_probs;
    std::vector<double> top1;  ///< the class, −1 where ignored
    std::vector<double> largest_logit;
    std::vector<double> teacher_logprobs;  ///< [tokens, K], 0 where there is no class
    double reduced_loss = 0;               ///< by the layer's reduction (sum or mean); only where every token is selected
    double reduced_z_loss = 0;
    std::vector<double> grad_hidden;  ///< [tokens, D]
    std::vector<double> grad_weight;  ///< [vocab, D]
    std::vector<double> grad_bias;    ///< [vocab]; empty without bias
};

/// Outputs of every token, for tokens that a Selection leaves out; from a kernel whose selected tokens have been checked.
struct KnownTokens {
    const float* lse = nullptr;       ///< [N]
    const float* entropy = nullptr;   ///< [N]; needed with grad_entropy only
    const float* logprobs = nullptr;  ///< [N]; needed with spec.dft only
};

/// The logit of hidden · weightᵀ + bias = x. The class's offset and the token's temperature are in it.
[[nodiscard]] double logit_of(const Spec& spec, double x, double offset, double temperature);

/// Divisors of a mean: of cross entropies and of z-losses. 1 for the other reductions.
struct Divisors {
    double cross_entropy = 1;
    double z_loss = 1;
};
template <class T>
[[nodiscard]] Divisors divisors(const Layer<T>& layer);

/// Precondition: `known` is given unless every token is selected or no vocabulary row is.
template <class T>
[[nodiscard]] Result oracle(const Layer<T>& layer, const Selection& selection, const KnownTokens& known = {});

}  // namespace flce::test

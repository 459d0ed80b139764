// Judging what a kernel wrote against oracle and reference.
#pragma once

#include <string>
#include <vector>

#include "tests/support/reference.hpp"

namespace flce::test {

/// KernelOutputs of a kernel as doubles; empty where not asked for. Shapes as in Result, for the whole problem or gathered for a Selection.
struct KernelOutputs {
    std::vector<double> loss;  ///< [tokens] for Reduction::none, else one
    std::vector<double> z_loss;
    std::vector<double> lse, logprobs, entropy, log_sum_sq_probs;
    std::vector<double> top1;              ///< classes
    std::vector<double> teacher_logprobs;  ///< [tokens, K]
    std::vector<double> grad_hidden, grad_weight, grad_bias;
};

struct Judgement {
    std::string output;
    double error = 0;  ///< relative, in the Euclidean norm
    double reference_error = 0;
    double bound = 0;
    std::string failure;  ///< empty: passed
};

/// Every output present in `got`. `truth` is the oracle's (plain gradients; what buffers held is added here). `exponentials`: the kernel
/// made its gradients of exponentials that forward kept, so that both factors of grad_weight's products are rounded, not only the gradient
/// of the logits. `rounded_parts`: how many parts grad_hidden is the sum of, each rounded for itself.
[[nodiscard]] std::vector<Judgement> judge(const Problem& problem, const Selection& selection, const KernelOutputs& got,
                                           const Result& truth, const Reference& yardstick, bool exponentials = false,
                                           std::int64_t rounded_parts = 1);

/// One line for each failure; empty when everything passed.
[[nodiscard]] std::string failures(const std::vector<Judgement>& judgements);

}  // namespace flce::test

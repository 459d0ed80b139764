// Every output of a kernel against fp64: what `flce check` compares, on the host.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "autotune/judge.hpp"
#include "autotune/reference.hpp"
#include "runtime/layer/layer.hpp"

namespace flce {

/// Rows that the reference covers: all of them, or tokens spread over the batch and vocabulary rows that hold the targets, both ends and a
/// spread.
struct Coverage {
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> rows;
    bool complete = true;
};

/// Chooses as many tokens and rows as take some seconds on two cores.
[[nodiscard]] Coverage plan_coverage(const Spec& spec, const RandomLayer& layer);

/// Outputs that a kernel has written. Vectors are empty where the spec has no such output.
struct WrittenOutputs {
    std::vector<float> token_loss, token_z_loss;  ///< [N], with Reduction::none
    std::vector<float> loss, z_loss;              ///< losses as the problem reduces them
    std::vector<float> lse, logprobs, entropy, log_sum_sq_probs;
    std::vector<float> teacher_logprobs;  ///< [N, K]
    std::vector<std::int64_t> top1;
    std::vector<double> grad_hidden, grad_bias;
    std::function<double(std::size_t)> grad_weight;    ///< an element by its place in memory: the whole need not fit as doubles
    std::vector<double> initial_weight, initial_bias;  ///< contents of the gradients' memory before; empty where gradients are written
};

using Verdicts = std::vector<std::pair<std::string, Verdict>>;

/// Compares the covered part of every output that the problem's spec has. `of_exponentials`: the kernel made its gradients of exponentials
/// that forward retained, on a GPU.
[[nodiscard]] Verdicts check_outputs(const ReferenceProblem& problem, const Coverage& coverage, const WrittenOutputs& written,
                                     bool of_exponentials);

}  // namespace flce

// One rank's call of a ParallelKernel, and the expected results: the bits of equal passes and collectives by hand.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "flce/parallel.hpp"
#include "tests/support/number_formats.hpp"
#include "tests/support/sharded_run.hpp"

namespace flce::test {

struct RankCall {
    ParallelForwardArgs forward;
    BackwardArgs backward;
};

inline RankCall call_of(const KernelRun& run) {
    const MergeArgs merge = run.merge_args();
    RankCall call{.forward = {.call = run.forward_args()}, .backward = run.backward_args()};
    ForwardArgs& forward = call.forward.call;
    forward.partial_sums = {};
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        if (kForwardFields[i] && kMergeFields[i]) forward.*kForwardFields[i] = merge.*kMergeFields[i];
    }
    call.forward.target_class_weight = merge.target_class_weight;
    call.forward.class_weight_total = merge.class_weight_total;
    return call;
}

/// The rows of a matrix that are a rank's part.
inline TensorView part_of(TensorView whole, const Communicator& ranks) {
    whole.shape[0] /= ranks.size;
    whole.data = static_cast<std::byte*>(whole.data) + ranks.rank * whole.shape[0] * whole.shape[1] * scalar_bytes(whole.dtype);
    return whole;
}

/// The call with sequence parallel.
inline void use_part_of_tokens(RankCall& call, const Communicator& ranks) {
    call.forward.call.hidden = call.backward.hidden = part_of(call.backward.hidden, ranks);
    call.backward.grad_hidden = part_of(call.backward.grad_hidden, ranks);
}

/// Sum of ranks' grad_hidden, as ThreadGroup makes it.
inline std::vector<std::byte> summed_grad_hidden(const ShardedRun& run, const Spec& spec, std::int64_t num_tokens) {
    const DType dtype = grad_hidden_dtype(spec);
    std::vector<float> sum(static_cast<std::size_t>(num_tokens * spec.hidden_size), 0.F);
    for (std::size_t shard = 0; shard < run.size(); ++shard) {
        const auto bytes = run.run(shard).bytes_of("grad_hidden");
        const std::vector<float> part = decode(bytes.data(), static_cast<std::int64_t>(sum.size()), dtype);
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    return encode(sum, dtype);
}

/// All that a rank's step wrote, but for grad_hidden, which is a sum over ranks.
inline void expect_results_of(const KernelRun& run, const KernelRun& by_hand, std::size_t rank) {
    const auto right = by_hand.bytes();
    for (const char* name : {"loss", "z_loss", "lse", "logprobs", "entropy", "top1", "log_sum_sq_probs", "teacher_logprobs",
                             "target_class_weight", "class_weight_total", "invalid_label", "grad_weight", "grad_bias"}) {
        if (!right.contains(name)) continue;
        EXPECT_TRUE(run.bytes_of(name) == right.at(name)) << name << " of rank " << rank;
    }
}

/// `whole`: the sum over ranks. `sequence`: the rank has its part of it, where its whole's would begin.
inline void expect_grad_hidden(const KernelRun& run, const std::vector<std::byte>& whole, const Communicator& ranks, bool sequence) {
    const std::vector<std::byte> got = run.bytes_of("grad_hidden");
    const std::size_t size = sequence ? got.size() / static_cast<std::size_t>(ranks.size) : got.size();
    const std::size_t first = sequence ? static_cast<std::size_t>(ranks.rank) * size : 0;
    EXPECT_EQ(std::memcmp(&got[first], &whole[first], size), 0) << "grad_hidden of rank " << ranks.rank;
}

}  // namespace flce::test

// A Problem whose classes lie on several shards, each with buffers of its own as on ranks of their own: forward, partial sums gathered,
// merge, backward, grad_hidden added up.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/support/kernel_run.hpp"

namespace flce::test {

/// The spec of a shard's kernel: at most `classes` of the whole spec's, in `rows` rows (0: as many as classes).
[[nodiscard]] Spec shard_spec(const Spec& whole, std::int64_t classes, std::int64_t rows = 0);

/// Shards of `classes` each, one after the other from label 0 on; a shard's rows past the vocabulary are padding.
[[nodiscard]] std::vector<Shard> shards_of(std::int64_t vocab_size, const std::vector<std::int64_t>& rows);

/// The part of `whole` that a shard has. `spec`: of the shards' kernel.
[[nodiscard]] Problem shard_problem(const Problem& whole, const Spec& spec, const Shard& shard);

class ShardedRun {
public:
    /// `kernel`: one kernel for all shards. `whole` has no shards and has to outlive the run.
    ShardedRun(std::shared_ptr<const Kernel> kernel, const Problem& whole, const std::vector<Shard>& shards);

    /// Makes each shard retain from now on: a part of as much as it has a use for, in memory of its own, or in its grad_weight's.
    void retain(RetainedPlace place, double part = 1.0);
    /// Forward and merge, on each shard.
    void forward();
    void backward(const Wanted& wanted = {});
    /// Does KernelRun::backward_in_stages on each shard.
    void backward_in_stages(const Wanted& wanted, bool hidden_ready);

    [[nodiscard]] KernelOutputs outputs(const Selection& selection) const;
    [[nodiscard]] std::vector<float> token_floats(const std::string& name) const { return runs_.front()->token_floats(name); }
    [[nodiscard]] const KernelRun& run(std::size_t shard) const { return *runs_[shard]; }
    [[nodiscard]] std::size_t size() const { return runs_.size(); }
    /// Faults of any shard, and outputs of merge that differ between shards.
    [[nodiscard]] std::string violations() const;

private:
    const Problem& whole_;
    std::vector<Shard> shards_;
    std::vector<std::unique_ptr<Problem>> problems_;
    std::vector<std::unique_ptr<KernelRun>> runs_;
};

/// How a sharded step is run.
struct ShardedWay {
    bool retains = false;
    RetainedPlace place = RetainedPlace::own;
    double part = 1.0;
    bool in_stages = false;
    bool hidden_ready = false;
};

/// run_and_judge over shards, every way of retaining, in stages and not.
[[nodiscard]] testing::AssertionResult run_and_judge_shards(const std::shared_ptr<const Kernel>& kernel, const Problem& whole,
                                                            const std::vector<Shard>& shards, const Wanted& wanted = {});

}  // namespace flce::test

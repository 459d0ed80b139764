// A Problem on a device: inputs and outputs between guard bytes, outputs and workspaces poisoned, everything compared afterwards.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/call_fields.hpp"
#include "tests/support/compare.hpp"
#include "tests/support/guarded_buffer.hpp"

namespace flce::test {

/// Gradients that a backward call is asked for.
struct Wanted {
    bool grad_hidden = true;
    bool grad_weight = true;
    bool grad_bias = true;  ///< where the Spec has a bias
};

class KernelRun {
public:
    /// `problem` has to outlive the run.
    KernelRun(std::shared_ptr<const Kernel> kernel, const Problem& problem);

    /// Makes forward retain from now on: in `bytes` of guarded memory, or in the beginning of grad_weight. A backward call that writes
    /// grad_weight ends the latter.
    void retain(RetainedPlace place, std::size_t bytes);
    void forward();
    /// Makes a shard's outputs from all shards' partial sums, after forward.
    void merge(const std::vector<std::byte>& all_partial_sums);
    /// Poisons the wanted gradients (or restores the contents of an accumulating buffer) first, unless `keep`.
    void backward(const Wanted& wanted = {}, bool keep = false);
    /// Does backward in two calls. Unless `hidden_ready`, hidden comes as late as the kernel can do without it.
    void backward_in_stages(const Wanted& wanted = {}, bool hidden_ready = false);

    /// The arguments of the next calls, for tests that change them.
    [[nodiscard]] ForwardArgs forward_args() const;
    [[nodiscard]] MergeArgs merge_args() const;
    [[nodiscard]] BackwardArgs backward_args(const Wanted& wanted = {}) const;
    [[nodiscard]] Workspace forward_workspace() const { return {buffer("forward workspace").data(), buffer("forward workspace").bytes()}; }
    [[nodiscard]] Workspace backward_workspace() const {
        return {buffer("backward workspace").data(), buffer("backward workspace").bytes()};
    }
    [[nodiscard]] const Kernel& kernel() const { return *kernel_; }

    /// Outputs of the calls so far, for a selection.
    [[nodiscard]] KernelOutputs outputs(const Selection& selection) const;
    /// lse and entropy of every token, as floats, for oracle and reference.
    [[nodiscard]] std::vector<float> token_floats(const std::string& name) const;
    [[nodiscard]] std::uint64_t invalid_label() const;
    /// Every output and gradient as bytes, by name.
    [[nodiscard]] std::map<std::string, std::vector<std::byte>> bytes() const;
    /// One buffer.
    [[nodiscard]] std::vector<std::byte> bytes_of(const std::string& name) const { return buffer(name).download(); }
    /// Every buffer, inputs and workspaces too.
    [[nodiscard]] std::map<std::string, std::vector<std::byte>> all_bytes() const;
    /// Guards overrun, inputs changed, padding of the weight's gradient not 0 (or touched when accumulating), ignored tokens not 0,
    /// gradients changed without a valid token. Empty: none.
    [[nodiscard]] std::string violations() const;

private:
    struct Entry {
        GuardedBuffer buffer;
        std::vector<std::byte> content;  ///< contents of an input; an accumulated gradient's contents before
        bool input = false;
        bool written = false;
    };
    const GuardedBuffer& buffer(const std::string& name) const { return entries_.at(name).buffer; }
    void input(const std::string& name, std::vector<std::byte> content, std::size_t residue);
    void output(const std::string& name, std::size_t bytes, std::size_t residue, std::vector<std::byte> before = {});
    void reset(const std::string& name);
    /// Prepares a buffer that a call will write.
    void prepare(const char* name);
    [[nodiscard]] bool has(const std::string& name) const { return entries_.contains(name); }
    [[nodiscard]] ScalarType type_of(Elements elements) const;
    [[nodiscard]] TensorView view(const CallTensor& tensor) const;
    /// Every tensor that the problem has, by the table of a call's.
    template <class Args>
    [[nodiscard]] Args args() const;
    void add_inputs();
    void add_quantized_weight();
    void add_outputs();
    void add_shard_outputs();
    /// Gradients that a backward call is to write; true where grad_weight's memory was lent.
    bool prepare_gradients(const Wanted& wanted, bool keep);
    [[nodiscard]] std::string padding_violation() const;
    [[nodiscard]] std::string bias_padding_violation() const;
    [[nodiscard]] std::string ignored_violation() const;
    [[nodiscard]] std::string no_valid_token_violation() const;

    std::shared_ptr<const Kernel> kernel_;
    const Problem& problem_;
    Spec held_;  ///< spec of the tensors in memory: a shard's vocab_size and padded_vocab_size are those of its weight
    CallSizes sizes_;
    std::map<std::string, Entry> entries_;
    Retained retained_;
};

/// Runs forward and backward, judges everything and returns the faults. `work` bounds the oracle's multiplications. On a GPU also with
/// everything retained that the kernel can use, a part of it, and in grad_weight's memory.
[[nodiscard]] testing::AssertionResult run_and_judge(const std::shared_ptr<const Kernel>& kernel, const Problem& problem, double work = 4e8,
                                                     const Wanted& wanted = {});

}  // namespace flce::test

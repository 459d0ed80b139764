// A layer whose classes lie over several ranks: a rank's kernel with the collectives between its passes. Communication is the caller's.
//
//     auto kernel = session.get_kernel(flce::parse_spec("D=4096,V=16032,whole_vocab_size=128256,dtype=bf16"));
//     const flce::ParallelKernel head(kernel, flce::nccl_communicator(comm), {.communication_stream = {side}});
//     head.forward ({{.hidden = h, .weight = w, .target = t, .loss = loss, .lse = lse, .vocab_start = 16032 * rank}}, workspace, stream);
//     head.backward({.hidden = h, .weight = w, .target = t, .lse = lse, .grad_hidden = dh, .grad_weight = dw, .vocab_start = …}, …);
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "flce/flce.hpp"

namespace flce {

/// A group of ranks as one rank sees it. All ranks call the same functions in the same order; a function throws where it fails. On a GPU a
/// function is asynchronous on `stream`, a stream of the kernel's device; on a CPU its work has ended when it returns. No function may keep
/// an address.
struct Communicator {
    int rank = 0;
    int size = 1;
    /// Every rank's `bytes` at `part`, in the order of ranks, to `all` [size · bytes].
    std::function<void(const void* part, void* all, std::size_t bytes, Stream stream)> all_gather{};
    /// The sum over ranks of `count` elements at `data`, in place.
    std::function<void(void* data, std::int64_t count, DType dtype, Stream stream)> all_reduce{};
    /// The sum over ranks of size · `count` elements at `data`, of which this rank gets part number `rank` at `part`. With
    /// sequence_parallel alone.
    std::function<void(const void* data, void* part, std::int64_t count, DType dtype, Stream stream)> reduce_scatter{};
};

/// A Communicator over an ncclComm_t of the caller's, which has to outlive it. NCCL is loaded at run time: the process's libnccl.so.2, or
/// the library that FLCE_NCCL names. Throws EnvironmentError where there is none, DeviceError where it fails.
[[nodiscard]] Communicator nccl_communicator(void* comm);

struct ParallelOptions {
    /// Each rank has N/R of the tokens' hidden states, those of rank 0 first. Hidden states are gathered in forward and again in backward,
    /// and each rank gets its part of grad_hidden.
    bool sequence_parallel = false;
    /// A stream other than the call's. On it grad_hidden is added up while grad_weight is made, and with sequence_parallel hidden states
    /// are gathered while grad_hidden is made, where Kernel::reads_hidden_late says so. None: everything runs on the call's stream, in
    /// turn.
    Stream communication_stream{};
};

/// Arguments of forward, and two outputs that backward needs besides. `call.hidden` is [N, D], or [N/R, D] with sequence_parallel;
/// partial_sums is absent, and outputs are those of a kernel without shards.
struct ParallelForwardArgs {
    ForwardArgs call{};
    TensorView target_class_weight{};  ///< MergeArgs' output, and so is class_weight_total
    TensorView class_weight_total{};
};

/// A rank's part of every step of such a layer. Thread-safe as far as its communicator is. N is the number of all tokens.
class ParallelKernel {
public:
    /// Throws ArgumentError where the spec has no whole_vocab_size, or the communicator lacks a function or has no such rank.
    ParallelKernel(std::shared_ptr<const Kernel> kernel, Communicator communicator, ParallelOptions options = {});
    ~ParallelKernel();
    ParallelKernel(ParallelKernel&&) noexcept;
    ParallelKernel& operator=(ParallelKernel&&) noexcept;

    [[nodiscard]] const Kernel& kernel() const noexcept;
    /// Scratch bytes of either pass over num_tokens tokens of all ranks: the kernel's, the partial sums of all ranks and, with
    /// sequence_parallel, hidden states and grad_hidden of all tokens. Throws ArgumentError as Kernel::workspace_bytes does, and for a
    /// number of tokens that sequence_parallel cannot divide.
    [[nodiscard]] std::size_t workspace_bytes(std::int64_t num_tokens) const;

    /// Computes outputs that have equal bits on every rank. Throws the errors of Kernel::forward, Kernel::merge and the communicator.
    void forward(const ParallelForwardArgs& args, Workspace workspace, Stream stream = {}) const;
    /// args.hidden and grad_hidden as in forward; grad_hidden, which all ranks ask for or none, is the sum over ranks, its elements of
    /// grad_hidden_dtype(spec). args.stage has to be whole.
    void backward(const BackwardArgs& args, Workspace workspace, Stream stream = {}) const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace flce

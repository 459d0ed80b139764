// A rank's passes with the collectives between them.
#include <fmt/format.h>

#include <optional>

#include "flce/parallel.hpp"
#include "runtime/call_fields.hpp"
#include "runtime/parallel/side_stream.hpp"

namespace flce {
namespace {

constexpr std::size_t kAlignment = 256;

/// Hands out pieces of the caller's workspace.
class Room {
public:
    explicit Room(Workspace workspace = {}) : data_(static_cast<std::byte*>(workspace.data)), bytes_(workspace.bytes) {}

    std::byte* take(std::size_t bytes) {
        std::byte* const piece = data_ == nullptr ? nullptr : data_ + used_;
        used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
        return piece;
    }
    [[nodiscard]] std::size_t used() const { return used_; }
    /// Throws ArgumentError where the pieces do not fit.
    void check(const char* call) const {
        if (used_ <= bytes_) return;
        throw ArgumentError(
            fmt::format("{}: workspace has {} bytes; {} are needed (ParallelKernel::workspace_bytes)", call, bytes_, used_));
    }

private:
    std::byte* data_;
    std::size_t bytes_;
    std::size_t used_ = 0;
};

/// The tensors that two passes' structs both have.
template <class To, class From>
void copy_tensors(To& to, const From& from) {
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        const auto into = fields_of(to)[i];
        const auto out_of = fields_of(from)[i];
        if (into && out_of) to.*into = from.*out_of;
    }
}

}  // namespace

struct ParallelKernel::State {
    std::shared_ptr<const Kernel> kernel;
    Communicator communicator;
    ParallelOptions options;
    std::optional<SideStream> side;  ///< stream beside the call's, where there is a communication_stream

    [[nodiscard]] const Spec& spec() const { return kernel->spec(); }
    [[nodiscard]] std::int64_t ranks_of_tokens() const { return options.sequence_parallel ? communicator.size : 1; }
    [[nodiscard]] std::size_t hidden_bytes(std::int64_t num_tokens, DType dtype) const {
        return static_cast<std::size_t>(num_tokens * spec().hidden_size) * element_bytes(dtype);
    }
    [[nodiscard]] std::size_t partial_bytes(std::int64_t num_tokens) const {
        return static_cast<std::size_t>(num_tokens) * static_cast<std::size_t>(kernel->partial_sum_fields()) * sizeof(float);
    }
    [[nodiscard]] TensorView floats(void* data, std::int64_t rows, std::int64_t columns) const {
        return TensorView::matrix(data, ScalarType::fp32, rows, columns, kernel->device_ref());
    }

    /// Gathers all ranks' hidden states, in the order of ranks.
    void gather_hidden(TensorView& hidden, std::byte* all, Stream stream) const {
        if (!options.sequence_parallel) return;
        const std::int64_t part = hidden.ndim == 2 ? hidden.shape[0] : 0;
        communicator.all_gather(hidden.data, all, hidden_bytes(part, spec().dtype), stream);
        hidden = TensorView::matrix(all, hidden.dtype, part * communicator.size, hidden.shape[1], hidden.device);
    }
    /// Whether hidden states may be on their way from other ranks while grad_hidden is made.
    [[nodiscard]] bool gathers_beside(const BackwardArgs& args, std::int64_t num_tokens) const {
        if (!side || !options.sequence_parallel || args.weight.ndim != 2) return false;
        const std::int64_t rows = args.weight.shape[spec().layout == WeightLayout::vocab_major ? 0 : 1];
        const std::int64_t classes = std::min({spec().whole_vocab_size - args.vocab_start, rows, spec().vocab_size});
        return classes > 0 && kernel->reads_hidden_late(num_tokens, args.retained, classes);
    }
    /// Tokens of all ranks.
    [[nodiscard]] std::int64_t tokens_of(const TensorView& hidden) const {
        return hidden.present && hidden.ndim == 2 ? hidden.shape[0] * ranks_of_tokens() : 0;
    }

    void check_hidden(const char* call, const TensorView& hidden) const {
        const bool right = hidden.present && hidden.ndim == 2 && hidden.shape[1] == spec().hidden_size && hidden.strides[1] == 1 &&
                           hidden.strides[0] == spec().hidden_size && hidden.device == kernel->device_ref();
        if (options.sequence_parallel && !right) {
            throw ArgumentError(fmt::format("{}: hidden must be this rank's [num_tokens / {}, {}], contiguous and on the kernel's device",
                                            call, communicator.size, spec().hidden_size));
        }
    }
    void reduce(const BackwardArgs& asked, void* whole, std::int64_t num_tokens, Stream stream) const {
        const DType dtype = grad_hidden_dtype(spec());
        const std::int64_t count = num_tokens * spec().hidden_size;
        if (options.sequence_parallel) {
            communicator.reduce_scatter(whole, asked.grad_hidden.data, count / communicator.size, dtype, stream);
        } else {
            communicator.all_reduce(whole, count, dtype, stream);
        }
    }
};

ParallelKernel::ParallelKernel(std::shared_ptr<const Kernel> kernel, Communicator communicator, ParallelOptions options)
    : state_(std::make_unique<State>()) {
    if (kernel == nullptr) throw ArgumentError("ParallelKernel: kernel is null");
    if (!is_shard(kernel->spec())) {
        throw ArgumentError(
            fmt::format("ParallelKernel: the kernel of {} is no shard's; its spec needs a whole_vocab_size", kernel->spec().text()));
    }
    if (communicator.size < 1 || communicator.rank < 0 || communicator.rank >= communicator.size) {
        throw ArgumentError(fmt::format("ParallelKernel: communicator.rank is {} of {}", communicator.rank, communicator.size));
    }
    if (!communicator.all_gather) throw ArgumentError("ParallelKernel: communicator.all_gather is empty");
    if (!options.sequence_parallel && !communicator.all_reduce) throw ArgumentError("ParallelKernel: communicator.all_reduce is empty");
    if (options.sequence_parallel && !communicator.reduce_scatter) {
        throw ArgumentError("ParallelKernel: communicator.reduce_scatter is empty; sequence_parallel needs it");
    }
    state_->kernel = std::move(kernel);
    state_->communicator = std::move(communicator);
    state_->options = options;
    if (options.communication_stream.handle != nullptr && state_->kernel->device_ref().kind == DeviceKind::cuda) {
        state_->side.emplace(state_->kernel->device_ref().index, options.communication_stream);
    }
}

ParallelKernel::~ParallelKernel() = default;
ParallelKernel::ParallelKernel(ParallelKernel&&) noexcept = default;
ParallelKernel& ParallelKernel::operator=(ParallelKernel&&) noexcept = default;

const Kernel& ParallelKernel::kernel() const noexcept { return *state_->kernel; }

std::size_t ParallelKernel::workspace_bytes(std::int64_t num_tokens) const {
    const State& s = *state_;
    const std::size_t passes = s.kernel->workspace_bytes(num_tokens);
    if (num_tokens % s.ranks_of_tokens() != 0) {
        throw ArgumentError(fmt::format("workspace_bytes: num_tokens is {}; with sequence_parallel it must be a multiple of {} ranks",
                                        num_tokens, s.communicator.size));
    }
    Room forward;
    forward.take(std::max(passes, s.kernel->workspace_bytes(num_tokens, Pass::merge)));
    forward.take(s.partial_bytes(num_tokens));
    forward.take(s.partial_bytes(num_tokens) * static_cast<std::size_t>(s.communicator.size));
    Room backward;
    backward.take(passes);
    if (s.options.sequence_parallel) {
        forward.take(s.hidden_bytes(num_tokens, s.spec().dtype));
        backward.take(s.hidden_bytes(num_tokens, s.spec().dtype));
        backward.take(s.hidden_bytes(num_tokens, grad_hidden_dtype(s.spec())));
    }
    return std::max(forward.used(), backward.used());
}

void ParallelKernel::forward(const ParallelForwardArgs& args, Workspace workspace, Stream stream) const {
    const State& s = *state_;
    if (args.call.partial_sums.present) throw ArgumentError("forward: partial_sums is given; ParallelKernel has memory of its own for it");
    s.check_hidden("forward", args.call.hidden);
    const std::int64_t n = s.tokens_of(args.call.hidden);
    const std::int64_t fields = s.kernel->partial_sum_fields();
    Room room(workspace);
    const std::size_t scratch = std::max(s.kernel->workspace_bytes(n), s.kernel->workspace_bytes(n, Pass::merge));
    const Workspace of_pass{room.take(scratch), scratch};
    std::byte* const part = room.take(s.partial_bytes(n));
    std::byte* const all = room.take(s.partial_bytes(n) * static_cast<std::size_t>(s.communicator.size));
    std::byte* const hidden = s.options.sequence_parallel ? room.take(s.hidden_bytes(n, s.spec().dtype)) : nullptr;
    room.check("forward");

    ForwardArgs shard = args.call;
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {  // merge writes the outputs
        if (kForwardFields[i] != nullptr && kCallTensors[i].shard == Use::none) shard.*kForwardFields[i] = {};
    }
    shard.partial_sums = s.floats(part, fields, n);
    s.gather_hidden(shard.hidden, hidden, stream);
    s.kernel->forward(shard, of_pass, stream);
    s.communicator.all_gather(part, all, s.partial_bytes(n), stream);
    MergeArgs merge;
    copy_tensors(merge, args.call);
    merge.ignore_index = args.call.ignore_index;
    merge.reduction = args.call.reduction;
    merge.all_partial_sums = s.floats(all, fields * s.communicator.size, n);
    merge.target_class_weight = args.target_class_weight;
    merge.class_weight_total = args.class_weight_total;
    s.kernel->merge(merge, of_pass, stream);
}

void ParallelKernel::backward(const BackwardArgs& args, Workspace workspace, Stream stream) const {
    const State& s = *state_;
    if (args.stage != BackwardStage::whole) throw ArgumentError("backward: stage must be whole; ParallelKernel cuts the call itself");
    s.check_hidden("backward", args.hidden);
    const std::int64_t n = s.tokens_of(args.hidden);
    const DType sum_dtype = grad_hidden_dtype(s.spec());
    Room room(workspace);
    const std::size_t scratch = s.kernel->workspace_bytes(n);
    const Workspace of_pass{room.take(scratch), scratch};
    std::byte* const hidden = s.options.sequence_parallel ? room.take(s.hidden_bytes(n, s.spec().dtype)) : nullptr;
    std::byte* const sum = s.options.sequence_parallel ? room.take(s.hidden_bytes(n, sum_dtype)) : nullptr;
    room.check("backward");

    BackwardArgs call = args;
    const bool beside = args.grad_hidden.present && s.gathers_beside(args, n);
    if (beside) s.side->follow(stream);  // the workspace may be in use
    s.gather_hidden(call.hidden, hidden, beside ? s.options.communication_stream : stream);
    if (!args.grad_hidden.present) return s.kernel->backward(call, of_pass, stream);
    if (s.options.sequence_parallel) {
        call.grad_hidden = TensorView::matrix(sum, scalar_type_of(sum_dtype), n, s.spec().hidden_size, s.kernel->device_ref());
    }
    call.stage = BackwardStage::until_grad_hidden;
    call.hidden_ready = !beside;
    s.kernel->backward(call, of_pass, stream);
    if (beside) s.side->join(stream);  // before the sum, for which nothing here waits yet
    if (s.side) s.side->follow(stream);
    s.reduce(args, call.grad_hidden.data, n, s.side ? s.options.communication_stream : stream);
    call.stage = BackwardStage::rest;
    s.kernel->backward(call, of_pass, stream);
    if (s.side) s.side->join(stream);
}

}  // namespace flce

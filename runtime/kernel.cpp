// The public calls of a kernel: every argument is checked here, once, and turned into the slots that launchers and CPU code read.
#include <fmt/format.h>

#include <algorithm>

#include "flce/flce.hpp"
#include "generator/call_slots.hpp"
#include "runtime/argument_checks.hpp"
#include "runtime/call_fields.hpp"
#include "runtime/retained_choice.hpp"

namespace flce {
namespace {

constexpr std::int64_t kRetainedAlignment = 16;

// Above this, byte offsets into [N, V] or [N, D] would leave 64 bits.
std::int64_t most_tokens(const Spec& spec) { return (std::int64_t{1} << 60) / std::max(spec.hidden_size, spec.padded_vocab_size); }

// Checks the arguments of one call and fills its slots.
class Call {
public:
    Call(const Kernel& kernel, const char* name) : spec_(kernel.spec()), checks_(name, kernel.device_ref()) { slots_.fill(0); }

    /// Everything but workspace and what is retained.
    template <class Args>
    void arguments(const Args& args) {
        take_num_tokens(args.hidden);
        take_reduction(args.reduction);
        set(Slot::ignore_index, args.ignore_index);
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            if (const auto field = fields_of(args)[i]) take(i, args.*field, use_of(kCallTensors[i], args));
        }
        set(Slot::target_bits, args.target.dtype == ScalarType::int32 ? 32 : 64);
        set(Slot::teacher_bits, args.teacher_ids.dtype == ScalarType::int32 ? 32 : 64);
        set(Slot::num_valid_code, static_cast<std::int64_t>(count_code(args.num_valid)));
    }

    /// What backward asks of tensors together.
    void check_gradients(const BackwardArgs& args) const {
        if (args.grad_entropy.present && spec_.outputs.entropy && !args.entropy.present) {
            checks_.fail("entropy is absent; grad_entropy needs it as forward wrote it");
        }
        if (spec_.dft && spec_.outputs.loss && !args.logprob.present) {
            checks_.fail("logprob is absent; the spec has dft, which needs it as forward wrote it");
        }
        if (!args.grad_hidden.present && !args.grad_weight.present && !args.grad_bias.present) {
            checks_.fail("grad_hidden, grad_weight and grad_bias are all absent; at least one must be given");
        }
    }

    /// `grad_weight`: that this call writes, absent where it writes none. It may be the memory that what is retained was lent.
    void retained(const Kernel& kernel, const Retained& retained, const TensorView& grad_weight) {
        const bool lent = retained.place == RetainedPlace::grad_weight && retained.bytes != 0;
        if (lent) {
            const std::size_t lendable = kernel.retained_bytes(num_tokens_, RetainedPlace::grad_weight);
            if (retained.bytes != lendable) {
                checks_.fail(
                    fmt::format("retained.bytes is {} in grad_weight's memory; {} tokens are lent {} of it (Kernel::retained_bytes)",
                                retained.bytes, num_tokens_, lendable));
            }
        } else if (retained.place != RetainedPlace::own && retained.place != RetainedPlace::grad_weight) {
            checks_.fail(fmt::format("retained.place is {}; allowed are own (0), grad_weight (1)", static_cast<int>(retained.place)));
        }
        const bool written_over = lent && retained.data == grad_weight.data;
        set(Slot::retained, checks_.retained(retained, kRetainedAlignment, written_over ? Access::none : Access::write));
        set(Slot::retained_bytes, static_cast<std::int64_t>(retained.bytes));
        set(Slot::retained_in_grad_weight, lent ? 1 : 0);
    }

    void workspace(const Workspace& workspace, std::size_t needed) {
        set(Slot::workspace, checks_.workspace(workspace, needed, num_tokens_));
        set(Slot::workspace_bytes, static_cast<std::int64_t>(workspace.bytes));
        checks_.overlaps();
    }

    [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }
    [[nodiscard]] const std::int64_t* slots() const { return slots_.data(); }

private:
    void set(Slot slot, std::int64_t value) { slots_[static_cast<std::size_t>(slot)] = value; }
    /// N is what hidden says; its other dimension and all other tensors must agree.
    void take_num_tokens(const TensorView& hidden) {
        if (hidden.present && (hidden.ndim != 2 || hidden.shape[1] != spec_.hidden_size)) {
            checks_.fail(fmt::format("hidden.shape is {}; it must be [num_tokens, hidden_size] with hidden_size {}", shape_text(hidden),
                                     spec_.hidden_size));
        }
        num_tokens_ = hidden.present ? hidden.shape[0] : 0;
        if (num_tokens_ < 0 || num_tokens_ > most_tokens(spec_)) {
            checks_.fail(fmt::format("hidden.shape is {}; num_tokens must be 0 to {}", shape_text(hidden), most_tokens(spec_)));
        }
        set(Slot::num_tokens, num_tokens_);
    }

    void take_reduction(Reduction reduction) {
        switch (reduction) {
            case Reduction::none: set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::none)); break;
            case Reduction::sum: set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::sum)); break;
            case Reduction::mean: set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::mean)); break;
            case Reduction::weighted_mean:
                if (!spec_.token_weight) checks_.fail("reduction is weighted_mean, but the spec has no token_weight; use mean");
                set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::weighted_mean));
                break;
            default:
                checks_.fail(fmt::format("reduction is {}; allowed are none (0), sum (1), mean (2), weighted_mean (3)",
                                         static_cast<int>(reduction)));
        }
        reduction_ = reduction;
    }

    /// A tensor of the table, into the slot of its number.
    void take(std::size_t which, const TensorView& view, Use use) {
        const CallTensor& tensor = kCallTensors[which];
        const bool optional = use == Use::read_if_given || use == Use::write_if_given;
        if (optional && !view.present && view.data == nullptr) return;  // most of a call's are
        if (!holds(tensor.condition, spec_, reduction_)) return checks_.absent(view, tensor.name, why_not(tensor.condition));
        const bool written = use == Use::write || use == Use::write_if_given;
        slots_[which] =
            checks_.tensor(view, optional ? Presence::optional : Presence::required,
                           {tensor.name, types_of(tensor.elements, spec_), shape_of(tensor.extent, spec_, num_tokens_, reduction_),
                            written ? Access::write : Access::read, alignment_of(tensor.extent)});
    }

    static CountCode count_code(const TensorView& num_valid) {
        switch (num_valid.dtype) {
            case ScalarType::int32: return CountCode::int32;
            case ScalarType::int64: return CountCode::int64;
            default: return CountCode::fp32;
        }
    }

    const Spec& spec_;
    ArgumentChecks checks_;
    CallSlots slots_;
    std::int64_t num_tokens_ = 0;
    Reduction reduction_ = Reduction::mean;
};

}  // namespace

std::size_t Kernel::workspace_bytes(std::int64_t num_tokens, Pass pass) const {
    const std::int64_t most = most_tokens(spec_);
    if (num_tokens < 0 || num_tokens > most) {
        throw ArgumentError(fmt::format("workspace_bytes: num_tokens is {}; allowed are 0 to {}", num_tokens, most));
    }
    switch (pass) {
        case Pass::forward: return static_cast<std::size_t>(workspace_bytes_of(false, num_tokens));
        case Pass::backward: return static_cast<std::size_t>(workspace_bytes_of(true, num_tokens));
        case Pass::forward_backward:
            return static_cast<std::size_t>(std::max(workspace_bytes_of(false, num_tokens), workspace_bytes_of(true, num_tokens)));
    }
    throw ArgumentError(
        fmt::format("workspace_bytes: pass is {}; allowed are forward (0), backward (1), forward_backward (2)", static_cast<int>(pass)));
}

std::size_t Kernel::retained_bytes(std::int64_t num_tokens, RetainedPlace place) const {
    const std::int64_t most = most_tokens(spec_);
    if (num_tokens < 0 || num_tokens > most) {
        throw ArgumentError(fmt::format("retained_bytes: num_tokens is {}; allowed are 0 to {}", num_tokens, most));
    }
    if (place != RetainedPlace::own && place != RetainedPlace::grad_weight) {
        throw ArgumentError(fmt::format("retained_bytes: place is {}; allowed are own (0), grad_weight (1)", static_cast<int>(place)));
    }
    return static_cast<std::size_t>(retained_bytes_of(num_tokens, place));
}

Retained Kernel::choose_retained(std::int64_t num_tokens, const RetainOptions& options) const {
    if (options.workspace_limit_bytes < 0 || options.least_work < 0) {
        throw ArgumentError(fmt::format("choose_retained: workspace_limit_bytes is {}, least_work is {}; allowed are 0 and more",
                                        options.workspace_limit_bytes, options.least_work));
    }
    RetainedRoom room{.most = retained_bytes(num_tokens)};
    if (room.most == 0) return {};
    if (options.lend_grad_weight) room.lendable = retained_bytes(num_tokens, RetainedPlace::grad_weight);
    if (options.workspace_limit_bytes > 0) room.workspace = workspace_bytes(num_tokens);
    return flce::choose_retained(spec_, plan_, num_tokens, room, options);
}

void Kernel::forward(const ForwardArgs& args, Workspace workspace, Stream stream) const {
    Call call(*this, "forward");
    call.arguments(args);
    call.retained(*this, args.retained, {});
    call.workspace(workspace, workspace_bytes(call.num_tokens(), Pass::forward));
    run(false, call.slots(), stream);
}

void Kernel::backward(const BackwardArgs& args, Workspace workspace, Stream stream) const {
    Call call(*this, "backward");
    call.arguments(args);
    call.check_gradients(args);
    call.retained(*this, args.retained, args.grad_weight);
    call.workspace(workspace, workspace_bytes(call.num_tokens(), Pass::backward));
    run(true, call.slots(), stream);
}

Explanation Kernel::explain() const {
    std::string device = device_.name;
    if (device_.kind == DeviceKind::cuda) device += fmt::format(" ({}, cuda:{})", device_.gpu.arch, device_ref_.index);
    if (device_.kind == DeviceKind::cpu) device += fmt::format(" ({}, {}-bit vectors)", device_.cpu.cpu, device_.cpu.vector_bits);
    return {spec_.text(), plan_.text(), std::move(device), reasons_ ? reasons_() : std::vector<std::string>()};
}

}  // namespace flce

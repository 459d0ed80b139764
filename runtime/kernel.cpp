// The public calls of a kernel: every argument is checked here, once, and turned into the slots that launchers and CPU code read.
#include <fmt/format.h>

#include <algorithm>

#include "flce/flce.hpp"
#include "generator/call_slots.hpp"
#include "runtime/argument_checks.hpp"
#include "runtime/retained_choice.hpp"

namespace flce {
namespace {

constexpr std::int64_t kRowAlignment = 16;  // of hidden, weight and their gradients: vector loads and bulk copies

ScalarType scalar_type(DType dtype) {
    switch (dtype) {
        case DType::bf16: return ScalarType::bf16;
        case DType::fp16: return ScalarType::fp16;
        case DType::fp32: return ScalarType::fp32;
    }
    throw InternalError(fmt::format("dtype {} has no scalar type", static_cast<int>(dtype)));
}

// Above this, byte offsets into [N, V] or [N, D] would leave 64 bits.
std::int64_t most_tokens(const Spec& spec) { return (std::int64_t{1} << 60) / std::max(spec.hidden_size, spec.padded_vocab_size); }

// Checks the arguments of one call and fills its slots.
class Call {
public:
    Call(const Kernel& kernel, const char* name) : spec_(kernel.spec()), checks_(name, kernel.device_ref()) { slots_.fill(0); }

    // Forward and backward name their common inputs alike.
    template <class Args>
    void inputs(const Args& args) {
        const ScalarType dtype = scalar_type(spec_.dtype);
        const TensorView& hidden = args.hidden;
        // N is whatever hidden says; its other dimension and everything else must agree.
        if (hidden.present && (hidden.ndim != 2 || hidden.shape[1] != spec_.hidden_size)) {
            checks_.fail(fmt::format("hidden.shape is {}; it must be [num_tokens, hidden_size] with hidden_size {}", shape_text(hidden),
                                     spec_.hidden_size));
        }
        num_tokens_ = hidden.present ? hidden.shape[0] : 0;
        if (num_tokens_ < 0 || num_tokens_ > most_tokens(spec_)) {
            checks_.fail(fmt::format("hidden.shape is {}; num_tokens must be 0 to {}", shape_text(hidden), most_tokens(spec_)));
        }
        set(Slot::num_tokens, num_tokens_);
        take(Slot::hidden, hidden, Presence::required,
             {"hidden", TypeSet(dtype), {2, num_tokens_, spec_.hidden_size, "[num_tokens, hidden_size]"}, Access::read, kRowAlignment});
        take(Slot::weight, args.weight, Presence::required,
             {"weight", TypeSet(scalar_type(weight_dtype(spec_))), weight_shape(), Access::read, kRowAlignment});
        optional_of_spec(Slot::bias, args.bias, spec_.bias, {"bias", TypeSet(dtype), classes()}, "the spec has no bias");
        optional_of_spec(Slot::class_weight, args.class_weight, spec_.class_weight, {"class_weight", TypeSet(ScalarType::fp32), classes()},
                         "the spec has no class_weight");
        take(Slot::target, args.target, Presence::required, {"target", TypeSet(ScalarType::int32, ScalarType::int64), tokens()});
        set(Slot::target_bits, args.target.dtype == ScalarType::int32 ? 32 : 64);
        set(Slot::ignore_index, args.ignore_index);
        reduction(args.reduction, args.num_valid);
    }

    void outputs(const ForwardArgs& args) {
        constexpr TypeSet kFloat(ScalarType::fp32);
        const Outputs& offered = spec_.outputs;
        take_if(offered.loss, Slot::loss, args.loss, {"loss", kFloat, loss_shape(), Access::write}, "spec.outputs has no loss");
        take_if(offered.loss, Slot::z_loss, args.z_loss, {"z_loss", kFloat, loss_shape(), Access::write}, "spec.outputs has no loss");
        take(Slot::lse, args.lse, Presence::required, {"lse", kFloat, tokens(), Access::write});
        take_if(offered.logprob, Slot::logprob, args.logprob, {"logprob", kFloat, tokens(), Access::write}, "spec.outputs has no logprob");
        take_if(offered.entropy, Slot::entropy, args.entropy, {"entropy", kFloat, tokens(), Access::write}, "spec.outputs has no entropy");
        take(Slot::invalid_label, args.invalid_label, Presence::optional,
             {"invalid_label", TypeSet(ScalarType::uint64), scalar(), Access::write});
    }

    void saved_and_upstream(const BackwardArgs& args) {
        constexpr TypeSet kFloat(ScalarType::fp32);
        const Outputs& offered = spec_.outputs;
        take(Slot::lse, args.lse, Presence::required, {"lse", kFloat, tokens()});
        if (args.grad_entropy.present && offered.entropy && !args.entropy.present) {
            checks_.fail("entropy is absent; grad_entropy needs it as forward wrote it");
        }
        take_if(offered.entropy, Slot::entropy, args.entropy, {"entropy", kFloat, tokens()}, "spec.outputs has no entropy");
        take_if(offered.loss, Slot::grad_loss, args.grad_loss, {"grad_loss", kFloat, loss_shape()}, "spec.outputs has no loss");
        take_if(offered.lse, Slot::grad_lse, args.grad_lse, {"grad_lse", kFloat, tokens()}, "spec.outputs has no lse");
        take_if(offered.logprob, Slot::grad_logprob, args.grad_logprob, {"grad_logprob", kFloat, tokens()}, "spec.outputs has no logprob");
        take_if(offered.entropy, Slot::grad_entropy, args.grad_entropy, {"grad_entropy", kFloat, tokens()}, "spec.outputs has no entropy");
    }

    void gradients(const BackwardArgs& args) {
        const TypeSet wide(scalar_type(spec_.grad_weight_dtype));
        if (!args.grad_hidden.present && !args.grad_weight.present && !args.grad_bias.present) {
            checks_.fail("grad_hidden, grad_weight and grad_bias are all absent; at least one must be given");
        }
        take(Slot::grad_hidden, args.grad_hidden, Presence::optional,
             {"grad_hidden",
              TypeSet(scalar_type(spec_.dtype)),
              {2, num_tokens_, spec_.hidden_size, "[num_tokens, hidden_size]"},
              Access::write,
              kRowAlignment});
        take(Slot::grad_weight, args.grad_weight, Presence::optional, {"grad_weight", wide, weight_shape(), Access::write, kRowAlignment});
        take_if(spec_.bias, Slot::grad_bias, args.grad_bias, {"grad_bias", wide, classes(), Access::write}, "the spec has no bias");
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
        set(Slot::retained, checks_.retained(retained, kRowAlignment, written_over ? Access::none : Access::write));
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
    void take(Slot slot, const TensorView& view, Presence presence, const Expected& expected) {
        set(slot, checks_.tensor(view, presence, expected));
    }
    // An optional tensor that only kernels with that feature take.
    void take_if(bool offered, Slot slot, const TensorView& view, const Expected& expected, const char* why_not) {
        if (offered) {
            take(slot, view, Presence::optional, expected);
        } else {
            checks_.absent(view, expected.name, why_not);
        }
    }
    void optional_of_spec(Slot slot, const TensorView& view, bool in_spec, const Expected& expected, const char* why_not) {
        if (in_spec) {
            take(slot, view, Presence::required, expected);
        } else {
            checks_.absent(view, expected.name, why_not);
        }
    }

    void reduction(Reduction reduction, const TensorView& num_valid) {
        switch (reduction) {
            case Reduction::none: set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::none)); break;
            case Reduction::sum: set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::sum)); break;
            case Reduction::mean: set(Slot::reduction, static_cast<std::int64_t>(ReductionCode::mean)); break;
            default: checks_.fail(fmt::format("reduction is {}; allowed are none (0), sum (1), mean (2)", static_cast<int>(reduction)));
        }
        reduction_ = reduction;
        if (reduction != Reduction::mean) {
            checks_.absent(num_valid, "num_valid", "only reduction mean divides by it");
            return;
        }
        take(Slot::num_valid, num_valid, Presence::optional,
             {"num_valid", TypeSet(ScalarType::fp32, ScalarType::int32, ScalarType::int64), scalar()});
        const CountCode code = num_valid.dtype == ScalarType::int32   ? CountCode::int32
                               : num_valid.dtype == ScalarType::int64 ? CountCode::int64
                                                                      : CountCode::fp32;
        set(Slot::num_valid_code, static_cast<std::int64_t>(code));
    }

    [[nodiscard]] ExpectedShape scalar() const { return {0, 0, 0, "scalar"}; }
    [[nodiscard]] ExpectedShape tokens() const { return {1, num_tokens_, 0, "[num_tokens]"}; }
    [[nodiscard]] ExpectedShape classes() const { return {1, spec_.vocab_size, 0, "[vocab_size]"}; }
    [[nodiscard]] ExpectedShape loss_shape() const { return reduction_ == Reduction::none ? tokens() : scalar(); }
    [[nodiscard]] ExpectedShape weight_shape() const {
        if (spec_.layout == WeightLayout::vocab_major) {
            return {2, spec_.padded_vocab_size, spec_.hidden_size, "[padded_vocab_size, hidden_size]"};
        }
        return {2, spec_.hidden_size, spec_.padded_vocab_size, "[hidden_size, padded_vocab_size]"};
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
    call.inputs(args);
    call.outputs(args);
    call.retained(*this, args.retained, {});
    call.workspace(workspace, workspace_bytes(call.num_tokens(), Pass::forward));
    run(false, call.slots(), stream);
}

void Kernel::backward(const BackwardArgs& args, Workspace workspace, Stream stream) const {
    Call call(*this, "backward");
    call.inputs(args);
    call.saved_and_upstream(args);
    call.gradients(args);
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

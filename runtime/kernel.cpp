// The public calls of a kernel: every argument is checked here, once, and turned into the slots that launchers and CPU code read.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "flce/flce.hpp"
#include "generator/call_slots.hpp"
#include "runtime/argument_checks.hpp"
#include "runtime/call_fields.hpp"
#include "runtime/retained_choice.hpp"
#include "templates/common/divergence_math.cuh"

namespace flce {
namespace {

constexpr std::int64_t kRetainedAlignment = 16;

// Above this, byte offsets into [N, V] or [N, D] would leave 64 bits.
std::int64_t most_tokens(const Spec& spec) {
    constexpr std::int64_t kMostPlaces = (std::int64_t{1} << 31) - 1;  // places of a call's ids that are sorted
    const std::int64_t most = (std::int64_t{1} << 60) / std::max(spec.hidden_size, spec.padded_vocab_size);
    return spec.support ? std::min(most, kMostPlaces / spec.teacher_top_k) : most;
}

// Checks the arguments of one call and fills its slots.
class Call {
public:
    Call(const Kernel& kernel, const char* name) : spec_(kernel.spec()), checks_(name, kernel.device_ref()) { slots_.fill(0); }

    /// Takes everything but workspace and retained memory.
    template <class Args>
    void arguments(const Args& args) {
        take_sizes(args);
        take_reduction(args.reduction);
        if constexpr (requires { args.walk; }) take_walk(args.walk);
        set(Slot::ignore_index, args.ignore_index);
        set(Slot::fp8_hidden_scale, std::bit_cast<std::uint32_t>(static_cast<float>(spec_.fp8_hidden_scale)));
        set(Slot::fp8_weight_scale, std::bit_cast<std::uint32_t>(static_cast<float>(spec_.fp8_weight_scale)));
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            if (const auto field = fields_of(args)[i]) take(i, args.*field, use_of(kCallTensors[i], args, spec_));
        }
        set(Slot::target_bits, args.target.dtype == ScalarType::int32 ? 32 : 64);
        set(Slot::teacher_bits, args.teacher_ids.dtype == ScalarType::int32 ? 32 : 64);
        set(Slot::num_valid_code, static_cast<std::int64_t>(count_code(args.num_valid)));
    }

    void stage(BackwardStage stage) {
        if (stage != BackwardStage::whole && stage != BackwardStage::until_grad_hidden && stage != BackwardStage::rest) {
            checks_.fail(fmt::format("stage is {}; allowed are whole (0), until_grad_hidden (1), rest (2)", static_cast<int>(stage)));
        }
        static_assert(static_cast<int>(BackwardStage::until_grad_hidden) == static_cast<int>(StageCode::first) &&
                      static_cast<int>(BackwardStage::rest) == static_cast<int>(StageCode::rest));
        set(Slot::stage, static_cast<std::int64_t>(stage));
    }
    void hidden_ready(bool ready) { set(Slot::hidden_ready, ready ? 1 : 0); }

    /// Checks that backward makes of several tensors together.
    void check_gradients(const BackwardArgs& args) const {
        if (args.grad_entropy.present && spec_.outputs.entropy && !args.entropy.present) {
            checks_.fail("entropy is absent; grad_entropy needs it as forward wrote it");
        }
        if (has_teacher_head(spec_) && (args.grad_lse.present || args.grad_entropy.present)) {
            checks_.fail("grad_lse or grad_entropy is given; beside a divergence lse and entropy have no gradient");
        }
        if (spec_.dft && spec_.outputs.loss && !args.logprobs.present) {
            checks_.fail("logprobs is absent; the spec has dft, which needs it as forward wrote it");
        }
        if (!args.grad_hidden.present && !args.grad_weight.present && !args.grad_bias.present) {
            checks_.fail("grad_hidden, grad_weight and grad_bias are all absent; at least one must be given");
        }
    }

    /// `grad_weight`: the gradient that this call writes, absent where it writes none. The gradient's memory may be lent for the retained
    /// values.
    void retained(const Kernel& kernel, const Retained& retained, const TensorView& grad_weight) {
        const bool lent = retained.place == RetainedPlace::grad_weight && retained.bytes != 0;
        if (lent) {
            const std::size_t lendable = kernel.retained_bytes(sizes_.num_tokens, RetainedPlace::grad_weight, sizes_.vocab_columns);
            if (retained.bytes != lendable) {
                checks_.fail(
                    fmt::format("retained.bytes is {} in grad_weight's memory; {} tokens are lent {} of it (Kernel::retained_bytes)",
                                retained.bytes, sizes_.num_tokens, lendable));
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
        set(Slot::workspace, checks_.workspace(workspace, needed, sizes_.num_tokens));
        set(Slot::workspace_bytes, static_cast<std::int64_t>(workspace.bytes));
        checks_.overlaps();
    }

    [[nodiscard]] std::int64_t num_tokens() const { return sizes_.num_tokens; }
    [[nodiscard]] const std::int64_t* slots() const { return slots_.data(); }

private:
    void set(Slot slot, std::int64_t value) { slots_[static_cast<std::size_t>(slot)] = value; }
    template <class Args>
    void take_sizes(const Args& args) {
        take_num_tokens(args.hidden);
        sizes_.vocab_columns = spec_.vocab_size;
        sizes_.weight_rows = spec_.padded_vocab_size;
        if (is_shard(spec_)) {
            take_shard(args.weight, args.vocab_start);
        } else if (args.vocab_start != 0) {
            checks_.fail(fmt::format("vocab_start is {}; it must be 0, since the spec has no whole_vocab_size", args.vocab_start));
        }
        set(Slot::vocab_start, args.vocab_start);
        set(Slot::vocab_columns, sizes_.vocab_columns);
        set(Slot::weight_rows, sizes_.weight_rows);
    }
    void take_sizes(const MergeArgs& args) {
        if (!is_shard(spec_)) checks_.fail("the spec has no whole_vocab_size, so that there is nothing to merge");
        const TensorView& target = args.target;
        set_num_tokens("target", target, target.present && target.ndim == 1 ? target.shape[0] : 0);
        const std::int64_t fields = shard_fields(spec_).count;
        const TensorView& sums = args.all_partial_sums;
        if (sums.present && (sums.ndim != 2 || sums.shape[0] < fields || sums.shape[0] % fields != 0)) {
            checks_.fail(fmt::format("all_partial_sums.shape is {}; it must be [shards x {}, num_tokens]", shape_text(sums), fields));
        }
        sizes_.num_shards = sums.present ? sums.shape[0] / fields : 1;
        set(Slot::num_shards, sizes_.num_shards);
    }

    /// N is what hidden says; its other dimension and all other tensors must agree.
    void take_num_tokens(const TensorView& hidden) {
        if (hidden.present && (hidden.ndim != 2 || hidden.shape[1] != spec_.hidden_size)) {
            checks_.fail(fmt::format("hidden.shape is {}; it must be [num_tokens, hidden_size] with hidden_size {}", shape_text(hidden),
                                     spec_.hidden_size));
        }
        set_num_tokens("hidden", hidden, hidden.present ? hidden.shape[0] : 0);
    }
    void set_num_tokens(const char* name, const TensorView& of, std::int64_t num_tokens) {
        if (num_tokens < 0 || num_tokens > most_tokens(spec_)) {
            checks_.fail(fmt::format("{}.shape is {}; num_tokens must be 0 to {}", name, shape_text(of), most_tokens(spec_)));
        }
        sizes_.num_tokens = num_tokens;
        set(Slot::num_tokens, num_tokens);
    }

    /// Number of rows of the weight, and of those that are classes.
    void take_shard(const TensorView& weight, std::int64_t vocab_start) {
        if (vocab_start < 0 || vocab_start > std::int64_t{1} << 40) {
            checks_.fail(fmt::format("vocab_start is {}; it must be the label of the weight's first row, 0 or more", vocab_start));
        }
        const bool vocab_major = spec_.layout == WeightLayout::vocab_major;
        if (vocab_major && weight.present && weight.ndim == 2) {
            sizes_.weight_rows = weight.shape[0];
            if (sizes_.weight_rows < 0 || sizes_.weight_rows > spec_.padded_vocab_size) {
                checks_.fail(fmt::format("weight.shape is {}; a shard has at most padded_vocab_size = {} rows", shape_text(weight),
                                         spec_.padded_vocab_size));
            }
        }
        sizes_.vocab_columns = std::clamp<std::int64_t>(spec_.whole_vocab_size - vocab_start, 0, sizes_.weight_rows);
        if (sizes_.vocab_columns > spec_.vocab_size) {
            checks_.fail(fmt::format("weight.shape is {}; from label {} on it has {} classes, and the spec's vocab_size is {}",
                                     shape_text(weight), vocab_start, sizes_.vocab_columns, spec_.vocab_size));
        }
    }

    void take_walk(DivergenceWalk walk) {
        if (walk != DivergenceWalk::sums && walk != DivergenceWalk::mixture) {
            checks_.fail(fmt::format("walk is {}; allowed are sums (0), mixture (1)", static_cast<int>(walk)));
        }
        const bool mixes = is_shard(spec_) && has_teacher_head(spec_) && divergence_form(spec_.divergence_beta) == kMixture;
        if (walk == DivergenceWalk::mixture && !mixes) {
            checks_.fail("walk is mixture; only a shard of a divergence with a divergence_beta between 0 and 1 has a second walk");
        }
        static_assert(static_cast<int>(DivergenceWalk::mixture) == static_cast<int>(WalkCode::mixture));
        set(Slot::walk, static_cast<std::int64_t>(walk));
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
        sizes_.reduction = reduction;
    }

    /// A tensor of the table, into the slot of its number.
    void take(std::size_t which, const TensorView& view, Use use) {
        const CallTensor& tensor = kCallTensors[which];
        const bool optional = use == Use::may_read || use == Use::may_write;
        if (optional && !view.present && view.data == nullptr) return;  // most of a call's are
        if (!holds(tensor.condition, spec_, sizes_.reduction)) return checks_.absent(view, tensor.name, why_not(tensor.condition));
        if (use == Use::none) return checks_.absent(view, tensor.name, "the spec is a shard's; Kernel::merge writes it");
        const bool written = use == Use::write || use == Use::may_write;
        slots_[which] = checks_.tensor(view, optional ? Presence::optional : Presence::required,
                                       {tensor.name, types_of(tensor.elements, spec_), shape_of(tensor.extent, spec_, sizes_),
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
    CallSizes sizes_;
};

}  // namespace

std::size_t Kernel::workspace_bytes(std::int64_t num_tokens, Pass pass) const {
    const std::int64_t most = most_tokens(spec_);
    if (num_tokens < 0 || num_tokens > most) {
        throw ArgumentError(fmt::format("workspace_bytes: num_tokens is {}; allowed are 0 to {}", num_tokens, most));
    }
    if (pass == Pass::forward_backward) {
        return static_cast<std::size_t>(
            std::max(workspace_bytes_of(Pass::forward, num_tokens), workspace_bytes_of(Pass::backward, num_tokens)));
    }
    if (pass == Pass::merge && !is_shard(spec_)) {
        throw ArgumentError("workspace_bytes: pass is merge, but the spec has no whole_vocab_size");
    }
    if (pass != Pass::forward && pass != Pass::merge && pass != Pass::backward) {
        throw ArgumentError(fmt::format(
            "workspace_bytes: pass is {}; allowed are forward (0), backward (1), forward_backward (2), merge (3)", static_cast<int>(pass)));
    }
    return static_cast<std::size_t>(workspace_bytes_of(pass, num_tokens));
}

std::size_t Kernel::retained_bytes(std::int64_t num_tokens, RetainedPlace place, std::int64_t vocab_columns) const {
    const std::int64_t most = most_tokens(spec_);
    if (num_tokens < 0 || num_tokens > most) {
        throw ArgumentError(fmt::format("retained_bytes: num_tokens is {}; allowed are 0 to {}", num_tokens, most));
    }
    if (place != RetainedPlace::own && place != RetainedPlace::grad_weight) {
        throw ArgumentError(fmt::format("retained_bytes: place is {}; allowed are own (0), grad_weight (1)", static_cast<int>(place)));
    }
    if (vocab_columns < 0 || vocab_columns > spec_.vocab_size) {
        throw ArgumentError(fmt::format("retained_bytes: vocab_columns is {}; allowed are 0 to {}", vocab_columns, spec_.vocab_size));
    }
    return static_cast<std::size_t>(retained_bytes_of(num_tokens, place, vocab_columns == 0 ? spec_.vocab_size : vocab_columns));
}

bool Kernel::reads_hidden_late(std::int64_t num_tokens, const Retained& retained, std::int64_t vocab_columns) const {
    const std::size_t everything = retained_bytes(num_tokens, RetainedPlace::own, vocab_columns);
    // A backward from an entropy computes logits again.
    const bool used = !spec_.outputs.entropy && retained.place == RetainedPlace::own;
    return defers_hidden() && used && everything > 0 && retained.bytes >= everything;
}

Retained Kernel::choose_retained(std::int64_t num_tokens, const RetainOptions& options) const {
    if (options.workspace_limit_bytes < 0 || options.least_work < 0) {
        throw ArgumentError(fmt::format("choose_retained: workspace_limit_bytes is {}, least_work is {}; allowed are 0 and more",
                                        options.workspace_limit_bytes, options.least_work));
    }
    RetainedRoom room{.most = retained_bytes(num_tokens, RetainedPlace::own, options.vocab_columns)};
    if (room.most == 0) return {};
    if (options.retain_in_grad_weight) room.lendable = retained_bytes(num_tokens, RetainedPlace::grad_weight, options.vocab_columns);
    if (options.workspace_limit_bytes > 0) room.workspace = workspace_bytes(num_tokens);
    return flce::choose_retained(spec_, plan_, num_tokens, room, options);
}

void Kernel::forward(const ForwardArgs& args, Workspace workspace, Stream stream) const {
    Call call(*this, "forward");
    call.arguments(args);
    call.retained(*this, args.retained, {});
    call.workspace(workspace, workspace_bytes(call.num_tokens(), Pass::forward));
    run(Pass::forward, call.slots(), stream);
}

void Kernel::merge(const MergeArgs& args, Workspace workspace, Stream stream) const {
    Call call(*this, "merge");
    call.arguments(args);
    call.workspace(workspace, workspace_bytes(call.num_tokens(), Pass::merge));
    run(Pass::merge, call.slots(), stream);
}

int Kernel::partial_sum_fields() const noexcept { return is_shard(spec_) ? shard_fields(spec_).count : 0; }

void Kernel::backward(const BackwardArgs& args, Workspace workspace, Stream stream) const {
    Call call(*this, "backward");
    call.arguments(args);
    call.stage(args.stage);
    call.hidden_ready(args.hidden_ready);
    call.check_gradients(args);
    call.retained(*this, args.retained, args.grad_weight);
    call.workspace(workspace, workspace_bytes(call.num_tokens(), Pass::backward));
    run(Pass::backward, call.slots(), stream);
}

Explanation Kernel::explain() const {
    std::string device = device_.name;
    if (device_.kind == DeviceKind::cuda) device += fmt::format(" ({}, cuda:{})", device_.gpu.arch, device_ref_.index);
    if (device_.kind == DeviceKind::cpu) device += fmt::format(" ({}, {}-bit vectors)", device_.cpu.cpu, device_.cpu.vector_bits);
    return {spec_.text(), plan_.text(), std::move(device), reasons_ ? reasons_() : std::vector<std::string>()};
}

}  // namespace flce

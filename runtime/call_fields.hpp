// The table of a call's tensors over the public argument structs: the field that holds each, and what a spec and a call ask of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "flce/flce.hpp"
#include "generator/call_tensors.hpp"
#include "generator/shard_layout.hpp"
#include "runtime/argument_checks.hpp"

namespace flce {

#define FLCE_FORWARD_FIELD(name, elements, extent, condition, forward, shard, merge, backward) FLCE_FIELD_##forward(ForwardArgs, name),
#define FLCE_MERGE_FIELD(name, elements, extent, condition, forward, shard, merge, backward) FLCE_FIELD_##merge(MergeArgs, name),
#define FLCE_BACKWARD_FIELD(name, elements, extent, condition, forward, shard, merge, backward) FLCE_FIELD_##backward(BackwardArgs, name),
/// Fields by kCallTensors' index; null: the struct has no such tensor.
inline constexpr std::array<TensorView ForwardArgs::*, kCallTensorCount> kForwardFields = {FLCE_CALL_TENSORS(FLCE_FORWARD_FIELD)};
inline constexpr std::array<TensorView MergeArgs::*, kCallTensorCount> kMergeFields = {FLCE_CALL_TENSORS(FLCE_MERGE_FIELD)};
inline constexpr std::array<TensorView BackwardArgs::*, kCallTensorCount> kBackwardFields = {FLCE_CALL_TENSORS(FLCE_BACKWARD_FIELD)};
#undef FLCE_FORWARD_FIELD
#undef FLCE_MERGE_FIELD
#undef FLCE_BACKWARD_FIELD

[[nodiscard]] constexpr const auto& fields_of(const ForwardArgs&) { return kForwardFields; }
[[nodiscard]] constexpr const auto& fields_of(const MergeArgs&) { return kMergeFields; }
[[nodiscard]] constexpr const auto& fields_of(const BackwardArgs&) { return kBackwardFields; }
[[nodiscard]] inline Use use_of(const CallTensor& tensor, const ForwardArgs& args, const Spec& spec) {
    if (!is_shard(spec)) return tensor.forward;
    const bool is_lse = tensor.extent == Extent::tokens && std::string_view(tensor.name).ends_with("lse");
    return is_lse && args.walk == DivergenceWalk::mixture ? Use::read : tensor.shard;
}
[[nodiscard]] inline Use use_of(const CallTensor& tensor, const MergeArgs&, const Spec&) { return tensor.merge; }
[[nodiscard]] inline Use use_of(const CallTensor& tensor, const BackwardArgs&, const Spec&) { return tensor.backward; }

/// Number of tensors in one of the structs.
template <class Fields>
[[nodiscard]] constexpr std::size_t field_count(const Fields& fields) {
    std::size_t count = 0;
    for (const auto field : fields) count += field != nullptr ? 1 : 0;
    return count;
}

// A field that is not in the table would be neither checked nor passed on.
static_assert(sizeof(ForwardArgs) == field_count(kForwardFields) * sizeof(TensorView) + 3 * sizeof(std::int64_t) + sizeof(Retained));
static_assert(sizeof(MergeArgs) == field_count(kMergeFields) * sizeof(TensorView) + 2 * sizeof(std::int64_t));
static_assert(sizeof(BackwardArgs) == field_count(kBackwardFields) * sizeof(TensorView) + 4 * sizeof(std::int64_t) + sizeof(Retained));

[[nodiscard]] constexpr ScalarType scalar_type_of(DType dtype) {
    return dtype == DType::bf16 ? ScalarType::bf16 : dtype == DType::fp16 ? ScalarType::fp16 : ScalarType::fp32;
}

[[nodiscard]] inline TypeSet types_of(Elements elements, const Spec& spec) {
    switch (elements) {
        case Elements::spec: return TypeSet(scalar_type_of(spec.dtype));
        case Elements::weight:
            if (spec.weight_format == WeightFormat::e4m3) return TypeSet(ScalarType::e4m3, ScalarType::uint8);
            if (spec.weight_format == WeightFormat::nvfp4) return TypeSet(ScalarType::uint8);
            return TypeSet(scalar_type_of(weight_dtype(spec)));
        case Elements::scale:
            if (spec.weight_format == WeightFormat::nvfp4) return TypeSet(ScalarType::e4m3, ScalarType::uint8);
            return TypeSet(ScalarType::fp32);
        case Elements::grad_hidden: return TypeSet(scalar_type_of(grad_hidden_dtype(spec)));
        case Elements::grad_weight: return TypeSet(scalar_type_of(spec.grad_weight_dtype));
        case Elements::fp32: return TypeSet(ScalarType::fp32);
        case Elements::int32: return TypeSet(ScalarType::int32);
        case Elements::label: return TypeSet(ScalarType::int32, ScalarType::int64);
        case Elements::count: return TypeSet(ScalarType::fp32, ScalarType::int32, ScalarType::int64);
        case Elements::uint64: return TypeSet(ScalarType::uint64);
        case Elements::int64: return TypeSet(ScalarType::int64);
    }
    return {};
}

/// Sizes of one call.
struct CallSizes {
    std::int64_t num_tokens = 0;
    std::int64_t vocab_columns = 0;  ///< value of Slot::vocab_columns; the next two fields are slots' values too
    std::int64_t weight_rows = 0;
    std::int64_t num_shards = 0;
    Reduction reduction = Reduction::mean;
};

/// Sizes of a call without shards, or of one whose shard has as many classes as the spec allows.
[[nodiscard]] inline CallSizes sizes_of(const Spec& spec, std::int64_t num_tokens, Reduction reduction) {
    return {num_tokens, spec.vocab_size, spec.padded_vocab_size, 1, reduction};
}

[[nodiscard]] inline ExpectedShape weight_shape(const Spec& spec, const CallSizes& sizes) {
    const char* const rows = is_shard(spec) ? "[rows of the weight, hidden_size]" : "[padded_vocab_size, hidden_size]";
    if (spec.weight_format == WeightFormat::nvfp4) {
        return {2, sizes.weight_rows, spec.hidden_size / 2,
                is_shard(spec) ? "[rows of the weight, hidden_size / 2]" : "[padded_vocab_size, hidden_size / 2]"};
    }
    if (spec.layout == WeightLayout::vocab_major) return {2, sizes.weight_rows, spec.hidden_size, rows};
    return {2, spec.hidden_size, spec.padded_vocab_size, "[hidden_size, padded_vocab_size]"};
}

[[nodiscard]] inline ExpectedShape weight_scale_shape(const Spec& spec, const CallSizes& sizes) {
    if (spec.weight_format == WeightFormat::nvfp4) {
        return {2, sizes.weight_rows, spec.hidden_size / kNvfp4Group, "[rows of the weight, hidden_size / 16]"};
    }
    const std::int64_t block = spec.weight_block;
    if (block == 0) return {1, sizes.weight_rows, 0, "[rows of the weight]"};
    return {2, (sizes.weight_rows + block - 1) / block, (spec.hidden_size + block - 1) / block,
            "[ceil(rows of the weight / 128), ceil(hidden_size / 128)]"};
}

[[nodiscard]] inline ExpectedShape shape_of(Extent extent, const Spec& spec, const CallSizes& sizes) {
    constexpr ExpectedShape kScalar{0, 0, 0, "scalar"};
    const ExpectedShape tokens{1, sizes.num_tokens, 0, "[num_tokens]"};
    switch (extent) {
        case Extent::scalar: return kScalar;
        case Extent::tokens: return tokens;
        case Extent::loss: return sizes.reduction == Reduction::none ? tokens : kScalar;
        case Extent::classes:
            if (is_shard(spec)) return {1, sizes.weight_rows, 0, "[rows of the weight]"};
            return {1, spec.vocab_size, 0, "[vocab_size]"};
        case Extent::hidden: return {2, sizes.num_tokens, spec.hidden_size, "[num_tokens, hidden_size]"};
        case Extent::weight: return weight_shape(spec, sizes);
        case Extent::weight_scale: return weight_scale_shape(spec, sizes);
        case Extent::teacher: return {2, sizes.num_tokens, spec.teacher_top_k, "[num_tokens, teacher_top_k]"};
        case Extent::teacher_hidden: return {2, sizes.num_tokens, spec.teacher_hidden_size, "[num_tokens, teacher_hidden_size]"};
        case Extent::top: return {2, sizes.num_tokens, spec.top_k, "[num_tokens, top_k]"};
        case Extent::teacher_weight:
            if (is_shard(spec) && spec.layout == WeightLayout::vocab_major)
                return {2, sizes.weight_rows, spec.teacher_hidden_size, "[rows of the weight, teacher_hidden_size]"};
            if (is_shard(spec)) return {2, spec.teacher_hidden_size, spec.padded_vocab_size, "[teacher_hidden_size, padded_vocab_size]"};
            if (spec.layout == WeightLayout::vocab_major)
                return {2, spec.vocab_size, spec.teacher_hidden_size, "[vocab_size, teacher_hidden_size]"};
            return {2, spec.teacher_hidden_size, spec.vocab_size, "[teacher_hidden_size, vocab_size]"};
        case Extent::partial_sums: return {2, shard_fields(spec).count, sizes.num_tokens, "[partial_sum_fields, num_tokens]"};
        case Extent::all_partial_sums: break;
    }
    return {2, sizes.num_shards * shard_fields(spec).count, sizes.num_tokens, "[shards x partial_sum_fields, num_tokens]"};
}

/// Bytes; 0: the elements' own. Rows are read with vector loads and bulk copies.
[[nodiscard]] constexpr std::int64_t alignment_of(Extent extent) {
    const bool operand =
        extent == Extent::hidden || extent == Extent::weight || extent == Extent::teacher_hidden || extent == Extent::teacher_weight;
    return operand ? 16 : 0;
}

[[nodiscard]] inline bool holds(Condition condition, const Spec& spec, Reduction reduction) {
    switch (condition) {
        case Condition::always: return true;
        case Condition::quantized: return is_quantized(spec);
        case Condition::nvfp4: return spec.weight_format == WeightFormat::nvfp4;
        case Condition::trained: return !is_quantized(spec);
        case Condition::bias: return spec.bias;
        case Condition::class_weight: return spec.class_weight;
        case Condition::class_offset: return spec.class_offset;
        case Condition::class_groups: return spec.class_groups;
        case Condition::temperature: return spec.temperature;
        case Condition::token_weight: return spec.token_weight;
        case Condition::teacher: return spec.teacher_top_k > 0;
        case Condition::teacher_head: return has_teacher_head(spec);
        case Condition::teacher_bias: return spec.teacher_bias;
        case Condition::top_k: return spec.top_k > 0;
        case Condition::loss: return spec.outputs.loss;
        case Condition::lse: return spec.outputs.lse;
        case Condition::logprobs: return spec.outputs.logprobs;
        case Condition::entropy: return spec.outputs.entropy;
        case Condition::top1: return spec.outputs.top1;
        case Condition::log_sum_sq_probs: return spec.outputs.log_sum_sq_probs;
        case Condition::mean: return reduction == Reduction::mean;
        case Condition::shard: return is_shard(spec);
        case Condition::shard_class_weight: return is_shard(spec) && spec.class_weight;
        case Condition::shard_smoothing: return is_shard(spec) && spec.class_weight && spec.label_smoothing > 0;
    }
    return false;
}

/// Reason to refuse a tensor that is given though its condition does not hold.
[[nodiscard]] constexpr const char* why_not(Condition condition) {
    switch (condition) {
        case Condition::always: break;
        case Condition::quantized: return "the spec's weight_dtype is neither e4m3 nor nvfp4";
        case Condition::nvfp4: return "the spec's weight_dtype is not nvfp4";
        case Condition::trained: return "the weight is quantised, and frozen";
        case Condition::bias: return "the spec has no bias";
        case Condition::class_weight: return "the spec has no class_weight";
        case Condition::class_offset: return "the spec has no class_offset";
        case Condition::class_groups: return "the spec has no class_groups";
        case Condition::temperature: return "the spec has no temperature";
        case Condition::token_weight: return "the spec has no token_weight";
        case Condition::teacher: return "the spec has no teacher_top_k";
        case Condition::teacher_head: return "the spec has no teacher_hidden_size";
        case Condition::teacher_bias: return "the spec has no teacher_bias";
        case Condition::top_k: return "the spec has no top_k";
        case Condition::loss: return "spec.outputs has no loss";
        case Condition::lse: return "spec.outputs has no lse";
        case Condition::logprobs: return "spec.outputs has no logprobs";
        case Condition::entropy: return "spec.outputs has no entropy";
        case Condition::top1: return "spec.outputs has no top1";
        case Condition::log_sum_sq_probs: return "spec.outputs has no log_sum_sq_probs";
        case Condition::mean: return "only reduction mean divides by it";
        case Condition::shard: return "the spec has no whole_vocab_size";
        case Condition::shard_class_weight: return "the spec has no whole_vocab_size with class_weight";
        case Condition::shard_smoothing: return "the spec has no whole_vocab_size with class_weight and label_smoothing";
    }
    return "";
}

}  // namespace flce

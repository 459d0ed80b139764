#include "runtime/c_arguments.hpp"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

#include "generator/call_tensors.hpp"
#include "runtime/c_structs.hpp"
#include "runtime/call_fields.hpp"

namespace flce {
namespace {

#define FLCE_FORWARD_FIELD(name, elements, extent, condition, forward, shard, merge, backward) \
    FLCE_FIELD_##forward(flce_forward_args, name),
#define FLCE_MERGE_FIELD(name, elements, extent, condition, forward, shard, merge, backward) FLCE_FIELD_##merge(flce_merge_args, name),
#define FLCE_BACKWARD_FIELD(name, elements, extent, condition, forward, shard, merge, backward) \
    FLCE_FIELD_##backward(flce_backward_args, name),
/// Tensors by kCallTensors' index; null: the struct has no such tensor.
constexpr std::array<const flce_tensor * flce_forward_args::*, kCallTensorCount> kForwardPointers = {FLCE_CALL_TENSORS(FLCE_FORWARD_FIELD)};
constexpr std::array<const flce_tensor * flce_merge_args::*, kCallTensorCount> kMergePointers = {FLCE_CALL_TENSORS(FLCE_MERGE_FIELD)};
constexpr std::array<const flce_tensor * flce_backward_args::*, kCallTensorCount> kBackwardPointers = {
    FLCE_CALL_TENSORS(FLCE_BACKWARD_FIELD)};
#undef FLCE_FORWARD_FIELD
#undef FLCE_MERGE_FIELD
#undef FLCE_BACKWARD_FIELD

constexpr const auto& pointers_of(const flce_forward_args&) { return kForwardPointers; }
constexpr const auto& pointers_of(const flce_merge_args&) { return kMergePointers; }
constexpr const auto& pointers_of(const flce_backward_args&) { return kBackwardPointers; }

// A field that is not in the table would not be passed on: beside tensors there are struct_size, ignore_index, reduction with reserved,
// what concerns retained memory, vocab_start, and stage with hidden_ready.
constexpr std::size_t kOfMerge = sizeof(std::size_t) + 2 * sizeof(std::int64_t);
constexpr std::size_t kOfForward = kOfMerge + sizeof(std::size_t) + sizeof(void*) + 2 * sizeof(std::int64_t);
static_assert(sizeof(flce_forward_args) == field_count(kForwardPointers) * sizeof(void*) + kOfForward);
static_assert(sizeof(flce_merge_args) == field_count(kMergePointers) * sizeof(void*) + kOfMerge);
static_assert(sizeof(flce_backward_args) == field_count(kBackwardPointers) * sizeof(void*) + kOfForward + sizeof(std::int64_t));

static_assert(FLCE_REDUCTION_NONE == static_cast<int>(Reduction::none) && FLCE_REDUCTION_SUM == static_cast<int>(Reduction::sum) &&
              FLCE_REDUCTION_MEAN == static_cast<int>(Reduction::mean) &&
              FLCE_REDUCTION_WEIGHTED_MEAN == static_cast<int>(Reduction::weighted_mean));
static_assert(FLCE_STAGE_WHOLE == static_cast<int>(BackwardStage::whole) &&
              FLCE_STAGE_UNTIL_GRAD_HIDDEN == static_cast<int>(BackwardStage::until_grad_hidden) &&
              FLCE_STAGE_REST == static_cast<int>(BackwardStage::rest));
static_assert(FLCE_WALK_SUMS == static_cast<int>(DivergenceWalk::sums) && FLCE_WALK_MIXTURE == static_cast<int>(DivergenceWalk::mixture));
static_assert(FLCE_RETAINED_OWN == static_cast<int>(RetainedPlace::own) &&
              FLCE_RETAINED_GRAD_WEIGHT == static_cast<int>(RetainedPlace::grad_weight));

ScalarType scalar_type_of(std::int32_t dtype, const char* name) {
    switch (dtype) {
        case FLCE_BF16: return ScalarType::bf16;
        case FLCE_FP16: return ScalarType::fp16;
        case FLCE_FP32: return ScalarType::fp32;
        case FLCE_INT32: return ScalarType::int32;
        case FLCE_INT64: return ScalarType::int64;
        case FLCE_UINT64: return ScalarType::uint64;
        case FLCE_UINT8: return ScalarType::uint8;
        case FLCE_E4M3: return ScalarType::e4m3;
        default:
            throw ArgumentError(
                fmt::format("{}.dtype is {:#x} (DLPack code {}, {} bits); allowed are FLCE_BF16, FLCE_FP16, FLCE_FP32, "
                            "FLCE_INT32, FLCE_INT64, FLCE_UINT64, FLCE_UINT8, FLCE_E4M3",
                            name, dtype, dtype >> 8, dtype & 0xFF));
    }
}

TensorView view_of(const flce_tensor* tensor, const char* name) {
    if (tensor == nullptr) return {};
    if (tensor->device_type != FLCE_CPU && tensor->device_type != FLCE_CUDA) {
        throw ArgumentError(fmt::format("{}.device_type is {}; allowed are FLCE_CPU (1) and FLCE_CUDA (2)", name, tensor->device_type));
    }
    const bool cuda = tensor->device_type == FLCE_CUDA;
    return {.data = tensor->data,
            .dtype = scalar_type_of(tensor->dtype, name),
            .ndim = tensor->ndim,
            .shape = {tensor->shape[0], tensor->shape[1]},
            .strides = {tensor->strides[0], tensor->strides[1]},
            .device = {cuda ? DeviceKind::cuda : DeviceKind::cpu, tensor->device_index},
            .present = true};
}

Reduction reduction_of(std::int32_t reduction) {
    if (reduction < FLCE_REDUCTION_NONE || reduction > FLCE_REDUCTION_WEIGHTED_MEAN) {
        throw ArgumentError(fmt::format("reduction is {}; allowed are none (0), sum (1), mean (2), weighted_mean (3)", reduction));
    }
    return static_cast<Reduction>(reduction);
}

/// Retained memory of a call. Callers that were compiled before retained_place existed have none: where they retain exactly as many bytes
/// as grad_weight is lent for, the bytes lie in its memory.
template <class Args>
Retained retained_of(const Kernel& kernel, const Args& args) {
    Retained retained{args.retained, args.retained_bytes};
    if (args.struct_size >= offsetof(Args, reserved_2) + sizeof(args.reserved_2)) {
        check_reserved(args.reserved_2, "args");
        retained.place = retained_place_of(args.retained_place, "args.retained_place");
    } else if (args.retained_bytes != 0 && args.hidden != nullptr && args.hidden->ndim == 2) {
        const bool lent = args.retained_bytes == kernel.retained_bytes(args.hidden->shape[0], RetainedPlace::grad_weight);
        retained.place = lent ? RetainedPlace::grad_weight : RetainedPlace::own;
    }
    return retained;
}

DivergenceWalk walk_of(std::int32_t walk) {
    if (walk != FLCE_WALK_SUMS && walk != FLCE_WALK_MIXTURE) {
        throw ArgumentError(fmt::format("walk is {}; allowed are sums (0), mixture (1)", walk));
    }
    return static_cast<DivergenceWalk>(walk);
}

/// Converts the fields that the structs of all passes have.
template <class Args, class Given>
Args converted(const Given& given) {
    Args args;
    if constexpr (requires { given.walk; }) {
        args.walk = walk_of(given.walk);
    } else {
        check_reserved(given.reserved, "args");
    }
    args.ignore_index = given.ignore_index;
    args.reduction = reduction_of(given.reduction);
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        if (const auto pointer = pointers_of(given)[i]) args.*fields_of(args)[i] = view_of(given.*pointer, kCallTensors[i].name);
    }
    return args;
}

BackwardStage stage_of(std::int32_t stage) {
    if (stage < FLCE_STAGE_WHOLE || stage > FLCE_STAGE_REST) {
        throw ArgumentError(fmt::format("stage is {}; allowed are whole (0), until_grad_hidden (1), rest (2)", stage));
    }
    return static_cast<BackwardStage>(stage);
}

/// A list of a struct's fields.
template <class Args>
class StructFields {
public:
    template <class Field>
    StructFields& add(const char* name, const Field& field, const char* type) {
        const auto offset = reinterpret_cast<const char*>(&field) - reinterpret_cast<const char*>(&args);
        fields_.push_back({{"name", name}, {"offset", offset}, {"type", type}});
        return *this;
    }
    [[nodiscard]] nlohmann::json json() {
        for (std::size_t i = 0; i < kCallTensorCount; ++i) {
            if (const auto pointer = pointers_of(args)[i]) add(kCallTensors[i].name, args.*pointer, "tensor");
        }
        return {{"size", sizeof(Args)}, {"fields", fields_}};
    }

    const Args args{};

private:
    nlohmann::json fields_ = nlohmann::json::array();
};

template <class Args>
StructFields<Args> common_fields() {
    StructFields<Args> fields;
    fields.add("struct_size", fields.args.struct_size, "size")
        .add("ignore_index", fields.args.ignore_index, "int64")
        .add("reduction", fields.args.reduction, "int32");
    if constexpr (requires { fields.args.walk; }) {
        fields.add("walk", fields.args.walk, "int32");
    } else {
        fields.add("reserved", fields.args.reserved, "int32");
    }
    return fields;
}

template <class Args>
StructFields<Args> pass_fields() {
    StructFields<Args> fields = common_fields<Args>();
    fields.add("retained", fields.args.retained, "pointer")
        .add("retained_bytes", fields.args.retained_bytes, "size")
        .add("retained_place", fields.args.retained_place, "int32")
        .add("reserved_2", fields.args.reserved_2, "int32")
        .add("vocab_start", fields.args.vocab_start, "int64");
    return fields;
}

const char* name_of(Elements elements) {
    switch (elements) {
        case Elements::spec: return "spec";
        case Elements::weight: return "weight";
        case Elements::scale: return "scale";
        case Elements::grad_hidden: return "grad_hidden";
        case Elements::grad_weight: return "grad_weight";
        case Elements::fp32: return "fp32";
        case Elements::label: return "label";
        case Elements::count: return "count";
        case Elements::int32: return "int32";
        case Elements::uint64: return "uint64";
        case Elements::int64: return "int64";
    }
    throw InternalError("elements of a tensor have no name");
}

const char* name_of(Extent extent) {
    switch (extent) {
        case Extent::scalar: return "scalar";
        case Extent::tokens: return "tokens";
        case Extent::loss: return "loss";
        case Extent::classes: return "classes";
        case Extent::hidden: return "hidden";
        case Extent::weight: return "weight";
        case Extent::weight_scale: return "weight_scale";
        case Extent::teacher: return "teacher";
        case Extent::teacher_hidden: return "teacher_hidden";
        case Extent::teacher_weight: return "teacher_weight";
        case Extent::top: return "top";
        case Extent::partial_sums: return "partial_sums";
        case Extent::all_partial_sums: return "all_partial_sums";
    }
    throw InternalError("an extent has no name");
}

}  // namespace

RetainedPlace retained_place_of(std::int32_t place, const char* name) {
    if (place != FLCE_RETAINED_OWN && place != FLCE_RETAINED_GRAD_WEIGHT) {
        throw ArgumentError(fmt::format("{} is {}; allowed are own (0), grad_weight (1)", name, place));
    }
    return static_cast<RetainedPlace>(place);
}

TensorView tensor_of(const flce_tensor* tensor, const char* name) { return view_of(tensor, name); }

ForwardArgs arguments_of(const Kernel& kernel, const flce_forward_args* given) {
    const auto known = versioned<flce_forward_args, offsetof(flce_forward_args, retained)>(given, "args");
    auto args = converted<ForwardArgs>(known);
    args.retained = retained_of(kernel, known);
    args.vocab_start = known.vocab_start;
    return args;
}

MergeArgs arguments_of(const flce_merge_args* given) {
    return converted<MergeArgs>(versioned<flce_merge_args, offsetof(flce_merge_args, teacher_lse)>(given, "args"));
}

BackwardArgs arguments_of(const Kernel& kernel, const flce_backward_args* given) {
    const auto known = versioned<flce_backward_args, offsetof(flce_backward_args, retained)>(given, "args");
    auto args = converted<BackwardArgs>(known);
    args.retained = retained_of(kernel, known);
    args.vocab_start = known.vocab_start;
    args.stage = stage_of(known.stage);
    if (known.hidden_ready != 0 && known.hidden_ready != 1) {
        throw ArgumentError(fmt::format("hidden_ready is {}; allowed are 0 and 1", known.hidden_ready));
    }
    args.hidden_ready = known.hidden_ready == 1;
    return args;
}

std::string call_arguments_json() {
    nlohmann::json tensors = nlohmann::json::array();
    for (const CallTensor& tensor : kCallTensors) {
        tensors.push_back({{"name", tensor.name}, {"elements", name_of(tensor.elements)}, {"extent", name_of(tensor.extent)}});
    }
    StructFields<flce_backward_args> backward = pass_fields<flce_backward_args>();
    backward.add("stage", backward.args.stage, "int32").add("hidden_ready", backward.args.hidden_ready, "int32");
    return nlohmann::json{{"forward", pass_fields<flce_forward_args>().json()},
                          {"merge", common_fields<flce_merge_args>().json()},
                          {"backward", backward.json()},
                          {"tensors", tensors}}
        .dump();
}

}  // namespace flce

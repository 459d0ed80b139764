#include "runtime/c_arguments.hpp"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

#include "generator/call_tensors.hpp"
#include "runtime/c_structs.hpp"
#include "runtime/call_fields.hpp"

namespace flce {
namespace {

#define FLCE_FORWARD_FIELD(name, elements, extent, condition, forward, backward) FLCE_FIELD_##forward(flce_forward_args, name),
#define FLCE_BACKWARD_FIELD(name, elements, extent, condition, forward, backward) FLCE_FIELD_##backward(flce_backward_args, name),
/// By kCallTensors' index; null: the struct has no such tensor.
constexpr std::array<const flce_tensor * flce_forward_args::*, kCallTensorCount> kForwardPointers = {FLCE_CALL_TENSORS(FLCE_FORWARD_FIELD)};
constexpr std::array<const flce_tensor * flce_backward_args::*, kCallTensorCount> kBackwardPointers = {
    FLCE_CALL_TENSORS(FLCE_BACKWARD_FIELD)};
#undef FLCE_FORWARD_FIELD
#undef FLCE_BACKWARD_FIELD

constexpr const auto& pointers_of(const flce_forward_args&) { return kForwardPointers; }
constexpr const auto& pointers_of(const flce_backward_args&) { return kBackwardPointers; }

// A field that is not in the table would not be passed on: beside tensors there are struct_size, ignore_index, reduction with reserved, and
// what concerns retained memory.
constexpr std::size_t kOtherBytes = 2 * sizeof(std::size_t) + sizeof(void*) + 3 * sizeof(std::int64_t);
static_assert(sizeof(flce_forward_args) == field_count(kForwardPointers) * sizeof(void*) + kOtherBytes);
static_assert(sizeof(flce_backward_args) == field_count(kBackwardPointers) * sizeof(void*) + kOtherBytes);

static_assert(FLCE_REDUCTION_NONE == static_cast<int>(Reduction::none) && FLCE_REDUCTION_SUM == static_cast<int>(Reduction::sum) &&
              FLCE_REDUCTION_MEAN == static_cast<int>(Reduction::mean) &&
              FLCE_REDUCTION_WEIGHTED_MEAN == static_cast<int>(Reduction::weighted_mean));
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
        default:
            throw ArgumentError(
                fmt::format("{}.dtype is {:#x} (DLPack code {}, {} bits); allowed are FLCE_BF16, FLCE_FP16, FLCE_FP32, "
                            "FLCE_INT32, FLCE_INT64, FLCE_UINT64",
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

/// Callers that were compiled before there was a retained_place have none. Of theirs, as many bytes as grad_weight is lent for lie in its
/// memory.
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

template <class Args, class Given>
Args converted(const Kernel& kernel, const Given* given) {
    const Given known = versioned<Given, offsetof(Given, retained)>(given, "args");
    check_reserved(known.reserved, "args");
    Args args;
    args.ignore_index = known.ignore_index;
    args.reduction = reduction_of(known.reduction);
    args.retained = retained_of(kernel, known);
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        if (const auto pointer = pointers_of(known)[i]) args.*fields_of(args)[i] = view_of(known.*pointer, kCallTensors[i].name);
    }
    return args;
}

template <class Args>
nlohmann::json struct_json() {
    nlohmann::json fields = nlohmann::json::array();
    const Args args{};
    const auto add = [&](const char* name, const void* field, const char* type) {
        const auto offset = static_cast<const char*>(field) - reinterpret_cast<const char*>(&args);
        fields.push_back({{"name", name}, {"offset", offset}, {"type", type}});
    };
    add("struct_size", &args.struct_size, "size");
    add("ignore_index", &args.ignore_index, "int64");
    add("reduction", &args.reduction, "int32");
    add("reserved", &args.reserved, "int32");
    add("retained", static_cast<const void*>(&args.retained), "pointer");
    add("retained_bytes", &args.retained_bytes, "size");
    add("retained_place", &args.retained_place, "int32");
    add("reserved_2", &args.reserved_2, "int32");
    for (std::size_t i = 0; i < kCallTensorCount; ++i) {
        if (const auto pointer = pointers_of(args)[i]) add(kCallTensors[i].name, static_cast<const void*>(&(args.*pointer)), "tensor");
    }
    return {{"size", sizeof(Args)}, {"fields", fields}};
}

const char* name_of(Elements elements) {
    switch (elements) {
        case Elements::spec: return "spec";
        case Elements::weight: return "weight";
        case Elements::grad_weight: return "grad_weight";
        case Elements::fp32: return "fp32";
        case Elements::label: return "label";
        case Elements::count: return "count";
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
        case Extent::teacher: return "teacher";
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

ForwardArgs arguments_of(const Kernel& kernel, const flce_forward_args* given) { return converted<ForwardArgs>(kernel, given); }
BackwardArgs arguments_of(const Kernel& kernel, const flce_backward_args* given) { return converted<BackwardArgs>(kernel, given); }

std::string call_arguments_json() {
    nlohmann::json tensors = nlohmann::json::array();
    for (const CallTensor& tensor : kCallTensors) {
        tensors.push_back({{"name", tensor.name}, {"elements", name_of(tensor.elements)}, {"extent", name_of(tensor.extent)}});
    }
    return nlohmann::json{
        {"forward", struct_json<flce_forward_args>()}, {"backward", struct_json<flce_backward_args>()}, {"tensors", tensors}}
        .dump();
}

}  // namespace flce

// XLA's custom calls flce_forward, flce_merge and flce_backward: a call's buffers become the argument structs of flce.h.
//
// Attributes: spec, workspace_limit_bytes and num_tokens name the kernel; ignore_index; `arguments` and `results` name the buffers in
// their order, separated by commas, as the fields of the structs. Beside tensors there are `retained` (bytes, [..., R] uint8) and
// `workspace` (bytes). Losses are per token: sums are the caller's.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "jax/registry.hpp"
#include "xla/ffi/api/ffi.h"

namespace flce::xla_calls {
namespace {

namespace ffi = xla::ffi;

constexpr std::size_t kWorkspaceAlignment = 256;
constexpr std::size_t kRetainedAlignment = 16;

ffi::Error fault(ffi::ErrorCode code, const std::string& message) { return {code, "flce: " + message}; }

ffi::Error fault_of(flce_status status) {
    switch (status) {
        case FLCE_OK: return ffi::Error::Success();
        case FLCE_ERROR_SPEC:
        case FLCE_ERROR_PLAN:
        case FLCE_ERROR_ARGUMENT: return fault(ffi::ErrorCode::kInvalidArgument, flce_last_error());
        case FLCE_ERROR_CACHE_MISS: return fault(ffi::ErrorCode::kNotFound, flce_last_error());
        case FLCE_ERROR_ENVIRONMENT: return fault(ffi::ErrorCode::kUnavailable, flce_last_error());
        default: return fault(ffi::ErrorCode::kInternal, flce_last_error());
    }
}

/// Where the library's structs have a field, and which of a buffer's dimensions are one there.
struct Field {
    std::size_t offset = 0;
    std::string extent;  // as flce_call_arguments_json says it; "" for what is no tensor
};
using Fields = std::map<std::string, Field, std::less<>>;

std::string arguments_text() {
    std::size_t needed = 0;
    flce_call_arguments_json(nullptr, 0, &needed);
    std::string text(needed, '\0');
    flce_call_arguments_json(text.data(), text.size(), nullptr);
    text.resize(needed - 1);
    return text;
}

Fields fields_of(const char* pass) {
    static const auto described = nlohmann::json::parse(arguments_text());
    std::map<std::string, std::string> extents;
    for (const auto& tensor : described.at("tensors")) extents[tensor.at("name")] = tensor.at("extent");
    Fields fields;
    for (const auto& field : described.at(pass).at("fields")) {
        const std::string name = field.at("name");
        fields[name] = {field.at("offset"), field.at("type") == "tensor" ? extents.at(name) : ""};
    }
    return fields;
}

std::int32_t dtype_of(ffi::DataType type) {
    switch (type) {
        case ffi::DataType::BF16: return FLCE_BF16;
        case ffi::DataType::F16: return FLCE_FP16;
        case ffi::DataType::F32: return FLCE_FP32;
        case ffi::DataType::S32: return FLCE_INT32;
        case ffi::DataType::S64: return FLCE_INT64;
        case ffi::DataType::U32: return FLCE_INT64;  // two of them: jax has int64 with x64 alone
        default: return FLCE_DTYPE(255, 8);          // refused by the library, by the tensor's name
    }
}

/// A buffer as the library has it: tokens in one dimension.
flce_tensor tensor_of(const ffi::AnyBuffer& buffer, std::string_view extent, const Entry& entry) {
    flce_tensor tensor{};
    tensor.data = buffer.untyped_data();
    tensor.dtype = dtype_of(buffer.element_type());
    tensor.device_type = entry.device_type;
    tensor.device_index = entry.device_index;
    const auto dims = buffer.dimensions();
    std::int64_t all = 1;
    for (const std::int64_t dim : dims) all *= dim;
    if (buffer.element_type() == ffi::DataType::U32) all /= 2;
    // Partial sums have tokens behind the fields, everything else before the last dimension.
    const bool tokens_last = extent.ends_with("partial_sums");
    if (extent == "hidden" || extent == "weight" || extent == "teacher" || tokens_last) {
        const std::int64_t kept = dims.size() == 0 ? 1 : tokens_last ? dims[0] : dims[dims.size() - 1];
        std::int64_t tokens = 1;
        for (std::size_t i = tokens_last ? 1 : 0; i + (tokens_last ? 0 : 1) < dims.size(); ++i) tokens *= dims[i];
        tensor.ndim = 2;
        tensor.shape[0] = tokens_last ? kept : tokens;
        tensor.shape[1] = tokens_last ? tokens : kept;
        tensor.strides[0] = tensor.shape[1];
        tensor.strides[1] = 1;
    } else if (extent != "scalar") {
        tensor.ndim = 1;
        tensor.shape[0] = all;
        tensor.strides[0] = 1;
    }
    return tensor;
}

std::vector<std::string_view> split(std::string_view names) {
    std::vector<std::string_view> parts;
    while (!names.empty()) {
        const std::size_t end = std::min(names.find(','), names.size());
        parts.push_back(names.substr(0, end));
        names.remove_prefix(std::min(end + 1, names.size()));
    }
    return parts;
}

struct Bytes {
    std::byte* data = nullptr;
    std::size_t size = 0;
};

/// Struct of one pass, filled from a call's buffers by their names.
template <class Args>
class Arguments {
public:
    Arguments(const Fields& fields, const Entry& entry, std::size_t count) : fields_(fields), entry_(entry) { tensors_.reserve(count + 1); }

    /// False: the struct has no such field.
    bool take(std::string_view name, const ffi::AnyBuffer& buffer) {
        if (name == "workspace" || name == "retained") {
            (name == "workspace" ? workspace : retained) = Bytes{static_cast<std::byte*>(buffer.untyped_data()), buffer.size_bytes()};
            return true;
        }
        const auto field = fields_.find(name);
        if (field == fields_.end() || field->second.extent.empty()) return false;
        put(field->second, tensor_of(buffer, field->second.extent, entry_));
        if (name == "hidden" || name == "all_partial_sums") num_tokens = tensors_.back().shape[name == "hidden" ? 0 : 1];
        return true;
    }

    /// The word that reports labels out of range, where the pass has it: a shard's is merge's.
    void take_label_word(const std::vector<std::string_view>& results) {
        if (std::ranges::find(results, "partial_sums") != results.end()) return;
        const auto field = fields_.find("invalid_label");
        void* word = field == fields_.end() ? nullptr : label_word(entry_);
        if (word == nullptr) return;
        flce_tensor tensor{};
        tensor.data = word;
        tensor.dtype = FLCE_UINT64;
        tensor.device_type = entry_.device_type;
        tensor.device_index = entry_.device_index;
        put(field->second, tensor);
    }

    Args args{};
    Bytes workspace, retained;
    std::int64_t num_tokens = 0;

private:
    void put(const Field& field, const flce_tensor& tensor) {
        tensors_.push_back(tensor);
        *reinterpret_cast<const flce_tensor**>(reinterpret_cast<std::byte*>(&args) + field.offset) = &tensors_.back();
    }

    const Fields& fields_;
    const Entry& entry_;
    std::vector<flce_tensor> tensors_;
};

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

/// Scratch of a call: XLA's buffer, 256-byte aligned. A CPU's is allocated where XLA's is too small, as one traced for a GPU may be.
class Workspace {
public:
    ffi::Error take(Bytes given, std::size_t needed, const Entry& entry) {
        const auto address = reinterpret_cast<std::uintptr_t>(given.data);
        const std::size_t skipped = (kWorkspaceAlignment - address % kWorkspaceAlignment) % kWorkspaceAlignment;
        if (needed == 0) return ffi::Error::Success();
        size_ = needed;
        if (given.size >= needed + skipped) {
            data_ = given.data + skipped;
            size_ = given.size - skipped;
            return ffi::Error::Success();
        }
        if (entry.device_type != FLCE_CPU) {
            return fault(ffi::ErrorCode::kFailedPrecondition,
                         "the call has " + std::to_string(given.size) + " bytes of workspace and needs " + std::to_string(needed) +
                             ": it was traced for another device; trace it under jax.default_device of the GPU that runs it");
        }
        own_.reset(std::aligned_alloc(kWorkspaceAlignment, (needed + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment));
        if (own_ == nullptr)
            return fault(ffi::ErrorCode::kResourceExhausted, "no memory for " + std::to_string(needed) + " bytes of workspace");
        data_ = own_.get();
        return ffi::Error::Success();
    }

    void* data() const { return data_; }
    std::size_t size() const { return data_ == nullptr ? 0 : size_; }

private:
    std::unique_ptr<void, Free> own_;
    void* data_ = nullptr;
    std::size_t size_ = 0;
};

template <class Args>
struct Pass;
template <>
struct Pass<flce_forward_args> {
    static constexpr const char* kName = "forward";
    static constexpr std::int32_t kNumber = FLCE_FORWARD;
    static constexpr auto kRun = flce_kernel_forward;
    static constexpr flce_forward_args kInit = FLCE_FORWARD_ARGS_INIT;
};
template <>
struct Pass<flce_merge_args> {
    static constexpr const char* kName = "merge";
    static constexpr std::int32_t kNumber = FLCE_MERGE;
    static constexpr auto kRun = flce_kernel_merge;
    static constexpr flce_merge_args kInit = FLCE_MERGE_ARGS_INIT;
};
template <>
struct Pass<flce_backward_args> {
    static constexpr const char* kName = "backward";
    static constexpr std::int32_t kNumber = FLCE_BACKWARD;
    static constexpr auto kRun = flce_kernel_backward;
    static constexpr flce_backward_args kInit = FLCE_BACKWARD_ARGS_INIT;
};

/// Numbers and names among a call's attributes.
struct Attributes {
    Request request;
    std::int64_t ignore_index = 0;
    std::vector<std::string_view> arguments, results;
};

ffi::Error read(const ffi::Dictionary& attributes, std::int32_t device_index, Attributes& read) {
    const auto spec = attributes.get<std::string_view>("spec"), arguments = attributes.get<std::string_view>("arguments"),
               results = attributes.get<std::string_view>("results");
    const auto limit = attributes.get<std::int64_t>("workspace_limit_bytes"), tokens = attributes.get<std::int64_t>("num_tokens"),
               ignored = attributes.get<std::int64_t>("ignore_index");
    if (!spec.has_value() || !arguments.has_value() || !results.has_value() || !limit.has_value() || !tokens.has_value() ||
        !ignored.has_value()) {
        return fault(ffi::ErrorCode::kInvalidArgument, "the call lacks an attribute; it was made by another version of flce.jax");
    }
    read.request = {device_index, std::string(*spec), *limit, *tokens};
    read.ignore_index = *ignored;
    read.arguments = split(*arguments);
    read.results = split(*results);
    return ffi::Error::Success();
}

template <class Args>
ffi::Error take_buffers(const Attributes& given, const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results,
                        Arguments<Args>& made) {
    if (given.arguments.size() != arguments.size() || given.results.size() != results.size()) {
        return fault(ffi::ErrorCode::kInvalidArgument, "the call's names do not match its buffers");
    }
    for (std::size_t i = 0; i < arguments.size() + results.size(); ++i) {
        const bool result = i >= arguments.size();
        const std::string_view name = result ? given.results[i - arguments.size()] : given.arguments[i];
        bool taken = false;
        if (result) {
            auto buffer = results.get<ffi::AnyBuffer>(i - arguments.size());
            taken = buffer.has_value() && made.take(name, **buffer);
        } else {
            const auto buffer = arguments.get<ffi::AnyBuffer>(i);
            taken = buffer.has_value() && made.take(name, *buffer);
        }
        if (!taken) return fault(ffi::ErrorCode::kInvalidArgument, std::string(name) + " is no buffer of a " + Pass<Args>::kName);
    }
    return ffi::Error::Success();
}

/// As many retained bytes as the kernel has use for; forward and backward of a step come to the same number.
template <class Args>
ffi::Error take_retained(const Entry& entry, const Arguments<Args>& made, Args& args) {
    if constexpr (!std::is_same_v<Args, flce_merge_args>) {
        std::size_t most = 0;
        if (made.retained.size == 0) return ffi::Error::Success();
        if (const flce_status status = flce_kernel_retained_bytes(entry.kernel, made.num_tokens, FLCE_RETAINED_OWN, &most)) {
            return fault_of(status);
        }
        args.retained_bytes = std::min(most, made.retained.size) / kRetainedAlignment * kRetainedAlignment;
        args.retained = args.retained_bytes == 0 ? nullptr : made.retained.data;
    }
    return ffi::Error::Success();
}

template <class Args>
ffi::Error run(void* stream, std::int32_t device_index, const ffi::Dictionary& attributes, const ffi::RemainingArgs& arguments,
               const ffi::RemainingRets& results) {
    static const Fields fields = fields_of(Pass<Args>::kName);
    Attributes given;
    if (auto error = read(attributes, device_index, given); error.failure()) return error;
    const Entry* entry = nullptr;
    if (const flce_status status = find(given.request, entry)) return fault_of(status);
    Arguments<Args> made(fields, *entry, arguments.size() + results.size());
    made.args = Pass<Args>::kInit;
    made.args.ignore_index = given.ignore_index;
    made.args.reduction = FLCE_REDUCTION_NONE;
    if (auto error = take_buffers(given, arguments, results, made); error.failure()) return error;
    made.take_label_word(given.results);
    if (auto error = take_retained(*entry, made, made.args); error.failure()) return error;
    std::size_t needed = 0;
    if (const flce_status status = flce_kernel_workspace_bytes(entry->kernel, made.num_tokens, Pass<Args>::kNumber, &needed)) {
        return fault_of(status);
    }
    Workspace workspace;
    if (auto error = workspace.take(made.workspace, needed, *entry); error.failure()) return error;
    return fault_of(Pass<Args>::kRun(entry->kernel, &made.args, workspace.data(), workspace.size(), stream));
}

template <class Args>
ffi::Error run_on_cpu(const ffi::Dictionary& attributes, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    return run<Args>(nullptr, -1, attributes, arguments, results);
}

/// Before XLA captures the call in a command buffer, where nothing can be compiled or loaded.
ffi::Error prepare_on_cuda(std::int32_t device_index, const ffi::Dictionary& attributes, ffi::RemainingArgs /*arguments*/,
                           ffi::RemainingRets /*results*/) {
    Attributes given;
    if (auto error = read(attributes, device_index, given); error.failure()) return error;
    const Entry* entry = nullptr;
    return fault_of(find(given.request, entry));
}

auto on_cpu() { return ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets(); }
auto on_cuda() {
    return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>().Attrs().RemainingArgs().RemainingRets();
}

}  // namespace
}  // namespace flce::xla_calls

#pragma GCC visibility push(default)
#define FLCE_JAX_PASS(pass)                                                                                                         \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(flce_jax_cpu_##pass, flce::xla_calls::run_on_cpu<flce_##pass##_args>, flce::xla_calls::on_cpu()); \
    XLA_FFI_DEFINE_HANDLER_SYMBOL(flce_jax_cuda_##pass, flce::xla_calls::run<flce_##pass##_args>, flce::xla_calls::on_cuda(),       \
                                  {xla::ffi::Traits::kCmdBufferCompatible})

FLCE_JAX_PASS(forward);
FLCE_JAX_PASS(merge);
FLCE_JAX_PASS(backward);
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    flce_jax_cuda_prepare, flce::xla_calls::prepare_on_cuda,
    xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>().Ctx<xla::ffi::DeviceOrdinal>().Attrs().RemainingArgs().RemainingRets());
#pragma GCC visibility pop

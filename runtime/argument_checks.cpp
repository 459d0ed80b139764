#include "runtime/argument_checks.hpp"

#include <fmt/format.h>

#include <limits>

namespace flce {
namespace {

constexpr std::int64_t kWorkspaceAlignment = 256;

std::string dimensions_text(int ndim, std::int64_t rows, std::int64_t columns) {
    if (ndim == 0) return "[]";
    return ndim == 1 ? fmt::format("[{}]", rows) : fmt::format("[{}, {}]", rows, columns);
}

std::string types_text(TypeSet types) {
    std::string text;
    for (const ScalarType type : {ScalarType::bf16, ScalarType::fp16, ScalarType::fp32, ScalarType::int32, ScalarType::int64,
                                  ScalarType::uint64, ScalarType::e4m3, ScalarType::uint8}) {
        if (!types.contains(type)) continue;
        if (!text.empty()) text += " or ";
        text += to_string(type);
    }
    return text;
}

// A scalar may also come as a vector of one element.
bool shape_matches(const TensorView& view, const ExpectedShape& shape) {
    switch (shape.ndim) {
        case 0: return view.ndim == 0 || (view.ndim == 1 && view.shape[0] == 1);
        case 1: return view.ndim == 1 && view.shape[0] == shape.rows;
        default: return view.ndim == 2 && view.shape[0] == shape.rows && view.shape[1] == shape.columns;
    }
}

std::int64_t elements_of(const ExpectedShape& shape) {
    return shape.ndim == 0 ? 1 : shape.ndim == 1 ? shape.rows : shape.rows * shape.columns;
}

// Row-major without gaps; the stride of a dimension of one element means nothing.
bool contiguous(const TensorView& view, const ExpectedShape& shape) {
    if (shape.ndim == 0) return true;
    if (shape.ndim == 1) return shape.rows <= 1 || view.strides[0] == 1;
    return (shape.columns <= 1 || view.strides[1] == 1) && (shape.rows <= 1 || view.strides[0] == shape.columns);
}

}  // namespace

const char* to_string(ScalarType type) noexcept {
    switch (type) {
        case ScalarType::bf16: return "bf16";
        case ScalarType::fp16: return "fp16";
        case ScalarType::fp32: return "fp32";
        case ScalarType::int32: return "int32";
        case ScalarType::int64: return "int64";
        case ScalarType::uint64: return "uint64";
        case ScalarType::uint8: return "uint8";
        case ScalarType::e4m3: return "e4m3";
    }
    return "unknown dtype";
}

std::string shape_text(const TensorView& view) {
    if (view.ndim < 0 || view.ndim > 2) return fmt::format("of {} dimensions", view.ndim);
    return dimensions_text(view.ndim, view.shape[0], view.shape[1]);
}

std::string to_string(DeviceRef device) {
    return device.kind == DeviceKind::cpu && device.index == 0
               ? "cpu"
               : fmt::format("{}:{}", device.kind == DeviceKind::cpu ? "cpu" : "cuda", device.index);
}

std::int64_t ArgumentChecks::tensor(const TensorView& view, Presence presence, const Expected& expected) {
    if (!view.present) {
        if (presence == Presence::required || view.data != nullptr) fail_missing(view, expected);
        return 0;
    }
    if (!shape_matches(view, expected.shape)) fail_shape(view, expected);
    if (!expected.types.contains(view.dtype)) fail_type(view, expected);
    const std::int64_t elements = elements_of(expected.shape);
    if (elements != 0 && !contiguous(view, expected.shape)) fail_strides(view, expected);
    const std::int64_t item_bytes = scalar_bytes(view.dtype);
    const std::int64_t alignment = expected.alignment != 0 ? expected.alignment : item_bytes;
    const auto address = reinterpret_cast<std::uintptr_t>(view.data);
    const bool memory_fits = elements == 0 || (address != 0 && address % static_cast<std::uintptr_t>(alignment) == 0);
    if (!(view.device == device_) || !memory_fits) fail_place(view, expected, alignment);
    add_range(view.data, elements * item_bytes, expected.name, expected.access);
    return static_cast<std::int64_t>(address);
}

void ArgumentChecks::absent(const TensorView& view, const char* name, const char* why) const {
    if (view.present || view.data != nullptr) fail(fmt::format("{} is given, but {}; leave it absent", name, why));
}

std::int64_t ArgumentChecks::workspace(const Workspace& workspace, std::size_t needed, std::int64_t num_tokens) {
    if (workspace.bytes < needed) {
        fail(fmt::format("workspace has {} bytes; {} tokens need {} (Kernel::workspace_bytes)", workspace.bytes, num_tokens, needed));
    }
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
    if (needed != 0 && address == 0) fail(fmt::format("workspace.data is null with {} bytes; {} are needed", workspace.bytes, needed));
    if (needed != 0 && address % kWorkspaceAlignment != 0) {
        fail(fmt::format("workspace.data is {:#x}; it must be aligned to {} bytes", address, kWorkspaceAlignment));
    }
    if (workspace.bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
        fail(fmt::format("workspace has {} bytes; allowed are 0 to 2^63 - 1", workspace.bytes));
    }
    add_range(workspace.data, static_cast<std::int64_t>(workspace.bytes), "workspace", Access::write);
    return static_cast<std::int64_t>(address);
}

std::int64_t ArgumentChecks::retained(const Retained& retained, std::int64_t alignment, Access access) {
    const auto address = reinterpret_cast<std::uintptr_t>(retained.data);
    if (retained.bytes > static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max())) {
        fail(fmt::format("retained.bytes is {}; allowed are 0 to 2^63 - 1", retained.bytes));
    }
    if ((address == 0) != (retained.bytes == 0)) {
        fail(fmt::format("retained.data is {:#x} with {} bytes; give both, or neither", address, retained.bytes));
    }
    if (address % static_cast<std::uintptr_t>(alignment) != 0) {
        fail(fmt::format("retained.data is {:#x}; it must be aligned to {} bytes", address, alignment));
    }
    if (access != Access::none) add_range(retained.data, static_cast<std::int64_t>(retained.bytes), "retained", access);
    return static_cast<std::int64_t>(address);
}

void ArgumentChecks::overlaps() const {
    for (std::size_t i = 0; i < range_count_; ++i) {
        const Range& a = ranges_[i];
        for (std::size_t j = 0; j < i; ++j) {
            const Range& b = ranges_[j];
            if (a.begin < b.end && b.begin < a.end && (a.access == Access::write || b.access == Access::write)) fail_overlap(a, b);
        }
    }
}

void ArgumentChecks::add_range(const void* data, std::int64_t bytes, const char* name, Access access) {
    if (bytes == 0) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    ranges_[range_count_++] = {begin, begin + static_cast<std::uintptr_t>(bytes), name, access};
}

void ArgumentChecks::fail(const std::string& message) const { throw ArgumentError(fmt::format("{}: {}", call_, message)); }

void ArgumentChecks::fail_missing(const TensorView& view, const Expected& expected) const {
    if (view.data != nullptr) {
        fail(fmt::format("{} has data but is marked absent; make views with TensorView::scalar, vector or matrix", expected.name));
    }
    fail(fmt::format("{} is absent; it must be {} {}", expected.name, types_text(expected.types), expected.shape.meaning));
}

void ArgumentChecks::fail_shape(const TensorView& view, const Expected& expected) const {
    const ExpectedShape& shape = expected.shape;
    fail(fmt::format("{}.shape is {}; it must be {}{}", expected.name, shape_text(view),
                     dimensions_text(shape.ndim, shape.rows, shape.columns), shape.ndim == 0 ? "" : fmt::format(" = {}", shape.meaning)));
}

void ArgumentChecks::fail_strides(const TensorView& view, const Expected& expected) const {
    const ExpectedShape& shape = expected.shape;
    fail(fmt::format("{}.strides are {}; it must be contiguous: {}", expected.name,
                     dimensions_text(shape.ndim, view.strides[0], view.strides[1]),
                     dimensions_text(shape.ndim, shape.ndim == 1 ? 1 : shape.columns, 1)));
}

void ArgumentChecks::fail_type(const TensorView& view, const Expected& expected) const {
    fail(fmt::format("{}.dtype is {}; it must be {}", expected.name, to_string(view.dtype), types_text(expected.types)));
}

void ArgumentChecks::fail_place(const TensorView& view, const Expected& expected, std::int64_t alignment) const {
    if (!(view.device == device_)) {
        fail(fmt::format("{} is on {}; this kernel's device is {}", expected.name, to_string(view.device), to_string(device_)));
    }
    const ExpectedShape& shape = expected.shape;
    if (view.data == nullptr) {
        fail(fmt::format("{}.data is null; {} elements are needed", expected.name, dimensions_text(shape.ndim, shape.rows, shape.columns)));
    }
    fail(fmt::format("{}.data is {:#x}; it must be aligned to {} bytes", expected.name, reinterpret_cast<std::uintptr_t>(view.data),
                     alignment));
}

void ArgumentChecks::fail_overlap(const Range& a, const Range& b) const {
    const Range& output = a.access == Access::write ? a : b;
    const Range& other = a.access == Access::write ? b : a;
    fail(fmt::format("{} [{:#x}, {:#x}) overlaps {} [{:#x}, {:#x}); what is written must have memory of its own", output.name, output.begin,
                     output.end, other.name, other.begin, other.end));
}

}  // namespace flce

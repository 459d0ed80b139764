// Checks of the tensors handed to a call. Nothing has been launched or written when one fails, and a call that passes costs some ten
// nanoseconds a tensor: comparisons only, text is made for errors alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "flce/flce.hpp"
#include "generator/call_tensors.hpp"

namespace flce {

enum class Presence : std::uint8_t { required, optional };
enum class Access : std::uint8_t { none, read, write };  ///< none: overlaps are no matter

/// Element types a tensor may have.
struct TypeSet {
    std::uint32_t bits = 0;
    constexpr TypeSet() = default;
    template <class... Types>
    constexpr explicit TypeSet(Types... types) : bits(((1U << static_cast<unsigned>(types)) | ...)) {}
    [[nodiscard]] constexpr bool contains(ScalarType type) const {
        return static_cast<unsigned>(type) < 32 && (bits >> static_cast<unsigned>(type) & 1U) != 0;
    }
};

struct ExpectedShape {
    int ndim = 0;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    const char* meaning = "";  ///< "[num_tokens, hidden_size]"
};

struct Expected {
    const char* name;
    TypeSet types;
    ExpectedShape shape;
    Access access = Access::read;
    std::int64_t alignment = 0;  ///< bytes; 0: the elements' alignment
};

class ArgumentChecks {
public:
    /// `call` is "forward", "merge" or "backward": every message starts with it.
    ArgumentChecks(const char* call, DeviceRef device) : call_(call), device_(device) {}

    /// Checks the tensor if it is there and returns its address as a slot value (0: absent). Throws ArgumentError.
    std::int64_t tensor(const TensorView& view, Presence presence, const Expected& expected);
    /// Checks a tensor that this kernel or call does not take: throws if it is there, saying why it may not be.
    void absent(const TensorView& view, const char* name, const char* why) const;
    /// `needed` bytes of scratch, 256-byte aligned. Returns its address.
    std::int64_t workspace(const Workspace& workspace, std::size_t needed, std::int64_t num_tokens);
    /// Checks the memory that forward leaves to backward, aligned as given. Returns its address.
    std::int64_t retained(const Retained& retained, std::int64_t alignment, Access access);
    /// No output may share bytes with another tensor or the workspace.
    void overlaps() const;

    [[noreturn]] void fail(const std::string& message) const;

private:
    struct Range {
        std::uintptr_t begin;
        std::uintptr_t end;
        const char* name;
        Access access;
    };

    [[noreturn]] void fail_missing(const TensorView& view, const Expected& expected) const;
    [[noreturn]] void fail_shape(const TensorView& view, const Expected& expected) const;
    [[noreturn]] void fail_strides(const TensorView& view, const Expected& expected) const;
    [[noreturn]] void fail_type(const TensorView& view, const Expected& expected) const;
    [[noreturn]] void fail_place(const TensorView& view, const Expected& expected, std::int64_t alignment) const;
    [[noreturn]] void fail_overlap(const Range& a, const Range& b) const;
    void add_range(const void* data, std::int64_t bytes, const char* name, Access access);

    const char* call_;
    DeviceRef device_;
    std::array<Range, kCallTensorCount + 2> ranges_;  // tensors, the workspace and the retained memory
    std::size_t range_count_ = 0;
};

[[nodiscard]] const char* to_string(ScalarType type) noexcept;
[[nodiscard]] std::string to_string(DeviceRef device);
[[nodiscard]] std::string shape_text(const TensorView& view);

}  // namespace flce

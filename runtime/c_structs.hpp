// Structs that callers of the C ABI pass: they may know fewer fields than this library, or more.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "flce/error.hpp"

namespace flce {

template <class Pointer>
Pointer not_null(Pointer pointer, const char* name) {
    if (pointer == nullptr) throw ArgumentError(fmt::format("{} is NULL", name));
    return pointer;
}

/// The caller's struct in the size that this library knows. A newer caller's further fields must be zero: they ask for features that this
/// library lacks. (When a struct grows, callers of the first version pass less than its size: lower `least` to that and leave the rest
/// zero.)
template <class Struct, std::size_t least = sizeof(Struct)>
Struct versioned(const Struct* given, const char* name) {
    constexpr std::size_t kMost = 4096;  // a struct_size that was never set is caught before anything behind it is read
    const std::size_t size = not_null(given, name)->struct_size;
    if (size < least || size > kMost) {
        throw ArgumentError(fmt::format("{}.struct_size is {}; this library's is {}", name, size, sizeof(Struct)));
    }
    const auto* bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(Struct); i < size; ++i) {
        if (bytes[i] != 0) throw ArgumentError(fmt::format("{} has a field set at byte {} that this library does not know", name, i));
    }
    Struct known{};
    std::memcpy(&known, given, std::min(size, sizeof(Struct)));
    return known;
}

/// Writes results to a struct whose caller may know more fields.
template <class Struct>
void return_struct(const Struct& result, Struct* out, const char* name) {
    const std::size_t size = not_null(out, name)->struct_size;
    if (size < sizeof(Struct)) throw ArgumentError(fmt::format("{}.struct_size is {}; at least {} is needed", name, size, sizeof(Struct)));
    *out = result;
    out->struct_size = size;
}

/// Fields without a meaning yet: a caller that sets one means something that this library does not do.
inline void check_reserved(std::int32_t reserved, const char* name) {
    if (reserved != 0) throw ArgumentError(fmt::format("{}.reserved is {}; it must be 0", name, reserved));
}

}  // namespace flce

// Little-endian integers and checksums, as the file formats of the cache use them. Pure: no files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace flce {

inline constexpr std::size_t kChecksumBytes = 16;

/// XXH3-128 in its canonical (big-endian) form.
[[nodiscard]] std::array<std::byte, kChecksumBytes> checksum_of(std::span<const std::byte> bytes);

[[nodiscard]] inline std::string_view as_text(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
[[nodiscard]] inline std::span<const std::byte> as_byte_span(std::string_view text) {
    return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

/// Writes one field after another into memory that is large enough.
struct ByteWriter {
    std::byte* at;

    void bytes(const void* data, std::size_t size) {
        if (size != 0) std::memcpy(at, data, size);
        at += size;
    }
    template <class Integer>
    void integer(Integer value) {
        for (std::size_t i = 0; i < sizeof(Integer); ++i) *at++ = static_cast<std::byte>(value >> (8 * i));
    }
};

/// Takes one field after another off bytes that are long enough.
struct ByteReader {
    std::span<const std::byte> rest;

    std::span<const std::byte> bytes(std::size_t size) {
        const auto taken = rest.first(size);
        rest = rest.subspan(size);
        return taken;
    }
    template <class Integer>
    Integer integer() {
        Integer value = 0;
        for (std::size_t i = 0; i < sizeof(Integer); ++i) value |= static_cast<Integer>(std::to_integer<Integer>(rest[i]) << (8 * i));
        rest = rest.subspan(sizeof(Integer));
        return value;
    }
};

}  // namespace flce

// SHA-256 of bytes in one piece (OpenSSL), and hexadecimal text.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

namespace flce {

inline constexpr std::size_t kSha256Bytes = 32;
using Sha256 = std::array<std::byte, kSha256Bytes>;

[[nodiscard]] Sha256 sha256_of(std::span<const std::byte> bytes);

/// Two lower-case digits a byte.
[[nodiscard]] std::string hex_of(std::span<const std::byte> bytes);

}  // namespace flce

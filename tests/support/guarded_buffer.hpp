// Device memory with guard bytes on both sides, at no better alignment than the contract asks for.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "flce/buffer.hpp"

namespace flce::test {

/// Every byte 0xff is a NaN in bf16, fp16 and fp32: bytes that nobody wrote, or past the end, show up in any sum.
inline constexpr std::byte kPoison{0xff};
inline constexpr std::byte kGuard{0xa5};

/// The address of the first byte is `residue` modulo 256.
class GuardedBuffer {
public:
    GuardedBuffer() = default;
    GuardedBuffer(DeviceRef device, std::size_t bytes, std::size_t residue, std::byte guard);

    [[nodiscard]] void* data() const { return static_cast<std::byte*>(memory_.data()) + offset_; }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }
    void upload(const void* host) { memory_.upload(host, bytes_, offset_); }
    void fill(std::byte value);
    [[nodiscard]] std::vector<std::byte> download() const;
    [[nodiscard]] bool holds(const std::vector<std::byte>& content) const;
    /// Empty, or where a guard byte was written.
    [[nodiscard]] std::string overrun() const;

private:
    Buffer memory_;
    std::size_t bytes_ = 0;
    std::size_t offset_ = 0;
    std::byte guard_{};
};

}  // namespace flce::test

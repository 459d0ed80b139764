#include "tests/support/guarded_buffer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace flce::test {
namespace {

constexpr std::size_t kGuardBytes = 512;  // at least, on either side

}  // namespace

GuardedBuffer::GuardedBuffer(DeviceRef device, std::size_t bytes, std::size_t residue, std::byte guard)
    : memory_(device, bytes + 2 * kGuardBytes + 512), bytes_(bytes), guard_(guard) {
    const auto base = reinterpret_cast<std::uintptr_t>(memory_.data());
    offset_ = (base + kGuardBytes + 255) / 256 * 256 + residue - base;
    memory_.fill(guard);
}

void GuardedBuffer::fill(std::byte value) {
    const std::vector<std::byte> content(bytes_, value);
    upload(content.data());
}

std::vector<std::byte> GuardedBuffer::download() const {
    std::vector<std::byte> content(bytes_);
    memory_.download(content.data(), bytes_, offset_);
    return content;
}

std::string GuardedBuffer::overrun() const {
    const auto intact = [this](std::size_t first, std::size_t count, std::string_view where) -> std::string {
        std::vector<std::byte> content(count);
        memory_.download(content.data(), count, first);
        const auto wrong = std::find_if(content.begin(), content.end(), [this](std::byte b) { return b != guard_; });
        if (wrong == content.end()) return {};
        const auto at = static_cast<std::ptrdiff_t>(first) + (wrong - content.begin());
        return fmt::format(
            "wrote {} bytes {}",
            where == "before the start" ? static_cast<std::ptrdiff_t>(offset_) - at : at - static_cast<std::ptrdiff_t>(offset_ + bytes_),
            where);
    };
    std::string before = intact(0, offset_, "before the start");
    if (!before.empty()) return before;
    const std::size_t end = offset_ + bytes_;
    return intact(end, memory_.bytes() - end, "past the end");
}

}  // namespace flce::test

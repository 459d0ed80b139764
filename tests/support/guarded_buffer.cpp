#include "tests/support/guarded_buffer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

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

// Where the host can reach the memory, nothing is copied for this: a workspace is tens of megabytes, filled before every call.
void GuardedBuffer::fill(std::byte value) {
    if (memory_.device().kind == DeviceKind::cpu) {
        if (bytes_ != 0) std::memset(data(), static_cast<int>(value), bytes_);
        return;
    }
    const std::vector<std::byte> content(bytes_, value);
    upload(content.data());
}

std::vector<std::byte> GuardedBuffer::download() const {
    std::vector<std::byte> content(bytes_);
    memory_.download(content.data(), bytes_, offset_);
    return content;
}

bool GuardedBuffer::holds(const std::vector<std::byte>& content) const {
    if (memory_.device().kind != DeviceKind::cpu) return download() == content;
    return content.size() == bytes_ && (bytes_ == 0 || std::memcmp(data(), content.data(), bytes_) == 0);
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

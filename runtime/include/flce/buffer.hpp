// Memory, copies and timing on a device for programs that have no framework to give them: the command line, tests, benchmarks, examples.
// Kernels themselves never use this.
#pragma once

#include <cstddef>
#include <memory>

#include "flce/flce.hpp"

namespace flce {

/// Owned memory on a device: host memory (for DeviceKind::cpu) or CUDA device memory, 256-byte aligned. Movable.
class Buffer {
public:
    Buffer() = default;
    /// Throws EnvironmentError where there is no such device, DeviceError (or std::bad_alloc) when out of memory. bytes may be 0.
    Buffer(DeviceRef device, std::size_t bytes);
    [[nodiscard]] void* data() const noexcept;
    [[nodiscard]] std::size_t bytes() const noexcept;
    [[nodiscard]] DeviceRef device() const noexcept;
    /// Synchronous copies; throw ArgumentError when out of range.
    void upload(const void* host, std::size_t bytes, std::size_t offset = 0);
    void download(void* host, std::size_t bytes, std::size_t offset = 0) const;
    void fill(std::byte value);

private:
    struct State;
    std::shared_ptr<State> state_;
};

/// Waits for everything submitted to the device (returns at once for a CPU).
void synchronize(DeviceRef device);

/// Time between start() and stop() on a stream: CUDA events on a GPU, the steady clock on a CPU.
class Timer {
public:
    explicit Timer(DeviceRef device);
    void start(Stream stream = {});
    /// Waits for the work since start() and returns milliseconds.
    [[nodiscard]] double stop_ms(Stream stream = {});

private:
    struct State;
    std::shared_ptr<State> state_;
};

/// Free and total memory of a CUDA device in bytes. Throws EnvironmentError for a CPU.
struct MemoryInfo {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
};
[[nodiscard]] MemoryInfo memory_info(DeviceRef device);

}  // namespace flce

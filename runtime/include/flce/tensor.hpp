// Views of the caller's memory, DLPack-style. flce never owns, copies or keeps what they point to.
#pragma once

#include <array>
#include <cstdint>

#include "flce/device.hpp"

namespace flce {

enum class ScalarType : std::uint8_t { bf16, fp16, fp32, int32, int64, uint64, uint8, e4m3 };

/// Place of memory: host memory, or device memory of CUDA device `index`.
struct DeviceRef {
    DeviceKind kind = DeviceKind::cpu;
    int index = 0;
    friend bool operator==(const DeviceRef&, const DeviceRef&) = default;
};

/// Up to two dimensions; strides in elements. A default-constructed view means "absent".
struct TensorView {
    void* data = nullptr;
    ScalarType dtype = ScalarType::fp32;
    int ndim = 0;  ///< 0 (scalar), 1 or 2
    std::array<std::int64_t, 2> shape{0, 0};
    std::array<std::int64_t, 2> strides{0, 0};
    DeviceRef device{};
    bool present = false;  ///< set by the makers below, so that an empty tensor (N = 0, null data) is still a tensor

    [[nodiscard]] static TensorView scalar(void* data, ScalarType dtype, DeviceRef device = {}) {
        return {data, dtype, 0, {0, 0}, {0, 0}, device, true};
    }
    [[nodiscard]] static TensorView vector(void* data, ScalarType dtype, std::int64_t size, DeviceRef device = {}) {
        return {data, dtype, 1, {size, 0}, {1, 0}, device, true};
    }
    /// Contiguous row-major [rows, columns].
    [[nodiscard]] static TensorView matrix(void* data, ScalarType dtype, std::int64_t rows, std::int64_t columns, DeviceRef device = {}) {
        return {data, dtype, 2, {rows, columns}, {columns, 1}, device, true};
    }
};

[[nodiscard]] constexpr std::int64_t scalar_bytes(ScalarType type) noexcept {
    switch (type) {
        case ScalarType::bf16:
        case ScalarType::fp16: return 2;
        case ScalarType::fp32:
        case ScalarType::int32: return 4;
        case ScalarType::int64:
        case ScalarType::uint64: return 8;
        case ScalarType::uint8:
        case ScalarType::e4m3: return 1;
    }
    return 0;
}

}  // namespace flce

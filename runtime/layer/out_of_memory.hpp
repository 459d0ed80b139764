// The error of a buffer for which there is no memory.
#pragma once

#include <new>
#include <stdexcept>
#include <string_view>

#include "flce/flce.hpp"

namespace flce {

class OutOfMemory : public EnvironmentError {
public:
    /// `buffer`: its name ("hidden [4096, 128]"). The message says what would need less.
    OutOfMemory(std::string_view buffer, double bytes, DeviceRef device);
};

/// Returns make(), which takes the buffer's memory. `bytes` is in floating point, since products of sizes may overflow. Throws OutOfMemory.
template <class Make>
auto allocated(std::string_view buffer, double bytes, DeviceRef device, Make&& make) {
    constexpr double kMoreThanThereIs = 0x1p53;  // doubles beyond are not exact
    constexpr int kDeviceOutOfMemory = 2;        // CUDA_ERROR_OUT_OF_MEMORY
    const auto none = [&] { return OutOfMemory(buffer, bytes, device); };
    if (bytes >= kMoreThanThereIs) throw none();
    try {
        return make();
    } catch (const std::bad_alloc&) {
        throw none();
    } catch (const std::length_error&) {  // thrown by a vector
        throw none();
    } catch (const DeviceError& error) {
        if (error.result() != kDeviceOutOfMemory) throw;
        throw none();
    }
}

}  // namespace flce

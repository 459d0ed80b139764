// What a command says where there is no memory for one of its buffers.
#pragma once

#include <new>
#include <stdexcept>
#include <string_view>

#include "flce/flce.hpp"

namespace flce::cli {

class OutOfMemory : public EnvironmentError {
public:
    /// Of `bytes` for the buffer of that name ("hidden [4096, 128]"): says what would need less.
    OutOfMemory(std::string_view buffer, double bytes, DeviceRef device);
};

/// What `make` returns, which takes the buffer's memory: in all `bytes`, in floating point since products of sizes may overflow. Throws OutOfMemory.
template <class Make>
auto allocated(std::string_view buffer, double bytes, DeviceRef device, Make&& make) {
    constexpr double kNobodyHas = 0x1p53;  // and bytes are not exact beyond
    constexpr int kDeviceOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY
    const auto none = [&] { return OutOfMemory(buffer, bytes, device); };
    if (bytes >= kNobodyHas) throw none();
    try {
        return make();
    } catch (const std::bad_alloc&) {
        throw none();
    } catch (const std::length_error&) {  // of a vector
        throw none();
    } catch (const DeviceError& error) {
        if (error.result() != kDeviceOutOfMemory) throw;
        throw none();
    }
}

}  // namespace flce::cli

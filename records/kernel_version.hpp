// Version of the kernels that a measurement is of.
#pragma once

#include <string_view>

#include "flce/device.hpp"

namespace flce {

/// A digest of the templates and of the generator for that kind of device, without their comments: 16 hexadecimal digits, made when the
/// library is built.
[[nodiscard]] std::string_view kernel_version(DeviceKind kind) noexcept;

}  // namespace flce

// What functions of the C ABI in other rooms share with runtime/c_api.cpp.
#pragma once

#include <functional>

#include "flce/flce.h"

namespace flce {

/// Calls `body` and returns FLCE_OK; an exception becomes a status, and the thread's last error.
[[nodiscard]] flce_status c_api_call(const std::function<void()>& body) noexcept;

/// `given` as this library knows it; NULL: no callback is set. Throws ArgumentError for a struct_size that is not one.
[[nodiscard]] flce_job job_of(const flce_job* given);

}  // namespace flce

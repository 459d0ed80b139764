// Helpers that functions of the C ABI in other rooms share with runtime/c_api.cpp.
#pragma once

#include <functional>
#include <memory>

#include "flce/flce.h"
#include "flce/flce.hpp"

namespace flce {

/// A reference to a handle's kernel. Throws ArgumentError for NULL.
[[nodiscard]] std::shared_ptr<const Kernel> shared_kernel(const flce_kernel* handle);

/// Calls `body` and returns FLCE_OK; an exception becomes a status, and the thread's last error.
[[nodiscard]] flce_status c_api_call(const std::function<void()>& body) noexcept;

/// `given` as this library knows it; NULL: no callback is set. Throws ArgumentError for a struct_size that is not one.
[[nodiscard]] flce_job job_of(const flce_job* given);

}  // namespace flce

// Kernels of this process that XLA's calls run, by device, spec and size, with the words that say which label was out of range.
#pragma once

#include <cstdint>
#include <string>

#include "flce/flce.h"

namespace flce::xla_calls {

/// One kernel, which lives as long as the process: an executable of XLA may run at any time.
struct Entry {
    flce_kernel* kernel = nullptr;
    std::int32_t device_type = FLCE_CPU;
    std::int32_t device_index = 0;
    std::size_t number = 0;  // place of its word among the device's
};

/// A kernel as a call's attributes name it.
struct Request {
    std::int32_t device_index = -1;  // CUDA ordinal; -1: the CPU
    std::string spec;
    std::int64_t workspace_limit_bytes = 0;
    std::int64_t num_tokens = 0;
};

/// Finds or makes the kernel. FLCE_OK, or the status of the call that failed, with flce_last_error.
flce_status find(const Request& request, const Entry*& entry);

/// Words per device that kernels report a label in, the last for all kernels that come later.
constexpr std::size_t kLabelWords = 1024;

/// The word of an entry, in memory of its device; null where there is none.
void* label_word(const Entry& entry);

}  // namespace flce::xla_calls

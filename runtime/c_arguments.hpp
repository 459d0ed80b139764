// Conversion of the C ABI's argument structs to C++'s, by the table of a call's tensors.
#pragma once

#include <cstdint>
#include <string>

#include "flce/flce.h"
#include "flce/flce.hpp"

namespace flce {

/// `name`: of the argument, for messages. Throws ArgumentError.
[[nodiscard]] RetainedPlace retained_place_of(std::int32_t place, const char* name);

/// All throw ArgumentError for faults that C++'s types rule out.
[[nodiscard]] ForwardArgs arguments_of(const Kernel& kernel, const flce_forward_args* given);
[[nodiscard]] MergeArgs arguments_of(const flce_merge_args* given);
[[nodiscard]] BackwardArgs arguments_of(const Kernel& kernel, const flce_backward_args* given);

/// A tensor, absent where the pointer is NULL. Throws ArgumentError.
[[nodiscard]] TensorView tensor_of(const flce_tensor* tensor, const char* name);

/// Text that flce_call_arguments_json returns.
[[nodiscard]] std::string call_arguments_json();

}  // namespace flce

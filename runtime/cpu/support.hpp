// A softmax over the classes that a token names, on the CPU: the weight's rows of these classes against the token, in both passes.
#pragma once

#include "runtime/cpu/passes.hpp"

namespace flce {

/// The passes where the spec has support. No more of the weight is read than its named rows.
void run_cpu_support_forward(const CpuContext& context, const CpuCall& call);
void run_cpu_support_backward(const CpuContext& context, const CpuCall& call);

}  // namespace flce

// The text of a CUDA program: one configuration and an instantiation of every kernel it needs, in units that are compiled side by side.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

struct CudaSource {
    std::vector<CudaUnit> units;
    std::vector<std::string> options;
    std::vector<KernelEntry> kernels;

    /// Number of the kernel `name` in `kernels`. Throws InternalError where it does not exist.
    [[nodiscard]] int kernel(std::string_view name) const;
};

[[nodiscard]] CudaSource cuda_source(const Spec& spec, const Device& device, const Plan& plan);

/// Whether backward must zero columns past the vocabulary one by one (a hidden_major gradient that is overwritten).
[[nodiscard]] bool zeroes_columns(const Spec& spec);

}  // namespace flce

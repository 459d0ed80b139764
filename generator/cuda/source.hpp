// The text of a CUDA program: one configuration and an instantiation of every kernel it needs, in units that are compiled side by side.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "flce/device.hpp"
#include "flce/plan.hpp"
#include "flce/spec.hpp"
#include "generator/cuda/common/kernel_role.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

struct CudaSource {
    std::vector<CudaUnit> units;
    std::vector<std::string> options;
    std::vector<KernelEntry> kernels;

    /// Number of the role's kernel in `kernels`, by which launches name it. Throws InternalError where the set has none.
    [[nodiscard]] int kernel(KernelRole role) const;
    /// Adds `entry` to `kernels` as the role's kernel.
    void add(KernelRole role, const KernelEntry& entry);

private:
    std::array<int, kKernelRoleCount> numbers_{};  ///< of the roles' kernels, counted from 1; 0: the set has none
};

[[nodiscard]] CudaSource cuda_source(const Spec& spec, const Device& device, const Plan& plan);

/// Whether backward must zero columns past the vocabulary one by one (a hidden_major gradient that is overwritten).
[[nodiscard]] bool zeroes_columns(const Spec& spec);

}  // namespace flce

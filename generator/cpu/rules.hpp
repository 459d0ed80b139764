// Rules of the CPU backend for a plan. illegal_reason asks here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "flce/plan.hpp"

namespace flce {

/// Vector registers of a CPU's instruction set at this vector width: AArch64 and AVX-512 have 32, older x86-64 instructions 16.
[[nodiscard]] int vector_registers(const CpuProperties& cpu, int vector_bits) noexcept;

/// Why the CPU backend cannot run `plan` on `device`; std::nullopt when it can (scratch is asked for apart).
[[nodiscard]] std::optional<std::string> cpu_plan_problem(const Spec& spec, const Device& device, const Plan& plan);

}  // namespace flce

// The memory that --retain chooses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cli/command.hpp"
#include "runtime/layer/layer.hpp"

namespace flce::cli {

/// Memory in which a command lets forward retain values for backward.
class RetainedMemory {
public:
    /// Throws UsageError where the flags' choice is none that there is, is over their limit, or the kernel cannot use grad_weight's memory.
    RetainedMemory(const Kernel& kernel, std::int64_t num_tokens, const MemoryFlags& flags);
    /// Retained memory for both passes over `outputs`.
    [[nodiscard]] Retained of(const LayerOutputs& outputs) const;
    /// Bytes beside the gradients.
    [[nodiscard]] std::size_t own_bytes() const { return retained_.place == RetainedPlace::own ? retained_.bytes : 0; }
    [[nodiscard]] std::size_t bytes() const { return retained_.bytes; }

private:
    Retained retained_;              ///< retained memory without grad_weight's address
    std::optional<Scratch> memory_;  ///< memory of its own
};

}  // namespace flce::cli

#include "cli/retained_memory.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace flce::cli {

RetainedMemory::RetainedMemory(const Kernel& kernel, std::int64_t num_tokens, const MemoryFlags& flags) {
    const std::string choice = flags.choice();
    const std::size_t lent = kernel.retained_bytes(num_tokens, RetainedPlace::grad_weight);
    std::size_t own = 0;
    if (choice == "auto") {
        const RetainedSizes sizes = automatic_retained(kernel, num_tokens, flags.limit_bytes());
        own = sizes.own;
        bytes_ = sizes.lent;
    } else if (choice == "grad_weight") {
        bytes_ = lent;
        if (lent == 0 && num_tokens > 0) {
            throw UsageError(
                fmt::format("--retain grad_weight: {} cannot use that memory (it has to be written, not accumulated into, vocab_major)",
                            kernel.plan().text()));
        }
    } else if (choice != "none") {
        own = kernel.retained_bytes(num_tokens);
        if (choice != "all") own = std::min(own, static_cast<std::size_t>(parse_bytes("--retain", choice)));
        flags.check_limit(static_cast<std::int64_t>(own + kernel.workspace_bytes(num_tokens)));
    }
    if (own == 0) return;
    bytes_ = own;
    memory_.emplace("retained", kernel.device_ref(), own);
}

Retained RetainedMemory::of(const LayerOutputs& outputs) const {
    if (bytes_ == 0) return {};
    return {memory_ ? memory_->workspace().data : outputs.grad_weight.view.data, bytes_};
}

}  // namespace flce::cli

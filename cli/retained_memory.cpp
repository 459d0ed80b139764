#include "cli/retained_memory.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace flce::cli {

RetainedMemory::RetainedMemory(const Kernel& kernel, std::int64_t num_tokens, const MemoryFlags& flags) {
    const std::string choice = flags.choice();
    if (choice == "auto") {
        retained_ = automatic_retained(kernel, num_tokens, flags.workspace_limit_bytes());
    } else if (choice == "grad_weight") {
        retained_ = {.bytes = kernel.retained_bytes(num_tokens, RetainedPlace::grad_weight), .place = RetainedPlace::grad_weight};
        if (retained_.bytes == 0 && num_tokens > 0) {
            throw UsageError(fmt::format(
                "--retain grad_weight: {} cannot use that memory (it has to be written, not accumulated into, vocab_major, without fp8)",
                kernel.plan().text()));
        }
    } else if (choice != "none") {
        retained_.bytes = kernel.retained_bytes(num_tokens);
        if (choice != "all") retained_.bytes = std::min(retained_.bytes, static_cast<std::size_t>(parse_bytes("--retain", choice)));
        flags.check_limit(static_cast<std::int64_t>(retained_.bytes + kernel.workspace_bytes(num_tokens)));
    }
    if (own_bytes() == 0) return;
    memory_.emplace("retained", kernel.device_ref(), retained_.bytes);
    retained_.data = memory_->workspace().data;
}

Retained RetainedMemory::of(const LayerOutputs& outputs) const {
    Retained retained = retained_;
    if (retained.place == RetainedPlace::grad_weight && retained.bytes > 0) retained.data = outputs.grad_weight.view.data;
    return retained;
}

}  // namespace flce::cli

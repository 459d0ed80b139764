#include "runtime/layer/out_of_memory.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "runtime/argument_checks.hpp"
#include "runtime/text.hpp"

namespace flce {
namespace {

std::string_view what_needs_less(std::string_view buffer) {
    constexpr std::array kSizedByVocabulary{"weight", "grad_weight", "bias", "grad_bias", "class_weight", "class_offset", "class_group"};
    const std::string_view name = buffer.substr(0, buffer.find(' '));
    if (std::ranges::find(kSizedByVocabulary, name) != kSizedByVocabulary.end()) return "a smaller vocab_size or hidden_size needs less";
    if (name == "workspace") return "fewer tokens or less scratch need less";
    if (name == "retained") return "a smaller buffer does for a part";
    return "fewer tokens need less";
}

}  // namespace

OutOfMemory::OutOfMemory(std::string_view buffer, double bytes, DeviceRef device)
    : EnvironmentError(fmt::format("out of memory on {}: {} takes {} ({:.0f} bytes); {}", to_string(device), buffer, human_bytes(bytes),
                                   bytes, what_needs_less(buffer))) {}

}  // namespace flce

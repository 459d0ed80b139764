#include <algorithm>
#include <utility>

#include "cache/artifact_cache.hpp"
#include "flce/flce.hpp"
#include "records/kernel_version.hpp"

namespace flce {

std::string plan_digest(std::span<const std::shared_ptr<const Kernel>> kernels) {
    std::vector<std::pair<std::string, std::string>> plans;
    std::vector<std::string_view> versions;
    for (const auto& kernel : kernels) {
        if (kernel == nullptr) throw ArgumentError("plan_digest: a kernel is null");
        plans.emplace_back(kernel->spec().text(), kernel->plan().text());
        versions.push_back(kernel_version(kernel->device().kind));
    }
    const auto sort_out = [](auto& list) {
        std::ranges::sort(list);
        const auto repeated = std::ranges::unique(list);
        list.erase(repeated.begin(), repeated.end());
    };
    sort_out(plans);
    sort_out(versions);
    KeyBuilder key("plans");
    for (const auto& [spec, plan] : plans) key.add("spec", spec).add("plan", plan);
    for (const std::string_view version : versions) key.add("kernels", version);
    return key.finish().hex();
}

}  // namespace flce

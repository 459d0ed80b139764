#include "runtime/payload_check.hpp"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "flce/error.hpp"
#include "runtime/cpu/gemm.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/cubin_cache.hpp"
#include "runtime/cuda/cubin_loader.hpp"
#include "runtime/cuda/cuda_kernel.hpp"
#include "runtime/host/host_code.hpp"
#include "runtime/host/object_file.hpp"
#include "runtime/kernel_factory.hpp"

namespace flce {
namespace {

using Metadata = nlohmann::json;

/// JSON of any origin; a discarded value for text that is not JSON, or is nested deeper than metadata is.
Metadata parse_metadata(const std::string& text) {
    constexpr int kMostLevels = 32;
    return Metadata::parse(text, [](int depth, Metadata::parse_event_t, Metadata&) { return depth <= kMostLevels; }, false);
}

std::string metadata_text(const Metadata& metadata, const char* key) {
    const auto found = metadata.is_object() ? metadata.find(key) : metadata.end();
    return metadata.is_object() && found != metadata.end() && found->is_string() ? found->get<std::string>() : "";
}

/// Kernels that metadata lists.
std::vector<KernelEntry> kernels_in(const Metadata& metadata) {
    std::vector<KernelEntry> kernels;
    const auto listed = metadata.find("kernels");
    if (listed == metadata.end() || !listed->is_array()) return kernels;
    for (const Metadata& kernel : *listed) {
        KernelEntry entry;
        entry.name = metadata_text(kernel, "name");
        if (entry.name.empty()) continue;
        const auto smem = kernel.find("dynamic_smem_bytes");
        if (smem != kernel.end() && smem->is_number_unsigned()) entry.dynamic_smem_bytes = smem->get<std::uint32_t>();
        kernels.push_back(std::move(entry));
    }
    return kernels;
}

PayloadCheck::Result check_object(const Metadata& metadata, const Artifact& artifact) {
    const auto target = metadata.find("target");
    const std::string triple = metadata_text(target == metadata.end() ? metadata : *target, "triple");
    if (triple.empty()) return {"its metadata names no target", false};
    const bool launchers = metadata.contains("holds");
    const std::span<const char* const> symbols = launchers ? std::span<const char* const>(kLauncherSymbols) : kCpuSymbols;
    std::string fault = host_object_fault(artifact.payload, triple, symbols);
    // Linking runs none of its code, so any CPU of the architecture will do.
    if (!fault.empty() || !host_object_fault(artifact.payload, native_triple(), {}).empty()) return {std::move(fault), false};
    try {
        (void)HostCode::load(artifact.payload, "cache entry");
        return {"", true};
    } catch (const CompileError& error) {
        return {error.what(), false};
    }
}

}  // namespace

struct PayloadCheck::Gpus {
    std::map<std::string, std::shared_ptr<const CudaContext>> by_arch;  // one of each architecture

    Gpus() {
        const std::vector<Device> devices = cuda_devices();
        for (std::size_t i = 0; i < devices.size(); ++i) {
            const std::string& arch = devices[i].gpu.arch;
            if (!by_arch.contains(arch)) by_arch.emplace(arch, CudaDriver::load()->context(static_cast<int>(i)));
        }
    }

    [[nodiscard]] Result check_cubin(const Metadata& metadata, const Artifact& artifact) const {
        const std::string arch = metadata_text(metadata, "arch");
        if (arch.empty()) return {"its metadata names no architecture", false};
        const std::vector<KernelEntry> kernels = kernels_in(metadata);
        std::string fault = cubin_fault(artifact.payload, arch, kernels);
        const auto gpu = by_arch.find(arch);
        if (!fault.empty() || gpu == by_arch.end()) return {std::move(fault), false};
        std::unique_ptr<CudaModule> module;
        fault = load_fault(gpu->second, artifact.payload, kernels, module);
        return {std::move(fault), module != nullptr};
    }
};

PayloadCheck::PayloadCheck() = default;
PayloadCheck::~PayloadCheck() = default;

PayloadCheck::Result PayloadCheck::check(const Artifact& artifact) {
    const Metadata metadata = parse_metadata(artifact.metadata);
    if (!metadata.is_object()) return {"its metadata is no JSON object", false};
    const std::string kind = metadata_text(metadata, "kind");
    if (kind == "compiler") return {compiler_fault(artifact), true};
    if (kind == "check") return {"", false};  // a sentence for people: any is one
    if (kind == "object") return check_object(metadata, artifact);
    if (kind != "cubin")
        return {fmt::format("its metadata says that it is a \"{}\"; known are check, cubin, compiler and object", kind), false};
    if (gpus_ == nullptr) gpus_ = std::make_unique<Gpus>();
    return gpus_->check_cubin(metadata, artifact);
}

}  // namespace flce

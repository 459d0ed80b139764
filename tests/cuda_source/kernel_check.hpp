// Compiles kernels of generated units and looks at what they use.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "cache/byte_io.hpp"
#include "generator/cuda_program.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/nvrtc.hpp"

namespace flce::test {

/// The kernels that hold a tile of a GEMM in registers.
[[nodiscard]] inline bool has_main_loop(const std::string& kernel) {
    return kernel.starts_with("flce_forward") || kernel.starts_with("flce_dlogits") || kernel.starts_with("flce_grad_hidden") ||
           kernel.starts_with("flce_grad_weight") || kernel.starts_with("flce_backward_chunks") || kernel.starts_with("flce_heads");
}

/// Units of one configuration as one, which NVRTC is quicker with. The second of a name gets a number: flce_forward, flce_forward_1.
[[nodiscard]] inline CudaUnit together(const std::vector<CudaUnit>& units) {
    CudaUnit all;
    for (const CudaUnit& unit : units) {
        std::string text = unit.source;
        if (!all.source.empty()) text.erase(0, text.find("extern \"C\""));
        for (KernelEntry kernel : unit.kernels) {
            const auto is_it = [&](const KernelEntry& other) {
                return other.name == kernel.name || other.name.starts_with(kernel.name + "_");
            };
            if (const auto others = std::ranges::count_if(all.kernels, is_it); others > 0) {
                const std::string numbered = kernel.name + "_" + std::to_string(others);
                text.replace(text.find(kernel.name + "("), kernel.name.size(), numbered);
                kernel.name = numbered;
            }
            all.kernels.push_back(kernel);
        }
        all.source += text;
    }
    return all;
}

[[nodiscard]] inline std::string digest_of(const std::string& text) {
    std::string digest;
    for (const std::byte byte : checksum_of(as_byte_span(text))) digest += fmt::format("{:02x}", static_cast<unsigned>(byte));
    return digest;
}

/// Log of NVRTC for a unit. A text is compiled once in a process, and where FLCE_TEST_CACHE names a folder once for these templates: many
/// units of different options are equal.
[[nodiscard]] inline std::string compile_log(const CudaUnit& unit, const std::vector<std::string>& options) {
    static std::map<std::string, std::string> logs;
    static const std::string templates = [] {
        std::string all;
        for (const EmbeddedHeader& header : embedded_templates()) all.append(header.name).append(header.text);
        return digest_of(all);
    }();
    std::string text = unit.source + templates;
    for (const std::string& option : options) text += "\n" + option;
    for (const KernelEntry& kernel : unit.kernels) text += "\n" + kernel.name;
    const std::string name = digest_of(text);
    if (const auto known = logs.find(name); known != logs.end()) return known->second;
    const char* cache = std::getenv("FLCE_TEST_CACHE");
    const std::filesystem::path file = cache == nullptr ? std::filesystem::path() : std::filesystem::path(cache) / "compile-logs" / name;
    if (!file.empty() && std::filesystem::exists(file)) {
        std::ifstream in(file, std::ios::binary);
        return logs[name].assign(std::istreambuf_iterator<char>(in), {});
    }
    const std::string log = Nvrtc::load()->compile(unit.source, embedded_templates(), options, unit.kernels).log;
    if (!file.empty()) {
        const std::filesystem::path part = file.string() + fmt::format(".{}", getpid());
        std::filesystem::create_directories(file.parent_path());
        std::ofstream(part, std::ios::binary) << log;
        std::filesystem::rename(part, file);
    }
    return logs[name] = log;
}

/// Resources by ptxas of every kernel of `unit`. Fails the test on a warning, or where a kernel is missing.
[[nodiscard]] inline std::vector<KernelResources> compiled(const CudaUnit& unit, std::vector<std::string> options) {
    options.emplace_back("--ptxas-options=-v");
    const std::string log = compile_log(unit, options);
    EXPECT_EQ(log.find("warning"), std::string::npos) << log;
    EXPECT_EQ(log.find("Potential Performance Loss"), std::string::npos) << log;  // each multiplication waits for the one before
    std::vector<KernelResources> report = parse_ptxas_report(log);
    EXPECT_EQ(report.size(), unit.kernels.size()) << log;
    for (const KernelResources& used : report) {
        EXPECT_GT(used.registers, 0) << used.name;
        EXPECT_LE(used.registers, 255) << used.name;
    }
    return report;
}

}  // namespace flce::test

// Compiles kernels of generated units and looks at what they use.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "generator/cuda_program.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/nvrtc.hpp"

namespace flce::test {

/// The kernels that hold a tile of a GEMM in registers.
[[nodiscard]] inline bool has_main_loop(const std::string& kernel) {
    return kernel.starts_with("flce_forward") || kernel.starts_with("flce_dlogits") || kernel.starts_with("flce_grad_hidden") ||
           kernel.starts_with("flce_grad_weight") || kernel.starts_with("flce_backward_chunks");
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

/// What ptxas says of every kernel of `unit`. Fails the test on a warning, or where a kernel is missing.
[[nodiscard]] inline std::vector<KernelResources> compiled(const CudaUnit& unit, std::vector<std::string> options) {
    options.emplace_back("--ptxas-options=-v");
    const auto result = Nvrtc::load()->compile(unit.source, embedded_templates(), options, unit.kernels);
    EXPECT_EQ(result.log.find("warning"), std::string::npos) << result.log;
    std::vector<KernelResources> report = parse_ptxas_report(result.log);
    EXPECT_EQ(report.size(), unit.kernels.size()) << result.log;
    for (const KernelResources& used : report) {
        EXPECT_GT(used.registers, 0) << used.name;
        EXPECT_LE(used.registers, 255) << used.name;
    }
    return report;
}

}  // namespace flce::test

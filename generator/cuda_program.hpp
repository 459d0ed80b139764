// Makes of (Spec, Device, Plan) everything that runs a CUDA kernel set: source for NVRTC, launch programs, workspace sizes. Pure: no files,
// no clock, no GPU.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flce/plan.hpp"
#include "generator/launch_program.hpp"

namespace flce {

/// A file of templates/, embedded in the library at build time.
struct EmbeddedHeader {
    std::string_view name;  ///< name in #include: "flce/sm80/mainloop.cuh"
    std::string_view text;
};
[[nodiscard]] std::span<const EmbeddedHeader> embedded_templates();

/// A source that NVRTC compiles at once. Each GEMM kernel is a unit of its own, so that a set takes no longer than its slowest kernel.
struct CudaUnit {
    std::string source;  ///< a configuration and instantiations; the logic is in templates/. Depends on the structure of the Spec only:
                         ///< option values (logit_scale, softcap, …) are parameters set by the launch programs
    std::vector<KernelEntry> kernels;
};

struct CudaProgram {
    std::vector<CudaUnit> units;
    std::vector<std::string> options;  ///< options for NVRTC: architecture, language level; no paths
    std::vector<KernelEntry> kernels;  ///< kernels of all units, as launches number them
    LaunchProgram forward;
    LaunchProgram merge;              ///< empty where the spec is not a shard's
    LaunchProgram backward;           ///< skips work for gradients that Slot::grad_hidden, grad_weight and grad_bias leave out
    Expr forward_workspace_bytes{0};  ///< bytes over Slot::num_tokens
    Expr merge_workspace_bytes{0};
    Expr backward_workspace_bytes{0};
    Expr retained_bytes{0};  ///< most bytes that forward may leave for backward in Slot::retained, over Slot::vocab_columns as well; bytes
                             ///< of grad_weight that may be lent:
    Expr lendable_bytes{0};
    bool defers_hidden = false;  ///< whether a backward in stages reads hidden in the last one alone, where everything is retained
};

/// Precondition: illegal_reason(spec, device, plan) is empty and spec is normalized.
[[nodiscard]] CudaProgram generate_cuda(const Spec& spec, const Device& device, const Plan& plan);

}  // namespace flce

// What prewarm is asked for, as flags or as a manifest, and the kernel sets that it comes to.
//
// A manifest is a JSON object; every key may be left out, others are errors:
//
//     {
//       "specs":            ["D=2048,V=151936,dtype=bf16,tied", {"D": 4096, "V": 128256}, "@layer.json"],
//       "hf_configs":       ["models/qwen3/config.json"],
//       "autocast":         ["bf16"],
//       "devices":          ["sm_90a", "NVIDIA A100"],
//       "num_tokens":       [4096, 8192],
//       "workspace_limits": ["2G", 536870912, 0]
//     }
//
//     specs             each as --spec takes it, or an object with the spec's keys
//     hf_configs        config.json files
//     autocast          dtypes (bf16, fp16) that autocast computes these configs' models in, with parameters in fp32; without it, as the files
//                       say
//     devices           names as --device takes them
//     num_tokens        tokens that a call may have: whole numbers, 0 (not known) or more; without the list, any number of them. Without a limit a
//                       call need not say how many it has, so 0 is always among them
//     workspace_limits  KernelOptions::workspace_limit_bytes of the calls: bytes, or text like "2G"; 0: none
//
// Relative paths begin at the manifest's folder. All specs and configs are compiled for all devices, with every limit and every number of tokens. What
// a manifest does not say is taken from the command line: --autocast, --device, --num-tokens, --workspace-limit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/command.hpp"

namespace flce::cli {

struct PrewarmFlags {
    std::vector<std::string> specs;
    std::vector<std::filesystem::path> hf_configs;
    std::vector<std::string> autocast;
    std::vector<std::filesystem::path> manifests;
    std::vector<std::string> devices;
    std::vector<std::int64_t> num_tokens;
    std::vector<std::string> workspace_limits;
    std::vector<std::string> scratch;
    std::string plan;
};

/// One get_kernel of a run that is to find everything compiled.
struct PrewarmRequest {
    Spec spec;
    std::string device_name;
    Device device;
    KernelOptions options;
    bool any_tokens = false;  ///< whatever options.num_tokens is
};

/// Everything that flags and manifests name, in their order. Throws UsageError, SpecError and EnvironmentError (an unknown device) before anything is
/// compiled.
[[nodiscard]] std::vector<PrewarmRequest> prewarm_requests(const PrewarmFlags& flags);

/// The files that flags and manifests name, manifests included: what they come to changes with these.
[[nodiscard]] std::vector<std::filesystem::path> prewarm_files(const PrewarmFlags& flags);

/// A kernel set to compile: requests that come to the same one are one.
struct PrewarmItem {
    Spec spec;
    std::string device_name;
    Device device;
    std::string plan;
};
/// In the requests' order. Throws PlanError where a limit or a plan is not to be had.
[[nodiscard]] std::vector<PrewarmItem> prewarm_items(Session& session, const std::vector<PrewarmRequest>& requests);

}  // namespace flce::cli

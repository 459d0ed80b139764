// Requests to prewarm, by options or by a manifest, and the kernel sets that they come to.
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
//     specs             each a spec's text, or an object with the spec's keys
//     hf_configs        config.json files
//     autocast          dtypes (bf16, fp16) that autocast computes these configs' models in, with parameters in fp32; without the key, the
//                       files' own dtypes
//     devices           names of devices
//     num_tokens        tokens that a call may have: whole numbers, 0 (not known) or more; without the list, any number of them. Without a
//                       limit a call from C++ or C need not say how many it has, so 0 is always among them
//     workspace_limits  KernelOptions::workspace_limit_bytes of the calls: bytes, or text like "2G"; 0: none
//
// Relative paths begin at the manifest's folder. All specs and configs are compiled for all devices, with every limit and every number of
// tokens. Keys that a manifest leaves out are taken from the options beside it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "flce/prewarm.hpp"

namespace flce {

/// One get_kernel of a run that is to find everything compiled.
struct PrewarmRequest {
    Spec spec;
    std::string device_name;
    Device device;
    KernelOptions options;
    bool any_tokens = false;  ///< whatever options.num_tokens is
};

/// Everything that options and manifests name, in their order. Throws ArgumentError, SpecError and EnvironmentError (an unknown device)
/// before anything is compiled.
[[nodiscard]] std::vector<PrewarmRequest> prewarm_requests(const PrewarmWants& wants);

/// The files that a manifest names, itself included: a change of these may change the requests.
[[nodiscard]] std::vector<std::filesystem::path> manifest_files(const std::filesystem::path& manifest);

/// The kernel sets that requests come to, in the requests' order. Throws PlanError where a limit or a plan is not to be had.
[[nodiscard]] std::vector<PrewarmItem> prewarm_items(Session& session, const std::vector<PrewarmRequest>& requests);

}  // namespace flce

// Compiles kernels before they are needed, for devices that need not be here, into the cache or into a pack. `flce prewarm` does this;
// docs/prewarm.md describes it.
//
//     flce::PrewarmReport report = flce::prewarm({.wants = {.specs = {flce::parse_spec("D=2048,V=151936,dtype=bf16")}, .devices =
//     {"h100"}},
//                                                 .pack = "kernels.flcepack"});
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "flce/flce.hpp"

namespace flce {

/// The kernels that are asked for: of every spec, for every device, limit and number of tokens.
struct PrewarmWants {
    std::vector<Spec> specs{};
    std::vector<std::filesystem::path> hf_configs{};  ///< models' config.json files
    std::vector<std::string> autocast{};              ///< "bf16", "fp16": dtypes that these models are computed in, with parameters in fp32
    std::vector<std::filesystem::path> manifests{};   ///< JSON files that list wants (docs/prewarm.md)
    std::vector<std::string> devices{};               ///< names as resolve_device takes them: "sm_90a", "NVIDIA H200", "x86-64-v4", "cpu"
    std::vector<std::int64_t> num_tokens{};           ///< tokens of a call; empty: any number
    std::vector<std::int64_t> workspace_limits{};     ///< KernelOptions::workspace_limit_bytes of calls; 0: none. Empty: none
    std::vector<std::int64_t> scratch_bytes{};        ///< scratch of sessions; empty: the default
    std::string plan{};                               ///< plan instead of the planner's choice
};

/// A kernel set. Wants that ask for equal kernel sets are one item.
struct PrewarmItem {
    Spec spec{};
    std::string device_name{};
    Device device{};
    std::string plan{};
};

struct PrewarmOptions {
    PrewarmWants wants{};
    std::filesystem::path cache_dir{};  ///< cache directory, like SessionOptions::cache_dir
    std::filesystem::path pack{};       ///< pack to write with the entries that these kernels use, and no others; empty: no pack
    int jobs = 0;                       ///< worker processes; 0: as many as cores and memory have room for
    /// The flce command, of this library's build: kernels are compiled in processes of it. Empty: bin/flce beside the folder of libflce, as
    /// it is in the build tree, an install and the Python package.
    std::filesystem::path command{};
};

/// The work that prewarm has found, before any of it is done.
struct PrewarmRoom {
    std::size_t sets = 0;  ///< kernel sets
    std::size_t workers = 0;
    int cores = 0;
    std::int64_t memory_bytes = 0;  ///< available
};

/// How far prewarm is.
struct PrewarmProgress {
    std::size_t sets = 0;
    std::size_t done = 0;
    std::int64_t compiled = 0;  ///< artifacts
    std::int64_t hits = 0;      ///< artifacts that a cache had
    std::int64_t failed = 0;    ///< kernel sets
};

/// Functions by which prewarm() tells its caller of its progress, in the calling thread, and asks whether to stop. Each may be empty.
struct PrewarmListener {
    std::function<void(const PrewarmRoom&)> begin{};
    std::function<void(const PrewarmProgress&)> progress{};  ///< several times a second
    std::function<void(const PrewarmItem&)> failed{};
    std::function<bool()> stop{};  ///< whether to end; kernels at work are given up, finished ones are kept
};

/// A kernel set, and the result of compiling it.
struct PrewarmedItem {
    PrewarmItem item{};
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    std::string error{};       ///< empty: its kernels are there
    bool environment = false;  ///< the error is the environment's
};

struct PrewarmReport {
    std::vector<PrewarmedItem> items{};
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    std::int64_t failed = 0;
    std::size_t not_kept = 0;                     ///< sets that were compiled but that no cache keeps; not counted where a pack is written
    bool stopped = false;                         ///< whether the listener stopped the call
    std::optional<std::filesystem::path> pack{};  ///< pack that was written: only if every kernel is in it
    std::filesystem::path cache_dir{};            ///< empty: the local cache is off

    /// The object that `flce prewarm --json` prints.
    [[nodiscard]] std::string json() const;
};

/// Kernels that fail are in the report. Throws ArgumentError, SpecError, PlanError and EnvironmentError before anything is compiled, and
/// EnvironmentError where there is no flce command or a pack cannot be written.
[[nodiscard]] PrewarmReport prewarm(const PrewarmOptions& options, const PrewarmListener& listener = {});

struct MissingReport {
    std::size_t sets = 0;                ///< kernel sets that were asked for
    std::vector<PrewarmItem> missing{};  ///< sets that a run in this environment would not find (a strict run, where FLCE_STRICT says so)

    /// The object that `flce prewarm --check --json` prints.
    [[nodiscard]] std::string json() const;
};
/// Looks, and compiles nothing. Throws as prewarm() does.
[[nodiscard]] MissingReport missing(const PrewarmWants& wants, const std::filesystem::path& cache_dir = {});

}  // namespace flce

// Compiles kernels into the cache or into a pack, for devices that need not be here, in worker processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "prewarm/requests.hpp"
#include "runtime/workers/worker_process.hpp"

namespace flce {

struct PrewarmOptions {
    PrewarmWants wants;
    std::filesystem::path cache_dir{};  ///< as SessionOptions::cache_dir
    std::filesystem::path pack{};       ///< also write what these kernels use, and nothing else, as one pack; empty: no pack
    int jobs = 0;                       ///< worker processes; 0: as many as cores and memory have room for
    std::filesystem::path program{};    ///< the flce command, which workers are started from
};

/// How far prewarm is.
struct PrewarmProgress {
    std::size_t sets = 0;  ///< kernel sets
    std::size_t done = 0;
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    std::int64_t failed = 0;
};

/// The work that prewarm has found, before any of it is done.
struct PrewarmRoom {
    std::size_t sets = 0;
    std::size_t workers = 0;
    int cores = 0;
    std::int64_t memory_bytes = 0;  ///< available
};

/// What prewarm tells its caller, in the thread that runs it, and asks it. Each may be empty.
struct PrewarmListener {
    std::function<void(const PrewarmRoom&)> begin{};
    std::function<void(const PrewarmProgress&)> progress{};  ///< several times a second
    std::function<void(const PrewarmItem&)> failed{};
    std::function<bool()> stop{};  ///< whether to end; kernels at work are given up, the others are kept
};

/// A kernel set, and what became of it.
struct PrewarmedItem {
    PrewarmItem item;
    std::int64_t compiled = 0;  ///< artifacts
    std::int64_t hits = 0;
    std::string error{};       ///< empty: its kernels are there
    bool environment = false;  ///< the error is the environment's
};

struct PrewarmReport {
    std::vector<PrewarmedItem> items;
    std::int64_t compiled = 0;
    std::int64_t hits = 0;
    std::int64_t failed = 0;
    std::size_t not_kept = 0;                     ///< sets that were compiled, and that no cache keeps; not counted for a pack
    bool complete = true;                         ///< false: it was stopped
    std::optional<std::filesystem::path> pack{};  ///< that was written
    std::filesystem::path cache_dir{};            ///< empty: the local cache is off
};

/// Kernels that fail are in the report. Throws ArgumentError, SpecError, PlanError and EnvironmentError before anything is compiled, and EnvironmentError
/// where a worker cannot be started or a pack not written.
[[nodiscard]] PrewarmReport prewarm(const PrewarmOptions& options, const PrewarmListener& listener = {});

/// Of what options name, the kernel sets that a run in this environment would not find (a strict one, where FLCE_STRICT says so). Compiles nothing.
struct MissingReport {
    std::size_t sets = 0;  ///< all that options name
    std::vector<PrewarmItem> missing;
};
[[nodiscard]] MissingReport missing(const PrewarmWants& wants, const std::filesystem::path& cache_dir = {});

}  // namespace flce

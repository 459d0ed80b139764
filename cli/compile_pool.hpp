// Kernels compiled side by side, in processes: NVRTC serialises within one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/worker_process.hpp"

namespace flce::cli {

struct CompileJob {
    Spec spec;
    std::string device_json;
    std::string plan;
};

class CompilePool {
public:
    CompilePool(std::string cache_dir, std::size_t most_processes) : cache_dir_(std::move(cache_dir)), most_(most_processes) {}

    /// Compiles into the cache; what does not compile is left for whoever needs it to say why. `done` hears how many jobs are finished, and whether
    /// the last one failed; it may be called from any thread, one at a time. Returns false where `stop` (asked between jobs) ended it.
    bool compile(const std::vector<CompileJob>& jobs, const std::function<bool()>& stop, const std::function<double()>& seconds_left,
                 const std::function<void(std::size_t, bool)>& done = {});

private:
    std::string cache_dir_;
    std::size_t most_;
    std::vector<std::unique_ptr<WorkerProcess>> processes_;
};

/// As many as the machine's cores keep busy: a set of kernels is compiled by several threads.
[[nodiscard]] std::size_t default_compile_processes();

}  // namespace flce::cli

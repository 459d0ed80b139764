// First use of a family of GPU kernels on an architecture for which flce brings no records: its results are compared with the CPU
// backend's, once per cache, before a caller has the kernel.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "runtime/environment.hpp"
#include "runtime/layer/agreement.hpp"
#include "runtime/session.hpp"

namespace flce {

/// Whether records that flce brings were measured on a GPU of that architecture ("sm_90a"): its kernels have then run there.
[[nodiscard]] bool ships_records_for(std::string_view arch);

/// Outcomes of checks by architecture, product, driver, path, dtype and version of the kernels. They lie in the local directory of a cache,
/// in no pack and in no remote store. Without a directory they are this object's alone. Thread-safe.
class FirstUse {
public:
    /// `options`: those of the session's cache.
    explicit FirstUse(const ArtifactCache::Options& options);

    /// Returns if kernels like this one agreed with the CPU backend's here, now or earlier. Throws DeviceError that names the path and the
    /// way round where they did not. A check for which there is no memory, and one that strict mode has no outcome of, is a warning: it
    /// compiles a kernel of the CPU.
    void require(const Kernel& kernel, const Backends& backends, int threads);

    /// Compares now, whatever is known, and keeps the outcome. Throws what compare_steps throws.
    std::vector<Difference> compare(const Kernel& kernel, const Backends& backends, int threads);

private:
    [[nodiscard]] std::shared_ptr<const Artifact> outcome_of(const Kernel& kernel, const Backends& backends, int threads);

    ArtifactCache cache_;
    bool compiles_;
    std::mutex mutex_;
    std::map<CacheKey, std::shared_ptr<const Artifact>> known_;
};

/// A path's check on one GPU, for people who ask.
struct PathCheck {
    DeviceRef device;
    std::string name;     ///< the GPU's
    std::string path;     ///< "cuda_sm80"
    std::string skipped;  ///< why there is nothing to compare; empty: there is
    std::vector<Difference> differences{};
    double seconds = 0;
};

/// Compares every path of every GPU of this machine with the CPU backend over a layer, and keeps the outcomes in the session's cache.
[[nodiscard]] std::vector<PathCheck> check_paths(const Spec& spec, const Environment& environment, const Backends& backends);

}  // namespace flce

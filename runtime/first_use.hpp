// First use of a family of GPU kernels on an architecture for which flce brings no records: its results are compared with the CPU
// backend's, once per cache, before a caller has the kernel.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
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

/// Outcomes of checks. A family of kernels is what shares one: architecture, product, driver, compilers, path, strategy, dtype, layout, how
/// grad_weight is written, shards, and whether the layer is a tiny one. Outcomes lie in the local directory of a cache, in no pack and no
/// remote store. Without a directory they are this object's alone. Thread-safe.
class FirstUse {
public:
    /// `options`: those of the session's cache.
    explicit FirstUse(const ArtifactCache::Options& options);

    /// Returns if kernels like this one agreed with the CPU backend's here, now or earlier. Throws DeviceError that names the path and the
    /// ways round where they did not, or where the driver refused them. A check that cannot be made is a warning: there is no memory for
    /// it, its random results are not finite, or strict mode, which compiles no kernel of the CPU, has no outcome.
    void require(const Kernel& kernel, const Backends& backends, int threads);

    /// Compares now, whatever is known, and keeps the outcome. A fault that is known stays: of another layer, or found by this object on
    /// another GPU of the kind. Throws what compare_steps throws.
    std::vector<Difference> compare(const Kernel& kernel, const Backends& backends, int threads);
    /// The layer of the fault that is known of kernels like this one; empty: none is.
    [[nodiscard]] std::string faulty_layer(const Kernel& kernel, const Backends& backends);

private:
    [[nodiscard]] std::shared_ptr<const Artifact> outcome_of(const Kernel& kernel, const Backends& backends, int threads);
    [[nodiscard]] std::string ways_round(const Kernel& kernel, const Backends& backends) const;

    ArtifactCache cache_;
    std::mutex mutex_;
    std::map<CacheKey, std::shared_ptr<const Artifact>> known_;
    std::set<CacheKey> faults_now_;  ///< families of which compare() has found a fault
};

/// A path's check on one GPU, for people who ask.
struct PathCheck {
    DeviceRef device;
    std::string name;           ///< the GPU's
    std::string path;           ///< "cuda_sm80"
    std::string skipped;        ///< reason why nothing was compared; empty: it was
    std::string fault;          ///< output that differs, or call that the driver refused; empty: results agree
    std::string other_fault{};  ///< a layer of which a fault is known and stays
    std::vector<Difference> differences{};
    double seconds = 0;
};

/// Compares every path of every GPU of this machine with the CPU backend over a layer, and keeps the outcomes in the session's cache. Empty
/// where there is no GPU, with the reason in `why`.
[[nodiscard]] std::vector<PathCheck> check_paths(const Spec& spec, const Environment& environment, const Backends& backends,
                                                 std::string* why);

}  // namespace flce

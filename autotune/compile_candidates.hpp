// Kernels of what a search asks for, in the cache before it does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "autotune/tuner.hpp"

namespace flce {

/// Counts of compile_candidates.
struct CompiledCandidates {
    std::size_t candidates = 0;
    std::size_t failed = 0;
    std::int64_t compiled = 0;  ///< kernels that no cache had
    bool complete = true;       ///< false: it was stopped
};
/// Compiles a search's kernels into the cache: kernels of its first candidates, of every single change of the cost model's choice, and of
/// every plan that the search can come to from there. Tuning then compiles no kernel, unless another path or strategy than the cost model's
/// wins. Launchers are a plan's own and are not compiled here. The device need not be here. `progress`: candidates done, and all of them.
[[nodiscard]] CompiledCandidates compile_candidates(const TuneOptions& options, const WorkerCommand& worker,
                                                    const std::function<void(std::size_t done, std::size_t all)>& progress,
                                                    const std::function<bool()>& stop);

}  // namespace flce

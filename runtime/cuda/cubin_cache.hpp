// Cubins in the artifact cache, with and without a compiler on this machine.
//
// A cubin's key is its recipe (sources, headers, options, architecture, kernels) and the compiler's build. A machine without NVRTC, a
// container with a pack say, cannot know that build; so beside every cubin a "compiler" entry is kept under the recipe alone, which names
// the compiler of the newest cubin that a cache heard of. With NVRTC the entry is never read: a session compiles with its own NVRTC rather
// than take another compiler's code.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "cache/artifact_cache.hpp"
#include "generator/cuda_program.hpp"

namespace flce {

/// A cubin's recipe: everything that the cubin follows from but the compiler. No path, driver version, time or name of a machine is among
/// it.
struct CubinRecipe {
    std::string_view arch;  ///< exact: "sm_90a"
    std::string_view source;
    std::span<const EmbeddedHeader> headers;
    std::span<const std::string> options;
    std::span<const KernelEntry> kernels;  ///< kernels that the cubin must have before it is published
};
[[nodiscard]] CacheKey recipe_key(const CubinRecipe& recipe);

/// The recipe's digest, and the key of its cubin by one compiler.
[[nodiscard]] CacheKey cubin_key(const CacheKey& recipe, const std::string& compiler_build_id);

/// Cubins that `fault` has something against are put aside, as ArtifactCache says.
/// The cubin of `recipe` by the NVRTC of this build: from the cache, or compiled. Where the cache is strict, nothing can be compiled and
/// anybody's will do.
[[nodiscard]] std::shared_ptr<const Artifact> cubin_by(const std::string& build_id, const CacheKey& recipe, const std::string& arch,
                                                       ArtifactCache& cache, const std::function<Artifact()>& compile,
                                                       const ArtifactCache::PayloadFault& fault = {});

/// The cubin of `recipe` by whichever compiler a tier has one of; null if none has.
[[nodiscard]] std::shared_ptr<const Artifact> cubin_by_any_compiler(const CacheKey& recipe, ArtifactCache& cache,
                                                                    const ArtifactCache::PayloadFault& fault = {});

/// Why a "compiler" entry's payload is no compiler's build; empty: it is one.
[[nodiscard]] std::string compiler_fault(const Artifact& compiler);

}  // namespace flce

// The tiers of a session's artifact cache, out of its options and the environment.
#pragma once

#include "cache/artifact_cache.hpp"
#include "flce/flce.hpp"
#include "records/record_store.hpp"
#include "runtime/environment.hpp"

namespace flce {

/// Throws EnvironmentError for keys that cannot be read: a session that must not trust everybody does not go on trusting everybody.
[[nodiscard]] ArtifactCache::Options cache_options(const SessionOptions& options, const Environment& environment);

/// Places where a session looks for tuning records.
[[nodiscard]] RecordPlaces record_places(const SessionOptions& options, const Environment& environment);

/// Whether kernels may come compiled, from packs or a remote cache.
[[nodiscard]] bool holds_kernels_of_others(const SessionOptions& options, const Environment& environment);

}  // namespace flce

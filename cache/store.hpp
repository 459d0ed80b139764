// One tier of the artifact cache. The disk store is the first; read-only packs and remote stores fit behind the same two calls.
#pragma once

#include <cstdint>
#include <optional>

#include "cache/artifact_cache.hpp"

namespace flce {

/// Thread-safe. Nothing here throws for a fault of the medium: a fault is a miss (or an artifact not kept), counted, and reported once.
class Store {
public:
    Store() = default;
    virtual ~Store() = default;
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;

    [[nodiscard]] virtual std::optional<Artifact> get(const CacheKey& key) = 0;
    /// Keeps `artifact` if it can. A tier that is read-only ignores it.
    virtual void put(const CacheKey& key, const Artifact& artifact) = 0;
    [[nodiscard]] virtual std::int64_t faults() const = 0;
};

}  // namespace flce

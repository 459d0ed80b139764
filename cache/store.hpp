// One tier of the artifact cache behind the memory of the process: the local directory, packs, a remote store.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/artifact_cache.hpp"

namespace flce {

/// Result of asking a tier.
struct Lookup {
    std::optional<Artifact> artifact;  ///< verified; absent: not there, or not usable
    std::vector<std::byte> entry;      ///< the artifact as it was stored (cache/artifact_format.hpp)
    bool fault = false;                ///< something is wrong with the tier or the entry
};

enum class Kept { yes, no, fault };

/// Whether an entry that is put must survive a power cut. Copies of another tier's entries need not.
enum class Durability { now, whenever };

/// Thread-safe. Nothing here throws for a fault of the medium: it is a miss, or an entry not kept, reported once.
class Store {
public:
    Store() = default;
    virtual ~Store() = default;
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;

    /// Name in statistics and messages: "local", "packs", "remote".
    [[nodiscard]] virtual std::string_view name() const noexcept = 0;
    [[nodiscard]] virtual Lookup get(const CacheKey& key) = 0;
    /// Keeps an entry that encode_artifact made, or that another tier's get returned. A tier that is read-only says no.
    [[nodiscard]] virtual Kept put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) = 0;
    /// Tells the tier that the entry from get for `key` is sound but its payload cannot be used, for the reason `why`: the tier puts the
    /// entry aside if it can, and reports it. Returns whether get may have another entry of that key now.
    [[nodiscard]] virtual bool reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) = 0;
    /// Why this tier as a whole is of no use, or of less than it should be, as far as is known by now; empty: it is not. Opens the files
    /// that the answer takes, and asks no network.
    [[nodiscard]] virtual std::string out_of_use() { return {}; }
};

}  // namespace flce

// Compiled artifacts by content key: memory (of this process, while somebody holds it), the local directory, packs, a remote store. Bytes
// and digests only.
#pragma once

#include <array>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flce {

/// SHA-256 over length-prefixed, tagged fields. Content only: no absolute path and no time ever goes in, and a driver's version only in a
/// key of what was seen with that driver.
struct CacheKey {
    std::array<std::uint8_t, 32> digest{};
    [[nodiscard]] std::string hex() const;
    /// The inverse of hex().
    [[nodiscard]] static std::optional<CacheKey> parse(std::string_view hex);
    friend auto operator<=>(const CacheKey&, const CacheKey&) = default;
};

class KeyBuilder {
public:
    /// `kind` separates the key spaces: "cubin", "object", …
    explicit KeyBuilder(std::string_view kind);
    ~KeyBuilder();
    KeyBuilder(const KeyBuilder&) = delete;
    KeyBuilder& operator=(const KeyBuilder&) = delete;
    KeyBuilder& add(std::string_view tag, std::string_view bytes);
    [[nodiscard]] CacheKey finish();

private:
    struct State;
    std::unique_ptr<State> state_;
};

/// Contents of an entry: a JSON object describing it (spec, plan, architecture, compiler, resources) and the payload (cubin, object file).
struct Artifact {
    std::string metadata;
    std::vector<std::byte> payload;
};

class SigningKey;
class Store;

struct TierStatistics {
    std::string name;         ///< "memory", "local", "packs", "remote"
    std::int64_t hits = 0;    ///< lookups that it answered
    std::int64_t misses = 0;  ///< lookups that it did not
    std::int64_t faults = 0;  ///< entries or media that were harmed, refused or out of reach
    std::int64_t stored = 0;  ///< entries that it took
};

struct CacheStatistics {
    std::int64_t memory_hits = 0;
    std::int64_t disk_hits = 0;  ///< hits in the local directory
    std::int64_t pack_hits = 0;
    std::int64_t remote_hits = 0;
    std::int64_t created = 0;
    std::int64_t disk_faults = 0;  ///< faults of the local directory
    std::int64_t pack_faults = 0;
    std::int64_t remote_faults = 0;
    std::vector<TierStatistics> tiers;  ///< in the order in which they are asked
};

/// Thread-safe. A fault of a tier costs a compile at most and is reported once, never thrown.
class ArtifactCache {
public:
    struct Options {
        std::filesystem::path directory;              ///< the local directory; empty: none
        std::vector<std::shared_ptr<Store>> further;  ///< asked in order after the directory, which keeps what they have
        std::chrono::milliseconds lock_wait{30'000};  ///< longest wait for another process that compiles the same key; 0: no locks
        std::uint64_t max_bytes = 0;                  ///< most bytes of the directory: entries used longest ago go first; 0: no limit
        std::shared_ptr<const SigningKey> signer;     ///< signs what this cache creates; none: unsigned
        bool creates = true;  ///< false: get_or_create throws CacheMissError where no tier has the artifact, and nothing is compiled
        bool strict = false;  ///< a tier that is out of use as a whole (Store::out_of_use) is an EnvironmentError, not a warning
        bool counts_on_machine =
            false;  ///< statistics that the directory cannot take go elsewhere (cache/statistics_file.hpp), not nowhere
        /// Hears of every entry that this cache found, created or kept, as it is stored: a pack for the same requests has to hold these
        /// entries.
        std::function<void(const CacheKey&, std::span<const std::byte> entry)> on_use;
    };
    /// Throws only where options.strict says so, as get_or_create and find do.
    explicit ArtifactCache(Options options);
    ~ArtifactCache();
    ArtifactCache(const ArtifactCache&) = delete;
    ArtifactCache& operator=(const ArtifactCache&) = delete;

    /// Why the caller cannot use a tier's artifact (its payload does not load); empty: the caller can. A faulty entry counts as a fault of
    /// its tier, which puts the entry aside, and the search goes on. The function is asked of every artifact that is returned, except one
    /// that this process creates meanwhile. The function may keep the loaded payload: the last artifact that it accepted is the one that is
    /// returned. Its exceptions go to the caller: a fault of the device says nothing about the entry.
    using PayloadFault = std::function<std::string(const Artifact&)>;

    /// The artifact under `key`; `create` makes it if no tier has it. One `create` per key at a time in this process: concurrent callers
    /// wait for it and share its result; an exception goes to all of them and is not remembered. `created`, if given, says whether this
    /// call or the one it waited for ran `create`. `create` and `fault` may ask for other keys, not for their own.
    [[nodiscard]] std::shared_ptr<const Artifact> get_or_create(const CacheKey& key, const std::function<Artifact()>& create,
                                                                bool* created = nullptr, const PayloadFault& fault = {});
    /// The artifact under `key` if a tier has it, null otherwise. With `accept`, the first that it says yes to: tiers may hold different
    /// ones where a key names something that changes. `accept` and `fault` may ask for other keys.
    [[nodiscard]] std::shared_ptr<const Artifact> find(const CacheKey& key, const std::function<bool(const Artifact&)>& accept = {},
                                                       const PayloadFault& fault = {});

    enum class Replace { always, if_absent };
    /// Stores an artifact in every tier that takes it; `if_absent`: unless the local directory has one already.
    void keep(const CacheKey& key, const Artifact& artifact, Replace replace);

    [[nodiscard]] CacheStatistics statistics() const;
    [[nodiscard]] const std::filesystem::path& directory() const noexcept;
    /// Options, for another cache over the same tiers, whose statistics are its own.
    [[nodiscard]] const Options& options() const noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace flce

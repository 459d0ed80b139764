// Compiled artifacts by content key: memory (of this process, while somebody holds it), then disk. Bytes and digests only.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace flce {

/// SHA-256 over length-prefixed, tagged fields. Content only: no absolute path, driver version or time ever goes in.
struct CacheKey {
    std::array<std::uint8_t, 32> digest{};
    [[nodiscard]] std::string hex() const;
    friend bool operator==(const CacheKey&, const CacheKey&) = default;
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

/// What an entry holds: a JSON object describing it (spec, plan, architecture, compiler, resources) and the payload (cubin, object file).
struct Artifact {
    std::string metadata;
    std::vector<std::byte> payload;
};

class Store;

struct CacheStatistics {
    std::int64_t memory_hits = 0;
    std::int64_t disk_hits = 0;
    std::int64_t created = 0;
    std::int64_t disk_faults = 0;
};

/// Thread-safe. A fault of the disk layer costs a compile at most and is reported once, never thrown.
class ArtifactCache {
public:
    struct Options {
        std::filesystem::path directory;              ///< empty: no disk layer
        std::vector<std::shared_ptr<Store>> further;  ///< asked in order after the directory, which keeps what they have
        std::chrono::milliseconds lock_wait{30'000};  ///< longest wait for another process that compiles the same key; 0: no locks
    };
    explicit ArtifactCache(Options options);
    ~ArtifactCache();
    ArtifactCache(const ArtifactCache&) = delete;
    ArtifactCache& operator=(const ArtifactCache&) = delete;

    /// The artifact under `key`; `create` makes it if no layer has it. One `create` per key at a time in this process: concurrent callers
    /// wait for it and share its result; an exception goes to all of them and is not remembered. `created`, if given, says whether this
    /// call or the one it waited for ran `create`. `create` may ask for other keys, not for its own.
    [[nodiscard]] std::shared_ptr<const Artifact> get_or_create(const CacheKey& key, const std::function<Artifact()>& create,
                                                                bool* created = nullptr);
    [[nodiscard]] CacheStatistics statistics() const;
    [[nodiscard]] const std::filesystem::path& directory() const noexcept;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace flce

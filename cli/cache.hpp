// The parts of flce cache.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "cache/signature.hpp"
#include "cli/command.hpp"

namespace flce::cli {

struct CacheFlags {
    std::filesystem::path cache_dir;
    std::vector<std::filesystem::path> packs;  ///< --pack of what looks
    std::vector<std::filesystem::path> sources;
    std::filesystem::path target;
    std::string max_bytes;
    std::filesystem::path pack_file;  ///< --pack of export
    bool load = false;
    bool json = false;

    /// Throws UsageError where there is none.
    [[nodiscard]] std::filesystem::path directory() const;
    /// Whether to look at the local directory: not where --pack names what to look at.
    [[nodiscard]] bool looks_at_directory() const { return packs.empty(); }
    /// --pack's, else those that a session takes.
    [[nodiscard]] const std::vector<std::filesystem::path>& packs_to_look_at() const;
};

/// The local directory, opened as a session would; missing is empty. Throws EnvironmentError if a session would refuse it.
class LocalCache {
public:
    explicit LocalCache(std::filesystem::path directory);
    /// Throws where it cannot tell whether these are all.
    [[nodiscard]] std::vector<StoredFile> entries() const;
    [[nodiscard]] bool exists() const { return exists_; }
    [[nodiscard]] const std::filesystem::path& directory() const { return directory_; }
    [[nodiscard]] DiskStore& store() { return store_; }

private:
    std::filesystem::path directory_;
    DiskStore store_;
    bool exists_ = false;
};

/// Another process, cleaning up perhaps, has removed the entry since it was listed.
[[nodiscard]] bool gone(const Lookup& found);

/// FLCE_TRUSTED_KEYS.
[[nodiscard]] TrustedKeys trusted_keys();

/// An artifact's metadata; a discarded value where it is no JSON.
[[nodiscard]] Json metadata_of(const Artifact& artifact);
/// A value of it as text; empty: there is none.
[[nodiscard]] std::string text_at(const Json& metadata, const char* key);

// Actions of the subcommands; they return exit codes.
[[nodiscard]] int verify_cache(const CacheFlags& flags);
[[nodiscard]] int export_cache(const CacheFlags& flags);
[[nodiscard]] int import_cache(const CacheFlags& flags);
[[nodiscard]] int make_keys(const CacheFlags& flags);

}  // namespace flce::cli

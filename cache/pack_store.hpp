// Packs (cache/pack_format.hpp) as a read-only tier, and how one is written.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/file_descriptor.hpp"
#include "cache/pack_format.hpp"
#include "cache/store.hpp"

namespace flce {

/// One open pack, which stays readable when its name is removed or given to a newer one.
class PackFile {
public:
    /// Checks the head; the entries are checked when they are read. A pack is used if the user or root owns it and nobody else may write
    /// it; or, with `trusted` keys, only if one of them signed it; its owner does not matter. Throws EnvironmentError naming the fault.
    [[nodiscard]] static std::unique_ptr<PackFile> open(const std::filesystem::path& path, const TrustedKeys& trusted);

    /// The verified entry of `key`. fault with the reason in `why` if it is harmed.
    [[nodiscard]] Lookup get(const CacheKey& key, std::string& why) const;
    /// Whether its entry of `key` is the one with that digest.
    [[nodiscard]] bool holds(const CacheKey& key, const Sha256& digest) const;
    [[nodiscard]] const std::vector<PackedEntry>& index() const noexcept { return index_; }
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

private:
    PackFile() = default;
    std::filesystem::path path_;
    FileDescriptor file_;
    std::vector<PackedEntry> index_;
};

/// Writes `contents` as the pack `path`, complete or not at all. Throws EnvironmentError when it cannot.
void write_pack(const std::filesystem::path& path, const PackContents& contents, const SigningKey* signer = nullptr);

/// Several packs, asked in order. Packs are opened at the first use; one that cannot be used is left out, with a warning.
class PackStore final : public Store {
public:
    PackStore(std::vector<std::filesystem::path> paths, TrustedKeys trusted) : paths_(std::move(paths)), trusted_(std::move(trusted)) {}

    [[nodiscard]] std::string_view name() const noexcept override { return "packs"; }
    [[nodiscard]] Lookup get(const CacheKey& key) override;
    [[nodiscard]] Kept put(const CacheKey&, std::span<const std::byte>, Durability) override { return Kept::no; }
    /// Leaves the entry out from now on. Another pack may have one of the same key.
    [[nodiscard]] bool reject(const CacheKey& key, std::span<const std::byte> entry, const std::string& why) override;
    /// A pack that had to be left out.
    [[nodiscard]] std::string out_of_use() override;

private:
    /// Whether a pack had to be left out, the first time that is known.
    bool open_all();

    std::vector<std::filesystem::path> paths_;
    TrustedKeys trusted_;
    std::once_flag opened_;
    std::vector<std::unique_ptr<PackFile>> packs_;
    std::string left_out_;  // why, of the first that was
    std::mutex mutex_;
    std::set<std::pair<const PackFile*, CacheKey>> rejected_;  // under mutex_
};

}  // namespace flce

// The pack of a prewarm: the entries that its kernels use, and no others, in one form whatever cache they came from.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "prewarm/requests.hpp"

namespace flce {

/// Leaves an entry in a folder of a prewarm's own, unless it is there already. Throws EnvironmentError when it cannot.
void leave_entry(const std::filesystem::path& folder, const CacheKey& key, std::span<const std::byte> entry);

/// Writes the pack of entries in `folder`. `used`: for each of `items`, the keys in hexadecimal of what it used. Entries that several items
/// share are described by the first of them, since which made them depends on the cache; signed with FLCE_SIGNING_KEY or not at all.
/// Returns how many there are.
std::size_t write_prewarm_pack(const std::filesystem::path& pack, const std::filesystem::path& folder,
                               const std::vector<PrewarmItem>& items, const std::vector<std::vector<std::string>>& used);

}  // namespace flce

// The bytes of one cache entry. Pure: no files.
//
// Version 1. Integers are little-endian; nothing follows the checksum.
//
//     entry    = magic schema key metadata_bytes payload_bytes packed_bytes metadata packed checksum
//     magic    = "FLCEART" 0x1A                                   8 bytes
//     schema   = u32                                              1
//     key      = the SHA-256 the entry is stored under            32 bytes
//     metadata_bytes, payload_bytes, packed_bytes = u64           sizes of metadata, of the unpacked payload, of packed
//     metadata = JSON object, UTF-8
//     packed   = one zstd frame holding the payload
//     checksum = XXH3-128 of everything before it, canonical (big-endian) form    16 bytes
//
// The checksum finds accidents (torn writes, bad memory, bad disks); who may write a directory decides whether its entries are trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"

namespace flce {

inline constexpr std::uint32_t kArtifactSchema = 1;
inline constexpr std::size_t kArtifactHeaderBytes = 8 + 4 + 32 + 3 * 8;
inline constexpr std::size_t kArtifactChecksumBytes = 16;
// Far above anything flce compiles; a declared size beyond them is refused before any memory is asked for.
inline constexpr std::uint64_t kMaxMetadataBytes = 16ULL << 20;
inline constexpr std::uint64_t kMaxPayloadBytes = 256ULL << 20;
inline constexpr std::uint64_t kMaxEntryBytes =
    kArtifactHeaderBytes + kMaxMetadataBytes + kMaxPayloadBytes + (2ULL << 20) + kArtifactChecksumBytes;

/// Throws std::length_error for an artifact beyond the limits.
[[nodiscard]] std::vector<std::byte> encode_artifact(const CacheKey& key, const Artifact& artifact);

/// std::nullopt, with the reason in `why`, for anything but a complete, unharmed entry of this schema stored under `key`.
[[nodiscard]] std::optional<Artifact> decode_artifact(const CacheKey& key, std::span<const std::byte> entry, std::string& why);

}  // namespace flce

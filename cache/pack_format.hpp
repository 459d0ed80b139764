// The bytes of a pack: many entries in one file, to be shipped with a program. Pure: no files.
//
// Version 1. Integers are little-endian; nothing follows the last entry. There is exactly one pack for given entries and signer: no time,
// path, host or padding to choose.
//
//     pack      = head entries
//     head      = magic schema entry_count file_bytes signature_bytes index [signature] checksum
//     magic     = "FLCEPAK" 0x1A                                   8 bytes
//     schema    = u32                                              1
//     entry_count = u32
//     file_bytes = u64                                             of the whole pack
//     signature_bytes = u64                                        0 or 96
//     index     = entry_count × (key offset bytes digest), keys ascending, no two the same
//     key       = 32 bytes
//     offset, bytes = u64                                          where the entry lies, from the beginning of the file; how long it is
//     digest    = SHA-256 of the entry
//     signature = the signer's Ed25519 public key (32 bytes), then its signature over everything before `signature` (64 bytes)
//     checksum  = XXH3-128 of everything before it, canonical (big-endian) form    16 bytes
//     entries   = in the index's order, each beginning at the next multiple of 64, zero bytes between them: entries of
//     cache/artifact_format.hpp
//
// The signature covers the entries by their digests. Offsets follow from the sizes, and a reader accepts no others; aligned as they are, a
// pack can be mapped and its entries read in place (PackStore reads, since a mapped file that shrinks under the reader kills it).
//
// History: 1 is the first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "cache/sha256.hpp"
#include "cache/signature.hpp"

namespace flce {

inline constexpr std::uint32_t kPackSchema = 1;
inline constexpr std::size_t kPackHeaderBytes = 8 + 4 + 4 + 8 + 8;  // up to the index
inline constexpr std::uint32_t kMaxPackEntries = 1U << 20;
inline constexpr std::uint64_t kPackAlignment = 64;

struct PackedEntry {
    CacheKey key;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    Sha256 digest{};
};

/// Entries by key, each as encode_artifact made it.
using PackContents = std::map<CacheKey, std::vector<std::byte>>;

/// Everything before the entries, and where they go. Throws std::length_error for more entries than a pack holds.
struct PackHead {
    std::vector<std::byte> bytes;
    std::vector<PackedEntry> index;
    std::uint64_t file_bytes = 0;
};
[[nodiscard]] PackHead encode_pack_head(const PackContents& contents, const SigningKey* signer = nullptr);

/// How long the head of a pack is, from its first kPackHeaderBytes; std::nullopt, with the reason in `why`, if they do not begin a pack of
/// `file_bytes`.
[[nodiscard]] std::optional<std::uint64_t> pack_head_bytes(std::span<const std::byte> header, std::uint64_t file_bytes, std::string& why);

/// The index of a complete, unharmed head, signed by one of `trusted` if there are any; else std::nullopt, with the reason in `why`.
[[nodiscard]] std::optional<std::vector<PackedEntry>> decode_pack_head(std::span<const std::byte> head, std::uint64_t file_bytes,
                                                                       std::string& why, const TrustedKeys& trusted = {});

}  // namespace flce

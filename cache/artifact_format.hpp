// The bytes of one cache entry. Pure: no files.
//
// Version 2. Integers are little-endian; nothing follows the checksum.
//
//     entry     = magic schema key metadata_bytes payload_bytes packed_bytes signature_bytes metadata packed [signature] checksum
//     magic     = "FLCEART" 0x1A                                   8 bytes
//     schema    = u32                                              2
//     key       = the SHA-256 the entry is stored under            32 bytes
//     metadata_bytes, payload_bytes, packed_bytes = u64            sizes of metadata, of the unpacked payload, of packed
//     signature_bytes = u64                                        0 or 96
//     metadata  = JSON object, UTF-8
//     packed    = one zstd frame holding the payload, its content size declared
//     signature = the signer's Ed25519 public key (32 bytes), then its signature over everything before `signature` (64 bytes)
//     checksum  = XXH3-128 of everything before it, canonical (big-endian) form    16 bytes
//
// Metadata is for people and tools; nothing that a kernel does depends on it. Keys, absent where they make no sense:
//     kind               "cubin", "object" (host code), "compiler" (which compiler's cubin there is: runtime/cuda/cubin_cache.hpp) or
//                        "check" (outcome of a first use: runtime/first_use.hpp)
//     holds              contents of an object: "CUDA launchers"; absent: CPU kernels
//     spec, plan         JSON of the request for which the entry was made; requests that generate the same code share an entry
//     arch               "sm_90a"; for objects target: {triple, cpu, features}
//     compiler, compiler_build_id, options     "NVRTC 13.0" and its ELF build-ids; "LLVM 19.1.7"
//     kernels            a list, per kernel: name, registers, shared memory, stack, spills
//     created_by         "flce 0.1.0"
// No entry holds a time, a path, a host's or a user's name: the same inputs give the same bytes.
//
// History: 1 had no signature_bytes and no signature. The schema is part of every key, so no version ever asks for another's entries.
//
// The checksum finds accidents (torn writes, bad memory, bad disks); who may write a directory, or whose signature is on an entry, decides
// whether it is trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/artifact_cache.hpp"
#include "cache/byte_io.hpp"
#include "cache/signature.hpp"

namespace flce {

inline constexpr std::uint32_t kArtifactSchema = 2;
inline constexpr std::size_t kArtifactHeaderBytes = 8 + 4 + 32 + 4 * 8;
inline constexpr std::size_t kArtifactChecksumBytes = kChecksumBytes;
// Far above anything flce compiles; a declared size beyond them is refused before any memory is asked for.
inline constexpr std::uint64_t kMaxMetadataBytes = 16ULL << 20;
inline constexpr std::uint64_t kMaxPayloadBytes = 256ULL << 20;
inline constexpr std::uint64_t kMaxEntryBytes =
    kArtifactHeaderBytes + kMaxMetadataBytes + kMaxPayloadBytes + (2ULL << 20) + kSignatureBytes + kArtifactChecksumBytes;

/// Signed if there is a key. Throws std::length_error for an artifact beyond the limits.
[[nodiscard]] std::vector<std::byte> encode_artifact(const CacheKey& key, const Artifact& artifact, const SigningKey* signer = nullptr);

/// std::nullopt, with the reason in `why`, for anything but a complete, unharmed entry of this schema stored under `key`, signed by one of
/// `trusted` if there are any.
[[nodiscard]] std::optional<Artifact> decode_artifact(const CacheKey& key, std::span<const std::byte> entry, std::string& why,
                                                      const TrustedKeys& trusted = {});

/// The key that an entry says it is stored under, for tools that find one under no name; std::nullopt if it is no entry.
[[nodiscard]] std::optional<CacheKey> key_of_entry(std::span<const std::byte> entry);

}  // namespace flce

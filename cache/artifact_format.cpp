#include "cache/artifact_format.hpp"

#include <fmt/format.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace flce {
namespace {

constexpr std::string_view kMagic{"FLCEART\x1a", 8};
constexpr int kCompressionLevel = 3;

struct Header {
    std::string_view magic;
    std::uint32_t schema = 0;
    std::span<const std::byte> key;
    std::uint64_t metadata_bytes = 0;
    std::uint64_t payload_bytes = 0;
    std::uint64_t packed_bytes = 0;
    std::uint64_t signature_bytes = 0;
};

Header take_header(std::span<const std::byte> entry) {
    ByteReader in{entry};
    Header header;
    header.magic = as_text(in.bytes(kMagic.size()));
    header.schema = in.integer<std::uint32_t>();
    header.key = in.bytes(sizeof(CacheKey::digest));
    header.metadata_bytes = in.integer<std::uint64_t>();
    header.payload_bytes = in.integer<std::uint64_t>();
    header.packed_bytes = in.integer<std::uint64_t>();
    header.signature_bytes = in.integer<std::uint64_t>();
    return header;
}

// Everything that can be told without trusting a declared size; empty when the entry is sound.
std::string fault_of(const CacheKey& key, std::span<const std::byte> entry, const Header& header) {
    if (header.magic != kMagic) return "not an flce artifact";
    if (header.schema != kArtifactSchema) return fmt::format("schema {}, this build reads {}", header.schema, kArtifactSchema);
    if (header.metadata_bytes > kMaxMetadataBytes || header.payload_bytes > kMaxPayloadBytes || header.packed_bytes > entry.size()) {
        return fmt::format("declares {} bytes of metadata, {} of payload and {} packed, beyond what an entry may hold",
                           header.metadata_bytes, header.payload_bytes, header.packed_bytes);
    }
    if (header.signature_bytes != 0 && header.signature_bytes != kSignatureBytes) {
        return fmt::format("declares a signature of {} bytes, beyond what an entry may hold", header.signature_bytes);
    }
    const std::uint64_t expected =
        kArtifactHeaderBytes + header.metadata_bytes + header.packed_bytes + header.signature_bytes + kArtifactChecksumBytes;
    if (entry.size() != expected) return fmt::format("{} bytes long, its header says {}", entry.size(), expected);
    const auto body = entry.first(entry.size() - kArtifactChecksumBytes);
    if (!std::ranges::equal(checksum_of(body), entry.subspan(body.size()))) return "checksum mismatch";
    if (std::memcmp(header.key.data(), key.digest.data(), key.digest.size()) != 0) return "holds the entry of another key";
    return {};
}

}  // namespace

std::array<std::byte, kChecksumBytes> checksum_of(std::span<const std::byte> bytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
    std::array<std::byte, kChecksumBytes> result;
    static_assert(sizeof canonical.digest == sizeof result);
    std::memcpy(result.data(), canonical.digest, sizeof result);
    return result;
}

std::vector<std::byte> encode_artifact(const CacheKey& key, const Artifact& artifact, const SigningKey* signer) {
    if (artifact.metadata.size() > kMaxMetadataBytes || artifact.payload.size() > kMaxPayloadBytes) {
        throw std::length_error(fmt::format("artifact of {} bytes with {} of metadata is beyond {} and {}", artifact.payload.size(),
                                            artifact.metadata.size(), kMaxPayloadBytes, kMaxMetadataBytes));
    }
    const std::size_t packed_at = kArtifactHeaderBytes + artifact.metadata.size();
    const std::size_t signature_bytes = signer == nullptr ? 0 : kSignatureBytes;
    std::vector<std::byte> entry(packed_at + ZSTD_compressBound(artifact.payload.size()) + signature_bytes + kArtifactChecksumBytes);
    const std::size_t packed_bytes = ZSTD_compress(entry.data() + packed_at, entry.size() - packed_at, artifact.payload.data(),
                                                   artifact.payload.size(), kCompressionLevel);
    if (ZSTD_isError(packed_bytes)) throw std::runtime_error(fmt::format("zstd: {}", ZSTD_getErrorName(packed_bytes)));

    ByteWriter writer{entry.data()};
    writer.bytes(kMagic.data(), kMagic.size());
    writer.integer<std::uint32_t>(kArtifactSchema);
    writer.bytes(key.digest.data(), key.digest.size());
    writer.integer<std::uint64_t>(artifact.metadata.size());
    writer.integer<std::uint64_t>(artifact.payload.size());
    writer.integer<std::uint64_t>(packed_bytes);
    writer.integer<std::uint64_t>(signature_bytes);
    writer.bytes(artifact.metadata.data(), artifact.metadata.size());
    writer.at += packed_bytes;
    if (signer != nullptr) {
        const Signature signature = signer->sign(std::span(entry).first(packed_at + packed_bytes));
        writer.bytes(signature.data(), signature.size());
    }
    const std::size_t body_bytes = packed_at + packed_bytes + signature_bytes;
    const auto checksum = checksum_of(std::span(entry).first(body_bytes));
    writer.bytes(checksum.data(), checksum.size());
    entry.resize(body_bytes + kArtifactChecksumBytes);
    return entry;
}

std::optional<Artifact> decode_artifact(const CacheKey& key, std::span<const std::byte> entry, std::string& why,
                                        const TrustedKeys& trusted) {
    if (entry.size() < kArtifactHeaderBytes + kArtifactChecksumBytes) {
        why = fmt::format("truncated to {} bytes", entry.size());
        return std::nullopt;
    }
    const Header header = take_header(entry);
    why = fault_of(key, entry, header);
    if (!why.empty()) return std::nullopt;

    const auto metadata = entry.subspan(kArtifactHeaderBytes, header.metadata_bytes);
    const auto packed = entry.subspan(kArtifactHeaderBytes + header.metadata_bytes, header.packed_bytes);
    if (!trusted.empty()) {
        const std::size_t signed_bytes = kArtifactHeaderBytes + header.metadata_bytes + header.packed_bytes;
        why = trusted.fault_of(entry.first(signed_bytes), entry.subspan(signed_bytes, header.signature_bytes));
        if (!why.empty()) return std::nullopt;
    }
    if (ZSTD_getFrameContentSize(packed.data(), packed.size()) != header.payload_bytes) {
        why = "the packed payload's size differs from the header's";
        return std::nullopt;
    }
    Artifact artifact;
    artifact.metadata = as_text(metadata);
    artifact.payload.resize(header.payload_bytes);
    const std::size_t unpacked = ZSTD_decompress(artifact.payload.data(), artifact.payload.size(), packed.data(), packed.size());
    if (ZSTD_isError(unpacked) || unpacked != header.payload_bytes) {
        why = "the payload does not unpack";
        return std::nullopt;
    }
    return artifact;
}

std::optional<CacheKey> key_of_entry(std::span<const std::byte> entry) {
    if (entry.size() < kArtifactHeaderBytes + kArtifactChecksumBytes) return std::nullopt;
    const Header header = take_header(entry);
    if (header.magic != kMagic) return std::nullopt;
    CacheKey key;
    std::memcpy(key.digest.data(), header.key.data(), key.digest.size());
    return key;
}

}  // namespace flce

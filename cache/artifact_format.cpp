#include "cache/artifact_format.hpp"

#include <fmt/format.h>
#include <xxhash.h>
#include <zstd.h>

#include <array>
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
};

// Writes one field after another into memory that is large enough.
struct Writer {
    std::byte* at;

    void bytes(const void* data, std::size_t size) {
        if (size != 0) std::memcpy(at, data, size);
        at += size;
    }
    template <class Integer>
    void integer(Integer value) {
        for (std::size_t i = 0; i < sizeof(Integer); ++i) *at++ = static_cast<std::byte>(value >> (8 * i));
    }
};

template <class Integer>
Integer take_integer(std::span<const std::byte>& in) {
    Integer value = 0;
    for (std::size_t i = 0; i < sizeof(Integer); ++i) value |= static_cast<Integer>(std::to_integer<Integer>(in[i]) << (8 * i));
    in = in.subspan(sizeof(Integer));
    return value;
}

std::string_view as_text(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

Header take_header(std::span<const std::byte> in) {
    Header header;
    header.magic = as_text(in.first(kMagic.size()));
    in = in.subspan(kMagic.size());
    header.schema = take_integer<std::uint32_t>(in);
    header.key = in.first(sizeof(CacheKey::digest));
    in = in.subspan(sizeof(CacheKey::digest));
    header.metadata_bytes = take_integer<std::uint64_t>(in);
    header.payload_bytes = take_integer<std::uint64_t>(in);
    header.packed_bytes = take_integer<std::uint64_t>(in);
    return header;
}

std::array<std::byte, kArtifactChecksumBytes> checksum_of(std::span<const std::byte> bytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
    std::array<std::byte, kArtifactChecksumBytes> result;
    static_assert(sizeof canonical.digest == sizeof result);
    std::memcpy(result.data(), canonical.digest, sizeof result);
    return result;
}

// Everything that can be told without trusting a declared size; empty when the entry is sound.
std::string fault_of(const CacheKey& key, std::span<const std::byte> entry, const Header& header) {
    if (header.magic != kMagic) return "not an flce artifact";
    if (header.schema != kArtifactSchema) return fmt::format("schema {}, this build reads {}", header.schema, kArtifactSchema);
    if (header.metadata_bytes > kMaxMetadataBytes || header.payload_bytes > kMaxPayloadBytes || header.packed_bytes > entry.size()) {
        return fmt::format("declares {} bytes of metadata, {} of payload and {} packed, beyond what an entry may hold",
                           header.metadata_bytes, header.payload_bytes, header.packed_bytes);
    }
    const std::uint64_t expected = kArtifactHeaderBytes + header.metadata_bytes + header.packed_bytes + kArtifactChecksumBytes;
    if (entry.size() != expected) return fmt::format("{} bytes long, its header says {}", entry.size(), expected);
    const auto body = entry.first(entry.size() - kArtifactChecksumBytes);
    if (std::memcmp(checksum_of(body).data(), entry.data() + body.size(), kArtifactChecksumBytes) != 0) return "checksum mismatch";
    if (std::memcmp(header.key.data(), key.digest.data(), key.digest.size()) != 0) return "holds the entry of another key";
    return {};
}

}  // namespace

std::vector<std::byte> encode_artifact(const CacheKey& key, const Artifact& artifact) {
    if (artifact.metadata.size() > kMaxMetadataBytes || artifact.payload.size() > kMaxPayloadBytes) {
        throw std::length_error(fmt::format("artifact of {} bytes with {} of metadata is beyond {} and {}", artifact.payload.size(),
                                            artifact.metadata.size(), kMaxPayloadBytes, kMaxMetadataBytes));
    }
    const std::size_t packed_at = kArtifactHeaderBytes + artifact.metadata.size();
    std::vector<std::byte> entry(packed_at + ZSTD_compressBound(artifact.payload.size()) + kArtifactChecksumBytes);
    const std::size_t packed_bytes = ZSTD_compress(entry.data() + packed_at, entry.size() - packed_at, artifact.payload.data(),
                                                   artifact.payload.size(), kCompressionLevel);
    if (ZSTD_isError(packed_bytes)) throw std::runtime_error(fmt::format("zstd: {}", ZSTD_getErrorName(packed_bytes)));

    Writer writer{entry.data()};
    writer.bytes(kMagic.data(), kMagic.size());
    writer.integer<std::uint32_t>(kArtifactSchema);
    writer.bytes(key.digest.data(), key.digest.size());
    writer.integer<std::uint64_t>(artifact.metadata.size());
    writer.integer<std::uint64_t>(artifact.payload.size());
    writer.integer<std::uint64_t>(packed_bytes);
    writer.bytes(artifact.metadata.data(), artifact.metadata.size());
    writer.at += packed_bytes;
    const std::size_t body_bytes = packed_at + packed_bytes;
    const auto checksum = checksum_of(std::span(entry).first(body_bytes));
    writer.bytes(checksum.data(), checksum.size());
    entry.resize(body_bytes + kArtifactChecksumBytes);
    return entry;
}

std::optional<Artifact> decode_artifact(const CacheKey& key, std::span<const std::byte> entry, std::string& why) {
    if (entry.size() < kArtifactHeaderBytes + kArtifactChecksumBytes) {
        why = fmt::format("truncated to {} bytes", entry.size());
        return std::nullopt;
    }
    const Header header = take_header(entry);
    why = fault_of(key, entry, header);
    if (!why.empty()) return std::nullopt;

    const auto packed = entry.subspan(kArtifactHeaderBytes + header.metadata_bytes, header.packed_bytes);
    if (ZSTD_getFrameContentSize(packed.data(), packed.size()) != header.payload_bytes) {
        why = "the packed payload's size differs from the header's";
        return std::nullopt;
    }
    Artifact artifact;
    artifact.metadata = as_text(entry.subspan(kArtifactHeaderBytes, header.metadata_bytes));
    artifact.payload.resize(header.payload_bytes);
    const std::size_t unpacked = ZSTD_decompress(artifact.payload.data(), artifact.payload.size(), packed.data(), packed.size());
    if (ZSTD_isError(unpacked) || unpacked != header.payload_bytes) {
        why = "the payload does not unpack";
        return std::nullopt;
    }
    return artifact;
}

}  // namespace flce

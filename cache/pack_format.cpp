#include "cache/pack_format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "cache/artifact_format.hpp"
#include "cache/byte_io.hpp"

namespace flce {
namespace {

constexpr std::string_view kPackMagic{"FLCEPAK\x1a", 8};
constexpr std::size_t kIndexEntryBytes = 32 + 8 + 8 + kSha256Bytes;

std::uint64_t aligned(std::uint64_t offset) { return (offset + kPackAlignment - 1) / kPackAlignment * kPackAlignment; }

struct PackHeader {
    std::string_view magic;
    std::uint32_t schema = 0;
    std::uint32_t entry_count = 0;
    std::uint64_t file_bytes = 0;
    std::uint64_t signature_bytes = 0;
};

PackHeader take_header(ByteReader& in) {
    PackHeader header;
    header.magic = as_text(in.bytes(kPackMagic.size()));
    header.schema = in.integer<std::uint32_t>();
    header.entry_count = in.integer<std::uint32_t>();
    header.file_bytes = in.integer<std::uint64_t>();
    header.signature_bytes = in.integer<std::uint64_t>();
    return header;
}

std::uint64_t head_bytes_of(std::uint64_t entry_count, std::uint64_t signature_bytes) {
    return kPackHeaderBytes + entry_count * kIndexEntryBytes + signature_bytes + kChecksumBytes;
}

PackedEntry take_entry(ByteReader& in) {
    PackedEntry entry;
    const auto key = in.bytes(entry.key.digest.size());
    std::memcpy(entry.key.digest.data(), key.data(), key.size());
    entry.offset = in.integer<std::uint64_t>();
    entry.bytes = in.integer<std::uint64_t>();
    const auto digest = in.bytes(kSha256Bytes);
    std::copy(digest.begin(), digest.end(), entry.digest.begin());
    return entry;
}

// The index must be the one that the writer makes for these sizes.
std::string fault_of(const std::vector<PackedEntry>& index, std::uint64_t head_bytes, std::uint64_t file_bytes) {
    std::uint64_t end = head_bytes;
    for (std::size_t i = 0; i < index.size(); ++i) {
        if (index[i].bytes > kMaxEntryBytes) return fmt::format("declares an entry of {} bytes", index[i].bytes);
        if (i > 0 && !(index[i - 1].key < index[i].key)) return "its keys are not in order";
        if (index[i].offset != aligned(end)) return "its entries are not where they belong";
        end = index[i].offset + index[i].bytes;
    }
    return end == file_bytes ? "" : "its entries do not fill it";
}

}  // namespace

PackHead encode_pack_head(const PackContents& contents, const SigningKey* signer) {
    if (contents.size() > kMaxPackEntries) {
        throw std::length_error(fmt::format("a pack of {} entries is beyond {}", contents.size(), kMaxPackEntries));
    }
    const std::uint64_t signature_bytes = signer == nullptr ? 0 : kSignatureBytes;
    PackHead head;
    head.bytes.resize(head_bytes_of(contents.size(), signature_bytes));
    head.index.reserve(contents.size());
    head.file_bytes = head.bytes.size();
    for (const auto& [key, bytes] : contents) {
        head.index.push_back({key, aligned(head.file_bytes), bytes.size(), sha256_of(bytes)});
        head.file_bytes = head.index.back().offset + bytes.size();
    }
    ByteWriter writer{head.bytes.data()};
    writer.bytes(kPackMagic.data(), kPackMagic.size());
    writer.integer<std::uint32_t>(kPackSchema);
    writer.integer<std::uint32_t>(static_cast<std::uint32_t>(contents.size()));
    writer.integer<std::uint64_t>(head.file_bytes);
    writer.integer<std::uint64_t>(signature_bytes);
    for (const PackedEntry& entry : head.index) {
        writer.bytes(entry.key.digest.data(), entry.key.digest.size());
        writer.integer<std::uint64_t>(entry.offset);
        writer.integer<std::uint64_t>(entry.bytes);
        writer.bytes(entry.digest.data(), entry.digest.size());
    }
    const auto written = [&] { return std::span<const std::byte>(head.bytes.data(), writer.at); };
    if (signer != nullptr) {
        const Signature signature = signer->sign(written());
        writer.bytes(signature.data(), signature.size());
    }
    const auto checksum = checksum_of(written());
    writer.bytes(checksum.data(), checksum.size());
    return head;
}

std::optional<std::uint64_t> pack_head_bytes(std::span<const std::byte> header, std::uint64_t file_bytes, std::string& why) {
    why.clear();
    if (header.size() < kPackHeaderBytes) {
        why = fmt::format("truncated to {} bytes", header.size());
        return std::nullopt;
    }
    ByteReader in{header};
    const PackHeader declared = take_header(in);
    if (declared.magic != kPackMagic) {
        why = "not an flce pack";
    } else if (declared.schema != kPackSchema) {
        why = fmt::format("schema {}, this build reads {}", declared.schema, kPackSchema);
    } else if (declared.entry_count > kMaxPackEntries || (declared.signature_bytes != 0 && declared.signature_bytes != kSignatureBytes)) {
        why = fmt::format("declares {} entries and a signature of {} bytes, beyond what a pack may hold", declared.entry_count,
                          declared.signature_bytes);
    } else if (declared.file_bytes != file_bytes || head_bytes_of(declared.entry_count, declared.signature_bytes) > file_bytes) {
        why = fmt::format("{} bytes long, its header says {}", file_bytes, declared.file_bytes);
    }
    if (!why.empty()) return std::nullopt;
    return head_bytes_of(declared.entry_count, declared.signature_bytes);
}

std::optional<std::vector<PackedEntry>> decode_pack_head(std::span<const std::byte> head, std::uint64_t file_bytes, std::string& why,
                                                         const TrustedKeys& trusted) {
    const auto head_bytes = pack_head_bytes(head, file_bytes, why);
    if (!head_bytes) return std::nullopt;
    if (*head_bytes != head.size()) {
        why = fmt::format("its head is truncated to {} bytes", head.size());
        return std::nullopt;
    }
    const auto body = head.first(head.size() - kChecksumBytes);
    if (!std::ranges::equal(checksum_of(body), head.subspan(body.size()))) {
        why = "checksum mismatch";
        return std::nullopt;
    }
    ByteReader in{body};
    const PackHeader header = take_header(in);
    const auto signed_part = body.first(body.size() - header.signature_bytes);
    if (!trusted.empty()) {
        why = trusted.fault_of(signed_part, body.subspan(signed_part.size()));
        if (!why.empty()) return std::nullopt;
    }
    std::vector<PackedEntry> index;
    index.reserve(header.entry_count);
    for (std::uint32_t i = 0; i < header.entry_count; ++i) index.push_back(take_entry(in));
    why = fault_of(index, *head_bytes, file_bytes);
    if (!why.empty()) return std::nullopt;
    return index;
}

}  // namespace flce

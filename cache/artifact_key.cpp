#include <openssl/evp.h>

#include <charconv>
#include <stdexcept>

#include "cache/artifact_cache.hpp"
#include "cache/artifact_format.hpp"
#include "cache/sha256.hpp"

namespace flce {
namespace {

// Changes when the meaning of keys or the format of entries does, so that old entries are simply never asked for again.
constexpr std::string_view kKeySchema = "flce key 2";
static_assert(kArtifactSchema == 2, "an entry of another schema needs keys of its own: change kKeySchema too");

}  // namespace

struct KeyBuilder::State {
    EVP_MD_CTX* context = EVP_MD_CTX_new();
    ~State() { EVP_MD_CTX_free(context); }

    void bytes(std::string_view data) {
        if (EVP_DigestUpdate(context, data.data(), data.size()) != 1) throw std::runtime_error("SHA-256 update failed");
    }
    // The length before the bytes, little-endian, makes ("ab", "c") and ("a", "bc") different keys.
    void field(std::string_view data) {
        std::array<char, 8> length{};
        for (std::size_t i = 0; i < length.size(); ++i) length[i] = static_cast<char>(static_cast<std::uint64_t>(data.size()) >> (8 * i));
        bytes({length.data(), length.size()});
        bytes(data);
    }
};

KeyBuilder::KeyBuilder(std::string_view kind) : state_(std::make_unique<State>()) {
    if (state_->context == nullptr || EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) != 1) {
        throw std::runtime_error("SHA-256 is not available from OpenSSL");
    }
    state_->field(kKeySchema);
    state_->field(kind);
}

KeyBuilder::~KeyBuilder() = default;

KeyBuilder& KeyBuilder::add(std::string_view tag, std::string_view bytes) {
    state_->field(tag);
    state_->field(bytes);
    return *this;
}

CacheKey KeyBuilder::finish() {
    CacheKey key;
    unsigned size = 0;
    if (EVP_DigestFinal_ex(state_->context, key.digest.data(), &size) != 1 || size != key.digest.size()) {
        throw std::runtime_error("SHA-256 did not finish");
    }
    return key;
}

std::string CacheKey::hex() const { return hex_of(std::as_bytes(std::span(digest))); }

std::optional<CacheKey> CacheKey::parse(std::string_view hex) {
    CacheKey key;
    if (hex.size() != 2 * key.digest.size()) return std::nullopt;
    for (std::size_t i = 0; i < key.digest.size(); ++i) {
        const char* const digits = hex.data() + 2 * i;
        const auto [end, error] = std::from_chars(digits, digits + 2, key.digest[i], 16);
        if (error != std::errc() || end != digits + 2) return std::nullopt;
    }
    // One text for each key.
    return key.hex() == hex ? std::optional(key) : std::nullopt;
}

Sha256 sha256_of(std::span<const std::byte> bytes) {
    Sha256 digest;
    unsigned size = 0;
    if (EVP_Digest(bytes.data(), bytes.size(), reinterpret_cast<unsigned char*>(digest.data()), &size, EVP_sha256(), nullptr) != 1 ||
        size != digest.size()) {
        throw std::runtime_error("SHA-256 is not available from OpenSSL");
    }
    return digest;
}

std::string hex_of(std::span<const std::byte> bytes) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    text.reserve(2 * bytes.size());
    for (const std::byte byte : bytes) {
        text += kDigits[std::to_integer<unsigned>(byte) >> 4];
        text += kDigits[std::to_integer<unsigned>(byte) & 15];
    }
    return text;
}

}  // namespace flce

#include <openssl/evp.h>

#include <stdexcept>

#include "cache/artifact_cache.hpp"

namespace flce {
namespace {

// Changes when the meaning of keys does, so that old entries are simply never asked for again.
constexpr std::string_view kKeySchema = "flce key 1";

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

std::string CacheKey::hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    text.reserve(2 * digest.size());
    for (const std::uint8_t byte : digest) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

}  // namespace flce

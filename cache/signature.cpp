#include "cache/signature.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "cache/file_descriptor.hpp"
#include "flce/error.hpp"

namespace flce {
namespace {

struct FreeKey {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
struct FreeContext {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};
struct FreeBio {
    void operator()(BIO* bio) const { BIO_free(bio); }
};
using KeyPointer = std::unique_ptr<EVP_PKEY, FreeKey>;
using ContextPointer = std::unique_ptr<EVP_MD_CTX, FreeContext>;

constexpr std::size_t kMaxPemBytes = 64 << 10;

using ReadPem = EVP_PKEY* (*)(BIO*, EVP_PKEY**, pem_password_cb*, void*);

// An encrypted key has nobody to ask for its password.
int no_password(char*, int, int, void*) { return -1; }

KeyPointer read_pem(const std::filesystem::path& file, ReadPem read, const char* what) {
    std::ifstream stream(file, std::ios::binary);
    std::string text(kMaxPemBytes, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(stream.gcount()));
    const std::unique_ptr<BIO, FreeBio> bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
    KeyPointer key(text.empty() || !bio ? nullptr : read(bio.get(), nullptr, &no_password, nullptr));
    if (!key || EVP_PKEY_get_id(key.get()) != EVP_PKEY_ED25519) {
        throw EnvironmentError(fmt::format("{} is not an Ed25519 {} key in PEM that can be read", file.string(), what));
    }
    return key;
}

std::array<std::byte, kPublicKeyBytes> raw_public_key(const EVP_PKEY* key) {
    std::array<std::byte, kPublicKeyBytes> raw{};
    std::size_t size = raw.size();
    if (EVP_PKEY_get_raw_public_key(key, reinterpret_cast<unsigned char*>(raw.data()), &size) != 1 || size != raw.size()) {
        throw std::runtime_error("OpenSSL gives no raw Ed25519 key");
    }
    return raw;
}

const unsigned char* raw(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }

}  // namespace

struct SigningKey::Key {
    KeyPointer pointer;
};

std::shared_ptr<const SigningKey> SigningKey::read(const std::filesystem::path& file) {
    auto key = std::make_shared<Key>(Key{read_pem(file, &PEM_read_bio_PrivateKey, "private")});
    auto result = std::shared_ptr<SigningKey>(new SigningKey(key));
    result->public_key_ = raw_public_key(key->pointer.get());
    return result;
}

Signature SigningKey::sign(std::span<const std::byte> message) const {
    Signature signature;
    std::copy(public_key_.begin(), public_key_.end(), signature.begin());
    const ContextPointer context(EVP_MD_CTX_new());
    std::size_t size = kSignatureBytes - kPublicKeyBytes;
    if (!context || EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_->pointer.get()) != 1 ||
        EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(signature.data() + kPublicKeyBytes), &size, raw(message.data()),
                       message.size()) != 1) {
        throw std::runtime_error("OpenSSL could not sign");
    }
    return signature;
}

void write_key_pair(const std::filesystem::path& private_file, const std::filesystem::path& public_file) {
    const KeyPointer key(EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"));
    const auto write = [&](const std::filesystem::path& path, mode_t mode, auto write_key) {
        const std::unique_ptr<BIO, FreeBio> bio(BIO_new(BIO_s_mem()));
        const char* text = nullptr;
        if (!key || !bio || write_key(bio.get()) != 1) throw std::runtime_error("OpenSSL could not make a key");
        const long size = BIO_get_mem_data(bio.get(), &text);
        FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
        if (!file || ::write(file.get(), text, static_cast<std::size_t>(size)) != size || !file.close()) {
            throw EnvironmentError(fmt::format("key {} cannot be written: {}", path.string(), std::strerror(errno)));
        }
    };
    write(private_file, 0600, [&](BIO* bio) { return PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
    write(public_file, 0644, [&](BIO* bio) { return PEM_write_bio_PUBKEY(bio, key.get()); });
}

TrustedKeys TrustedKeys::read(const std::vector<std::filesystem::path>& files) {
    TrustedKeys trusted;
    for (const auto& file : files) trusted.keys_.push_back(raw_public_key(read_pem(file, &PEM_read_bio_PUBKEY, "public").get()));
    return trusted;
}

std::string TrustedKeys::fault_of(std::span<const std::byte> message, std::span<const std::byte> signature) const {
    if (signature.size() != kSignatureBytes) return "not signed";
    const auto signer = signature.first(kPublicKeyBytes);
    const auto is_signer = [&](const auto& key) { return std::ranges::equal(key, signer); };
    if (std::ranges::none_of(keys_, is_signer)) return "signed by a key that is not trusted";
    const KeyPointer key(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, raw(signer.data()), signer.size()));
    const ContextPointer context(EVP_MD_CTX_new());
    const bool good = key && context && EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
                      EVP_DigestVerify(context.get(), raw(signature.data() + kPublicKeyBytes), kSignatureBytes - kPublicKeyBytes,
                                       raw(message.data()), message.size()) == 1;
    return good ? "" : "its signature is wrong";
}

}  // namespace flce

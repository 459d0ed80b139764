// Ed25519 signatures of packs and entries (OpenSSL). A signature is 96 bytes: the signer's raw public key, then the signature proper.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace flce {

inline constexpr std::size_t kPublicKeyBytes = 32;
inline constexpr std::size_t kSignatureBytes = kPublicKeyBytes + 64;
using Signature = std::array<std::byte, kSignatureBytes>;

class SigningKey {
public:
    /// A private key in PEM (`openssl genpkey -algorithm ed25519`). Throws EnvironmentError for anything else.
    [[nodiscard]] static std::shared_ptr<const SigningKey> read(const std::filesystem::path& file);

    [[nodiscard]] Signature sign(std::span<const std::byte> message) const;

private:
    struct Key;
    explicit SigningKey(std::shared_ptr<const Key> key) : key_(std::move(key)) {}
    std::shared_ptr<const Key> key_;
    std::array<std::byte, kPublicKeyBytes> public_key_{};
};

/// Makes a key pair: two PEM files that must not exist yet, the private one readable by the user alone. Throws EnvironmentError when it
/// cannot.
void write_key_pair(const std::filesystem::path& private_file, const std::filesystem::path& public_file);

/// Keys whose signatures count. None: signatures are not asked for.
class TrustedKeys {
public:
    TrustedKeys() = default;
    /// Public keys in PEM (`openssl pkey -in PRIVATE -pubout`). Throws EnvironmentError for anything else.
    [[nodiscard]] static TrustedKeys read(const std::vector<std::filesystem::path>& files);

    [[nodiscard]] bool empty() const noexcept { return keys_.empty(); }
    /// Why `signature` does not make `message` trustworthy; empty: it does. An empty signature is an absent one.
    [[nodiscard]] std::string fault_of(std::span<const std::byte> message, std::span<const std::byte> signature) const;

private:
    std::vector<std::array<std::byte, kPublicKeyBytes>> keys_;
};

}  // namespace flce

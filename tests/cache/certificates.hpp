// Certificates for servers on loopback, made afresh by the test that needs them.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

namespace flce::test {

/// PEM files.
struct Certificate {
    std::filesystem::path certificate;
    std::filesystem::path key;
};

/// How a server's certificate can be wrong.
struct CertificateOptions {
    std::string host = "IP:127.0.0.1";  ///< the one it is for: IP:… or DNS:…
    long valid_from_s = -3600;          ///< seconds from now
    long valid_until_s = 3600;
};

/// A certificate authority of nobody but the test.
class CertificateAuthority {
public:
    CertificateAuthority();
    ~CertificateAuthority();
    CertificateAuthority(const CertificateAuthority&) = delete;
    CertificateAuthority& operator=(const CertificateAuthority&) = delete;

    /// Writes the authority's certificate: NAME.pem, and in the folder NAME under the name by which OpenSSL looks for it.
    [[nodiscard]] std::filesystem::path write(const std::filesystem::path& folder, const std::string& name) const;
    /// Writes a server's: NAME.pem, NAME.key.
    [[nodiscard]] Certificate issue(const std::filesystem::path& folder, const std::string& name, const CertificateOptions& options) const;

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace flce::test

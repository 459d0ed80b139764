#include "tests/cache/certificates.hpp"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <stdexcept>

namespace flce::test {
namespace {

namespace fs = std::filesystem;

template <auto Free>
struct FreeWith {
    template <class T>
    void operator()(T* held) const {
        Free(held);
    }
};
using KeyPointer = std::unique_ptr<EVP_PKEY, FreeWith<EVP_PKEY_free>>;
using CertificatePointer = std::unique_ptr<X509, FreeWith<X509_free>>;

void check(bool done, const char* what) {
    if (!done) throw std::runtime_error(std::string("OpenSSL: ") + what);
}

KeyPointer make_key() {
    KeyPointer key(EVP_EC_gen("P-256"));
    check(key != nullptr, "no key");
    return key;
}

struct Names {
    std::string subject;
    const X509* issuer;  // null: itself
};

long next_number() {
    static long number = 0;
    return ++number;
}

CertificatePointer make_certificate(const Names& names, EVP_PKEY* key, const CertificateOptions& options) {
    CertificatePointer certificate(X509_new());
    check(certificate && X509_set_version(certificate.get(), X509_VERSION_3) == 1, "no certificate");
    ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), next_number());
    X509_gmtime_adj(X509_getm_notBefore(certificate.get()), options.valid_from_s);
    X509_gmtime_adj(X509_getm_notAfter(certificate.get()), options.valid_until_s);
    X509_NAME* const subject = X509_get_subject_name(certificate.get());
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(names.subject.c_str()), -1, -1, 0);
    X509_set_issuer_name(certificate.get(), names.issuer == nullptr ? subject : X509_get_subject_name(names.issuer));
    check(X509_set_pubkey(certificate.get(), key) == 1, "no public key");
    return certificate;
}

void extend(X509* certificate, int extension, const std::string& value) {
    X509_EXTENSION* const made = X509V3_EXT_conf_nid(nullptr, nullptr, extension, value.c_str());
    check(made != nullptr && X509_add_ext(certificate, made, -1) == 1, value.c_str());
    X509_EXTENSION_free(made);
}

template <class Write>
void write_pem(const fs::path& path, const Write& write) {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    check(file != nullptr && write(file) == 1, path.c_str());
    std::fclose(file);
}

void write_certificate(const fs::path& path, X509* certificate) {
    write_pem(path, [&](std::FILE* file) { return PEM_write_X509(file, certificate); });
}

}  // namespace

struct CertificateAuthority::State {
    KeyPointer key = make_key();
    CertificatePointer certificate;
};

CertificateAuthority::CertificateAuthority() : state_(std::make_unique<State>()) {
    state_->certificate = make_certificate({fmt::format("flce test authority {}", next_number()), nullptr}, state_->key.get(), {});
    extend(state_->certificate.get(), NID_basic_constraints, "critical,CA:TRUE");
    extend(state_->certificate.get(), NID_key_usage, "critical,keyCertSign");
    check(X509_sign(state_->certificate.get(), state_->key.get(), EVP_sha256()) > 0, "not signed");
}

CertificateAuthority::~CertificateAuthority() = default;

fs::path CertificateAuthority::write(const fs::path& folder, const std::string& name) const {
    const fs::path file = folder / (name + ".pem");
    write_certificate(file, state_->certificate.get());
    fs::create_directory(folder / name);
    fs::create_symlink(
        file, folder / name /
                  fmt::format("{:08x}.0", X509_NAME_hash_ex(X509_get_subject_name(state_->certificate.get()), nullptr, nullptr, nullptr)));
    return file;
}

Certificate CertificateAuthority::issue(const fs::path& folder, const std::string& name, const CertificateOptions& options) const {
    const KeyPointer key = make_key();
    const CertificatePointer certificate = make_certificate({"flce test server", state_->certificate.get()}, key.get(), options);
    extend(certificate.get(), NID_subject_alt_name, options.host);
    check(X509_sign(certificate.get(), state_->key.get(), EVP_sha256()) > 0, "not signed");
    Certificate written{folder / (name + ".pem"), folder / (name + ".key")};
    write_certificate(written.certificate, certificate.get());
    write_pem(written.key, [&](std::FILE* file) { return PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
    return written;
}

}  // namespace flce::test

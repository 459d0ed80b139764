#include "cache/signature.hpp"

#include <gmock/gmock.h>

#include "cache/artifact_format.hpp"
#include "cache/byte_io.hpp"
#include "flce/error.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cache/keys.hpp"

namespace flce {
namespace {

using test::artifact_of;
using test::key_of;
using testing::HasSubstr;

class SignatureTest : public testing::Test {
protected:
    test::TemporaryDirectory folder_;
    test::KeyPair ours_ = test::make_key_pair(folder_.path(), "ours");
    test::KeyPair theirs_ = test::make_key_pair(folder_.path(), "theirs");
    std::shared_ptr<const SigningKey> signer_ = SigningKey::read(ours_.private_key);
    TrustedKeys trusted_ = TrustedKeys::read({theirs_.public_key, ours_.public_key});

    [[nodiscard]] std::string fault(std::span<const std::byte> entry, const TrustedKeys& trusted) const {
        std::string why;
        (void)decode_artifact(key_of("k"), entry, why, trusted);
        return why;
    }
};

TEST_F(SignatureTest, SignedByATrustedKey_Good) {
    const auto message = as_byte_span("a message");
    EXPECT_EQ(trusted_.fault_of(message, signer_->sign(message)), "");
    EXPECT_EQ(signer_->sign(message), signer_->sign(message));  // packs are reproducible
}

TEST_F(SignatureTest, OtherMessageOtherKeyNoSignature_Refused) {
    const auto message = as_byte_span("a message");
    Signature signature = signer_->sign(message);
    EXPECT_THAT(trusted_.fault_of(as_byte_span("b message"), signature), HasSubstr("wrong"));
    EXPECT_THAT(trusted_.fault_of(message, {}), HasSubstr("not signed"));
    EXPECT_THAT(TrustedKeys::read({theirs_.public_key}).fault_of(message, signature), HasSubstr("not trusted"));
    // Their key's name over our signature.
    const Signature other = SigningKey::read(theirs_.private_key)->sign(message);
    std::copy_n(other.begin(), kPublicKeyBytes, signature.begin());
    EXPECT_THAT(trusted_.fault_of(message, signature), HasSubstr("wrong"));
}

TEST_F(SignatureTest, Entry_SignatureAskedForOnlyWithTrustedKeys) {
    const auto with = encode_artifact(key_of("k"), artifact_of("p"), signer_.get());
    const auto without = encode_artifact(key_of("k"), artifact_of("p"));
    EXPECT_EQ(fault(with, {}), "");
    EXPECT_EQ(fault(without, {}), "");
    EXPECT_EQ(fault(with, trusted_), "");
    EXPECT_EQ(fault(without, trusted_), "not signed");
    EXPECT_THAT(fault(with, TrustedKeys::read({theirs_.public_key})), HasSubstr("not trusted"));
}

TEST_F(SignatureTest, EntryChangedAndItsChecksumMended_Refused) {
    const auto good = encode_artifact(key_of("k"), artifact_of("a small payload"), signer_.get());
    for (std::size_t i = 0; i < good.size() - kArtifactChecksumBytes; ++i) {
        auto harmed = good;
        harmed[i] ^= std::byte{1};
        const auto body = std::span(harmed).first(harmed.size() - kArtifactChecksumBytes);
        std::ranges::copy(checksum_of(body), harmed.begin() + static_cast<std::ptrdiff_t>(body.size()));
        EXPECT_NE(fault(harmed, trusted_), "") << "byte " << i;
    }
}

TEST_F(SignatureTest, KeyFileOfAnotherKind_ErrorNamesTheFile) {
    const auto nothing = folder_.path() / "nothing.pem";
    test::write_file(folder_.path() / "junk.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
    EXPECT_THAT([&] { (void)SigningKey::read(nothing); }, testing::ThrowsMessage<EnvironmentError>(HasSubstr("nothing.pem")));
    EXPECT_THROW((void)SigningKey::read(folder_.path() / "junk.pem"), EnvironmentError);
    // a key as long as an Ed25519 key, made for something else
    test::write_file(
        folder_.path() / "x25519.pem",
        "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VuAyEACSDwCSDwCSDwCSDwCSDwCSDwCSDwCSDwCSDwCSDwCSA=\n-----END PUBLIC KEY-----\n");
    EXPECT_THROW((void)TrustedKeys::read({folder_.path() / "x25519.pem"}), EnvironmentError);
    EXPECT_THROW((void)SigningKey::read(ours_.public_key), EnvironmentError);
    EXPECT_THROW((void)TrustedKeys::read({ours_.private_key}), EnvironmentError);
    EXPECT_THROW((void)TrustedKeys::read({ours_.public_key, nothing}), EnvironmentError);
}

}  // namespace
}  // namespace flce

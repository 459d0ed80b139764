#include <gmock/gmock.h>
#include <sys/stat.h>

#include "cache/artifact_format.hpp"
#include "cache/byte_io.hpp"
#include "cache/pack_store.hpp"
#include "flce/error.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cache/keys.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::key_of;
using test::payload_text;
using testing::HasSubstr;
using testing::ThrowsMessage;

class PackTest : public testing::Test {
protected:
    test::TemporaryDirectory folder_;
    fs::path path_ = folder_.path() / "kernels.flcepack";

    static PackContents contents(std::initializer_list<const char*> names) {
        PackContents result;
        for (const char* name : names) result[key_of(name)] = encode_artifact(key_of(name), artifact_of(name));
        return result;
    }
    [[nodiscard]] std::string payload(const char* name, const fs::path& path, const TrustedKeys& trusted = {}) const {
        PackStore store({path}, trusted);
        const Lookup found = store.get(key_of(name));
        return found.artifact ? payload_text(*found.artifact) : found.fault ? "fault" : "absent";
    }
};

TEST_F(PackTest, WrittenAndRead_EveryEntryAndNoOther) {
    write_pack(path_, contents({"a", "b", "c"}));
    for (const char* name : {"a", "b", "c"}) EXPECT_EQ(payload(name, path_), name);
    EXPECT_EQ(payload("d", path_), "absent");
    const auto pack = PackFile::open(path_, {});
    for (const PackedEntry& entry : pack->index()) EXPECT_EQ(entry.offset % kPackAlignment, 0u);
    EXPECT_EQ(fs::status(path_).permissions(), fs::perms(0644));
}

TEST_F(PackTest, NothingInIt_Fine) {
    write_pack(path_, {});
    EXPECT_EQ(payload("a", path_), "absent");
}

TEST_F(PackTest, SameInputs_SameBytesWhereverItLies) {
    const auto keys = test::make_key_pair(folder_.path(), "k");
    const auto signer = SigningKey::read(keys.private_key);
    fs::create_directory(folder_.path() / "elsewhere");
    const fs::path other = folder_.path() / "elsewhere" / "renamed";
    for (const SigningKey* key : {static_cast<const SigningKey*>(nullptr), signer.get()}) {
        write_pack(path_, contents({"a", "b", "c"}), key);
        write_pack(other, contents({"c", "b", "a"}), key);
        EXPECT_EQ(test::read_file(path_), test::read_file(other));
        EXPECT_EQ(payload("b", other), "b");
    }
}

TEST_F(PackTest, AnyByteChanged_RightKernelOrNone) {
    write_pack(path_, contents({"a", "b"}));
    const std::string whole = test::read_file(path_);
    int harmless = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
        std::string harmed = whole;
        harmed[i] = static_cast<char>(harmed[i] ^ (1 << (i % 8)));
        test::write_file(path_, harmed);
        int right = 0;
        for (const char* name : {"a", "b"}) {
            const std::string got = payload(name, path_);
            EXPECT_THAT(got, testing::AnyOf(name, "fault")) << "byte " << i;
            right += got == name ? 1 : 0;
        }
        if (right == 2) ++harmless;
    }
    // Nothing reads the bytes between entries.
    EXPECT_LT(harmless, 2 * static_cast<int>(kPackAlignment));
}

TEST_F(PackTest, TruncatedAtEveryByte_LeftOut) {
    write_pack(path_, contents({"a"}));
    const std::string whole = test::read_file(path_);
    for (std::size_t size = 0; size < whole.size(); ++size) {
        test::write_file(path_, whole.substr(0, size));
        EXPECT_EQ(payload("a", path_), "fault") << size;
    }
    test::write_file(path_, whole + "x");
    EXPECT_EQ(payload("a", path_), "fault");
}

TEST_F(PackTest, HugeDeclaredSizes_RefusedBeforeAllocation) {
    write_pack(path_, contents({"a"}));
    const std::string whole = test::read_file(path_);
    for (const std::size_t field : {12u, 16u, 24u, 64u, 72u}) {
        std::string harmed = whole;
        for (std::size_t i = 0; i < 4; ++i) harmed[field + i] = '\xff';
        // A mended checksum: what an attacker would do.
        const std::size_t head = kPackHeaderBytes + 80;
        const auto checksum = checksum_of(as_byte_span(std::string_view(harmed).substr(0, head)));
        harmed.replace(head, kChecksumBytes, as_text(checksum));
        test::write_file(path_, harmed);
        EXPECT_THROW((void)PackFile::open(path_, {}), EnvironmentError) << field;
    }
}

TEST_F(PackTest, SeveralPacks_FirstThatHasIt) {
    const fs::path second = folder_.path() / "second";
    PackContents changed;
    changed[key_of("a")] = encode_artifact(key_of("a"), artifact_of("another a"));
    changed[key_of("z")] = encode_artifact(key_of("z"), artifact_of("z"));
    write_pack(path_, contents({"a"}));
    write_pack(second, changed);
    PackStore store({path_, folder_.path() / "missing", second}, {});
    const Lookup first = store.get(key_of("a"));
    EXPECT_EQ(payload_text(*first.artifact), "a");
    EXPECT_TRUE(first.fault);  // the missing one, told once
    const Lookup other = store.get(key_of("z"));
    EXPECT_EQ(payload_text(*other.artifact), "z");
    EXPECT_FALSE(other.fault);
}

TEST_F(PackTest, EntryHarmedInTheFirst_TakenFromTheSecond) {
    const fs::path second = folder_.path() / "second";
    write_pack(path_, contents({"a"}));
    write_pack(second, contents({"a"}));
    std::string harmed = test::read_file(path_);
    harmed.back() = static_cast<char>(harmed.back() ^ 1);
    test::write_file(path_, harmed);
    PackStore store({path_, second}, {});
    const Lookup found = store.get(key_of("a"));
    EXPECT_EQ(payload_text(*found.artifact), "a");
    EXPECT_TRUE(found.fault);
}

TEST_F(PackTest, RemovedOrReplacedWhileOpen_StillRead) {
    write_pack(path_, contents({"a"}));
    PackStore store({path_}, {});
    EXPECT_TRUE(store.get(key_of("a")).artifact);
    write_pack(path_, contents({"b"}));
    EXPECT_TRUE(store.get(key_of("a")).artifact);
    fs::remove(path_);
    EXPECT_TRUE(store.get(key_of("a")).artifact);
}

TEST_F(PackTest, TruncatedWhileOpen_Fault) {
    write_pack(path_, contents({"a"}));
    PackStore store({path_}, {});
    EXPECT_TRUE(store.get(key_of("a")).artifact);
    fs::resize_file(path_, 10);
    const Lookup found = store.get(key_of("a"));
    EXPECT_FALSE(found.artifact);
    EXPECT_TRUE(found.fault);
}

TEST_F(PackTest, OthersMayWriteIt_RefusedUnlessSignedByATrustedKey) {
    const auto keys = test::make_key_pair(folder_.path(), "k");
    const TrustedKeys trusted = TrustedKeys::read({keys.public_key});
    write_pack(path_, contents({"a"}));
    fs::permissions(path_, fs::perms::group_write, fs::perm_options::add);
    EXPECT_THAT([&] { (void)PackFile::open(path_, {}); }, ThrowsMessage<EnvironmentError>(HasSubstr("lets group or others write")));
    EXPECT_THAT([&] { (void)PackFile::open(path_, trusted); }, ThrowsMessage<EnvironmentError>(HasSubstr("not signed")));
    write_pack(path_, contents({"a"}), SigningKey::read(keys.private_key).get());
    fs::permissions(path_, fs::perms::group_write, fs::perm_options::add);
    EXPECT_EQ(payload("a", path_, trusted), "a");
}

TEST_F(PackTest, SignedAndAnyByteChanged_RightKernelOrNone) {
    const auto keys = test::make_key_pair(folder_.path(), "k");
    const TrustedKeys trusted = TrustedKeys::read({keys.public_key});
    write_pack(path_, contents({"a"}), SigningKey::read(keys.private_key).get());
    const std::string whole = test::read_file(path_);
    EXPECT_EQ(payload("a", path_, trusted), "a");
    const std::size_t body = kPackHeaderBytes + 80 + kSignatureBytes;
    for (std::size_t i = 0; i < body; ++i) {
        std::string harmed = whole;
        harmed[i] = static_cast<char>(harmed[i] ^ 1);
        const auto checksum = checksum_of(as_byte_span(std::string_view(harmed).substr(0, body)));
        harmed.replace(body, kChecksumBytes, as_text(checksum));
        test::write_file(path_, harmed);
        EXPECT_EQ(payload("a", path_, trusted), "fault") << "byte " << i;
    }
}

TEST_F(PackTest, CannotBeWritten_ErrorAndNothingLeft) {
    EXPECT_THAT([&] { write_pack(folder_.path() / "no" / "such" / "folder", contents({"a"})); },
                ThrowsMessage<EnvironmentError>(HasSubstr("cannot be written")));
    EXPECT_TRUE(fs::is_empty(folder_.path()));
}

}  // namespace
}  // namespace flce

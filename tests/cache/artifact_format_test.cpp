#include "cache/artifact_format.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using test::artifact_of;
using test::key_of;
using testing::HasSubstr;

TEST(KeyBuilder, SameFields_SameKey) {
    EXPECT_EQ(key_of("a"), key_of("a"));
    EXPECT_EQ(key_of("a").hex().size(), 64u);
}

TEST(KeyBuilder, AnyDifference_DifferentKey) {
    const CacheKey base = KeyBuilder("k").add("ab", "c").add("d", "e").finish();
    EXPECT_NE(base, KeyBuilder("k").add("a", "bc").add("d", "e").finish());  // a border moved
    EXPECT_NE(base, KeyBuilder("k").add("d", "e").add("ab", "c").finish());  // the order
    EXPECT_NE(base, KeyBuilder("l").add("ab", "c").add("d", "e").finish());  // the kind
    EXPECT_NE(base, KeyBuilder("k").add("ab", "c").finish());
    EXPECT_NE(base, KeyBuilder("k").add("ab", std::string_view("c\0", 2)).add("d", "e").finish());
}

TEST(KeyBuilder, KnownInput_StaysTheSameAcrossBuilds) {
    // A changed value here silently invalidates every user's cache: change kKeySchema on purpose instead.
    EXPECT_EQ(KeyBuilder("cubin").add("source", "x").finish().hex(), "2d3e6003e49234ff7c8965821ee36c67964581248534fa88db8882a02e23a522");
}

TEST(CacheKey, Text_OneForEachKey) {
    const CacheKey key = key_of("a");
    EXPECT_EQ(CacheKey::parse(key.hex()), key);
    std::string upper = key.hex();
    std::ranges::transform(upper, upper.begin(), [](char c) { return static_cast<char>(std::toupper(c)); });
    ASSERT_NE(upper, key.hex());
    for (const std::string& other : {upper, key.hex() + "00", key.hex().substr(2), "+" + key.hex().substr(1), std::string(64, 'g')}) {
        EXPECT_FALSE(CacheKey::parse(other)) << other;
    }
}

TEST(ArtifactFormat, RoundTrip_EqualArtifact) {
    for (const std::string& payload : {std::string(), std::string("payload"), std::string(100'000, 'x')}) {
        const auto entry = encode_artifact(key_of("k"), artifact_of(payload));
        std::string why;
        const auto decoded = decode_artifact(key_of("k"), entry, why);
        ASSERT_TRUE(decoded) << why;
        EXPECT_EQ(decoded->metadata, R"({"kind":"test"})");
        EXPECT_EQ(test::payload_text(*decoded), payload);
    }
}

TEST(ArtifactFormat, TruncatedAtEveryByte_Refused) {
    const auto entry = encode_artifact(key_of("k"), artifact_of("a small payload"));
    for (std::size_t size = 0; size < entry.size(); ++size) {
        std::string why;
        EXPECT_FALSE(decode_artifact(key_of("k"), std::span(entry).first(size), why)) << size;
        EXPECT_FALSE(why.empty());
    }
}

TEST(ArtifactFormat, EveryBitFlipped_Refused) {
    auto entry = encode_artifact(key_of("k"), artifact_of("a small payload"));
    for (std::size_t i = 0; i < 8 * entry.size(); ++i) {
        entry[i / 8] ^= static_cast<std::byte>(1 << (i % 8));
        std::string why;
        EXPECT_FALSE(decode_artifact(key_of("k"), entry, why)) << "bit " << i;
        entry[i / 8] ^= static_cast<std::byte>(1 << (i % 8));
    }
}

TEST(ArtifactFormat, TrailingBytes_Refused) {
    auto entry = encode_artifact(key_of("k"), artifact_of("p"));
    entry.push_back(std::byte{0});
    std::string why;
    EXPECT_FALSE(decode_artifact(key_of("k"), entry, why));
}

TEST(ArtifactFormat, ForeignKey_Refused) {
    const auto entry = encode_artifact(key_of("other"), artifact_of("p"));
    std::string why;
    EXPECT_FALSE(decode_artifact(key_of("k"), entry, why));
    EXPECT_THAT(why, HasSubstr("another key"));
}

// The checksum finds accidents; what a header says is looked at all the same.
TEST(ArtifactFormat, HeaderChangedAndItsChecksumMended_Refused) {
    const auto good = encode_artifact(key_of("k"), artifact_of("a small payload"));
    const auto fault = [](std::vector<std::byte> entry) {
        const auto body = std::span(entry).first(entry.size() - kArtifactChecksumBytes);
        std::ranges::copy(checksum_of(body), entry.begin() + static_cast<std::ptrdiff_t>(body.size()));
        std::string why;
        EXPECT_FALSE(decode_artifact(key_of("k"), entry, why));
        return why;
    };
    const auto with = [&](std::size_t at, std::byte value) {
        auto entry = good;
        entry[at] = value;
        return fault(entry);
    };
    EXPECT_THAT(with(0, std::byte{'f'}), HasSubstr("not an flce artifact"));
    EXPECT_THAT(with(8, std::byte{kArtifactSchema - 1}), HasSubstr("schema 1"));
    EXPECT_THAT(with(8, std::byte{kArtifactSchema + 1}), HasSubstr("schema 3"));
    EXPECT_THAT(with(12, good[12] ^ std::byte{1}), HasSubstr("another key"));
    EXPECT_THAT(with(68, std::byte{1}), HasSubstr("declares a signature of 1 bytes"));
    EXPECT_THAT(with(52, good[52] ^ std::byte{1}), HasSubstr("payload"));
    auto longer = good;
    longer.insert(longer.end() - kArtifactChecksumBytes, std::byte{0});
    EXPECT_THAT(fault(longer), HasSubstr("its header says"));
}

TEST(ArtifactFormat, HugeDeclaredSizes_RefusedBeforeAllocation) {
    const auto good = encode_artifact(key_of("k"), artifact_of("p"));
    for (const std::size_t field : {44u, 52u, 60u, 68u}) {
        for (const std::uint64_t size : {1ULL << 40, ~0ULL, ~0ULL - kArtifactHeaderBytes}) {
            auto entry = good;
            std::memcpy(entry.data() + field, &size, sizeof size);
            std::string why;
            EXPECT_FALSE(decode_artifact(key_of("k"), entry, why));
            EXPECT_THAT(why, HasSubstr("declares")) << field;
        }
    }
}

TEST(ArtifactFormat, BeyondTheLimits_NotEncoded) {
    EXPECT_THROW((void)encode_artifact(key_of("k"), {std::string(kMaxMetadataBytes + 1, ' '), {}}), std::length_error);
}

}  // namespace
}  // namespace flce

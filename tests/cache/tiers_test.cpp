// The order of the tiers, and what they give one another.
#include <gmock/gmock.h>

#include <map>

#include "cache/artifact_format.hpp"
#include "cache/store.hpp"
#include "tests/cache/cache_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::ArtifactCacheTest;
using test::key_of;
using test::payload_text;

// A tier in memory, which another cache may have filled.
class MapStore final : public Store {
public:
    explicit MapStore(std::string name) : name_(std::move(name)) {}
    [[nodiscard]] std::string_view name() const noexcept override { return name_; }
    [[nodiscard]] Lookup get(const CacheKey& key) override {
        ++gets;
        const auto found = entries.find(key);
        if (found == entries.end()) return {.fault = ill};
        std::string why;
        return {decode_artifact(key, found->second, why), found->second, ill};
    }
    [[nodiscard]] Kept put(const CacheKey& key, std::span<const std::byte> entry, Durability durability) override {
        last_durability = durability;
        if (read_only) return Kept::no;
        entries[key] = {entry.begin(), entry.end()};
        return Kept::yes;
    }
    [[nodiscard]] bool reject(const CacheKey&, std::span<const std::byte>, const std::string& why) override {
        rejections.push_back(why);
        return false;
    }
    void fill(const CacheKey& key, const Artifact& artifact) { entries[key] = encode_artifact(key, artifact); }

    std::map<CacheKey, std::vector<std::byte>> entries;
    std::vector<std::string> rejections;
    int gets = 0;
    bool ill = false;
    bool read_only = false;
    Durability last_durability = Durability::now;

private:
    std::string name_;
};

Artifact never() { throw std::logic_error("not to be made"); }

TEST_F(ArtifactCacheTest, FartherTier_AskedAfterNearerOnesWhichAreGivenWhatItHas) {
    const auto packs = std::make_shared<MapStore>("packs");
    const auto remote = std::make_shared<MapStore>("remote");
    packs->read_only = true;
    remote->fill(key_of("shared"), artifact_of("from afar"));
    ArtifactCache cache({.directory = directory_.path(), .further = {packs, remote}});
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("shared"), never)), "from afar");
    EXPECT_EQ(packs->gets, 1);
    const CacheStatistics statistics = cache.statistics();
    EXPECT_EQ(statistics.remote_hits, 1);
    EXPECT_EQ(statistics.created, 0);
    ASSERT_EQ(statistics.tiers.size(), 4u);
    EXPECT_EQ(statistics.tiers[1].name, "local");
    EXPECT_EQ(statistics.tiers[1].misses, 1);
    EXPECT_EQ(statistics.tiers[1].stored, 1);
    EXPECT_EQ(statistics.tiers[2].misses, 1);
    EXPECT_EQ(statistics.tiers[2].stored, 0);
    EXPECT_EQ(statistics.tiers[3].hits, 1);
    int created = 0;
    EXPECT_EQ(fresh_get(key_of("shared"), created), "from afar");
    EXPECT_EQ(created, 0);
}

TEST_F(ArtifactCacheTest, Created_GivenToEveryTierDurably) {
    const auto remote = std::make_shared<MapStore>("remote");
    ArtifactCache cache({.directory = directory_.path(), .further = {remote}});
    (void)cache.get_or_create(key_of("new"), [] { return artifact_of("made"); });
    EXPECT_EQ(remote->entries.size(), 1u);
    EXPECT_EQ(remote->last_durability, Durability::now);
    EXPECT_TRUE(fs::exists(entry_path(key_of("new"))));
}

TEST_F(ArtifactCacheTest, TierIsIll_CountedAndTheNextIsAsked) {
    const auto ill = std::make_shared<MapStore>("packs");
    const auto remote = std::make_shared<MapStore>("remote");
    ill->ill = true;
    remote->fill(key_of("k"), artifact_of("p"));
    ArtifactCache cache({.further = {ill, remote}});
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), never)), "p");
    EXPECT_EQ(cache.statistics().pack_faults, 1);
    EXPECT_EQ(cache.statistics().remote_faults, 0);
}

TEST_F(ArtifactCacheTest, Find_NeverCreates) {
    ArtifactCache cache({.directory = directory_.path()});
    EXPECT_EQ(cache.find(key_of("k")), nullptr);
    (void)cache.get_or_create(key_of("k"), [] { return artifact_of("p"); });
    ASSERT_NE(cache.find(key_of("k")), nullptr);
    EXPECT_EQ(payload_text(*cache.find(key_of("k"))), "p");
}

TEST_F(ArtifactCacheTest, FindThatAccepts_GoesOnToTheNextTier) {
    const auto first = std::make_shared<MapStore>("packs");
    const auto second = std::make_shared<MapStore>("remote");
    first->fill(key_of("k"), artifact_of("old"));
    second->fill(key_of("k"), artifact_of("new"));
    ArtifactCache cache({.further = {first, second}});
    const auto found = cache.find(key_of("k"), [](const Artifact& artifact) { return payload_text(artifact) == "new"; });
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(payload_text(*found), "new");
    EXPECT_EQ(cache.find(key_of("k"), [](const Artifact&) { return false; }), nullptr);
}

TEST_F(ArtifactCacheTest, RemotePayloadThatCannotBeUsed_IsOverwrittenByAGoodOne) {
    const auto remote = std::make_shared<MapStore>("remote");
    remote->fill(key_of("k"), artifact_of("bad"));
    ArtifactCache cache({.directory = directory_.path(), .further = {remote}});
    const auto fault = [](const Artifact& artifact) -> std::string { return payload_text(artifact) == "bad" ? "it is bad" : ""; };
    EXPECT_EQ(payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("good"); }, nullptr, fault)), "good");
    EXPECT_THAT(remote->rejections, testing::ElementsAre("it is bad"));
    EXPECT_EQ(cache.statistics().remote_faults, 1);
    EXPECT_EQ(cache.statistics().disk_faults, 0);
    // Another machine gets the good one.
    ArtifactCache other({.further = {remote}});
    EXPECT_EQ(payload_text(*other.get_or_create(key_of("k"), never, nullptr, fault)), "good");
}

TEST_F(ArtifactCacheTest, Keep_ReplacesOnlyWhenToldTo) {
    ArtifactCache cache({.directory = directory_.path()});
    cache.keep(key_of("k"), artifact_of("first"), ArtifactCache::Replace::if_absent);
    cache.keep(key_of("k"), artifact_of("second"), ArtifactCache::Replace::if_absent);
    EXPECT_EQ(payload_text(*cache.find(key_of("k"))), "first");
    cache.keep(key_of("k"), artifact_of("third"), ArtifactCache::Replace::always);
    EXPECT_EQ(payload_text(*cache.find(key_of("k"))), "third");
}

TEST_F(ArtifactCacheTest, OnUse_HearsOfEveryEntryWhateverItsTier) {
    int created = 0;
    (void)fresh_get(key_of("on disk"), created);
    std::map<CacheKey, std::vector<std::byte>> used;
    ArtifactCache cache({.directory = directory_.path(), .on_use = [&](const CacheKey& key, std::span<const std::byte> entry) {
                             used[key] = {entry.begin(), entry.end()};
                         }});
    (void)cache.get_or_create(key_of("on disk"), never);
    (void)cache.get_or_create(key_of("new"), [] { return artifact_of("made"); });
    cache.keep(key_of("kept"), artifact_of("kept"), ArtifactCache::Replace::if_absent);
    cache.keep(key_of("kept"), artifact_of("kept"), ArtifactCache::Replace::if_absent);
    EXPECT_EQ(used.size(), 3u);
    for (const auto& [key, entry] : used) {
        std::string why;
        EXPECT_TRUE(decode_artifact(key, entry, why)) << why;
    }
}

}  // namespace
}  // namespace flce

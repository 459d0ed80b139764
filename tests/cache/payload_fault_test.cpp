// Entries that are sound as entries and hold what nobody can use: every tier's costs a search in the next one and at last a compile,
// never more.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "cache/artifact_format.hpp"
#include "cache/pack_store.hpp"
#include "flce/error.hpp"
#include "tests/cache/cache_fixture.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::artifact_of;
using test::ArtifactCacheTest;
using test::key_of;
using test::payload_text;
using testing::HasSubstr;

/// Says no to everything that begins with "bad".
std::string fault_of(const Artifact& artifact) { return payload_text(artifact).starts_with("bad") ? "it is bad" : ""; }

class PayloadFault : public ArtifactCacheTest {
protected:
    void fill(const std::string& payload) const {
        ArtifactCache cache({.directory = directory_.path()});
        cache.keep(key_of("k"), artifact_of(payload), ArtifactCache::Replace::always);
    }
    [[nodiscard]] fs::path pack_of(const std::string& name, const std::string& payload) const {
        const fs::path path = directory_.path() / name;
        write_pack(path, {{key_of("k"), encode_artifact(key_of("k"), artifact_of(payload))}});
        return path;
    }
    static std::string get(ArtifactCache& cache) {
        return payload_text(*cache.get_or_create(key_of("k"), [] { return artifact_of("made"); }, nullptr, fault_of));
    }
};

TEST_F(PayloadFault, LocalEntry_CostsACompileAndIsPutAside) {
    fill("bad");
    ArtifactCache cache({.directory = directory_.path()});
    EXPECT_EQ(get(cache), "made");
    EXPECT_EQ(cache.statistics().created, 1);
    EXPECT_EQ(cache.statistics().disk_faults, 1);
    EXPECT_EQ(warnings(), 1);
    EXPECT_TRUE(fs::exists(entry_path(key_of("k")).string() + ".corrupt"));
    int created = 0;
    EXPECT_EQ(fresh_get(key_of("k"), created), "made");  // the good one is there now
    EXPECT_EQ(created, 0);
}

TEST_F(PayloadFault, EveryTiersEntry_IsPassedOverAndNotCopied) {
    fill("bad here");
    const fs::path cache_dir = directory_.path();
    const auto packs = std::make_shared<PackStore>(std::vector{pack_of("a", "bad in a"), pack_of("b", "good in b")}, TrustedKeys());
    ArtifactCache cache({.directory = cache_dir, .further = {packs}});
    EXPECT_EQ(get(cache), "good in b");
    EXPECT_EQ(cache.statistics().created, 0);
    EXPECT_EQ(cache.statistics().pack_faults, 1);
    EXPECT_EQ(cache.statistics().pack_hits, 1);
    int created = 0;
    EXPECT_EQ(fresh_get(key_of("k"), created), "good in b");
    // An entry that was passed over once is not read again.
    ArtifactCache diskless({.further = {packs}});
    EXPECT_EQ(get(diskless), "good in b");
    EXPECT_EQ(diskless.statistics().pack_faults, 0);
}

TEST_F(PayloadFault, AllPacksAreBad_Compiled) {
    const auto packs = std::make_shared<PackStore>(std::vector{pack_of("a", "bad in a"), pack_of("b", "bad in b")}, TrustedKeys());
    ArtifactCache cache({.further = {packs}});
    EXPECT_EQ(get(cache), "made");
    EXPECT_EQ(cache.statistics().created, 1);
    EXPECT_EQ(cache.statistics().pack_faults, 2);
}

TEST_F(PayloadFault, Find_GoesOnPastIt) {
    fill("bad");
    const auto packs = std::make_shared<PackStore>(std::vector{pack_of("a", "good")}, TrustedKeys());
    ArtifactCache cache({.directory = directory_.path(), .further = {packs}});
    const auto found = cache.find(key_of("k"), {}, fault_of);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(payload_text(*found), "good");
}

TEST_F(PayloadFault, HeldInMemory_IsForgotten) {
    fill("bad");
    ArtifactCache cache({.directory = directory_.path()});
    const auto held = cache.get_or_create(key_of("k"), [] { return artifact_of("made"); });  // by one who only reads it
    EXPECT_EQ(payload_text(*held), "bad");
    EXPECT_EQ(get(cache), "made");
    const auto found = cache.find(key_of("k"), {}, fault_of);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(payload_text(*found), "made");
}

TEST_F(PayloadFault, NothingMayBeCreated_TheMissNamesIt) {
    fill("bad");
    ArtifactCache cache({.directory = directory_.path(), .creates = false});
    try {
        (void)get(cache);
        FAIL() << "there is nothing to be had";
    } catch (const CacheMissError& miss) {
        EXPECT_THAT(miss.what(), HasSubstr("it is bad"));
    }
}

TEST_F(PayloadFault, CannotBePutAside_CompiledEachTime) {
    fill("bad");
    const fs::path shard = entry_path(key_of("k")).parent_path();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        // Root may write everywhere: as somebody else, whose directory it is.
        if (::geteuid() == 0) {
            for (const auto& file : fs::recursive_directory_iterator(directory_.path())) {
                if (::chown(file.path().c_str(), 65534, 65534) != 0) ::_exit(100);
            }
            if (::chown(directory_.path().c_str(), 65534, 65534) != 0 || ::setuid(65534) != 0) ::_exit(100);
        }
        fs::permissions(shard, fs::perms::owner_read | fs::perms::owner_exec);
        for (int i = 0; i < 2; ++i) {
            ArtifactCache cache({.directory = directory_.path()});
            if (get(cache) != "made" || cache.statistics().created != 1) ::_exit(1);
        }
        fs::permissions(shard, fs::perms::owner_all);
        ::_exit(fs::exists(entry_path(key_of("k"))) ? 0 : 2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(PayloadFault, FaultOfTheDevice_IsThrownAndCondemnsNothing) {
    fill("good");
    ArtifactCache cache({.directory = directory_.path()});
    const auto broken = [](const Artifact&) -> std::string { throw DeviceError("out of memory", "cuModuleLoadData", 2); };
    EXPECT_THROW((void)cache.get_or_create(key_of("k"), [] { return artifact_of("made"); }, nullptr, broken), DeviceError);
    EXPECT_EQ(get(cache), "good");
    EXPECT_EQ(cache.statistics().created, 0);
}

TEST_F(PayloadFault, ManyThreads_OneCompile) {
    fill("bad");
    ArtifactCache cache({.directory = directory_.path()});
    std::vector<std::shared_ptr<const Artifact>> results(8);
    {
        std::vector<std::jthread> threads;
        for (auto& result : results) {
            threads.emplace_back([&] { result = cache.get_or_create(key_of("k"), [] { return artifact_of("made"); }, nullptr, fault_of); });
        }
    }
    for (const auto& result : results) EXPECT_EQ(payload_text(*result), "made");
    EXPECT_EQ(cache.statistics().created, 1);
}

}  // namespace
}  // namespace flce

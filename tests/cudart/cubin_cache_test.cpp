#include "runtime/cuda/cubin_cache.hpp"

#include <gmock/gmock.h>

#include "cache/disk_store.hpp"
#include "cache/pack_store.hpp"
#include "tests/cache/cache_test_support.hpp"

namespace flce {
namespace {

using test::artifact_of;
using test::payload_text;

class CubinCacheTest : public testing::Test {
protected:
    test::TemporaryDirectory folder_;
    CacheKey recipe_ = KeyBuilder("cubin recipe").add("source", "x").finish();

    [[nodiscard]] ArtifactCache::Options here(std::vector<std::shared_ptr<Store>> further = {}) const {
        return {.directory = folder_.path() / "cache", .further = std::move(further)};
    }
    std::string by(const std::string& build_id, ArtifactCache& cache) {
        return payload_text(*cubin_by(build_id, recipe_, "sm_90a", cache, [&] { return artifact_of("cubin by " + build_id); }));
    }
    std::string by_any(ArtifactCache& cache) {
        const auto cubin = cubin_by_any_compiler(recipe_, cache);
        return cubin ? payload_text(*cubin) : "none";
    }
    /// What a build machine's cache used, as a pack.
    std::shared_ptr<Store> pack_of(const std::string& name, const std::function<void(ArtifactCache&)>& use) {
        PackContents contents;
        ArtifactCache::Options options = here();
        options.on_use = [&](const CacheKey& key, std::span<const std::byte> entry) { contents[key] = {entry.begin(), entry.end()}; };
        ArtifactCache cache(options);
        use(cache);
        write_pack(folder_.path() / name, contents);
        return std::make_shared<PackStore>(std::vector{folder_.path() / name}, TrustedKeys());
    }
};

TEST_F(CubinCacheTest, WithoutACompiler_TheNewestCompilersCubin) {
    {
        ArtifactCache cache(here());
        EXPECT_EQ(by_any(cache), "none");
        EXPECT_EQ(by("old", cache), "cubin by old");
        EXPECT_EQ(by_any(cache), "cubin by old");
        EXPECT_EQ(by("new", cache), "cubin by new");
    }
    ArtifactCache later(here());
    EXPECT_EQ(by_any(later), "cubin by new");
    EXPECT_EQ(later.statistics().created, 0);
}

TEST_F(CubinCacheTest, WithACompiler_NeverAnothersCubin) {
    ArtifactCache cache(here());
    (void)by("old", cache);
    EXPECT_EQ(by("new", cache), "cubin by new");
    EXPECT_EQ(by("old", cache), "cubin by old");
    EXPECT_EQ(cache.statistics().created, 2);
}

TEST_F(CubinCacheTest, PackFromABuildMachine_UsedWhereThereIsNoCompiler) {
    // Twice: of what was compiled for it, and of what was in the build machine's cache already.
    for (const char* name : {"cold", "warm"}) {
        const auto pack = pack_of(name, [&](ArtifactCache& cache) { (void)by("builder", cache); });
        const test::TemporaryDirectory container;
        ArtifactCache cache({.directory = container.path(), .further = {pack}});
        EXPECT_EQ(by_any(cache), "cubin by builder") << name;
        // Afterwards it is in the container's own cache.
        ArtifactCache again({.directory = container.path()});
        EXPECT_EQ(by_any(again), "cubin by builder") << name;
    }
}

TEST_F(CubinCacheTest, CubinOfTheNearerTiersCompilerIsGone_TheNextTiersCompiler) {
    const auto pack = pack_of("pack", [&](ArtifactCache& cache) { (void)by("builder", cache); });
    {
        ArtifactCache cache(here());
        (void)by("gone", cache);
    }
    std::filesystem::remove(DiskStore(folder_.path() / "cache").path_of(cubin_key(recipe_, "gone")));
    std::filesystem::remove(DiskStore(folder_.path() / "cache").path_of(cubin_key(recipe_, "builder")));
    ArtifactCache cache(here({pack}));
    EXPECT_EQ(by_any(cache), "cubin by builder");
}

TEST_F(CubinCacheTest, CompilerEntryLost_WrittenAgainByTheNextThatHasTheCompiler) {
    ArtifactCache cache(here());
    (void)by("builder", cache);
    std::filesystem::remove(DiskStore(folder_.path() / "cache").path_of(recipe_));
    EXPECT_EQ(by_any(cache), "none");
    ArtifactCache next(here());
    (void)by("builder", next);
    EXPECT_EQ(next.statistics().created, 0);
    EXPECT_EQ(by_any(next), "cubin by builder");
}

TEST_F(CubinCacheTest, Strict_TakesAnotherCompilersRatherThanNone) {
    {
        ArtifactCache cache(here());
        (void)by("builder", cache);
    }
    ArtifactCache::Options options = here();
    options.creates = false;
    options.strict = true;
    ArtifactCache strict(options);
    EXPECT_EQ(by("mine", strict), "cubin by builder");
    EXPECT_EQ(strict.statistics().created, 0);
}

TEST_F(CubinCacheTest, CompileFails_NothingIsPromised) {
    ArtifactCache cache(here());
    EXPECT_THROW((void)cubin_by("ill", recipe_, "sm_90a", cache, []() -> Artifact { throw std::runtime_error("ill"); }),
                 std::runtime_error);
    EXPECT_EQ(by_any(cache), "none");
    EXPECT_FALSE(std::filesystem::exists(DiskStore(folder_.path() / "cache").path_of(recipe_)));
}

}  // namespace
}  // namespace flce

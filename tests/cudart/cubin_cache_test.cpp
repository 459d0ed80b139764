#include "runtime/cuda/cubin_cache.hpp"

#include <gmock/gmock.h>

#include <cstdlib>
#include <set>

#include "cache/disk_store.hpp"
#include "cache/pack_store.hpp"
#include "generator/device_tables.hpp"
#include "generator/planner.hpp"
#include "runtime/cuda/cuda_kernel.hpp"
#include "runtime/cuda/launcher.hpp"
#include "runtime/host/host_code.hpp"
#include "runtime/host/object_file.hpp"
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
    /// Entries that a build machine's cache used, as a pack.
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
    // Twice: with cubins compiled for the pack, and with cubins that were in the build machine's cache already.
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

/// Two of the headers as they are.
std::vector<EmbeddedHeader> two_headers() {
    const auto all = embedded_templates();
    return {all[0], all[1]};
}

TEST(CubinRecipe, AnyPartChanged_AnotherKey) {
    const auto headers = two_headers();
    const std::vector<std::string> options{"--gpu-architecture=sm_90a", "-std=c++20"};
    const std::vector<KernelEntry> kernels{{.name = "forward"}};
    const CubinRecipe recipe{"sm_90a", "source", headers, options, kernels};
    std::set<CacheKey> keys{recipe_key(recipe)};
    EXPECT_EQ(recipe_key(recipe), *keys.begin());
    const auto expect_another = [&](const char* what, const CubinRecipe& other) {
        EXPECT_TRUE(keys.insert(recipe_key(other)).second) << what;
    };
    // A template that is edited: one byte of it, one less, one that goes over to the next, another name.
    for (const char* edit : {"byte", "shorter", "moved", "renamed"}) {
        auto edited = headers;
        std::string first(headers[0].text);
        std::string second(headers[1].text);
        if (edit == std::string_view("byte")) first[first.size() / 2] = static_cast<char>(first[first.size() / 2] ^ 1);
        if (edit == std::string_view("shorter")) first.pop_back();
        if (edit == std::string_view("moved")) second.insert(second.begin(), first.back()), first.pop_back();
        if (edit == std::string_view("renamed")) edited[0].name = "flce/other.cuh";
        edited[0].text = first;
        edited[1].text = second;
        expect_another(edit, {"sm_90a", "source", edited, options, kernels});
    }
    expect_another("one header fewer", {"sm_90a", "source", std::span(headers).first(1), options, kernels});
    expect_another("architecture", {"sm_90", "source", headers, options, kernels});
    expect_another("source", {"sm_90a", "sources", headers, options, kernels});
    expect_another("options", {"sm_90a", "source", headers, std::span(options).first(1), kernels});
    const std::vector<KernelEntry> others{{.name = "backward"}};
    expect_another("kernels", {"sm_90a", "source", headers, options, others});
    EXPECT_NE(cubin_key(recipe_key(recipe), "build 1"), cubin_key(recipe_key(recipe), "build 2"));
}

/// Expects a text that says nothing of where or when it was made.
void expect_placeless(std::string_view text) {
    const std::string home = std::getenv("HOME") == nullptr ? FLCE_SOURCE_DIR : std::getenv("HOME");
    const std::string folders[] = {FLCE_SOURCE_DIR, std::filesystem::current_path().string(),
                                   home.size() > 1 ? home + "/" : FLCE_SOURCE_DIR};
    for (const std::string& folder : folders) EXPECT_THAT(std::string(text), testing::Not(testing::HasSubstr(folder)));
    for (const char* macro : {"__DATE__", "__TIME__", "__TIMESTAMP__", "__FILE__"}) {
        EXPECT_THAT(std::string(text), testing::Not(testing::HasSubstr(macro)));
    }
}

TEST(CubinRecipe, OfRealKernels_NoPathAndNoTime) {
    for (const EmbeddedHeader& header : embedded_templates()) expect_placeless(header.text);
    for (const auto& [spec_text, device_name] :
         {std::pair{"D=64,V=500,dtype=fp32,bias", "sm_80"}, {"D=2048,V=151936,dtype=bf16", "h100"}}) {
        const Spec spec = parse_spec(spec_text).normalized();
        const Device device = describe_device(device_name);
        const CudaProgram program = generate_cuda(spec, device, candidate_plans(spec, device).front());
        for (const CudaUnit& unit : program.units) expect_placeless(unit.source);
        for (const std::string& option : program.options) {
            EXPECT_THAT(option, testing::Not(testing::HasSubstr("/"))) << "includes lie in memory";
        }
    }
}

// A pack that is made on one architecture serves hosts of the other; a cache that creates nothing is asked for this machine's alone.
TEST_F(CubinCacheTest, LaunchersThatAreCompiled_AreThoseOfEveryHost) {
    const Spec spec = parse_spec("D=64,V=500,dtype=fp32").normalized();
    const Device device = describe_device("sm_80");
    const BuildRequest request{.spec = spec, .device = device, .plan = candidate_plans(spec, device).front()};
    const CudaProgram program = generate_cuda(spec, device, request.plan);
    const auto key_for = [&](std::string_view arch) {
        return launchers_key(program, launcher_target(linux_triple(arch)), launcher_generator());
    };
    ArtifactCache cache(here());
    cuda_launchers(request, program, cache);
    for (const std::string_view arch : host_archs()) {
        const auto object = cache.find(key_for(arch));
        ASSERT_NE(object, nullptr) << arch;
        EXPECT_EQ(host_object_fault(object->payload, linux_triple(arch), kLauncherSymbols), "") << arch;
        if (linux_triple(arch) != native_triple()) continue;
        ArtifactCache mine({.directory = folder_.path() / "mine", .creates = false});
        EXPECT_THROW(cuda_launchers(request, program, mine), CacheMissError);
        mine.keep(key_for(arch), *object, ArtifactCache::Replace::always);
        EXPECT_NO_THROW(cuda_launchers(request, program, mine));
    }
}

TEST(LaunchersKey, AnyPartChanged_AnotherKey) {
    const Spec spec = parse_spec("D=64,V=500,dtype=fp32").normalized();
    const Device device = describe_device("sm_80");
    const CudaProgram program = generate_cuda(spec, device, candidate_plans(spec, device).front());
    const CpuProperties target = describe_device("x86-64-v3").cpu;
    EXPECT_EQ(launcher_generator().size(), 16U);
    std::set<CacheKey> keys{launchers_key(program, target, launcher_generator())};
    EXPECT_TRUE(keys.insert(launchers_key(program, target, "another digest")).second);
    for (std::string CpuProperties::* field : {&CpuProperties::triple, &CpuProperties::cpu, &CpuProperties::features}) {
        CpuProperties other = target;
        (other.*field) += "x";
        EXPECT_TRUE(keys.insert(launchers_key(program, other, launcher_generator())).second);
    }
    const CudaProgram other =
        generate_cuda(parse_spec("D=72,V=500,dtype=fp32").normalized(), device, candidate_plans(spec, device).front());
    EXPECT_TRUE(keys.insert(launchers_key(other, target, launcher_generator())).second);
}

}  // namespace
}  // namespace flce

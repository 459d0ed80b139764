// Cubins and launchers that caches hold under the right key, with the right checksum, and that cannot be loaded.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>

#include "cache/artifact_format.hpp"
#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "cache/pack_store.hpp"
#include "flce/error.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/cubin_cache.hpp"
#include "runtime/cuda/cuda_kernel.hpp"
#include "runtime/kernel_factory.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cudart/fake_driver.hpp"
#include "tests/support/gpu.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;
using test::FakeGpu;
using testing::HasSubstr;

constexpr DeviceRef kFakeGpu{DeviceKind::cuda, 0};

BuildRequest request_of(const Device& device) {
    BuildRequest request;
    request.spec = parse_spec("D=64,V=1000,dtype=bf16,outputs=loss+lse");
    request.device = device;
    request.plan = choose_plan(request.spec, device);
    request.device_ref = kFakeGpu;
    request.reasons = [] { return std::vector<std::string>{}; };
    return request;
}

using Spoil = std::function<void(std::vector<std::byte>&)>;

/// A local directory with everything that a kernel of the fake GPU needs.
class SpoiltPayloads : public testing::Test {
protected:
    void SetUp() override {
        FLCE_REQUIRE_NVRTC();
        // Compiled once for all tests of this process, and where FLCE_TEST_CACHE names a folder for those of all processes.
        static const test::TemporaryDirectory own;
        const char* shared = std::getenv("FLCE_TEST_CACHE");
        DiskStore here(folder_.path());
        ArtifactCache cache({.directory = shared != nullptr && *shared != '\0' ? fs::path(shared) : own.path(),
                             .on_use = [&](const CacheKey& key, std::span<const std::byte> entry) {
                                 const std::scoped_lock lock(mutex_);
                                 EXPECT_EQ(here.put(key, entry, Durability::whenever), Kept::yes);
                             }});
        FakeGpu gpu;
        compile_cuda_kernel(request_of(FakeGpu::driver()->device(0)), cache);
    }

    /// Writes payloads of that kind (of host objects this machine's alone) anew, spoilt, as sound entries: `most` of them. How many there
    /// are.
    int spoil(const std::string& kind, const Spoil& spoil, int most = 100) const {
        DiskStore store(folder_.path());
        std::string why;
        int spoilt = 0;
        for (const StoredFile& file : list_entries(folder_.path(), why)) {
            Lookup found = store.inspect(file.key, why);
            if (spoilt == most || !found.artifact || !has_kind(*found.artifact, kind)) continue;
            if (kind == "object" && found.artifact->metadata.find(native_triple()) == std::string::npos) continue;
            spoil(found.artifact->payload);
            EXPECT_EQ(store.put(file.key, encode_artifact(file.key, *found.artifact), Durability::whenever), Kept::yes);
            ++spoilt;
        }
        return spoilt;
    }
    static bool has_kind(const Artifact& artifact, const std::string& kind) {
        return artifact.metadata.find("\"kind\":\"" + kind + "\"") != std::string::npos;
    }
    [[nodiscard]] int aside() const {
        int count = 0;
        for (const auto& file : fs::recursive_directory_iterator(folder_.path())) count += file.path().extension() == ".corrupt" ? 1 : 0;
        return count;
    }

    test::TemporaryDirectory folder_;
    std::mutex mutex_;
};

const std::map<std::string, Spoil>& spoils() {
    static const std::map<std::string, Spoil> all = {
        {"zeros", [](auto& payload) { std::ranges::fill(payload, std::byte{0}); }},
        {"empty", [](auto& payload) { payload.clear(); }},
        {"cut in half", [](auto& payload) { payload.resize(payload.size() / 2); }},
        {"one byte short", [](auto& payload) { payload.resize(payload.size() - 1); }},
        {"its header alone", [](auto& payload) { payload.resize(64); }},
        {"another machine's", [](auto& payload) { payload[18] = std::byte{243}; }},  // e_machine: RISC-V
    };
    return all;
}

TEST_F(SpoiltPayloads, Cubins_CompiledAgainAndPutAside) {
    const int spoilt = spoil("cubin", spoils().at("zeros"), 1);  // each compile takes seconds
    ASSERT_EQ(spoilt, 1);
    FakeGpu gpu;
    {
        ArtifactCache cache({.directory = folder_.path()});
        const auto kernel = make_cuda_kernel(request_of(FakeGpu::driver()->device(0)), cache, *FakeGpu::driver());
        EXPECT_EQ(cache.statistics().created, spoilt);
        EXPECT_EQ(cache.statistics().disk_faults, spoilt);
        EXPECT_GT(gpu.modules, spoilt);
    }
    EXPECT_EQ(aside(), spoilt);
    ArtifactCache healed({.directory = folder_.path()});
    compile_cuda_kernel(request_of(FakeGpu::driver()->device(0)), healed);
    EXPECT_EQ(healed.statistics().created, 0);
}

TEST_F(SpoiltPayloads, Cubins_EachWayOfSpoilingIsFound) {
    DiskStore store(folder_.path());
    std::string why;
    int cubins = 0;
    for (const StoredFile& file : list_entries(folder_.path(), why)) {
        const Lookup found = store.inspect(file.key, why);
        ASSERT_TRUE(found.artifact) << why;
        if (!has_kind(*found.artifact, "cubin")) continue;
        ++cubins;
        EXPECT_EQ(cubin_fault(found.artifact->payload, "sm_90a", {}), "");
        EXPECT_THAT(cubin_fault(found.artifact->payload, "sm_80", {}), HasSubstr("not sm_80"));
        for (const auto& [name, spoil_it] : spoils()) {
            std::vector<std::byte> payload = found.artifact->payload;
            spoil_it(payload);
            EXPECT_NE(cubin_fault(payload, "sm_90a", {}), "") << name;
        }
    }
    EXPECT_GT(cubins, 1);
}

TEST_F(SpoiltPayloads, Launchers_CompiledAgainAndPutAside) {
    for (const auto& [name, spoil_it] : spoils()) {
        SCOPED_TRACE(name);
        for (const bool loads : {false, true}) {
            ASSERT_EQ(spoil("object", spoil_it), 1);
            FakeGpu gpu;
            ArtifactCache cache({.directory = folder_.path()});
            const BuildRequest request = request_of(FakeGpu::driver()->device(0));
            if (loads) {
                EXPECT_NE(make_cuda_kernel(request, cache, *FakeGpu::driver()), nullptr);
            } else {
                compile_cuda_kernel(request, cache);
            }
            EXPECT_EQ(cache.statistics().created, 1);
            EXPECT_EQ(cache.statistics().disk_faults, 1);
            EXPECT_EQ(aside(), 1);
        }
    }
}

TEST_F(SpoiltPayloads, DriverRefusesTheImage_CompiledAgain) {
    FakeGpu gpu;
    gpu.load_results = {CUDA_ERROR_INVALID_IMAGE};
    ArtifactCache cache({.directory = folder_.path()});
    EXPECT_NE(make_cuda_kernel(request_of(FakeGpu::driver()->device(0)), cache, *FakeGpu::driver()), nullptr);
    EXPECT_EQ(cache.statistics().created, 1);
    EXPECT_EQ(aside(), 1);
    EXPECT_TRUE(gpu.context_stack.empty());
}

TEST_F(SpoiltPayloads, DriverIsOutOfMemory_ThrownAndNothingIsPutAside) {
    FakeGpu gpu;
    gpu.load_results = {CUDA_ERROR_OUT_OF_MEMORY};
    ArtifactCache cache({.directory = folder_.path()});
    EXPECT_THROW((void)make_cuda_kernel(request_of(FakeGpu::driver()->device(0)), cache, *FakeGpu::driver()), DeviceError);
    EXPECT_EQ(cache.statistics().created, 0);
    EXPECT_EQ(aside(), 0);
    EXPECT_EQ(gpu.modules, 0);
}

TEST_F(SpoiltPayloads, Strict_MissSaysWhatIsWrongWithWhatThereIs) {
    ASSERT_GT(spoil("cubin", spoils().at("zeros")), 1);
    FakeGpu gpu;
    ArtifactCache cache({.directory = folder_.path(), .creates = false, .strict = true});
    try {
        (void)make_cuda_kernel(request_of(FakeGpu::driver()->device(0)), cache, *FakeGpu::driver());
        FAIL() << "there is no cubin";
    } catch (const CacheMissError& miss) {
        EXPECT_THAT(miss.what(), HasSubstr("it is not an ELF file"));
    }
}

TEST(CompilerEntry, Spoilt_NamesNoCompiler) {
    EXPECT_EQ(compiler_fault(test::artifact_of("0a1b/2c3d")), "");
    EXPECT_NE(compiler_fault(test::artifact_of("")), "");
    EXPECT_NE(compiler_fault(test::artifact_of(std::string(8, '\0'))), "");
    const test::TemporaryDirectory folder;
    const CacheKey recipe = test::key_of("recipe");
    {
        ArtifactCache cache({.directory = folder.path()});
        (void)cubin_by("builder", recipe, "sm_90a", cache, [] { return test::artifact_of("cubin"); });
        cache.keep(recipe, test::artifact_of(std::string(8, '\0')), ArtifactCache::Replace::always);
        EXPECT_EQ(cubin_by_any_compiler(recipe, cache), nullptr);  // and puts it aside
    }
    ArtifactCache cache({.directory = folder.path()});
    (void)cubin_by("builder", recipe, "sm_90a", cache, [] { return test::artifact_of("cubin"); });
    EXPECT_NE(cubin_by_any_compiler(recipe, cache), nullptr);
}

}  // namespace
}  // namespace flce

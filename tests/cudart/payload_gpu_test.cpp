// Cached cubins that the driver of a real GPU gets to see: whatever it says to them, a kernel is made.
#include <gmock/gmock.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "cache/artifact_format.hpp"
#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "flce/error.hpp"
#include "runtime/cuda/cubin.hpp"
#include "runtime/cuda/cuda_kernel.hpp"
#include "runtime/payload_check.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/support/gpu.hpp"

namespace flce {
namespace {

BuildRequest request_here() {
    BuildRequest request;
    request.spec = parse_spec("D=64,V=1000,dtype=bf16");
    request.device = cuda_devices().at(0);
    request.plan = choose_plan(request.spec, request.device);
    request.device_ref = {DeviceKind::cuda, 0};
    request.reasons = [] { return std::vector<std::string>{}; };
    return request;
}

/// The first cubin of a directory.
std::pair<CacheKey, Artifact> a_cubin(DiskStore& store, const std::filesystem::path& directory) {
    std::string why;
    for (const StoredFile& file : list_entries(directory, why)) {
        Lookup found = store.inspect(file.key, why);
        if (found.artifact && read_cubin(found.artifact->payload, nullptr)) return {file.key, std::move(*found.artifact)};
    }
    throw std::runtime_error("no cubin: " + why);
}

TEST(GpuPayload, BytesOfACubinOverwritten_AKernelIsMadeAllTheSame) {
    FLCE_REQUIRE_GPU();
    FLCE_REQUIRE_NVRTC();
    const test::TemporaryDirectory folder;
    const BuildRequest request = request_here();
    {
        ArtifactCache cache({.directory = folder.path()});
        ASSERT_NE(make_cuda_kernel(request, cache), nullptr);
    }
    DiskStore store(folder.path());
    const auto [key, sound] = a_cubin(store, folder.path());
    constexpr std::size_t kPlaces = 12;
    constexpr std::size_t kBytes = 48;
    int refused = 0;
    for (std::size_t i = 0; i <= kPlaces; ++i) {
        Artifact spoilt = sound;
        // The first place is the ELF header, the last the end of the tables.
        const std::size_t at = i * (spoilt.payload.size() - kBytes) / kPlaces;
        std::fill_n(spoilt.payload.begin() + static_cast<std::ptrdiff_t>(at), kBytes, std::byte{0xa5});
        ASSERT_EQ(store.put(key, encode_artifact(key, spoilt), Durability::whenever), Kept::yes);
        ArtifactCache cache({.directory = folder.path()});
        EXPECT_NO_THROW(EXPECT_NE(make_cuda_kernel(request, cache), nullptr))
            << "overwritten from byte " << at << " of " << spoilt.payload.size();
        refused += cache.statistics().created > 0 ? 1 : 0;
    }
    EXPECT_GE(refused, 1);  // its ELF header at least
}

TEST(GpuPayload, Check_LoadsCubinsOfThisGpu) {
    FLCE_REQUIRE_GPU();
    FLCE_REQUIRE_NVRTC();
    const test::TemporaryDirectory folder;
    {
        ArtifactCache cache({.directory = folder.path()});
        compile_cuda_kernel(request_here(), cache);
    }
    DiskStore store(folder.path());
    Artifact cubin = a_cubin(store, folder.path()).second;
    PayloadCheck payloads;
    const PayloadCheck::Result sound = payloads.check(cubin);
    EXPECT_EQ(sound.fault, "");
    EXPECT_TRUE(sound.loaded);
    cubin.payload.resize(cubin.payload.size() / 2);
    const PayloadCheck::Result half = payloads.check(cubin);
    EXPECT_NE(half.fault, "");
    EXPECT_FALSE(half.loaded);
}

}  // namespace
}  // namespace flce

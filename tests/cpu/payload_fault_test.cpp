// CPU kernels whose cached object has the right key and checksum and cannot be linked.
#include <gmock/gmock.h>

#include <algorithm>
#include <functional>
#include <map>

#include "cache/artifact_format.hpp"
#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "tests/cache/cache_test_support.hpp"
#include "tests/cpu/cpu_test_support.hpp"

namespace flce {
namespace {

namespace fs = std::filesystem;

BuildRequest cpu_request(const std::string& spec) {
    BuildRequest request;
    request.spec = parse_spec(spec);
    request.device = native_cpu();
    request.plan = choose_plan(request.spec, request.device);
    request.device_ref = {DeviceKind::cpu, 0};
    request.reasons = [] { return std::vector<std::string>{}; };
    return request;
}

using Change = std::function<void(std::vector<std::byte>&)>;

/// The one entry of a directory with another payload, as a sound entry.
void replace_payload(const fs::path& directory, const Change& change) {
    DiskStore store(directory);
    std::string why;
    const auto files = list_entries(directory, why);
    ASSERT_EQ(files.size(), 1u) << why;
    Lookup found = store.inspect(files[0].key, why);
    ASSERT_TRUE(found.artifact) << why;
    change(found.artifact->payload);
    ASSERT_EQ(store.put(files[0].key, encode_artifact(files[0].key, *found.artifact), Durability::whenever), Kept::yes);
}

TEST(CpuObject, ThatCannotBeUsed_IsCompiledAgainAndPutAside) {
    const BuildRequest request = cpu_request("D=64,V=500,dtype=fp32");
    const test::TemporaryDirectory folder;
    const fs::path directory = folder.path() / "cache";
    // Whole objects of others, too: one that lacks functions, one that lacks the functions that it calls.
    const CpuProperties& cpu = request.device.cpu;
    const auto other_object = compile_host_object(cpu, "other", [](llvm::Module&) {});
    const std::map<std::string, Change> changes = {
        {"zeros", [](auto& payload) { std::ranges::fill(payload, std::byte{0}); }},
        {"empty", [](auto& payload) { payload.clear(); }},
        {"cut in half", [](auto& payload) { payload.resize(payload.size() / 2); }},
        {"one byte short", [](auto& payload) { payload.resize(payload.size() - 1); }},
        {"its header alone", [](auto& payload) { payload.resize(64); }},
        {"another architecture's", [](auto& payload) { payload[18] = std::byte{243}, payload[19] = std::byte{0}; }},
        {"without our functions", [&](auto& payload) { payload = other_object; }},
    };
    for (const auto& [name, change] : changes) {
        SCOPED_TRACE(name);
        for (const bool loads : {true, false}) {
            fs::remove_all(directory);
            {
                ArtifactCache cache({.directory = directory});
                compile_cpu_kernel(request, cache);
            }
            replace_payload(directory, change);
            {
                ArtifactCache cache({.directory = directory});
                if (loads) {
                    EXPECT_NE(make_cpu_kernel(request, cache), nullptr);
                } else {
                    compile_cpu_kernel(request, cache);
                }
                EXPECT_EQ(cache.statistics().created, 1);
                EXPECT_EQ(cache.statistics().disk_faults, 1);
            }
            ArtifactCache healed({.directory = directory});
            EXPECT_NE(make_cpu_kernel(request, healed), nullptr);
            EXPECT_EQ(healed.statistics().created, 0);
        }
    }
}

TEST(CpuObject, Missing_IsReportedWhereWhatThereIsCannotBeUsed) {
    const BuildRequest request = cpu_request("D=64,V=500,dtype=fp32");
    const test::TemporaryDirectory folder;
    const fs::path directory = folder.path() / "cache";
    {
        ArtifactCache cache({.directory = directory});
        compile_cpu_kernel(request, cache);
    }
    replace_payload(directory, [](auto& payload) { payload.clear(); });
    ArtifactCache cache({.directory = directory, .creates = false});
    EXPECT_THROW((void)make_cpu_kernel(request, cache), CacheMissError);
    EXPECT_THROW(compile_cpu_kernel(request, cache), CacheMissError);
}

}  // namespace
}  // namespace flce

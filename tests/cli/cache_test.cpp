// flce cache, and a pack's way from a build machine to one without compilers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "cache/artifact_format.hpp"
#include "cache/cleanup.hpp"
#include "cache/disk_store.hpp"
#include "tests/cli/process.hpp"
#include "tests/support/gpu.hpp"

namespace flce::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kSpec = "D=64,V=500,dtype=fp32";

class CacheCommand : public testing::Test {
protected:
    TemporaryFolder folder_;

    [[nodiscard]] ProcessResult run(const std::vector<std::string>& arguments, std::map<std::string, std::string> environment = {}) const {
        environment.try_emplace("FLCE_CACHE_DIR", folder_ / "cache");
        return run_flce(arguments, {.environment = std::move(environment)});
    }
    void fill() const { ASSERT_EQ(run({"prewarm", "--spec", kSpec, "--device", "x86-64-v3"}).exit_code, 0); }
};

TEST_F(CacheCommand, NothingThere_EmptyAnswers) {
    EXPECT_EQ(run({"cache", "ls", "--json"}).json().at("entries").size(), 0u);
    EXPECT_EQ(run({"cache", "stats", "--json"}).json().at("tiers").at("local").at("hits"), 0);
    EXPECT_EQ(run({"cache", "verify", "--json"}).json().at("checked"), 0);
    EXPECT_EQ(run({"cache", "gc", "--max-bytes", "0", "--json"}).json().at("removed_entries"), 0);
    EXPECT_FALSE(fs::exists(folder_ / "cache"));
}

TEST_F(CacheCommand, Ls_SaysWhatEntriesAre) {
    fill();
    const auto entries = run({"cache", "ls", "--json"}).json().at("entries");
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_EQ(entries[0].at("metadata").at("kind"), "object");
    EXPECT_THAT(entries[0].at("metadata").at("created_by").get<std::string>(), HasSubstr("flce "));
    EXPECT_GT(entries[0].at("bytes"), 100);
    EXPECT_THAT(run({"cache", "ls"}).out, HasSubstr(kSpec));
}

TEST_F(CacheCommand, Stats_CountsByTierOverProcesses) {
    fill();
    fill();
    const auto stats = run({"cache", "stats", "--json"}).json();
    EXPECT_EQ(stats.at("compiled"), 1);
    EXPECT_EQ(stats.at("entries"), 1);
    for (const char* tier : {"memory", "local", "packs", "remote"}) {
        for (const char* counter : {"hits", "misses", "faults"}) EXPECT_TRUE(stats.at("tiers").at(tier).contains(counter));
    }
    // The second prewarm's hit, and one of each prewarm when it makes sure that its kernels are kept.
    EXPECT_EQ(stats.at("tiers").at("local").at("hits"), 3);
    EXPECT_EQ(stats.at("tiers").at("local").at("misses"), 1);
}

TEST_F(CacheCommand, Stats_WithoutADirectoryThatCanBeUsed_AreThisMachines) {
    const std::map<std::string, std::string> here{{"TMPDIR", folder_.path()}};
    const auto stats = [&] { return run({"cache", "stats", "--json"}, here).json(); };
    EXPECT_EQ(stats().at("elsewhere").at("dir"), nullptr);
    EXPECT_THAT(run({"cache", "stats"}, here).out, testing::Not(HasSubstr("on this machine")));
    const std::map<std::string, std::string> diskless{{"TMPDIR", folder_.path()}, {"FLCE_NO_DISK_CACHE", "1"}};
    const std::vector<std::string> used{"check", "--spec", kSpec, "--device", "cpu", "--num-tokens", "4"};
    ASSERT_EQ(run(used, diskless).exit_code, 0);
    const auto without = stats();
    EXPECT_EQ(without.at("compiled"), 0);
    EXPECT_EQ(without.at("refusal"), nullptr);
    EXPECT_EQ(without.at("elsewhere").at("compiled"), 1);
    EXPECT_GE(without.at("elsewhere").at("tiers").at("memory").at("misses"), 1);

    // A refused directory is what these are wanted for.
    fs::create_directory(folder_ / "cache");
    fs::permissions(folder_ / "cache", fs::perms::all);
    ASSERT_EQ(run(used, here).exit_code, 0);
    const auto refused = stats();
    EXPECT_THAT(refused.at("refusal").get<std::string>(), HasSubstr("chmod go-w"));
    EXPECT_EQ(refused.at("elsewhere").at("compiled"), 2);
    EXPECT_GE(refused.at("elsewhere").at("tiers").at("local").at("faults"), 1);
    const std::string dir = refused.at("elsewhere").at("dir").get<std::string>();
    const ProcessResult text = run({"cache", "stats"}, here);
    EXPECT_EQ(text.exit_code, 0);
    EXPECT_THAT(text.out, AllOf(HasSubstr("chmod go-w"), HasSubstr(dir), HasSubstr("2 compiled")));
}

TEST_F(CacheCommand, Verify_FindsAHarmedEntryAndLeavesIt) {
    fill();
    EXPECT_EQ(run({"cache", "verify"}).exit_code, 0);
    for (const auto& file : fs::recursive_directory_iterator(folder_.path() / "cache" / "artifacts")) {
        if (file.path().extension() == ".art") fs::resize_file(file.path(), fs::file_size(file.path()) - 1);
    }
    const ProcessResult harmed = run({"cache", "verify", "--json"});
    EXPECT_EQ(harmed.exit_code, 1);
    ASSERT_EQ(harmed.json().at("bad").size(), 1u);
    EXPECT_THAT(harmed.json().at("bad")[0].at("why").get<std::string>(), HasSubstr("bytes long"));
    EXPECT_EQ(run({"cache", "verify"}).exit_code, 1);
    EXPECT_THAT(run({"cache", "ls"}).out, HasSubstr("HARMED"));
}

/// Every entry with a payload of zeros, as a sound entry.
void spoil_payloads(const fs::path& directory) {
    DiskStore store(directory);
    std::string why;
    for (const StoredFile& file : list_entries(directory, why)) {
        Lookup found = store.inspect(file.key, why);
        ASSERT_TRUE(found.artifact) << why;
        std::ranges::fill(found.artifact->payload, std::byte{0});
        ASSERT_EQ(store.put(file.key, encode_artifact(file.key, *found.artifact), Durability::whenever), Kept::yes);
    }
}

TEST_F(CacheCommand, Verify_LoadsPayloadsWhenAsked) {
    fill();
    const auto sound = run({"cache", "verify", "--load", "--json"}).json();
    EXPECT_EQ(sound.at("checked"), 1);
    EXPECT_EQ(sound.at("loaded"), 1);
    EXPECT_EQ(sound.at("bad").size(), 0u);
    const std::string pack = folder_ / "a.flcepack";
    ASSERT_EQ(run({"cache", "export", "--pack", pack}).exit_code, 0);
    spoil_payloads(folder_ / "cache");
    EXPECT_EQ(run({"cache", "verify"}).exit_code, 0);  // entries by themselves are sound
    const ProcessResult harmed = run({"cache", "verify", "--load", "--json"});
    EXPECT_EQ(harmed.exit_code, 1);
    ASSERT_EQ(harmed.json().at("bad").size(), 1u);
    EXPECT_THAT(harmed.json().at("bad")[0].at("why").get<std::string>(), HasSubstr("not an ELF file"));
    // The pack alone is looked at, and has the good one.
    const auto packed = run({"cache", "verify", "--load", "--pack", pack, "--json"});
    EXPECT_EQ(packed.exit_code, 0);
    EXPECT_EQ(packed.json().at("loaded"), 1);
    EXPECT_EQ(packed.json().at("checked"), 1);
}

TEST_F(CacheCommand, PayloadThatDoesNotLoad_CostsACompileAndNoError) {
    const std::vector<std::string> check{"check", "--spec", kSpec, "--device", "cpu", "--num-tokens", "4"};
    ASSERT_EQ(run(check).exit_code, 0);
    spoil_payloads(folder_ / "cache");
    const ProcessResult healed = run(check);
    EXPECT_EQ(healed.exit_code, 0) << healed.err;
    EXPECT_THAT(healed.err, AllOf(HasSubstr("not an ELF file"), HasSubstr("*.corrupt")));
    EXPECT_EQ(run({"cache", "verify", "--load"}).exit_code, 0);
    EXPECT_EQ(run(check).err, "");
}

TEST_F(CacheCommand, Verify_LoadReadsCubinsWhereThereIsNoGpu) {
    FLCE_REQUIRE_NVRTC();
    ASSERT_EQ(run({"prewarm", "--spec", kSpec, "--device", "sm_80"}).exit_code, 0);
    const auto sound = run({"cache", "verify", "--load", "--json"}).json();
    EXPECT_EQ(sound.at("bad").size(), 0u) << sound.dump();
    EXPECT_EQ(sound.at("loaded").get<int>() + sound.at("read").get<int>(), sound.at("checked").get<int>());
    spoil_payloads(folder_ / "cache");
    const auto spoilt = run({"cache", "verify", "--load", "--json"}).json();
    EXPECT_EQ(spoilt.at("bad").size(), sound.at("checked").get<std::size_t>());
}

TEST_F(CacheCommand, Ls_ListsPacksThatASessionTakes) {
    fill();
    const std::string pack = folder_ / "a.flcepack";
    ASSERT_EQ(run({"cache", "export", "--pack", pack}).exit_code, 0);
    const std::map<std::string, std::string> both{{"FLCE_CACHE_PACKS", pack + ":" + (folder_ / "missing.flcepack")}};
    const auto listed = run({"cache", "ls", "--json"}, both).json();
    ASSERT_EQ(listed.at("entries").size(), 2u);
    EXPECT_EQ(listed.at("entries")[0].at("pack"), nullptr);
    EXPECT_EQ(listed.at("entries")[1].at("pack"), pack);
    ASSERT_EQ(listed.at("packs").size(), 2u);
    EXPECT_EQ(listed.at("packs")[0].at("fault"), nullptr);
    EXPECT_THAT(listed.at("packs")[1].at("fault").get<std::string>(), HasSubstr("No such file"));
    const ProcessResult text = run({"cache", "ls"}, both);
    EXPECT_EQ(text.exit_code, 0);
    EXPECT_THAT(text.out, AllOf(HasSubstr("2 entries"), HasSubstr("1 of them in packs"), HasSubstr("missing.flcepack")));
    // Named, it is looked at alone, and has to be there.
    EXPECT_EQ(run({"cache", "ls", "--pack", pack, "--json"}, both).json().at("entries").size(), 1u);
    EXPECT_EQ(run({"cache", "ls", "--pack", folder_ / "missing.flcepack"}).exit_code, 3);
}

TEST_F(CacheCommand, Export_ToAFolderOrToAPack) {
    fill();
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"cache", "export"}, {"cache", "export", folder_ / "out", "--pack", folder_ / "a.flcepack"}}) {
        const ProcessResult refused = run(arguments);
        EXPECT_EQ(refused.exit_code, 2);
        EXPECT_THAT(refused.err, HasSubstr("--pack"));
    }
    EXPECT_FALSE(fs::exists(folder_ / "a.flcepack"));
}

TEST_F(CacheCommand, OutcomeOfAFirstUse_IsListedAndTravelsNowhere) {
    fill();
    const CacheKey key = KeyBuilder("first use").add("arch", "sm_86").finish();
    const std::string_view agreed = "agreed";
    const auto bytes = std::as_bytes(std::span(agreed));
    DiskStore store(folder_ / "cache");
    const Artifact outcome{R"({"kind": "check", "arch": "sm_86"})", {bytes.begin(), bytes.end()}};
    ASSERT_EQ(store.put(key, encode_artifact(key, outcome), Durability::whenever), Kept::yes);
    EXPECT_EQ(run({"cache", "ls", "--json"}).json().at("entries").size(), 2U);
    EXPECT_THAT(run({"cache", "ls"}).out, HasSubstr("check sm_86"));
    EXPECT_EQ(run({"cache", "verify", "--load", "--json"}).json().at("bad").size(), 0U);
    EXPECT_EQ(run({"cache", "export", "--pack", folder_ / "a.flcepack", "--json"}).json().at("exported"), 1);
    const std::map<std::string, std::string> other{{"FLCE_CACHE_DIR", folder_ / "other"}};
    EXPECT_EQ(run({"cache", "import", folder_ / "cache", "--json"}, other).json().at("imported"), 1);
    EXPECT_EQ(run({"cache", "ls", "--json"}, other).json().at("entries").size(), 1U);
}

TEST_F(CacheCommand, EntryThatOthersMayWrite_BadAndNeitherExportedNorImported) {
    fill();
    for (const auto& file : fs::recursive_directory_iterator(folder_.path() / "cache" / "artifacts")) {
        if (file.is_regular_file()) fs::permissions(file.path(), fs::perms::others_write | fs::perms::group_write, fs::perm_options::add);
    }
    const ProcessResult verified = run({"cache", "verify", "--json"});
    EXPECT_EQ(verified.exit_code, 1);
    EXPECT_THAT(verified.json().at("bad").at(0).at("why").get<std::string>(), HasSubstr("chmod go-w"));
    const ProcessResult packed = run({"cache", "export", "--pack", folder_ / "a.flcepack", "--json"});
    EXPECT_EQ(packed.exit_code, 1);
    EXPECT_EQ(packed.json().at("exported"), 0);
    EXPECT_EQ(packed.json().at("refused"), 1);
    const ProcessResult imported = run({"cache", "import", folder_ / "cache", "--json"}, {{"FLCE_CACHE_DIR", folder_ / "elsewhere"}});
    EXPECT_EQ(imported.exit_code, 1);
    EXPECT_EQ(imported.json().at("imported"), 0);
    EXPECT_EQ(imported.json().at("refused"), 1);
}

TEST_F(CacheCommand, EntryVanishesAfterItWasListed_IsNotBad) {
    if (*FLCE_SANITIZE != '\0') GTEST_SKIP() << "sanitizers want to be loaded first";
    if (!fs::exists(FLCE_FAULT_SHIM)) GTEST_SKIP() << "there is no " << FLCE_FAULT_SHIM;
    const auto vanishing = [&](const std::vector<std::string>& arguments, std::map<std::string, std::string> environment = {}) {
        fill();
        environment.insert({{"LD_PRELOAD", FLCE_FAULT_SHIM}, {"FLCE_FAULT_VANISH", ".art"}});
        const ProcessResult result = run(arguments, std::move(environment));
        EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
        EXPECT_EQ(run({"cache", "ls", "--json"}).json().at("entries").size(), 0u) << "it has not vanished";
        return result.json();
    };
    EXPECT_EQ(vanishing({"cache", "verify", "--json"}).at("checked"), 0);
    EXPECT_EQ(vanishing({"cache", "ls", "--json"}).at("entries").size(), 0u);
    EXPECT_EQ(vanishing({"cache", "export", "--pack", folder_ / "a.flcepack", "--json"}).at("refused"), 0);
    const auto imported = vanishing({"cache", "import", folder_ / "cache", "--json"}, {{"FLCE_CACHE_DIR", folder_ / "elsewhere"}});
    EXPECT_EQ(imported.at("refused"), 0);
    EXPECT_EQ(imported.at("imported"), 0);
}

TEST_F(CacheCommand, Gc_ShrinksToTheLimit) {
    fill();
    EXPECT_EQ(run({"cache", "gc", "--max-bytes", "1G", "--json"}).json().at("kept_entries"), 1);
    const auto emptied = run({"cache", "gc", "--max-bytes", "0", "--json"}).json();
    EXPECT_EQ(emptied.at("removed_entries"), 1);
    EXPECT_EQ(emptied.at("kept_bytes"), 0);
    EXPECT_EQ(run({"cache", "gc", "--max-bytes", "much"}).exit_code, 2);
}

TEST_F(CacheCommand, StaleDirectory_SaysSoInsteadOfNothingIsThere) {
    if (*FLCE_SANITIZE != '\0') GTEST_SKIP() << "sanitizers want to be loaded first";
    if (!fs::exists(FLCE_FAULT_SHIM)) GTEST_SKIP() << "there is no " << FLCE_FAULT_SHIM;
    fill();
    const auto stale = [&](const char* function, const std::vector<std::string>& arguments) {
        return run(arguments, {{"LD_PRELOAD", FLCE_FAULT_SHIM}, {"FLCE_FAULT_STALE", function}});
    };
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"cache", "gc", "--max-bytes", "0"}, {"cache", "verify"}, {"cache", "ls"}}) {
        for (const char* function : {"readdir", "lstat"}) {
            const ProcessResult said = stale(function, arguments);
            EXPECT_EQ(said.exit_code, 3) << arguments[1] << " " << function << ": " << said.out;
            EXPECT_THAT(said.err, HasSubstr("Stale file handle"));
        }
    }
    const ProcessResult kept = stale("unlink", {"cache", "gc", "--max-bytes", "0", "--json"});
    EXPECT_EQ(kept.exit_code, 3);
    EXPECT_EQ(kept.json().at("removed_entries"), 0);
    EXPECT_EQ(kept.json().at("kept_entries"), 1);
    EXPECT_THAT(kept.json().at("fault").get<std::string>(), HasSubstr("cannot be removed: Stale file handle"));
    EXPECT_EQ(run({"cache", "verify", "--json"}).json().at("checked"), 1);
    EXPECT_EQ(run({"cache", "gc", "--max-bytes", "0", "--json"}).json().at("removed_entries"), 1);
}

TEST_F(CacheCommand, Export_PayloadsBesideTheirMetadata) {
    fill();
    ASSERT_EQ(run({"cache", "export", folder_ / "out"}).exit_code, 0);
    int objects = 0;
    for (const auto& file : fs::directory_iterator(folder_.path() / "out")) {
        if (file.path().extension() != ".o") continue;
        ++objects;
        std::ifstream object(file.path(), std::ios::binary);
        std::string magic(4, '\0');
        object.read(magic.data(), 4);
        EXPECT_EQ(magic, "\177ELF");
        fs::path description = file.path();
        std::ifstream metadata(description.replace_extension(".json"));
        EXPECT_EQ(nlohmann::json::parse(metadata).at("kind"), "object");
    }
    EXPECT_EQ(objects, 1);
}

TEST_F(CacheCommand, PackAndImport_SameEntriesElsewhere) {
    fill();
    for (const char* name : {"a.flcepack", "b.flcepack"}) ASSERT_EQ(run({"cache", "export", "--pack", folder_ / name}).exit_code, 0);
    const auto bytes = [&](const char* name) {
        std::ifstream file(folder_ / name, std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    EXPECT_EQ(bytes("a.flcepack"), bytes("b.flcepack"));
    EXPECT_EQ(run({"cache", "ls", "--pack", folder_ / "a.flcepack", "--json"}).json().at("entries").size(), 1u);
    const std::map<std::string, std::string> elsewhere{{"FLCE_CACHE_DIR", folder_ / "elsewhere"}};
    const auto imported = run({"cache", "import", folder_ / "a.flcepack", folder_ / "cache", "--json"}, elsewhere).json();
    EXPECT_EQ(imported.at("imported"), 1);
    EXPECT_EQ(imported.at("present"), 1);
    const auto warm = run({"prewarm", "--spec", kSpec, "--device", "x86-64-v3", "--json"}, elsewhere).json();
    EXPECT_EQ(warm.at("compiled"), 0);
    EXPECT_EQ(run({"cache", "import", folder_ / "nothing"}, elsewhere).exit_code, 3);
}

TEST_F(CacheCommand, SignedPack_TakenWithTheKeyAndRefusedWithAnother) {
    fill();
    for (const char* name : {"ours", "theirs"}) ASSERT_EQ(run({"cache", "keygen", folder_ / name}).exit_code, 0);
    EXPECT_EQ(run({"cache", "keygen", folder_ / "ours"}).exit_code, 3);  // never over a key
    const std::string pack = folder_ / "kernels.flcepack";
    ASSERT_EQ(run({"cache", "export", "--pack", pack}, {{"FLCE_SIGNING_KEY", folder_ / "ours.pem"}}).exit_code, 0);
    const auto warm = [&](const std::string& trusted) {
        return run({"prewarm", "--spec", kSpec, "--device", "x86-64-v3", "--json"},
                   {{"FLCE_CACHE_PACKS", pack}, {"FLCE_TRUSTED_KEYS", folder_ / trusted}, {"FLCE_NO_DISK_CACHE", "1"}});
    };
    EXPECT_EQ(warm("ours.pub.pem").json().at("hits"), 1);
    EXPECT_EQ(warm("theirs.pub.pem").json().at("compiled"), 1);
    EXPECT_THAT(warm("theirs.pub.pem").err, HasSubstr("not trusted"));
    EXPECT_EQ(run({"cache", "verify"}, {{"FLCE_CACHE_PACKS", pack}, {"FLCE_TRUSTED_KEYS", folder_ / "theirs.pub.pem"}}).exit_code, 1);
}

TEST_F(CacheCommand, DirectoryOthersMayWrite_Refused) {
    fill();
    fs::permissions(folder_.path() / "cache", fs::perms::others_write, fs::perm_options::add);
    const ProcessResult refused = run({"cache", "ls"});
    EXPECT_EQ(refused.exit_code, 3);
    EXPECT_THAT(refused.err, HasSubstr("chmod go-w"));
}

TEST_F(CacheCommand, RefusedDirectory_PrewarmWarnsOnceForAllSpecs) {
    fs::create_directory(folder_ / "cache");
    fs::permissions(folder_ / "cache", fs::perms::all);
    const ProcessResult warmed = run({"prewarm", "--spec", kSpec, "--spec", "D=64,V=600,dtype=fp32,bias", "--spec", "D=64,V=700,dtype=bf16",
                                      "--device", "x86-64-v3", "--jobs", "1"});
    std::size_t warnings = 0;
    for (std::size_t at = 0; (at = warmed.err.find("is not used", at)) != std::string::npos; ++at) ++warnings;
    EXPECT_EQ(warnings, 1u) << warmed.err;
}

TEST_F(CacheCommand, PackOnAMachineWithoutNvrtc_HoldsTheCubins) {
    FLCE_REQUIRE_NVRTC();
    const std::vector<std::string> prewarm{"prewarm", "--spec", "D=64,V=500,dtype=fp32", "--device", "sm_80", "--json"};
    const ProcessResult built = run(prewarm);
    ASSERT_EQ(built.exit_code, 0) << built.err;
    const std::string pack = folder_ / "kernels.flcepack";
    ASSERT_EQ(run({"cache", "export", "--pack", pack}).exit_code, 0);

    const std::map<std::string, std::string> container{
        {"FLCE_CACHE_DIR", folder_ / "container"}, {"FLCE_CACHE_PACKS", pack}, {"FLCE_NVRTC", folder_ / "none"}};
    const ProcessResult used = run(prewarm, container);
    ASSERT_EQ(used.exit_code, 0) << used.err;
    EXPECT_EQ(used.json().at("compiled"), 0);
    // A kernel that no pack holds is an error that says so, and why the kernel cannot be made here.
    const ProcessResult missing = run({"prewarm", "--spec", "D=128,V=500,dtype=fp32,bias", "--device", "sm_80"}, container);
    EXPECT_EQ(missing.exit_code, 3);
    EXPECT_THAT(missing.err, AllOf(HasSubstr("no cache or pack holds"), HasSubstr("cannot be compiled here"), HasSubstr("FLCE_NVRTC")));
}

}  // namespace
}  // namespace flce::test
